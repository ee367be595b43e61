"""What a step reads and writes: every byte as often as the plan's table says, and never twice for want of a slot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.runtime import assembly
from lowtide.tiers.store import Extent, IOTicket, Priority
from tests.kit.stores import SlowStore

DEPTH, WIDTH = 6, 128


class SlowWrites(SlowStore):
    """Writes take far longer than reads, so that a slot is still being written from when the next unit is wanted."""

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        def late(*request: Any) -> IOTicket:
            time.sleep(0.05)
            return self.inner.write(*request)

        return self._later(f"slow write of {extent.key}", extent, block, priority, late, data)


@pytest.fixture(autouse=True)
def _slow_disk_without_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on a disk that is slow enough for slots to be still in use when the next unit is wanted."""
    opened = assembly._open_disk
    monkeypatch.setattr(assembly, "default_budget", lambda: None)
    monkeypatch.setattr(assembly, "_open_disk", lambda config, rank: SlowWrites(opened(config, rank), 0.001))


def traffic_of_a_step(folder: Path, update: str, slots: int) -> tuple[int, int]:
    """Bytes read and written in the third step."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = lowtide.shard(
        model, optimizer, disk=folder, update=update, comm=lowtide.Comm(bucket_bytes=0), activations="keep"
    )
    engine = engine_of(model)
    engine.arena.capacity = slots * max(u.layout.nbytes for u in engine.units)
    store = engine.store
    assert store is not None
    store.drain()
    engine.arena.trim()  # what the start took beyond that
    counted = []
    for _ in range(3):
        before = store.traffic.read_bytes, store.traffic.written_bytes
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()  # a step that was put off counts as well
        store.drain()
        counted.append((store.traffic.read_bytes - before[0], store.traffic.written_bytes - before[1]))
    return counted[-1]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_two_slots_move_no_more_than_many(tmp_path: Path, update: str) -> None:
    many = traffic_of_a_step(tmp_path, update, slots=DEPTH + 1)
    assert traffic_of_a_step(tmp_path, update, slots=3) == many
    assert traffic_of_a_step(tmp_path, update, slots=2) == many
