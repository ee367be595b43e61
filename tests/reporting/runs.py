"""Small models that train and are recorded."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.reporting.recorder import Recorder
from lowtide.reporting.timeline import Timeline, read_run
from lowtide.runtime.budget import give_back
from tests.kit.models import Block, Stack
from tests.kit.specimen import WIDTH


class Scored(nn.Module):
    """A model that returns its loss, as many do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def recorded(run: Path | None, *, blocks: int = 3, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer."""
    torch.manual_seed(0)
    model = model or Scored(Stack([Block() for _ in range(blocks)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options.setdefault("comm", lowtide.Comm(bucket_bytes=0))
    lowtide.shard(model, optimizer, run=run, **options)
    if run is not None:
        # What a sample costs is not in question: a step of these models lasts no longer than one.
        recorder_of(model)._watch._may_spend = lambda: True  # type: ignore[method-assign]
    return model, optimizer


def train(
    model: Any,
    optimizer: Any,
    steps: int,
    *,
    rank: int = 0,
    shape: tuple[int, ...] = (2, WIDTH),
    each: Callable[[int], Any] = id,
) -> list[float]:
    """So many steps, and their losses; ``each`` is called after every one."""
    losses: list[float] = []
    for step in range(steps):
        loss = model(torch.full(shape, 0.1 * (rank + step % 7 + 1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        each(step)
    return losses


def recorder_of(model: Any) -> Recorder:
    recorder = engine_of(model).recorder
    assert isinstance(recorder, Recorder)
    return recorder


def finished(model: Any, run: Path) -> Timeline:
    """The timeline, after the recorder has said its last word."""
    recorder_of(model).end("done")
    return read_run(run).first


def tidy() -> None:
    """What earlier tests left must not go, or be used again, while a process is watched."""
    gc.collect()
    give_back()
