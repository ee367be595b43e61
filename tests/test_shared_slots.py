"""Units on disk, ranks on one host: a unit is whole once, in memory that all of them map, and each rank reads its own shard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
import lowtide.errors
from lowtide.api import engine_of
from lowtide.comm.shared import pages
from lowtide.runtime import assembly
from lowtide.runtime.engine import Engine
from lowtide.runtime.shared_slots import SharedSlots
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack
from tests.kit.specimen import WIDTH

COUNT = 6
CHUNKS = 4096


def build(folder: str, *, comm: lowtide.Comm | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    torch.manual_seed(0)
    model = Stack([Block() for _ in range(COUNT)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    comm = comm or lowtide.Comm(bucket_bytes=1, deadline=30)
    options = {"stage": 3, "disk": folder, "update": lowtide.Update("step", chunk_bytes=CHUNKS), **options}
    model, optimizer = lowtide.shard(model, optimizer, comm=comm, **options)
    return model, optimizer, engine_of(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def slots_of(engine: Engine) -> SharedSlots | None:
    return engine.residency._shared


def one_copy(rank: int, world: int, folder: str, update: str) -> tuple[list[float], int]:
    model, optimizer, engine = build(folder, update=lowtide.Update(update, chunk_bytes=CHUNKS))
    slots = slots_of(engine)
    assert slots is not None
    losses = train(model, optimizer, rank)
    assert engine.arena.reserved_bytes == 0, "no rank has slots of its own"
    assert engine.ledger.peak["slots"] > 0
    assert engine.ledger.live["slots"] == 0
    return losses, slots.taken_bytes


def own_copies(rank: int, world: int, folder: str, update: str) -> list[float]:
    comm = lowtide.Comm(bucket_bytes=1, deadline=30, transport="torch")
    model, optimizer, engine = build(folder, comm=comm, update=lowtide.Update(update, chunk_bytes=CHUNKS))
    assert slots_of(engine) is None
    return train(model, optimizer, rank)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_unit_is_whole_once(ranks: int, update: str, tmp_path: Path) -> None:
    together = run_ranks(ranks, one_copy, str(tmp_path), update)
    apart = run_ranks(ranks, own_copies, str(tmp_path), update)
    assert [losses for losses, _ in together] == apart
    block = sum(p.numel() for p in Block().parameters()) * 4
    assert {taken for _, taken in together} == {together[0][1]}, "one memory"
    # What is used, what was used last and what comes next; each rounded up to pages and cut at multiples of them.
    assert together[0][1] <= 3 * (pages(block) + (8 + ranks) * 4096)


def holds_a_view(rank: int, world: int, folder: str) -> None:
    model, optimizer, _ = build(folder)
    held: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, *_: Any) -> None:
        if rank == 0 and not held:
            view = module.up.weight.detach()
            held.append((view, view.clone()))

    hook = model.blocks[1].register_forward_hook(keep)
    train(model, optimizer, rank)
    hook.remove()
    for view, copy in held:
        assert torch.equal(view, copy), "its memory was used for something else"
    assert len(held) == (rank == 0)


def test_a_view_that_one_rank_holds_keeps_its_memory_on_all(tmp_path: Path) -> None:
    run_ranks(2, holds_a_view, str(tmp_path))


class SlowLinear(torch.autograd.Function):
    """Has the weight in its hands for a while before it uses it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        return grad @ weight, None, None


class LookedAtTwice(nn.Module):
    """Backward needs ``body`` once more after its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.body = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        return self.body(SlowLinear.apply(self.front(x), self.body.weight.detach(), seconds))


def slow_reader(rank: int, world: int, folder: str, transport: str) -> list[float]:
    assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    torch.manual_seed(0)
    model: nn.Module = LookedAtTwice()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    comm = lowtide.Comm(bucket_bytes=0, deadline=30, transport=transport)
    update = lowtide.Update("backward", chunk_bytes=CHUNKS)
    lowtide.shard(model, optimizer, stage=3, units=nn.Linear, comm=comm, update=update, disk=folder)
    losses: list[float] = []
    for _ in range(4):
        loss = model(torch.ones(2, WIDTH), 0.3 * rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_update_in_backward_changes_nothing_that_others_read(tmp_path: Path) -> None:
    assert run_ranks(2, slow_reader, str(tmp_path), "shared") == run_ranks(2, slow_reader, str(tmp_path), "torch")


class Vain(nn.Module):
    """Changes its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(2)
        return x * self.scale


