"""Bytes per rank and phase against the ZeRO formulas, worked out here from the shapes alone.

A rank of W holds of what its stage shards 1/W, of the rest all of it. At stage 3 units are whole only while they are in use:
at most three at a time. A reduction has one buffer to send from and one to receive in.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lowtide
from lowtide.api import engine_of
from tests.kit.dist import run_ranks

FP32 = 4
COMM = lowtide.Comm(bucket_bytes=0)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width, bias=False), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Units of different sizes: a large table, four equal blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(301, 48)
        self.blocks = nn.ModuleList(Layer(48, 112) for _ in range(4))
        self.head = nn.Linear(48, 30)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pyramid(nn.Module):
    """No two units of the same size, and none close to another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64 * 2**k) for k in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).square().mean() for layer in self.layers), torch.zeros(()))


def units(model: nn.Module) -> list[list[int]]:
    """Numbers of elements of the parameters of every unit."""
    parts = [model.table, *model.blocks, model.head] if isinstance(model, Net) else list(model.layers)  # type: ignore[arg-type]
    return [[p.numel() for p in part.parameters()] for part in parts]  # type: ignore[union-attr]


def blocks_of_64(unit: list[int]) -> int:
    return sum(math.ceil(n / 64) for n in unit)


def whole_bytes(unit: list[int], ranks: int) -> int:
    """Parameters start at multiples of 64 elements, and all ranks have equally many such blocks."""
    return math.ceil(blocks_of_64(unit) / ranks) * ranks * 64 * FP32


def shard_bytes(unit: list[int], ranks: int) -> int:
    return whole_bytes(unit, ranks) // ranks


def elements_of(unit: list[int], rank: int, ranks: int) -> list[int]:
    """How many elements of each parameter lie in a rank's shard, without the padding."""
    share = shard_bytes(unit, ranks) // FP32
    lo, hi = rank * share, (rank + 1) * share
    out, at = [], 0
    for n in unit:
        out.append(max(0, min(hi, at + n) - max(lo, at)))
        at += math.ceil(n / 64) * 64
    return out


class Expected:
    """The formulas."""

    def __init__(self, model: nn.Module, rank: int, ranks: int, stage: int) -> None:
        every = units(model)
        self.largest = max(whole_bytes(u, ranks) for u in every)
        self.parameters = sum(shard_bytes(u, ranks) if stage >= 3 else whole_bytes(u, ranks) for u in every)
        mine = [n for u in every for n in elements_of(u, rank, ranks)]
        total = [n for u in every for n in u]
        # on one rank, where nothing is cut, gradients are autograd's own and not lowtide's to count
        self.gradients = FP32 * sum(mine if stage >= 2 else total) if ranks > 1 or stage >= 2 else 0
        kept = mine if stage >= 1 else total
        self.optimizer = sum(2 * FP32 * n + FP32 for n in kept if n)  # two moments per element, one step count per piece
        self.in_flight = stage >= 3 and ranks > 1


