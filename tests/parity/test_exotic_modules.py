"""Modules that are not quite modules, inside a model: scripted, traced, compiled, exported, with a forward of their own; and
embeddings whose gradients are sparse. Plain PyTorch's bits, or a refusal that is listed here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import lowtide
from lowtide.errors import Error
from tests.kit import out_of_core as out_of_core  # without a number: everything on disk
from tests.kit.dist import run_ranks

WIDTH = 8


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class OwnForward(nn.Module):
    """``forward`` is an attribute of the object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.forward = lambda x: self.inner(x)


class Delegating(nn.Module):
    """Attributes that it has not are those of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Mixed(nn.Module):
    """Scripted blocks in a list, among others, and a parameter around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([torch.jit.script(nn.Sequential(Inner(), Inner())), Inner(), torch.jit.script(Inner())])
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.gain
        return x


def among_others(module: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), module, nn.Linear(WIDTH, WIDTH))


def example() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


MODELS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: among_others(torch.jit.script(Inner())),
    "scripted blocks": lambda: nn.Sequential(torch.jit.script(Inner()), torch.jit.script(Inner())),
    "scripted and not": Mixed,
    "traced": lambda: among_others(torch.jit.trace(Inner(), example())),
    "scripted as a whole": lambda: torch.jit.script(nn.Sequential(Inner(), Inner())),
    "compiled": lambda: among_others(torch.compile(Inner(), backend="eager")),
    "symbolically traced": lambda: among_others(torch.fx.symbolic_trace(Inner())),
    "exported": lambda: among_others(torch.export.export(Inner(), (example(),)).module()),
    "forward as an attribute": lambda: among_others(OwnForward()),
    "delegating": lambda: among_others(Delegating()),
    "sparse": lambda: nn.Sequential(nn.Embedding(10, WIDTH, sparse=True)),
    "sparse, SparseAdam": lambda: nn.Sequential(nn.Embedding(10, WIDTH, sparse=True)),
    "sparse and not": lambda: nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), Inner()),
}
PLACEMENTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 0}),
    (1, {"stage": 3}),
    (1, {"stage": 0, "disk": True}),
    (1, {"stage": 0, "disk": True, "activations": "recompute"}),
    (2, {"stage": 0}),
    (2, {"stage": 3}),
]


def listed(name: str, ranks: int, options: dict[str, Any]) -> str | None:
    """The words with which this is refused, if it is."""
    if name == "scripted as a whole":
        return "Script its blocks, not the model"
    if "sparse" in name and (ranks, options) != (1, {"stage": 0}):
        tried = "disk" in options or (ranks, options["stage"]) == (2, 3)  # on parts of a model
        return "cannot be tried" if "SparseAdam" in name and tried else "sparse=False"
    return None


@contextmanager
def interpreted() -> Iterator[None]:
    """TorchScript computes as it is written: what it learns from runs may change bits from one to the next."""
    before = torch._C._jit_set_profiling_executor(False), torch._C._jit_set_profiling_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_profiling_executor(before[0])
        torch._C._jit_set_profiling_mode(before[1])


def losses(model: nn.Module, optimizer: Optimizer, name: str) -> list[float]:
    out: list[float] = []
    for number in range(3):
        x = torch.tensor([1, 2, 2, number]) if "sparse" in name else example() * (number + 1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def build(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    if "SparseAdam" in name:
        return model, SparseAdam(model.parameters(), lr=0.1)
    return model, SGD(model.parameters(), lr=0.1) if "sparse" in name else AdamW(model.parameters(), lr=0.01)


def problems(rank: int, world: int, options: dict[str, Any], folder: str) -> list[str]:
    """Ranks have the same batches, so that the numbers of several are those of one."""
    warnings.simplefilter("ignore")  # that TorchScript is old
    out: list[str] = []
    with interpreted():
        for name in MODELS:
            words = listed(name, world, options)
            expected = losses(*build(name), name)
            model, optimizer = build(name)
            where = {**options, "disk": folder if "disk" in options else None}
            try:
                lowtide.shard(model, optimizer, comm=lowtide.Comm(bucket_bytes=0, deadline=20), **where)
                got: Any = losses(model, optimizer, name)
            except Error as error:
                got = str(error)
            if words is None and got != expected:
                out.append(f"{name}: {got} instead of {expected}")
            if words is not None and (not isinstance(got, str) or words not in got):
                out.append(f"{name}: {got}, but it is listed as refused: {words}")
    return out


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("ranks", "options"), PLACEMENTS, ids=str)
def test_losses(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(ranks, problems, options, str(tmp_path))
    assert not any(found), "\n".join(text for texts in found for text in texts)
