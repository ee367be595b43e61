"""A few numbers and how far they can be trusted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000


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
