"""An emulated device: memory of its own, real copies into it, an error when it is full; and the same bits as without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import OverBudget
from tests.kit.models import MENAGERIE
from tests.kit.out_of_core import Where
from tests.kit.out_of_core import check as check_on_disk
from tests.kit.parity import Case, Recipe, check

MODELS = ["dropout", "buffers", "lstm", "embeddings"]
SMALL = (("device_memory", "1MiB"),)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("model", MODELS)
def test_units_on_disk(tmp_path: Path, model: str, update: str, world: int) -> None:
    assert model in MENAGERIE
    check_on_disk(world, Case(model, 3, Recipe(), SMALL), Where(update=update), tmp_path)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "host", "recompute"])
def test_units_on_the_host(activations: str, world: int) -> None:
    check(world, Case("dropout", 3, Recipe(), (*SMALL, ("activations", activations))))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def test_units_are_copied_in_and_the_device_stays_within_its_size() -> None:
    model, _ = lowtide.shard(blocks(), None, device_memory=40 << 10, comm=lowtide.Comm(bucket_bytes=0))
    engine = engine_of(model)
    model(torch.ones(2, 64)).sum().backward()
    assert engine.memory.device.separate
    assert 0 < engine.arena.reserved_bytes <= 40 << 10, "slots are on the device"
    assert engine.homes.reserved_bytes >= 4 * 64 * 64 * 4, "units live on the host"


def test_a_full_device_is_an_error_that_names_the_unit() -> None:
    model, _ = lowtide.shard(blocks(), None, device_memory=8 << 10, comm=lowtide.Comm(bucket_bytes=0))
    with pytest.raises(OverBudget, match="slots for units in use"):
        model(torch.ones(2, 64))
