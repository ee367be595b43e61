"""Ways to write a parameter, at every moment of a loop, wherever its values live: plain PyTorch's bits, or a typed error.

Ranks get the same batch, so that the numbers of several are those of one, and plain PyTorch is the oracle of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import lowtide
from lowtide.errors import Error
from tests.kit.parity import first_difference

WIDTH = 24
STEPS = 4

# -- ways -------------------------------------------------------------------------------------------------------------

Way = Callable[[nn.Parameter, nn.Parameter, dict[str, Any]], None]
WAYS: dict[str, Way] = {}
"""``way(p, q, kept)`` writes ``p``; ``q`` is a parameter of the same shape, ``kept`` what the loop keeps from call to call."""


def way(function: Way) -> Way:
    WAYS[function.__name__.strip("_")] = function
    return function


@way
def momentum(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data.mul_(0.9).add_(q.data, alpha=0.1)


@way
def clamp(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data.clamp_(-0.05, 0.05)


@way
def given(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data = p.data * 0.9 + 0.1 * q.data


@way
def given_and_kept(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data = kept["given"] = p.data * 0.9


@way
def given_then_changed(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data = other = p.data * 0.9
    other.mul_(0.5)


@way
def one_row(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data[1] = 0.0


@way
def known(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        p.mul_(0.9)


@way
def in_inference(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    with torch.inference_mode():
        p.mul_(0.9)


@way
def detached(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.detach().mul_(0.9)


@way
def numpy(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    values = p.detach().numpy()
    values *= 0.9


@way
def numpy_kept(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    """The view is taken once; later writes go to where the parameter was then."""
    if "view" not in kept:
        kept["view"] = p.detach().numpy()
    kept["view"] *= 0.9


@way
def dlpack(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    from_dlpack(p.detach()).mul_(0.9)


@way
def vector(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    values = nn.utils.parameters_to_vector([p, q])
    nn.utils.vector_to_parameters(values.detach() * 0.9, [p, q])


@way
def vector_kept(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    """An evolution strategy: one vector, changed in place and given again."""
    if "vector" not in kept:
        kept["vector"] = nn.utils.parameters_to_vector([p, q]).detach().clone()
    kept["vector"].mul_(0.9)
    nn.utils.vector_to_parameters(kept["vector"], [p, q])


@way
def several(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    torch._foreach_mul_([p.data, q.data], 0.9)


@way
def turned(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    p.data.copy_(p.data.flip(0))


@way
def initialised(p: nn.Parameter, q: nn.Parameter, kept: dict[str, Any]) -> None:
    nn.init.constant_(p, 0.05)


# -- moments ----------------------------------------------------------------------------------------------------------

MOMENTS = (
    *("before forward", "in the root", "in its unit, before use", "in its unit, after use", "in another unit", "in a hook"),
    *("before backward", "in backward", "before step", "after step"),
    *("gathered", "gathered to write", "gathered to write, before backward", "gathered to write, before step"),
)


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        self.at("before use")
        y = x + torch.tanh(self.linear(x))
        self.at("after use")
        return y


class Model(nn.Module):
    """``blocks.1`` is written; so is ``frozen`` with ``momentum=True``, as a momentum encoder is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Unit() for _ in range(4)])
        self.frozen = Unit().requires_grad_(False)
        self.at: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        self.at("in the root")
        with torch.no_grad():
            target = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()


@dataclass
class Case:
    way: str
    moment: str
    frozen: bool
    first: int
    """The step in which writing begins."""

    def __str__(self) -> str:
        return f"{self.way}, {self.moment}, {'frozen' if self.frozen else 'trained'}, from step {self.first}"


@dataclass
class Loop:
    """Some steps of training with one way to write at one moment."""

    case: Case
    model: Model
    optimizer: torch.optim.Optimizer
    number: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    numbers: list[Tensor] = field(default_factory=list)

    def write(self) -> None:
        target = self.model.frozen if self.case.frozen else self.model.blocks[1]
        WAYS[self.case.way](target.linear.weight, self.model.blocks[2].linear.weight, self.kept)

    def at(self, moment: str) -> None:
        if moment == self.case.moment and self.number >= self.case.first:
            if moment.startswith("gathered"):
                with lowtide.gathered(self.model, write="to write" in moment):
                    self.write()
            else:
                self.write()

    def run(self) -> list[Tensor]:
        model, case = self.model, self.case
        target: Unit = model.frozen if case.frozen else model.blocks[1]  # type: ignore[assignment]
        model.at = self.at
        target.at = lambda moment: self.at(f"in its unit, {moment}")
        model.blocks[0].at = lambda moment: self.at("in another unit") if moment == "before use" else None
        model.blocks[3].register_forward_hook(lambda *_: self.at("in a hook"))
        for self.number in range(STEPS):
            self.at("before forward")
            self.at("gathered")
            self.at("gathered to write")
            generator = torch.Generator().manual_seed(self.number)
            x = torch.randn(3, WIDTH, generator=generator).requires_grad_()
            loss = model(x)
            self.numbers.append(loss.detach().clone())
            self.at("before backward")
            self.at("gathered to write, before backward")
            loss.register_hook(lambda _: self.at("in backward"))
            loss.backward()
            self.at("before step")
            self.at("gathered to write, before step")
            self.optimizer.step()
            self.at("after step")
            self.optimizer.zero_grad()
        with lowtide.gathered(model):
            return self.numbers + [p.detach().clone() for p in model.parameters()]


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


@dataclass(frozen=True)
class Setup:
    ranks: int
    stage: int
    disk: bool
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.ranks}-stage{self.stage}{'-disk' if self.disk else ''}{''.join(f'-{v}' for _, v in self.options)}"


def outcome(case: Case, setup: Setup, folder: str) -> tuple[str, str]:
    """ "same", "plain raises", "refused" or "WRONG", and more about it."""
    try:
        expected: list[Tensor] | None = Loop(case, *build()).run()
    except RuntimeError:
        expected = None
    model, optimizer = build()
    options: dict[str, Any] = {"activations": "keep", "comm": lowtide.Comm(bucket_bytes=0, deadline=20), **dict(setup.options)}
    lowtide.shard(model, optimizer, stage=setup.stage, disk=folder if setup.disk else None, **options)
    try:
        got = Loop(case, model, optimizer).run()
    except Error as error:
        return "refused", f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):  # torch's own word for it, where autograd's graphs are its own
            return "refused", str(error)
        return ("plain raises" if expected is None else "WRONG"), f"{type(error).__name__}: {error}"
    if expected is None:
        return "WRONG", "plain PyTorch raises"
    different = [text for a, b in zip(got, expected, strict=True) if (text := first_difference(a, b))]
    return ("WRONG", different[0]) if different else ("same", "")


def cases(part: int) -> list[Case]:
    """About one in ``part`` of the product, always the same ones."""
    everything = [Case(w, m, frozen, first) for w in WAYS for m in MOMENTS for frozen in (False, True) for first in (0, 2)]
    return [case for case in everything if zlib.crc32(str(case).encode()) % part == 0]


def outcomes(rank: int, world: int, setup: Setup, folder: str, part: int) -> list[tuple[str, str, str]]:
    from lowtide.runtime import assembly

    assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    return [(str(case), *outcome(case, setup, folder)) for case in cases(part)]
