"""A few numbers and how far they can be trusted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RESAMPLES = 4000
MINIMUM_QUIET_ROUNDS = 3
ROUNDS_FOR_95_PERCENT = 6


@dataclass(frozen=True)
class Interval:
    """A median, the bootstrap interval around it, and the numbers it was made from.

    The interval aims at 95 %, but it cannot be wider than the range of the numbers, and the range of n numbers covers the true
    median with a chance of 1 - 2 ** (1 - n): 88 % for 4, 94 % for 5, 97 % for 6."""

    median: float
    low: float
    high: float
    all: tuple[float, ...]


def interval(values: Sequence[float]) -> Interval:
    """The percentile bootstrap of the median, with a fixed seed: the same numbers give the same interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return Interval(statistics.median(values), low, high, tuple(values))


def interval_name(fewest: int) -> str:
    """What the interval of so few numbers may be called; see `Interval`."""
    if fewest >= ROUNDS_FOR_95_PERCENT:
        return "95 % bootstrap interval"
    return f"range over rounds ({1 - 2.0 ** (1 - fewest):.0%} coverage)"


def quiet_rounds(members: Sequence[dict[str, Any]], quiet_share: float) -> list[int]:
    """The rounds of one group in which no turn was disturbed by other processes, or all if there are fewer than three.

    Chosen by what others did to the machine, never by a result."""
    alive = [m for m in members if m["failure"] is None]
    count = min((len(m["rounds"]) for m in alive), default=0)
    quiet = [i for i in range(count) if all(m["foreign_cpu_shares"][i] <= quiet_share for m in alive)]
    return quiet if len(quiet) >= MINIMUM_QUIET_ROUNDS else list(range(count))
