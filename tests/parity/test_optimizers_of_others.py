"""Optimizers as people write them: each trait for which an update in parts could go wrong, on models whose parameters differ in
dimensions, size and dtype. ``shard`` takes the pair and gives plain PyTorch's bits, states included, or refuses it by name and
reason. It never fails later, and never trains to other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Refused
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, left_over, settle, undefined_memory
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_same
from tests.kit.scenarios import batch, from_rank_0, record_dict
from tests.kit.specimen import WIDTH


class _Momentum(Optimizer):
    """What the others have in common: ``direction`` says how a parameter moves, from its gradient and its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def begin(self) -> None:
        """Called once in every step, before any parameter."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        return state["momentum"].mul_(0.9).add_(grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, param.grad, self.state[param]), alpha=group["lr"])


class Eager(_Momentum):
    """States are made in the constructor, for frozen parameters, too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["momentum"] = torch.zeros_like(param)


class Late(_Momentum):
    """A state that begins with the third step."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["steps"] = state.get("steps", 0) + 1
        return super().direction(param, grad, state) if state["steps"] > 2 else grad


class Centralised(_Momentum):
    """Kernels are treated as a whole, matrices are not (Ranger)."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        centred = grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 3 else grad
        return super().direction(param, centred, state)


class Limited(_Momentum):
    """Large gradients are scaled down by their own norm."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(param, grad / grad.norm().clamp_min(1.0), state)


class Blockwise(_Momentum):
    """From 4,096 elements on, blocks of 256 have a scale each."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if param.numel() < 4096:
            return super().direction(param, grad, state)
        blocks = grad.flatten().split(256)
        return super().direction(param, torch.cat([b / (1 + b.abs().max()) for b in blocks]).view_as(grad), state)


class Counting(_Momentum):
    """A counter that belongs to no parameter (MADGRAD)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["k"] = torch.tensor([0])  # type: ignore[index]

    def begin(self) -> None:
        self.state["k"] += 1  # type: ignore[index]

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(param, grad * float(self.state["k"]) ** -0.5, state)  # type: ignore[index]


class Listing(_Momentum):
    """A list on the optimizer, and a number in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[float] = []

    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        self.history.append(self.param_groups[0]["lr"] / self.param_groups[0]["k"])

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return super().direction(param, grad * (1.0 + 0.1 * len(self.history)), state)


class Noisy(_Momentum):
    """Langevin: random numbers, which pieces would draw in another order."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad + 0.01 * torch.randn_like(grad)


class Joint(_Momentum):
    """One number for all parameters, found from all of them (D-Adaptation)."""

    def begin(self) -> None:
        self.total = sum(float(p.grad.norm()) for g in self.param_groups for p in g["params"] if p.grad is not None)

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad / (1.0 + self.total)


class AdamW8bit(_Momentum):
    """As bitsandbytes keeps large states: codes, and a scale for every 256 of them."""

    __module__ = "bitsandbytes.optim.adamw"

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if param.numel() < 4096:
            return super().direction(param, grad, state)
        if "state1" not in state:
            state["state1"] = torch.full(param.shape, 127, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(-(-param.numel() // 256))
        scales = state["absmax1"].repeat_interleave(256)[: param.numel()].view_as(grad)
        mean = (state["state1"].float() - 127) / 127 * scales * 0.9 + grad
        state["absmax1"].copy_(torch.stack([block.abs().max() for block in mean.flatten().split(256)]))
        scales = state["absmax1"].repeat_interleave(256)[: param.numel()].view_as(grad)
        state["state1"].copy_((mean / scales.clamp_min(1e-12) * 127).round() + 127)
        return mean


class _Codes(Tensor):
    """A tensor subclass, as torchao keeps states in."""


class AdamW4bit(_Momentum):
    __module__ = "torchao.optim.adam"

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param).as_subclass(_Codes)
        state["exp_avg"].mul_(0.9).add_(grad)
        return state["exp_avg"].as_subclass(Tensor)


OTHERS: dict[str, Callable[[Any], Optimizer]] = {
    **{cls.__name__: cls for cls in (Eager, Late, Centralised, Limited, Blockwise, Counting, Listing, Noisy, Joint)},
    **{cls.__name__: cls for cls in (AdamW8bit, AdamW4bit)},
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "AdamW amsgrad": lambda params: AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: Adagrad(params, lr=1e-2),
    "Adafactor": lambda params: Adafactor(params, lr=1e-2),
}


class Net(nn.Module):
    """A parameter of every sort; those of ``odd`` in front, so that they are the first that anybody looks at."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd = odd
        if odd == "int8":  # as QLoRA keeps frozen weights
            self.first = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        elif odd == "complex":
            self.first = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        elif odd == "kernel":
            self.first = nn.Parameter(torch.randn(4, 2, 3, 3))
        elif odd == "large":
            self.first = nn.Parameter(torch.randn(WIDTH, 260))
        elif odd == "scalar":
            self.first = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.odd == "int8":
            x = x + x @ (self.first.to(x.dtype) * 0.01)
        elif self.odd == "complex":
            x = x + (x * self.first).real
        elif self.odd == "kernel":
            x = x + nn.functional.conv2d(x.reshape(-1, 2, 3, 4), self.first[:2], padding=1).reshape(-1, WIDTH)
        elif self.odd == "large":
            x = x + (x @ self.first)[:, :WIDTH]
        elif self.odd == "scalar":
            x = x * self.first
        for block in self.blocks:
            x = x + block(x)
        return x


