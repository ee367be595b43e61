"""Growth that does not end: of any kind of bytes, of memory that nobody accounts for, of file descriptors, threads, spools.

One number per series and step goes into a window that covers the whole run with few points (it is thinned when it is full). A
series leaks if it grows like a line: every quarter of the window above the one before it by about as much, the slope robust
(Theil–Sen: the median of all slopes between two points), little scatter around it, more in total than such a series may move
in a healthy run, and still so when the window is half as long again. What settles, jumps once or swings is none. No torch here.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.planning.text import size_text

FILE_DESCRIPTORS = "file descriptors"
THREADS = "threads"
NOT_OURS = "not ours"
SPOOL = "spool"
_COUNTED = (FILE_DESCRIPTORS, THREADS)

_WARM_UP = 8  # observations
_MOST = 96  # points in a window
_LEAST = 24
_LEAST_STEPS = 128
_LONGER = 0.5  # by this share of its length a window must have grown before anybody is told
_GOES_ON = 0.6  # of what its slope says a series must have grown meanwhile
_LOOK_EVERY = 12  # observations
_FLOOR = {FILE_DESCRIPTORS: 8.0, THREADS: 6.0}
_FLOOR_KNOWN = 1.0 * 2**20  # of bytes that are counted exactly
_FLOOR_UNKNOWN = 12.0 * 2**20
_SHARE_UNKNOWN = 0.015  # of the process: what the allocator keeps wanders
_LEAST_SLOPE = 16.0  # bytes per step
_EACH_QUARTER = 0.18  # of the whole growth; a line has a third
_UNDIMINISHED = 0.7  # of the first growth between two quarters; what settles grows less and less
_STEADY = 1.1  # times as fast a series may have grown before
_SCATTER = 0.2  # of the whole growth: the median distance from the line
_RISING = 0.85  # of all pairs that are half a window apart

Points: TypeAlias = "list[tuple[int, float]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """One series that does not stop growing."""

    series: str
    """``file descriptors``, ``threads``, ``not ours``, ``spool``, or tier and kind: ``host parameters``."""
    per_step: float
    grown: float
    steps: int

    @property
    def text(self) -> str:
        """For people, without where it comes from."""
        if self.series in _COUNTED:
            return f"{self.series} grow by {self.per_step:.2g} a step: {self.grown:.0f} more in {self.steps} steps"
        what = {
            NOT_OURS: "memory that lowtide does not hold (Python, torch, the training script)",
            SPOOL: "room taken in spool files",
        }.get(self.series, f"memory of the ledger ({self.series})")
        a_step, in_all = size_text(int(self.per_step)), size_text(int(self.grown))
        return f"{what} grows by {a_step} a step: {in_all} more in {self.steps} steps"


class _Window:
    """Points of one series, evenly spaced over all steps since it began."""

    def __init__(self) -> None:
        self.points: Points = []
        self._stride = 1
        self._seen = 0

    def add(self, step: int, value: float) -> None:
        if self._seen % self._stride == 0:
            self.points.append((step, value))
            if len(self.points) == _MOST:
                self.points = self.points[::2]
                self._stride *= 2
        self._seen += 1


@dataclass(frozen=True, slots=True)
class _Suspicion:
    step: int
    value: float
    leak: Leak


class LeakWatch:
    """Fed once per step or more rarely; says once what leaks."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._suspicions: dict[str, _Suspicion] = {}
        self._told: set[str] = set()
        self._seen = 0

    @property
    def suspects(self) -> frozenset[str]:
        """Series that look as if they leaked, and are looked at again before anybody is told."""
        return frozenset(self._suspicions)

    def restart(self) -> None:
        """Bytes have been moved on purpose: what was before cannot be compared with what comes."""
        self._windows.clear()
        self._suspicions.clear()
        self._seen = 0

    def observe(self, step: int, series: Mapping[str, float], process_bytes: float) -> list[Leak]:
        """Add what is true after ``step``; the leaks that are certain now and were not before."""
        self._seen += 1
        if self._seen <= _WARM_UP:
            return []
        for name, value in series.items():
            self._windows.setdefault(name, _Window()).add(step, float(value))
        for name in self._windows.keys() - series.keys():  # a kind of which nothing is left
            self._windows[name].add(step, 0.0)
        if self._seen % _LOOK_EVERY:
            return []
        return [leak for name in sorted(self._windows) if (leak := self._look(name, step, process_bytes)) is not None]

    def _look(self, name: str, step: int, process_bytes: float) -> Leak | None:
        if name in self._told:
            return None
        leak = growth(name, self._windows[name].points, process_bytes)
        before = self._suspicions.get(name)
        if leak is None:
            self._suspicions.pop(name, None)
            return None
        value = _median([v for _, v in self._windows[name].points[-5:]])
        if before is None:
            self._suspicions[name] = _Suspicion(step, value, leak)
            return None
        since = step - before.step
        if since < _LONGER * before.leak.steps or value - before.value < _GOES_ON * since * before.leak.per_step:
            return None
        self._told.add(name)
        del self._suspicions[name]
        return leak


def growth(name: str, points: Points, process_bytes: float = 0.0) -> Leak | None:
    """The growth of one series, if it is one that does not end: seen over the whole window, or, if it began late, over its
    second half. What grew faster in the first half is about to settle."""
    if (leak := _line(name, points, process_bytes)) is not None:
        return leak
    middle = len(points) // 2
    late = _line(name, points[middle:], process_bytes)
    return None if late is None or _theil_sen(points[:middle]) > late.per_step * _STEADY else late


def _line(name: str, points: Points, process_bytes: float) -> Leak | None:
    if len(points) < _LEAST or points[-1][0] - points[0][0] < _LEAST_STEPS:
        return None
    floor = _floor(name, process_bytes)
    quarters = [_median([v for _, v in q]) for q in _quarters(points)]
    rise = quarters[-1] - quarters[0]
    gains = [b - a for a, b in itertools.pairwise(quarters)]
    if rise < 0.7 * floor or min(gains) < _EACH_QUARTER * rise or gains[-1] < _UNDIMINISHED * gains[0]:
        return None
    slope = _theil_sen(points)
    steps = points[-1][0] - points[0][0]
    if slope * steps < floor or (name not in _COUNTED and slope < _LEAST_SLOPE):
        return None
    base = _median([v - slope * x for x, v in points])
    scatter = _median([abs(v - slope * x - base) for x, v in points])
    far = len(points) // 2
    rising = [b[1] > a[1] for a, b in zip(points, points[far:], strict=False)]
    if scatter > _SCATTER * rise or sum(rising) < _RISING * len(rising):
        return None
    return Leak(series=name, per_step=slope, grown=slope * steps, steps=steps)


def _floor(name: str, process_bytes: float) -> float:
    if name == NOT_OURS:
        return max(_FLOOR_UNKNOWN, _SHARE_UNKNOWN * process_bytes)
    return _FLOOR.get(name, _FLOOR_KNOWN)


def _quarters(points: Points) -> list[Points]:
    cuts = [len(points) * k // 4 for k in range(5)]
    return [points[a:b] for a, b in itertools.pairwise(cuts)]


def _theil_sen(points: Points) -> float:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] != a[0]]
    return _median(slopes) if slopes else 0.0


def _median(values: list[float]) -> float:
    return statistics.median(values)
