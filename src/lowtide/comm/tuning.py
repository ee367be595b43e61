"""Which algorithm carries a collective, and how much a reduction handles at once: what follows from timings.

Only algorithms that add along the one tree (comm/reduce.py) are chosen among, so a choice never changes a bit: two runs that
measured different times have the same results. But the ranks of an axis must choose alike, or their messages would not meet:
all of them give the same timings to the functions here (comm/measuring.py), which have nothing else to go by.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

BROADCASTS = "broadcasts"
"""Gather: a broadcast from every rank, all under way together. Parts may have any length."""
ALL_GATHER = "all-gather"
"""Gather: the backend's own collective. Parts must have one length."""
EXCHANGE = "exchange"
"""Reduce: everybody sends every piece to its owner, who adds. The only one that a codec may be used with."""
HALVING = "halving"
"""Reduce: pairs of ranks add up half of what they have, then pairs of pairs (comm/halving.py). A power of two of ranks."""

FEWEST_BUCKET_BYTES, MOST_BUCKET_BYTES = 1 << 20, 64 << 20
UNMEASURED_BUCKET_BYTES = 4 << 20
_FIXED_SHARE = 0.03  # of the time of an exchange that may not depend on its size
_CLEARLY = 0.8  # of the usual algorithm's time: what is hardly faster was noise

Seconds = Mapping[int, float]
"""How long something took, by the number of bytes."""


@dataclass(frozen=True)
class Choice:
    """An algorithm for every size: ``(most, name)`` for sizes up to ``most`` bytes. The last has no limit."""

    steps: tuple[tuple[int, str], ...]

    @classmethod
    def always(cls, name: str) -> Choice:
        return cls(((sys.maxsize, name),))

    def at(self, nbytes: int) -> str:
        return next(name for most, name in self.steps if nbytes <= most)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.steps)

    def __str__(self) -> str:
        *limited, (_, last) = self.steps
        return ", ".join([*(f"{name} up to {most} bytes" for most, name in limited), last if not limited else f"then {last}"])


@dataclass(frozen=True)
class Tuning:
    """How the ranks of one axis use what connects them. The same on all of them."""

    gather: Choice
    reduce: Choice
    latency: float = 0.0
    """Seconds that a reduction takes, however small; 0 if it was not measured."""
    bandwidth: float = math.inf
    """Bytes per second that a large one handles."""
    bucket_bytes: int = UNMEASURED_BUCKET_BYTES


def choose(timed: Mapping[str, Seconds]) -> Choice:
    """The fastest for each size at which all were timed. The first of ``timed`` is the usual one, and stays unless another is
    clearly faster. Between two sizes that were timed the nearer one decides; above the largest, the largest."""
    usual = next(iter(timed))
    sizes = sorted(n for n in timed[usual] if all(n in samples for samples in timed.values()))
    steps: list[tuple[int, str]] = []
    for at, nbytes in enumerate(sizes):
        best = min(timed, key=lambda name: timed[name][nbytes])
        name = best if timed[best][nbytes] < _CLEARLY * timed[usual][nbytes] else usual
        most = math.isqrt(nbytes * sizes[at + 1]) if at + 1 < len(sizes) else sys.maxsize
        if steps and steps[-1][1] == name:
            steps.pop()
        steps.append((most, name))
    return Choice(tuple(steps)) if steps else Choice.always(usual)


def fixed_and_speed(timed: Seconds) -> tuple[float, float]:
    """Seconds that an exchange takes however small it is, and bytes per second besides. Where only one size was timed, because
    already that one took long, all of it counts as fixed."""
    if len(timed) == 1:
        return next(iter(timed.values())), math.inf
    quickest, large = min(timed, key=lambda nbytes: timed[nbytes]), max(timed)  # a smaller one that took longer was disturbed
    more = timed[large] - timed[quickest]
    # Where even the largest was mostly fixed cost, the rest is noise: then no more than twice the speed that was seen.
    most = 2 * large / timed[large]
    speed = min((large - quickest) / more, most) if more > 0 else most
    # What it took for its own bytes is not fixed; but the speed is not known well enough to leave nothing of it.
    return max(timed[quickest] - quickest / speed, timed[quickest] / 2), speed


def bucket_bytes(latency: float, bandwidth: float) -> int:
    """The smallest power of two at which the fixed cost is a small share of the time, within limits: below them the work beside
    the exchange would count, above them memory."""
    needed = latency * bandwidth * (1 - _FIXED_SHARE) / _FIXED_SHARE if latency > 0 else 0.0
    size = FEWEST_BUCKET_BYTES
    while size < needed and size < MOST_BUCKET_BYTES:
        size *= 2
    return size
