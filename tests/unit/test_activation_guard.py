"""What becomes of activations that were to be computed again: dropped, kept because there is room, or never dropped."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from lowtide.errors import OverBudget
from lowtide.planning.options import UnitNeeds
from lowtide.planning.placement import Needs
from lowtide.runtime.guard import ActivationGuard

MIB = 1 << 20
COUNT = 4


class Unit:
    def __init__(self, index: int) -> None:
        self.index, self.name = index, f"blocks.{index}"


class Budget:
    """Always the same is left."""

    limit = 1000 * MIB
    margin = 0

    def __init__(self, left: int) -> None:
        self._left = left

    def left(self) -> int:
        return self._left

    def read(self) -> int:
        return self.limit - self._left

    def make_room(self, _: int) -> None: ...


def guard(*, left: int, policy: str = "auto", planned: str = "recompute", may_spill: bool = True) -> tuple[Any, list[Any]]:
    units = [Unit(i) for i in range(COUNT)]
    budget = cast("Any", Budget(left * MIB))
    found = ActivationGuard(cast("Any", units), [policy] * COUNT, lambda _: planned, budget=budget, may_spill=may_spill)
    sizes = dict(whole=10 * MIB, parameters=5 * MIB, gradients=5 * MIB, optimizer=10 * MIB, activations=0, inputs=0)
    rows = tuple(UnitNeeds(name=u.name, forward_seconds=0.1, backward_seconds=0.2, **sizes) for u in units)
    found.needs = Needs(
        units=rows, budget=Budget.limit, chunk_bytes=MIB, in_flight_units=1, has_disk=may_spill, in_backward=False
    )
    return found, units


@pytest.mark.parametrize(("left", "policy", "keeps"), [(900, "auto", True), (150, "auto", False), (900, "recompute", False)])
def test_in_the_first_step_activations_stay_where_all_of_them_have_room(left: int, policy: str, keeps: bool) -> None:
    found, units = guard(left=left, policy=policy)
    for unit in units:
        assert found.should_recompute(unit)
        assert found.should_keep(unit, 40 * MIB, None) is keeps
    assert found.kept == ({unit: "keep" for unit in units} if keeps else {})
    found.learning = False
    assert not found.should_keep(units[0], 40 * MIB, None)


@pytest.mark.parametrize(("left", "may_spill", "where"), [(900, True, "keep"), (150, True, "disk"), (150, False, "keep")])
def test_a_forward_that_changes_something_is_never_computed_again(
    left: int, may_spill: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, units = guard(left=left, may_spill=may_spill)
    with caplog.at_level(logging.WARNING, "lowtide"):
        for _ in range(2):
            for unit in units:
                assert found.should_recompute(unit), "all ranks go the way of one that computes again"
                assert found.should_keep(unit, 40 * MIB, "argument 'cache'")
                assert found.should_spill() is (where == "disk")
    assert found.kept == dict.fromkeys(units, where)
    assert [record.getMessage() for record in caplog.records] == [
        "the forward pass of unit 'blocks.0' changes argument 'cache', so its activations are not computed again in backward "
        "but kept"
    ], "one line, not one per unit and step"


def test_activations_that_must_stay_and_find_no_room() -> None:
    for may_spill in (True, False):
        found, units = guard(left=20, policy="stay", planned="keep", may_spill=may_spill)
        found.learning, found.activations = False, [40 * MIB] * COUNT
        if may_spill:
            assert not found.should_recompute(units[0])
            assert found.should_spill()
        else:
            with pytest.raises(OverBudget, match=r"blocks\.0"):
                found.should_recompute(units[0])
            first, units = guard(left=10, may_spill=False)
            with pytest.raises(OverBudget, match="that cannot be computed again"):
                first.should_keep(units[0], 40 * MIB, "argument 'cache'")