def batch(model: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    if isinstance(model, Net):
        return torch.randint(0, 301, (2, 7), generator=generator)
    return torch.randn(3, 64, generator=generator)


def phases(rank: int, ranks: int, stage: int, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net() if kind == "net" else Pyramid()
    expected = Expected(model, rank, ranks, stage)
    storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, comm=COMM)
    gc.collect()
    assert all(s.expired() for s in storages), "a parameter's own memory is still there beside ours"
    engine = engine_of(model)
    ledger = engine.ledger

    def check(phase: str, *, gradients: int, optimizer_bytes: int) -> None:
        live: Counter[str] = ledger.live
        assert live["parameters"] == expected.parameters, f"{phase}: parameters"
        assert live["gradients"] == gradients, f"{phase}: gradients"
        assert live["optimizer"] == optimizer_bytes, f"{phase}: optimizer"
        slots = 3 * expected.largest if expected.in_flight else 0
        assert ledger.peak["slots"] <= slots, f"{phase}: {ledger.peak['slots']} bytes of units were whole, {slots} allowed"
        assert ledger.peak["buffers in flight"] <= 2 * expected.largest, f"{phase}: buffers"
        assert set(live) <= {"parameters", "slots", "gradients", "optimizer", "buffers in flight"}, "and nothing else"

    check("after shard", gradients=0, optimizer_bytes=0)
    assert ledger.live["slots"] == ledger.live["buffers in flight"] == 0
    seen: dict[str, Any] = {}
    for number in range(3):
        had = expected.optimizer if number else 0
        out = model(batch(model, number, rank))
        check("forward", gradients=expected.gradients if number else 0, optimizer_bytes=had)
        out.square().mean().backward()
        check("backward", gradients=expected.gradients, optimizer_bytes=had)
        assert ledger.live["slots"] == 0, "nothing stays whole after backward"
        optimizer.step()
        check("step", gradients=expected.gradients, optimizer_bytes=expected.optimizer)
        assert ledger.live["slots"] == 0
        optimizer.zero_grad()
        check("zero_grad", gradients=expected.gradients, optimizer_bytes=expected.optimizer)
        assert all(p.grad is None for p in model.parameters())
        # what was really taken from the system, not only what is in use
        room = expected.parameters + (3 * expected.largest if expected.in_flight else 0)
        assert engine.arena.reserved_bytes <= room, f"{engine.arena.reserved_bytes} bytes reserved, {room} allowed"
        seen = {"parameters": ledger.live["parameters"], "gradients": ledger.live["gradients"], "slots": ledger.peak["slots"]}
    states = [v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert sum(states) == expected.optimizer
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["net", "pyramid"])
def test_every_phase(kind: str, stage: int, ranks: int) -> None:
    seen = run_ranks(ranks, phases, stage, kind)
    model = Net() if kind == "net" else Pyramid()
    numel = sum(p.numel() for p in model.parameters())
    if stage == 3:
        padded = sum(whole_bytes(u, ranks) for u in units(model))
        assert sum(s["parameters"] for s in seen) == padded, "all ranks together hold one copy"
        assert padded - FP32 * numel < FP32 * 64 * sum(len(u) + ranks for u in units(model))
    if stage >= 2:
        assert sum(s["gradients"] for s in seen) == FP32 * numel


def test_the_formulas_are_those_of_zero() -> None:
    """For a model of many elements, Adam in fp32: 16 bytes per element at stage 0, 16/W at stage 3."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(640, 640, bias=False) for _ in range(4))
    numel = 4 * 640 * 640
    totals = []
    for stage in range(4):
        e = Expected(model, 0, 4, stage)
        totals.append((e.parameters + e.gradients + e.optimizer) / numel)
    assert totals == pytest.approx([16, 4 + 4 + 8 / 4, 4 + 12 / 4, 16 / 4], rel=1e-3)


def sixteen_bits(rank: int, ranks: int, stage: int) -> None:
    """bf16 parameters, fp32 masters, gradients and moments: 2 + 4 + 4 + 8 bytes per element, each sharded or not."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    numel = 4 * 64 * 64
    precision = lowtide.Precision(param="bf16")
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision=precision, comm=COMM)
    model(torch.ones(1, 64)).float().sum().backward()
    optimizer.step()
    live = engine_of(model).ledger.live
    part = lambda sharded: numel // (ranks if sharded else 1)  # noqa: E731
    assert live["parameters"] == 2 * part(stage >= 3)
    assert live["gradients"] == 4 * part(stage >= 2)
    assert live["optimizer"] == 12 * part(stage >= 1) + sum(s["step"].nbytes for s in optimizer.state.values())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_kind_has_its_own_width(stage: int, ranks: int) -> None:
    run_ranks(ranks, sixteen_bits, stage)


class Branching(nn.Module):
    """Another path through the blocks in every pass: the guess which unit follows is wrong each time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(48, 112) for _ in range(9))

    def forward(self, x: Tensor, path: int) -> Tensor:
        for index in (0, 1 + path % 6, 7, 8):
            x = self.blocks[index](x)
        return x


def wrong_guesses(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Branching()
    unit = [p.numel() for p in model.blocks[0].parameters()]
    model, _ = lowtide.shard(model, None, stage=3, comm=COMM)
    with torch.no_grad():
        for path in range(24):
            model(torch.ones(2, 48), path)
    ledger = engine_of(model).ledger
    most = ledger.peak["slots"] / whole_bytes(unit, ranks)
    assert most <= 3, f"{most} units were whole at once"


def test_wrong_guesses_do_not_pile_up() -> None:
    """Evaluation alone: no backward pass and no step that would let go of everything."""
    run_ranks(2, wrong_guesses)
