"""The guess which unit comes next: the one that followed last time."""

from __future__ import annotations

from typing import Any

from lowtide.runtime.prefetch import Successors

Order: Any = Successors


def walk(order: Any, units: str) -> list[bool]:
    order.restart()
    return [order.observe(unit) for unit in units]


def test_nothing_is_known_at_first() -> None:
    assert Order().after("a", 3) == []
    assert Order().before("a", 3) == []


def test_what_followed_follows() -> None:
    order = Order()
    walk(order, "abcd")
    assert order.after("a", 1) == ["b"]
    assert order.after("a", 2) == ["b", "c"]
    assert order.after("a", 9) == ["b", "c", "d"]
    assert order.after("d", 1) == []
    assert order.after("a", 0) == []
    assert order.before("d", 2) == ["c", "b"]


def test_a_unit_in_use_is_no_news() -> None:
    assert walk(Order(), "aab") == [True, False, True]


def test_the_last_time_counts() -> None:
    order = Order()
    walk(order, "abc")
    walk(order, "acb")
    assert order.after("a", 2) == ["c", "b"]


def test_passes_are_not_joined() -> None:
    """The first unit of a pass does not follow the last of the one before."""
    order = Order()
    walk(order, "ab")
    walk(order, "ab")
    assert order.after("b", 1) == []


def test_circles_end() -> None:
    order = Order()
    walk(order, "abab")
    assert order.after("a", 5) == ["b", "a"]
