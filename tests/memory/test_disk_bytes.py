"""With everything on disk, memory holds what is in use and nothing else: slots, buffers, and what was asked to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.runtime.engine import Engine
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, left_over, settle, slowed, undefined_memory
from tests.kit.parity import first_difference

WIDTH, BLOCKS = 64, 4
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def start(folder: Path | str, where: Where, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Engine]:
    model = build()
    chosen = {**where.options(str(folder)), "units": [nn.Linear], "stage": 3, **options}
    model, optimizer = lowtide.shard(model, adam(model), **chosen)
    return model, optimizer, settle(model, where.resident)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, rank: int = 0) -> list[Tensor]:
    losses: list[Tensor] = []
    for number in range(steps):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("update", ["step", "backward"])
def test_nothing_stays(update: str, tmp_path: Path) -> None:
    model, optimizer, engine = start(tmp_path, Where(update, 8 << 20))
    for _ in range(3):
        train(model, optimizer)
        assert left_over(engine) is None
        live = {kind: nbytes for kind, nbytes in engine.ledger.live.items() if nbytes}
        assert set(live) <= {"optimizer"}, live  # step counters
        assert live.get("optimizer", 0) < 1000
    assert engine.homes.taken_bytes == 0
    engine.arena.trim()
    engine.buffers_arena.trim()
    assert engine.arena.reserved_bytes == engine.buffers_arena.reserved_bytes == 0
    # masters are the parameters themselves: parameters, gradients (where they are kept) and two moments
    kinds = 4 if update == "step" else 3
    assert kinds * BLOCKS * BLOCK_BYTES <= engine.usage().disk_bytes <= kinds * BLOCKS * (BLOCK_BYTES + 2 * 4096)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_slots_are_those_of_units_in_use_and_ahead(prefetch: int, update: str, tmp_path: Path) -> None:
    """One in use, one that is kept in case it comes again, and the guesses."""
    model, optimizer, engine = start(tmp_path, Where(update, 8 << 20, prefetch))
    train(model, optimizer)
    unit = max(u.layout.nbytes for u in engine.units)
    assert unit <= engine.ledger.peak["slots"] <= (2 + max(prefetch, 1)) * unit


def test_gradients_are_not_in_memory(tmp_path: Path) -> None:
    """Between backward and step they are on disk; autograd's own go as soon as a unit is reduced."""
    model, optimizer, engine = start(tmp_path, Where("step", 8 << 20))
    train(model, optimizer)
    model(torch.randn(3, WIDTH)).square().mean().backward()
    gc.collect()
    assert engine.ledger.live["gradients"] == 0
    assert left_over(engine) is None
    optimizer.step()
    assert engine.ledger.peak["gradients"] == 0


@pytest.mark.parametrize("resident", ["parameters", "states", "gradients", "mixed"])
def test_what_stays_is_counted(resident: str, tmp_path: Path) -> None:
    model, optimizer, engine = start(tmp_path, Where("step", 8 << 20, resident=resident))
    train(model, optimizer, 3)
    assert left_over(engine) is None
    unit = engine.units[0].layout.nbytes
    count = {"parameters": BLOCKS, "states": 2 * BLOCKS, "gradients": BLOCKS, "mixed": 4 * (BLOCKS // 2)}[resident]
    # parameters start on pages of their own, other kinds are packed
    assert count * BLOCK_BYTES <= engine.homes.taken_bytes <= count * unit


def expected_losses() -> list[Tensor]:
    model = build()
    return train(model, adam(model), 4)


@pytest.mark.parametrize("slow", [0.0, 0.002])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("slots", "chunks"), [(2, 1), (2, 2), (3, 4)])
def test_a_size_that_is_set_is_kept(slots: int, chunks: int, update: str, slow: float, tmp_path: Path) -> None:
    """Two slots and one chunk at a time are enough, and give the same bits."""
    where = Where(update, 4096, 3, slow=slow)
    with undefined_memory(), slowed(slow):
        model, optimizer, engine = start(tmp_path, where)
        assert left_over(engine) is None
        engine.arena.trim()
        engine.arena.capacity = slots * max(u.layout.nbytes for u in engine.units)
        engine.buffers_arena.capacity = chunks * max(s.largest_chunk_bytes for s in engine.update.streams.values())
        seen: list[int] = []
        trace = engine.trace.__call__

        def watch(what: str, unit: str) -> None:
            seen.append(engine.arena.reserved_bytes - (engine.arena.capacity or 0))
            seen.append(engine.buffers_arena.reserved_bytes - (engine.buffers_arena.capacity or 0))
            trace(what, unit)

        engine.residency._trace = watch  # type: ignore[assignment]
        losses = train(model, optimizer, 4)
        assert left_over(engine) is None
    assert max(seen) <= 0
    for number, (got, known) in enumerate(zip(losses, expected_losses(), strict=True)):
        assert first_difference(got, known) is None, f"loss {number}"


def _limited(rank: int, world: int, update: str, folder: str) -> list[Tensor]:
    with undefined_memory(), slowed(0.002 * rank):
        model, optimizer, engine = start(folder, Where(update, 4096, 3))
        assert left_over(engine) is None
        engine.arena.trim()
        engine.arena.capacity = 3 * max(u.layout.nbytes for u in engine.units)
        engine.buffers_arena.capacity = 2 * max(s.largest_chunk_bytes for s in engine.update.streams.values())
        losses = train(model, optimizer, 4, rank)
        assert left_over(engine) is None
    return losses


def _unlimited(rank: int, world: int) -> list[Tensor]:
    model = build()
    model, optimizer = lowtide.shard(model, adam(model), stage=3, units=[nn.Linear], comm=lowtide.Comm(bucket_bytes=0))
    return train(model, optimizer, 4, rank)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_size_that_is_set_on_two_ranks(update: str, tmp_path: Path) -> None:
    """One rank's disk is slower: which guesses find a slot differs from rank to rank, and must not change what is exchanged."""
    got, known = run_ranks(2, _limited, update, str(tmp_path)), run_ranks(2, _unlimited)
    for rank in (0, 1):
        for number, (a, b) in enumerate(zip(got[rank], known[rank], strict=True)):
            assert first_difference(a, b) is None, f"rank {rank}, loss {number}"


@pytest.mark.parametrize("update", ["step", "backward"])
def test_units_of_very_different_sizes_share_few_buffers(update: str, tmp_path: Path) -> None:
    """A buffer that is far too large for one chunk must not leave too little for the rest of it."""
    torch.manual_seed(0)

    def widths() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8), nn.Linear(8, 8))

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses: list[Tensor] = []
        for number in range(3):
            loss = model(torch.full((2, 8), 0.1 * number + 0.1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    plain = widths()
    known = run(plain, adam(plain))
    model = widths()
    options = {**Where(update, 1 << 20).options(str(tmp_path)), "units": [nn.Linear]}
    model, optimizer = lowtide.shard(model, adam(model), **options)
    engine = engine_of(model)
    assert left_over(engine) is None
    engine.buffers_arena.capacity = 2 * max(s.largest_chunk_bytes for s in engine.update.streams.values())
    for number, (got, loss) in enumerate(zip(run(model, optimizer), known, strict=True)):
        assert first_difference(got, loss) is None, f"loss {number}"
    assert left_over(engine) is None
