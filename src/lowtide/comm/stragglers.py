"""Which rank the others wait for, and why: from the seconds that every rank spent on each cause, step by step. Pure.

A rank is named when it stands out for several steps running, and stays named until it has not for as many: a single slow step
(a checkpoint, a page cache that went cold) names nobody. It is compared with the median of the other ranks, because with two
ranks the median of both is drawn up by the slow one itself. A cause that hardly matters to a step's length names nobody either.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ABOVE = 1.5  # times the others' median: stands out
_BELOW = 1.25  # times the others' median: does not stand out any more
_STEPS = 3  # running
_SHARE = 0.05  # of the step: what a rank loses must be more than this to matter
_LEAST = 0.01  # seconds: shorter than this is noise whatever the share
_MOST = 100.0  # times; beyond it the number says nothing

Seconds = Mapping[str, float]
"""What one rank spent on each cause in one step, such as ``compute`` and ``disk``."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that stands out, by which cause, and how much: times the median of the other ranks."""

    rank: int
    cause: str
    times: float

    def __str__(self) -> str:
        much = f"{self.times:.1f}×" if self.times < _MOST else f"over {_MOST:.0f}×"
        return f"rank {self.rank}: {self.cause} {much} the median"


class Stragglers:
    """Remembers the last steps. Every rank that is given the same numbers names the same ranks."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=_STEPS))
        self._named: set[tuple[int, str]] = set()

    def step(self, rows: Sequence[Seconds], step_seconds: float) -> tuple[Straggler, ...]:
        """Add one step: what every rank spent, and how long it took. Those who are named now, the worst first."""
        for cause in dict.fromkeys(cause for row in rows for cause in row):
            spent = [row.get(cause, 0.0) for row in rows]
            for rank, mine in enumerate(spent):
                others = spent[:rank] + spent[rank + 1 :]
                if others:
                    self._note(rank, cause, mine, statistics.median(others), step_seconds)
        found = [Straggler(rank, cause, self._usual(rank, cause)) for rank, cause in self._named]
        return tuple(sorted(found, key=lambda s: (-s.times, s.rank, s.cause)))

    def _usual(self, rank: int, cause: str) -> float:
        """How much a rank that is named stands out, in those of its last steps in which it did."""
        return statistics.median(times for times in self._times[rank, cause] if times >= _BELOW)

    def _note(self, rank: int, cause: str, mine: float, usual: float, step_seconds: float) -> None:
        matters = mine - usual > max(_LEAST, _SHARE * step_seconds)
        times = self._times[rank, cause]
        times.append(mine / max(usual, 1e-9) if matters else 1.0)
        if len(times) < _STEPS:
            return
        if min(times) > _ABOVE:
            self._named.add((rank, cause))
        elif max(times) < _BELOW:
            self._named.discard((rank, cause))
