"""How a step is divided, against counting moment by moment."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lowtide.reporting.division import divide, length, union, without
from lowtide.runtime.trace import SpanRow

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=6)


def moments(spans: list[tuple[int, int]]) -> set[int]:
    return {m for begin, end in spans for m in range(begin, end)}


@given(intervals, intervals)
def test_sets_of_intervals_are_sets_of_moments(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left = without(union(a), union(b))  # type: ignore[arg-type]
    assert moments(left) == moments(a) - moments(b)  # type: ignore[arg-type]
    assert length(left) == len(moments(a) - moments(b))
    assert all(x[1] <= y[0] for x, y in itertools.pairwise(left))


@given(passes=intervals, disk=intervals, ranks=intervals, updates=intervals, others=intervals)
def test_every_moment_is_one_thing(
    passes: list[tuple[int, int]],
    disk: list[tuple[int, int]],
    ranks: list[tuple[int, int]],
    updates: list[tuple[int, int]],
    others: list[tuple[int, int]],
) -> None:
    def rows(spans: list[tuple[int, int]], lane: str, verb: str, thread: int = 1) -> list[SpanRow]:
        return [SpanRow(a, b, lane, verb, "u", 0, thread) for a, b in spans]

    everything = rows(disk, "wait", "disk") + rows(ranks, "wait", "ranks") + rows(updates, "update", "update")
    everything += rows(others, "wait", "disk", thread=2) + rows(others, "disk read", "fetch", thread=3)
    part = divide(everything, passes, thread=1)
    waits = moments(disk) | moments(ranks)
    assert part.disk_wait == len(moments(disk))
    assert part.comm_wait == len(moments(ranks))
    assert part.update == len(moments(updates) - waits)
    assert part.compute == len(moments(passes) - waits - moments(updates))
