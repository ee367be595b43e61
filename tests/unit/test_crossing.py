"""When waiting for the network counts as the rule: not before three steps in a row, and never by noise."""

from __future__ import annotations

import pytest

from lowtide.runtime.crossing import LongWaits


def said(*shares: float) -> list[bool]:
    """After which steps of one second something is wrong, by the part of each that was waited."""
    waits = LongWaits()
    return [waits.look(seconds=1.0, waited=share) is not None for share in shares]


def test_three_long_waits_in_a_row() -> None:
    assert said(0.5, 0.4, 0.9) == [False, False, True]


def test_the_least_of_them_is_told() -> None:
    waits = LongWaits()
    assert waits.look(seconds=2.0, waited=1.0) is None
    assert waits.look(seconds=2.0, waited=0.8) is None
    assert waits.look(seconds=2.0, waited=1.8) == (
        "for 3 steps 40% of the time or more was spent waiting for gradients to cross the network"
    )


@pytest.mark.parametrize("calm", [0.0, 0.3, 1 / 3])
def test_one_calm_step_begins_the_count_anew(calm: float) -> None:
    assert said(0.9, 0.9, calm, 0.9, 0.9, 0.9) == [False] * 5 + [True]


def test_waits_that_come_and_go_change_nothing() -> None:
    assert not any(said(*[0.9, 0.9, 0.1] * 20))


def test_what_was_said_is_not_said_at_once_again() -> None:
    assert said(*[0.9] * 6) == [False, False, True, False, False, True]


def test_a_step_without_a_length_says_nothing() -> None:
    """The first one: nobody knows when it began."""
    waits = LongWaits()
    assert waits.look(seconds=0.0, waited=5.0) is None
    assert [waits.look(seconds=1.0, waited=0.9) is None for _ in range(3)] == [True, True, False]
