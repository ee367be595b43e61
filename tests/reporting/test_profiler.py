"""A profile that torch takes names lowtide's phases and units; without a profile nothing is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import lowtide
from lowtide.runtime import profiling
from tests.reporting.runs import recorded, train


def names(model: Any, optimizer: Any) -> list[str]:
    train(model, optimizer, 2)
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        train(model, optimizer, 1)
    return [event.name for event in taken.events() if event.name.startswith("lowtide ")]


def test_units_and_phases_have_names(tmp_path: Path) -> None:
    model, optimizer = recorded(None, stage=3, disk=str(tmp_path), update=lowtide.Update("step", chunk_bytes=4096))
    found = set(names(model, optimizer))
    for unit in ("inner.blocks.0", "inner.blocks.1", "inner.blocks.2"):
        assert found >= {f"lowtide forward {unit}", f"lowtide backward {unit}", f"lowtide update {unit}"}
    assert "lowtide backward" in found


def test_recomputation_has_a_name(tmp_path: Path) -> None:
    model, optimizer = recorded(None, stage=3, activations="recompute")
    assert "lowtide recompute inner.blocks.1" in names(model, optimizer)


def test_ranges_end(tmp_path: Path) -> None:
    model, optimizer = recorded(None, stage=3)
    train(model, optimizer, 1)
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        train(model, optimizer, 1)
        with record_function("afterwards"):
            torch.ones(8).sum()
    after = next(event for event in taken.events() if event.name == "afterwards")
    for event in taken.events():
        if event.name.startswith("lowtide "):
            assert event.time_range.end <= after.time_range.start


def test_no_profile_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(profiling, "record_function", lambda name: made.append(name))
    model, optimizer = recorded(None, stage=3)
    train(model, optimizer, 2)
    assert made == []
