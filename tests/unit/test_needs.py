"""What a measured step says about a unit's needs."""

from __future__ import annotations

from dataclasses import replace

from lowtide.planning.options import UnitNeeds
from lowtide.planning.placement import Needs
from lowtide.runtime.needs import backward_alone

UNITS = tuple(UnitNeeds(name=f"blocks.{i}", update_seconds=0.25) for i in range(4))
NEEDS = Needs(units=UNITS, budget=1 << 30, chunk_bytes=1, in_flight_units=1, has_disk=True, in_backward=False)
FORWARD = [1.0, 1.0, 2.0, 1.0]


def test_what_was_computed_again_is_not_counted_as_backward() -> None:
    """Else a plan that computes again would count it twice, and one that keeps would count it once."""
    assert backward_alone(NEEDS, ["keep"] * 4, FORWARD, 10.0) == 10.0
    assert backward_alone(NEEDS, ["keep", "recompute", "recompute", "disk"], FORWARD, 13.0) == 10.0


def test_nor_are_updates_in_backward() -> None:
    assert backward_alone(replace(NEEDS, in_backward=True), ["recompute"] * 4, FORWARD, 16.0) == 10.0


def test_a_backward_pass_is_no_shorter_than_forward_unless_it_was_measured_so() -> None:
    assert backward_alone(NEEDS, ["recompute"] * 4, FORWARD, 6.0) == 5.0
    assert backward_alone(NEEDS, ["recompute"] * 4, FORWARD, 0.0) == 0.0
