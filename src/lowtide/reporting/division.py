"""A step, divided: how long its thread computed, updated, and stood still for the disk or for other ranks.

Spans overlap (an update waits for the disk inside), so seconds are lengths of sets of intervals: a moment in which the step
waits is neither compute nor update, a moment in which it updates is not compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.runtime.trace import SpanRow

Intervals: TypeAlias = "list[tuple[float, float]]"
"""Sorted, and apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Seconds of one step."""

    compute: float
    update: float
    disk_wait: float
    comm_wait: float


def divide(rows: Sequence[SpanRow], passes: Iterable[tuple[float, float]], thread: int) -> Division:
    """``passes``: when forward and backward passes ran; ``thread``: the one that runs the step."""
    own = [row for row in rows if row.thread == thread]
    disk = union((r.begin, r.end) for r in own if r.lane == "wait" and r.verb == "disk")
    ranks = union((r.begin, r.end) for r in own if r.lane == "wait" and r.verb != "disk")
    waits = union([*disk, *ranks])
    updates = without(union((r.begin, r.end) for r in own if r.lane == "update"), waits)
    compute = without(without(union(passes), waits), updates)
    return Division(compute=length(compute), update=length(updates), disk_wait=length(disk), comm_wait=length(ranks))


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(intervals: Intervals, removed: Intervals) -> Intervals:
    """What of ``intervals`` is not in ``removed``."""
    left: Intervals = []
    at = 0
    for begin, end in intervals:
        while at < len(removed) and removed[at][1] <= begin:
            at += 1
        here = at
        while here < len(removed) and removed[here][0] < end:
            if removed[here][0] > begin:
                left.append((begin, removed[here][0]))
            begin = max(begin, removed[here][1])
            here += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
