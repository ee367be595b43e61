"""Plans for ranks whose memory differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.planning.ways_out import ways_out
from lowtide.spec.catalogue import load
from lowtide.spec.model import ModelSpec, UnitFacts, Work

MIB, GIB = 1 << 20, 1 << 30
HARDWARE = load("cpu-2")
WORK = Work(flops=1e10, moved_bytes=1e8, operations=40)
UNIT = UnitFacts(
    name="block",
    numel=25_000_000,
    trained_numel=25_000_000,
    parameter_bytes=100_000_000,
    forward=WORK,
    backward=WORK + WORK,
    activation_bytes=64 * MIB,
    input_bytes=4 * MIB,
)
MODEL = ModelSpec(name="blocks", units=(UNIT,) * 8, dtype="fp32", batch="2×256 tokens")
"""3.2 GB of states."""


def asked(*memories: float, **changes: object) -> Request:
    sizes = tuple(int(memory * GIB) for memory in memories)
    request = Request(world_size=len(sizes), rank_memory_bytes=sizes, disk_bytes=0, stage=3)
    return replace(request, **changes)  # type: ignore[arg-type]


def test_equal_memories_get_equal_parts_and_the_plan_of_ranks_that_are_alike() -> None:
    plan = make_plan(MODEL, HARDWARE, asked(4, 4))
    alike = Request(world_size=2, ranks_per_host=1, memory_bytes=4 * GIB, disk_bytes=0, stage=3, activations="keep")
    assert plan == make_plan(MODEL, HARDWARE, alike)
    assert plan.shares is None


def test_parts_are_equal_while_they_fit() -> None:
    assert make_plan(MODEL, HARDWARE, asked(8, 4)).shares is None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_follow_the_memory_and_every_rank_holds_its_own(stage: int) -> None:
    plan = make_plan(MODEL, HARDWARE, asked(4.5, 2.5 if stage < 3 else 2, stage=stage))
    assert plan.shares is not None
    large, small = plan.shares
    assert large > small
    assert large + small == pytest.approx(1, abs=1e-3)
    for memory, part in ((4.5, large), (2.5 if stage < 3 else 2, small)):
        one = Request(world_size=2, ranks_per_host=1, memory_bytes=int(memory * GIB), disk_bytes=0, stage=stage)
        make_plan(MODEL, HARDWARE, replace(one, part=part, activations="keep"))  # or it would raise
    assert plan.tiers[0].capacity_bytes == int(4.5 * GIB), "the largest part is the slowest"


def test_three_ranks_of_which_two_are_alike() -> None:
    plan = make_plan(MODEL, HARDWARE, asked(4, 4, 1.8))
    assert plan.shares is not None
    assert plan.shares[0] == plan.shares[1] > plan.shares[2]


def test_what_fits_in_no_way_says_what_is_short_and_what_helps() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(MODEL, HARDWARE, asked(1.5, 1.2))
    assert caught.value.tier == "host"
    assert caught.value.needed_bytes > caught.value.budget_bytes
    changes = [way.change for way in ways_out(MODEL, HARDWARE, asked(1.5, 1.2), most=9)]
    assert changes
    assert not any("disk" in change for change in changes), "beside a disk all ranks hold the number of the smallest"


def test_a_rank_that_has_no_room_at_all() -> None:
    with pytest.raises(DoesNotFit, match="without any part"):
        make_plan(MODEL, HARDWARE, asked(16, 0.2))


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="share nothing at stage 0"):
        make_plan(MODEL, HARDWARE, asked(4, 2, stage=0))
    with pytest.raises(ArgumentError, match="without a disk"):
        make_plan(MODEL, HARDWARE, asked(4, 2, disk_bytes=None))
    with pytest.raises(ArgumentError, match="without an accelerator"):
        make_plan(MODEL, load("h100-80g"), asked(4, 2))
    with pytest.raises(ArgumentError, match="2 memories for 3 ranks"):
        asked(4, 2, world_size=3)
