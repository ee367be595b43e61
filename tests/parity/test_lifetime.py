"""Without a process group; many models one after another; a model that is dropped gives back what it took."""

from __future__ import annotations

import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import lowtide
from tests.kit.dist import run_ranks
from tests.kit.lifetime import collected
from tests.kit.parity import Case, Recipe, difference
from tests.kit.scenarios import adamw, stack


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt", "odd_sizes", "convolutions", "checkpoint_reentrant_around"])
def test_without_a_process_group(model: str, stage: int) -> None:
    """In this very process, with as many threads as torch takes."""
    assert not dist.is_initialized()
    assert difference(0, 1, Case(model, stage, Recipe(clip=0.1))) is None


def _left_behind(rank: int, world: int, stage: int) -> tuple[int, int]:
    """A model that was dropped is gone; by how many threads and files a process grows per model."""

    def use() -> weakref.ref[torch.nn.Module]:
        model = stack()
        model, optimizer = lowtide.shard(model, adamw(model), stage=stage)
        model(torch.ones(1, 24)).sum().backward()
        optimizer.step()
        return weakref.ref(model)

    def held(*models: weakref.ref[torch.nn.Module]) -> tuple[int, int]:
        collected(*models)
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = held(use())
    after = held(*[use() for _ in range(4)])
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_dropped_model_leaves_nothing_behind(stage: int, ranks: int) -> None:
    for threads, files in run_ranks(ranks, _left_behind, stage):
        # Fewer may be there than before: what other tests left in this process ends when it likes.
        assert threads <= 0, f"{threads} threads more after 4 models"
        assert files <= 0, f"{files} open files more after 4 models"


def _many_alive(rank: int, world: int) -> None:
    systems = []
    for seed in range(6):
        model = stack(seed, 2)
        systems.append(lowtide.shard(model, adamw(model), stage=seed % 4))
    for _ in range(2):
        losses = [model(torch.full((1, 24), 0.1 * (rank + 1))).square().sum() for model, _ in systems]
        sum(losses[::-1], torch.zeros(())).backward()
        for _, optimizer in systems:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.isfinite(loss) for loss in losses)


def test_many_models_in_one_backward() -> None:
    """Their reductions interleave, in an order that is the same on all ranks."""
    run_ranks(2, _many_alive)
