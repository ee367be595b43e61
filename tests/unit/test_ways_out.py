"""What helps when nothing fits: changes of different kinds, the mildest of each, and every one of them does help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import DoesNotFit
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.planning.ways_out import WayOut, ways_out
from lowtide.spec.catalogue import load
from lowtide.spec.model import ModelSpec, UnitFacts, Work

MIB, GIB = 1 << 20, 1 << 30
HARDWARE = load("cpu-2")


def model(transient: int) -> ModelSpec:
    """Small states and a large moment: what does not fit is the batch."""
    work = Work(flops=1e10, moved_bytes=1e8, operations=40)
    unit = UnitFacts(
        name="block",
        numel=5_000_000,
        trained_numel=5_000_000,
        parameter_bytes=20_000_000,
        forward=work,
        backward=work + work,
        activation_bytes=64 * MIB,
        input_bytes=4 * MIB,
        transient_bytes=transient,
    )
    return ModelSpec(name="blocks", units=(unit,) * 4, dtype="fp32", batch="16×256 tokens")


def found(request: Request, transient: int, most: int = 3) -> list[WayOut]:
    with pytest.raises(DoesNotFit):
        make_plan(model(transient), HARDWARE, request)
    return ways_out(model(transient), HARDWARE, request, most=most)


def kinds(ways: list[WayOut]) -> list[str]:
    words = ("activations", "disk", "update", "batch", "ranks", "memory")
    return [next(word for word in words if word in way.change) for way in ways]


def test_a_smaller_batch_takes_one_place_only() -> None:
    """A half, a quarter and an eighth would all fit: they are one kind of change, and the half is the mildest."""
    ways = found(Request(memory_bytes=2 * GIB, update="backward"), transient=1800 * MIB)
    assert [way.change for way in ways if "batch" in way.change] == ["a batch 2 times smaller"]
    assert kinds(ways) == ["batch", "memory"], "more ranks compute as much each: they do not help here"


def test_of_smaller_batches_the_first_that_fits() -> None:
    ways = found(Request(memory_bytes=2 * GIB, update="backward"), transient=6000 * MIB)
    assert [way.change for way in ways if "batch" in way.change] == ["a batch 4 times smaller"]


def test_what_is_held_outside_of_units_shrinks_with_the_batch() -> None:
    """Logits are often the peak of a step."""
    logits = replace(model(MIB), outside_transient_bytes=1800 * MIB)
    ways = ways_out(logits, HARDWARE, Request(memory_bytes=2 * GIB, update="backward"))
    assert [way.change for way in ways if "batch" in way.change] == ["a batch 2 times smaller"]


def test_three_kinds_the_cheapest_first() -> None:
    request = Request(memory_bytes=700 * MIB, disk_bytes=0, activations="keep")
    ways = found(request, transient=MIB, most=9)
    assert kinds(ways) == sorted(set(kinds(ways)), key=("activations", "disk", "update", "batch", "ranks", "memory").index)
    assert len(ways) > 3
    assert [w.change for w in found(request, transient=MIB)] == [w.change for w in ways[:3]]
