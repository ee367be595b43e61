"""An emulated device: memory of its own, real copies into it, an error when it is full; and the same bits as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import OverBudget
from tests.kit import out_of_core  # without a memory number, everything goes to disk
from tests.kit.parity import Case, Recipe, check

assert out_of_core.RESIDENCIES

MODELS = ["mlp", "tied", "frozen_block", "dropout", "batchnorm", "channels_last"]


def options(folder: Path, *, disk: bool, **more: Any) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {"device_memory": "1MiB", **({"disk": str(folder)} if disk else {}), **more}
    return tuple(found.items())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_same_bits(tmp_path: Path, update: str, disk: bool, world: int) -> None:
    from tests.kit.models import MENAGERIE

    for name in [n for n in MODELS if n in MENAGERIE] or list(MENAGERIE)[:4]:
        check(world, Case(name, 3, Recipe(), options(tmp_path, disk=disk, update=update)))


@pytest.mark.parametrize("activations", ["host", "recompute"])
def test_activations_leave_the_device(tmp_path: Path, activations: str) -> None:
    from tests.kit.models import MENAGERIE

    check(1, Case(next(iter(MENAGERIE)), 3, Recipe(), options(tmp_path, disk=False, activations=activations)))


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
