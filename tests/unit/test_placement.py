"""A placement after a step has shown what it takes: as fast as the budget allows, and no slower than it must be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.planning.options import Tier, UnitNeeds, Way
from lowtide.planning.placement import Needs, Placement, UnitPlacement, after_measuring

MIB = 1 << 20
UNIT = UnitNeeds(
    name="block",
    whole=30 * MIB,
    parameters=15 * MIB,
    gradients=15 * MIB,
    optimizer=30 * MIB,
    activations=10 * MIB,
    inputs=1 * MIB,
    forward_seconds=0.1,
    backward_seconds=0.2,
)
COUNT = 12
GONE = Way(gradients_stay=False)  # when the next forward pass begins


def needs(budget: int) -> Needs:
    units = tuple(replace(UNIT, name=f"blocks.{i}") for i in range(COUNT))
    return Needs(units=units, budget=budget, chunk_bytes=MIB, in_flight_units=1, has_disk=False, in_backward=False, way=GONE)


def kept(placement: Placement) -> int:
    return sum(unit.activations == "keep" for unit in placement.units)


NOW = Placement(tuple(UnitPlacement(Tier.HOST, Tier.HOST, Tier.HOST, "keep") for _ in range(COUNT)), None, None)


@pytest.mark.parametrize("over", [1, 8, 10, 70, 10_000])
def test_without_a_disk_no_more_is_computed_again_than_was_too_much(over: int) -> None:
    """The update, which needs no activations, may seem not to fit either: nothing that is computed again changes that."""
    asked = needs(2000 * MIB)
    peak = asked.budget - asked.slack + over * MIB
    placement, forecast = after_measuring(asked, peak, NOW, ["auto"] * COUNT)
    given_up = COUNT - kept(placement)
    assert given_up == min(COUNT, -(-over // 9) + 1)
    assert forecast.peak_bytes >= 0


def test_a_policy_that_was_asked_for_stays() -> None:
    asked = needs(2000 * MIB)
    policies = ["keep"] * 6 + ["auto"] * 6
    placement, _ = after_measuring(asked, asked.budget + 10_000 * MIB, NOW, policies)
    assert [unit.activations for unit in placement.units] == ["keep"] * 6 + ["recompute"] * 6


@pytest.mark.parametrize("budget", [400, 700, 2000])
@pytest.mark.parametrize("has_disk", [False, True])
def test_what_must_not_be_computed_again_is_not(budget: int, has_disk: bool) -> None:
    asked = replace(needs(budget * MIB), has_disk=has_disk)
    policies = ["auto", "stay"] * (COUNT // 2)
    placement, _ = after_measuring(asked, asked.budget, NOW, policies)
    chosen = [unit.activations for unit in placement.units]
    assert "recompute" not in chosen[1::2]
    assert "recompute" in chosen[::2]
