"""Bytes per rank and phase: the ledger of real runs against the planner's formulas (lowtide/planning/formulas.py).

A rank of W holds of what its stage shards 1/W, of the rest all of it. At stage 3 units are whole only while they are in use:
at most three at a time. A reduction has one buffer to send from and one to receive in. Two cases are worked by hand from the
shapes, so that a formula and the engine cannot be wrong together.
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
from lowtide.planning.formulas import (
    Home,
    PhaseBytes,
    Setting,
    UnitBytes,
    from_precision,
    phase_table,
    states_bytes_per_rank,
    unit_from_layout,
)
from lowtide.spec.layout import ParamShape, UnitLayout, lay_out
from lowtide.stages import STAGES
from tests.kit.dist import run_ranks

FP32 = 4
COMM = lowtide.Comm(bucket_bytes=0, transport="torch")


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


def units(model: nn.Module) -> list[list[nn.Parameter]]:
    parts = [model.table, *model.blocks, model.head] if isinstance(model, Net) else list(model.layers)  # type: ignore[arg-type]
    return [list(part.parameters()) for part in parts]  # type: ignore[union-attr]


def whole_bytes(unit: list[nn.Parameter], ranks: int) -> int:
    """By hand: parameters start at multiples of 64 elements, and all ranks have equally many such blocks."""
    blocks = sum(math.ceil(p.numel() / 64) for p in unit)
    return math.ceil(blocks / ranks) * ranks * 64 * FP32


class Expected:
    """The formulas for a model that is not sharded yet, with all of it in memory."""

    def __init__(self, model: nn.Module, rank: int, ranks: int, stage: int) -> None:
        kinds = from_precision("fp32")
        shapes = [[ParamShape(tuple(p.shape), tuple(p.stride()), FP32) for p in unit] for unit in units(model)]
        cut: list[UnitLayout] = [lay_out(unit, lowtide.Partition(), ranks) for unit in shapes]
        self.units: list[UnitBytes] = [unit_from_layout(str(i), c, rank, STAGES[stage], kinds) for i, c in enumerate(cut)]
        setting = Setting(stage=STAGES[stage], world_size=ranks, gradients_stay=False)
        table = phase_table(self.units, [Home()] * len(self.units), setting)
        self._rows = [row for row in table if row.tier == "host"]
        self.rest: PhaseBytes = self._rows[0]
        self._ours = ranks > 1 or STAGES[stage].gradients

    def live(self, phase: str, *, gradients: bool, optimizer: bool) -> tuple[int, int, int]:
        """Bytes of the three kinds of states in a phase. Before the first backward there are no gradients, before the first
        update no states; and on one rank, where nothing is cut, gradients are autograd's own and not lowtide's to count."""
        rows = {(row.parameters, row.gradients, row.optimizer) for row in self._rows if row.phase == phase}
        (states,) = rows  # the same for all units
        return states[0], states[1] if gradients and self._ours else 0, states[2] if optimizer else 0


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

    def check(when: str, phase: str, *, gradients: bool = True, optimizer: bool = True) -> None:
        live: Counter[str] = ledger.live
        states = (live["parameters"], live["gradients"], live["optimizer"])
        assert states == expected.live(phase, gradients=gradients, optimizer=optimizer), when
        most = ledger.peak["slots"]
        assert most <= expected.rest.slots, f"{when}: {most} bytes of units were whole, {expected.rest.slots} allowed"
        assert ledger.peak["buffers in flight"] <= expected.rest.buffers, f"{when}: buffers"
        assert set(live) <= {"parameters", "slots", "gradients", "optimizer", "buffers in flight"}, "and nothing else"

    check("after shard", "rest", gradients=False, optimizer=False)
    assert ledger.live["slots"] == ledger.live["buffers in flight"] == 0
    seen: dict[str, Any] = {}
    for number in range(3):
        out = model(batch(model, number, rank))
        check("forward", "forward", optimizer=number > 0)
        out.square().mean().backward()
        check("backward", "reduce", optimizer=number > 0)
        assert ledger.live["slots"] == 0, "nothing stays whole after backward"
        optimizer.step()
        check("step", "update")
        assert ledger.live["slots"] == 0
        optimizer.zero_grad()
        check("zero_grad", "rest")
        assert all(p.grad is None for p in model.parameters())
        # what was really taken from the system, not only what is in use
        room = expected.rest.parameters + expected.rest.slots
        assert engine.arena.reserved_bytes <= room, f"{engine.arena.reserved_bytes} bytes reserved, {room} allowed"
        seen = {"parameters": ledger.live["parameters"], "gradients": ledger.live["gradients"], "slots": ledger.peak["slots"]}
    states = [v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert sum(states) == expected.rest.optimizer
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
    kinds, totals = from_precision("fp32"), []
    for stage in range(4):
        rest = Expected(model, 0, 4, stage).rest
        totals.append((rest.parameters + rest.gradients + rest.optimizer) / numel)
        assert totals[-1] == pytest.approx(states_bytes_per_rank(numel, STAGES[stage], 4, kinds).total / numel, rel=1e-3)
    assert totals == pytest.approx([16, 4 + 4 + 8 / 4, 4 + 12 / 4, 16 / 4], rel=1e-3)


# Net on 3 ranks, rank 0. In blocks of 64 elements (256 bytes): the table has 226 (301 x 48 elements), so 76 for each rank; a
# layer has 84 + 2 + 84 + 1 + 1, so 58; the head 23 + 1, so 8. Of its own, rank 0 has 4864 elements of the table, 3712 of the
# first matrix of each layer, 512 of the head: 20,224 in 6 pieces. In all there are 59,758 elements in 23 parameters.
WHOLE, PART = 256 * 3 * (76 + 4 * 58 + 8), 256 * (76 + 4 * 58 + 8)
BY_HAND = {
    0: (WHOLE, 4 * 59_758, 8 * 59_758 + 4 * 23),
    1: (WHOLE, 4 * 59_758, 8 * 20_224 + 4 * 6),
    2: (WHOLE, 4 * 20_224, 8 * 20_224 + 4 * 6),
    3: (PART, 4 * 20_224, 8 * 20_224 + 4 * 6),
}


@pytest.mark.parametrize("stage", BY_HAND)
def test_a_case_by_hand(stage: int) -> None:
    assert (WHOLE, PART) == (242_688, 80_896)
    expected = Expected(Net(), 0, 3, stage)
    assert expected.live("rest", gradients=True, optimizer=True) == BY_HAND[stage]
    assert expected.rest.slots == (3 * 58_368 if stage == 3 else 0), "the table: 228 blocks"
    assert expected.rest.buffers == 2 * 4 * 3 * 4864, "rank 0 receives its part of the table three times"


def two_layers(rank: int, ranks: int) -> list[int]:
    """Without any formula: what two ranks have of two matrices of 128 x 64 at stage 3, after a step of Adam."""
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters()), stage=3, units=[nn.Linear], comm=COMM)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    live = engine_of(model).ledger.live
    return [live["parameters"], live["gradients"], live["optimizer"], live["slots"]]


def test_a_run_by_hand() -> None:
    """2 x 8192 elements, half on each rank: 32 KiB of parameters, as much of gradients, 64 KiB of moments, 2 counters."""
    assert run_ranks(2, two_layers) == [[32_768, 32_768, 65_536 + 8, 0]] * 2


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
    unit = whole_bytes(list(model.blocks[0].parameters()), ranks)
    model, _ = lowtide.shard(model, None, stage=3, comm=COMM)
    with torch.no_grad():
        for path in range(24):
            model(torch.ones(2, 48), path)
    ledger = engine_of(model).ledger
    most = ledger.peak["slots"] / unit
    assert most <= 3, f"{most} units were whole at once"


def test_wrong_guesses_do_not_pile_up() -> None:
    """Evaluation alone: no backward pass and no step that would let go of everything."""
    run_ranks(2, wrong_guesses)


@pytest.mark.parametrize("zeroed", ["after the step", "after forward", "every second step", "to zeros"])
def test_gradients_have_room_in_a_forward_only_if_the_loop_has_let_them_go(zeroed: str) -> None:
    """And a placement counts on it only if every forward of a step has shown it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = lowtide.shard(model, optimizer, stage=3, memory="4GiB", comm=COMM)
    engine, seen = engine_of(model), []
    for number in range(4):
        out = model(batch(model, number, 0))
        seen.append(engine.ledger.live["gradients"] > 0)
        if zeroed == "after forward":
            optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        if zeroed == "after the step" or (zeroed == "every second step" and number % 2):
            optimizer.zero_grad()
        if zeroed == "to zeros":
            optimizer.zero_grad(set_to_none=False)
    some = {"after the step": [False] * 4, "every second step": [False, True, False, True]}
    assert seen == some.get(zeroed, [False, True, True, True])
    assert engine.placer._needs is not None
    assert engine.placer._needs.way.gradients_stay == seen[-1]


def test_a_gradient_that_was_put_aside_around_a_forward_is_known_again() -> None:
    def train(*, aside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        model, optimizer = lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, comm=COMM)
        model(batch(Net(), 0, 0)).square().mean().backward()
        held = [p.grad for p in model.parameters()]
        if aside:
            for p in model.parameters():
                p.grad = None
        out = model(batch(Net(), 1, 0))
        for p, grad in zip(model.parameters(), held, strict=True):
            p.grad = grad
        out.square().mean().backward()
        optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    for ours, expected in zip(train(aside=True), train(aside=False), strict=True):
        assert torch.equal(ours, expected)