ODD = ("nothing", "int8", "complex", "kernel", "large", "scalar")
ONE_RANK: dict[str, dict[str, Any]] = {
    "plain": {},
    "disk": {"where": Where()},
    "disk_backward": {"where": Where("backward")},
    "backward": {"update": "backward"},
}
TWO_RANKS: dict[str, dict[str, Any]] = {"stage1": {"stage": 1}, "stage3": {"stage": 3}, "stage3_disk": {"where": Where()}}
REASONS = {
    ("AdamW8bit", "large"): "quantised: what its numbers mean lies in other tensors",
    ("AdamW4bit", "nothing"): "as a _Codes, whose numbers lie in tensors of another shape",
    ("Noisy", "nothing"): "depends on the other",
    ("Joint", "nothing"): "depends on the other",
}
"""What is refused from disk, and why."""


def _train(system: Plain, rank: int) -> Trace:
    trace = Trace()
    for number in range(4):
        system.before_forward()
        loss = system.forward(batch(number, rank)).square().mean()
        loss.backward()
        system.after_backward(synced=True)
        trace.add(f"loss {number}", loss)
        system.before_step()
        system.optimizer.step()
        system.optimizer.zero_grad(set_to_none=number % 2 == 0)
    record_dict(trace, "optimizer", from_rank_0(system.optimizer.state_dict()))
    system.record(trace, 4)
    return trace


def _outcome(rank: int, world: int, name: str, odd: str, placement: dict[str, Any], folder: str) -> str:
    """Why ``shard`` refuses, or the empty text. Raises if anything else is wrong."""
    model = Net(odd)
    plain = (Plain if world == 1 else Hand)(model, OTHERS[name](model.parameters()))
    torch.manual_seed(0)
    expected = _train(plain, rank)
    model = Net(odd)
    options = dict(placement)
    where = options.pop("where", None)
    optimizer = OTHERS[name](model.parameters())
    how = {"comm": lowtide.Comm(bucket_bytes=0)} if where is None else where.options(folder)
    with undefined_memory():
        try:
            system = Sharded(model, optimizer, **(how | options))
        except Refused as error:
            assert type(model) is Net
            return str(error)
        if where is not None:
            settle(model, where.resident)
        torch.manual_seed(0)
        got = _train(system, rank)
    assert_same(got, expected)
    assert where is None or left_over(engine_of(model)) is None
    return ""


def _possible(name: str, odd: str) -> bool:
    """Whether plain PyTorch can do it."""
    return odd != "complex" or name in ("Eager", "Late", "Counting", "Listing", "AdamW", "SGD")


_PAIRS = [(name, odd) for name in OTHERS for odd in ODD if _possible(name, odd)]


@pytest.mark.thinned(16)
@pytest.mark.parametrize("placement", ONE_RANK)
@pytest.mark.parametrize(("name", "odd"), _PAIRS)
def test_on_one_rank(name: str, odd: str, placement: str, tmp_path: Path) -> None:
    (text,) = run_ranks(1, _outcome, name, odd, ONE_RANK[placement], str(tmp_path))
    _assert_told(text, name)
    assert not text or placement != "plain"


@pytest.mark.thinned(28)
@pytest.mark.parametrize("placement", TWO_RANKS)
@pytest.mark.parametrize(("name", "odd"), _PAIRS)
def test_on_two_ranks(name: str, odd: str, placement: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _outcome, name, odd, TWO_RANKS[placement], str(tmp_path))
    _assert_told(first, name)
    assert first == second


def _assert_told(text: str, name: str) -> None:
    assert not text or (text.startswith(name.split()[0] + " cannot") and ("Leave both out" in text or "Use shard(" in text))


@pytest.mark.parametrize(("name", "odd"), REASONS)
def test_the_reason_is_told(name: str, odd: str, tmp_path: Path) -> None:
    for placement in ("disk", "backward"):
        assert REASONS[name, odd] in _outcome(0, 1, name, odd, ONE_RANK[placement], str(tmp_path))


@pytest.mark.parametrize("name", ["Eager", "Late", "Counting", "Listing", "AdamW", "Adagrad", "Adafactor", "Centralised"])
def test_these_are_taken_from_disk(name: str, tmp_path: Path) -> None:
    """A refusal of everything would be right, too."""
    odd = "int8" if name == "AdamW" else "kernel"
    assert not _outcome(0, 1, name, odd, ONE_RANK["disk"], str(tmp_path))