def changes_what_others_read(rank: int, world: int, folder: str) -> str:
    assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Vain())
    lowtide.shard(model, None, stage=3, disk=folder, comm=lowtide.Comm(bucket_bytes=1, deadline=30))
    with pytest.raises(lowtide.errors.Refused, match="was changed while its unit"):
        model(torch.ones(2, WIDTH))
    with pytest.raises(lowtide.Error) as told:
        model(torch.ones(2, WIDTH))
    return str(told.value)


def test_a_change_that_other_ranks_could_have_read_poisons(tmp_path: Path) -> None:
    for said in run_ranks(2, changes_what_others_read, str(tmp_path)):
        assert "share" in said


def gathers_all(rank: int, world: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank writes something else: only rank 0's values count, and the memory was for a moment."""
    model, optimizer, engine = build(folder)
    train(model, optimizer, rank, steps=1)
    with lowtide.gathered(model):
        before = [p.detach().clone() for p in model.parameters()]
    with lowtide.gathered(model, write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if rank == 0 else 7.0)
    assert engine.store is not None
    engine.store.drain()
    end = time.monotonic() + 10
    while engine.arena.reserved_bytes and time.monotonic() < end:
        time.sleep(0.01)  # it is being written from there
    assert engine.arena.reserved_bytes == 0
    with lowtide.gathered(model):
        after = [p.detach().clone() for p in model.parameters()]
    return before, after


def test_gathered_works_on_copies(tmp_path: Path) -> None:
    for before, after in run_ranks(2, gathers_all, str(tmp_path)):
        assert all(torch.equal(a, 0.5 * b) for a, b in zip(after, before, strict=True))


def limited(rank: int, world: int, folder: str, places: int) -> tuple[int, int, list[float]]:
    model, optimizer, engine = build(folder)
    slots = slots_of(engine)
    assert slots is not None
    views: list[Tensor] = []
    hooks = [b.register_forward_hook(lambda m, *_: views.append(m.up.weight.detach())) for b in model.blocks]  # type: ignore
    train(model, optimizer, rank, steps=1)
    before = slots.taken_bytes
    for hook in hooks:
        hook.remove()
    views.clear()
    slots.capacity = places * max(pages(unit.layout.nbytes) for unit in engine.units)
    losses = train(model, optimizer, rank)
    assert slots.taken_bytes <= slots.capacity + 4096, "the page with the secret"
    return before, slots.taken_bytes, losses


def test_memory_beyond_the_limit_is_given_back(tmp_path: Path) -> None:
    """With a view of each, all units were there at once. Three places: what is used, was used last and comes next."""
    (before, after, losses), _ = run_ranks(2, limited, str(tmp_path), 3)
    assert after < before
    (before, after, unlimited), _ = run_ranks(2, limited, str(tmp_path), 100)
    assert after >= before
    assert losses == unlimited


class Unequal(nn.Module):
    """One unit is larger than all others together, and comes first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 40 * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x)[:, :WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.wide(x)


def unequal(rank: int, world: int, folder: str, places: int | None) -> list[float]:
    assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    torch.manual_seed(0)
    model: nn.Module = Unequal()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    comm = lowtide.Comm(bucket_bytes=0, deadline=30)
    lowtide.shard(model, optimizer, stage=3, units=nn.Linear, comm=comm, disk=folder)
    slots = slots_of(engine_of(model))
    assert slots is not None
    if places is not None:
        slots.capacity = places * max(unit.layout.nbytes for unit in engine_of(model).units)
    losses: list[float] = []
    for _ in range(3):
        losses += train(model, optimizer, rank, steps=1)
        assert slots.capacity is None or slots.taken_bytes <= slots.capacity + 4096
    engine_of(model).residency.trim()
    assert slots.taken_bytes <= 4096, "all of it is given back when all ranks say so"
    assert train(model, optimizer, rank, steps=1), "and comes again"
    return losses


def test_units_of_different_sizes_stay_within_the_limit(tmp_path: Path) -> None:
    assert run_ranks(2, unequal, str(tmp_path), 2) == run_ranks(2, unequal, str(tmp_path), None)


def too_small(rank: int, world: int, folder: str) -> str:
    model, optimizer, engine = build(folder)
    slots = slots_of(engine)
    assert slots is not None
    slots.capacity = 4096
    with pytest.raises(lowtide.errors.OverBudget) as told:
        train(model, optimizer, rank, steps=1)
    return str(told.value)


def test_no_room_for_one_unit_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, too_small, str(tmp_path))
    assert all("slots for units in use" in text for text in said)
