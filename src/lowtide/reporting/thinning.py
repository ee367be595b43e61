"""What of a long run is written down: everything at first, then ever less, so that a run of weeks stays small. No torch here.

Thinning by powers: the first ``whole`` of a sort are all kept; among the next as many every second, among the next twice as
many every fourth, and so on. So each doubling of a run's length adds a fixed number of lines, and how finely any part of it
can be seen is always the same share of its age.
"""

from __future__ import annotations

STEPS = 4096
MEMORY = 1024
_SECONDS = 1.0
_SHARE_OF_AGE = 1 / 500
_SLOWER = 1.1


def keeps(number: int, whole: int) -> bool:
    """Whether the ``number``-th of a sort (from 0) is kept."""
    return number % stride(number, whole) == 0


def stride(number: int, whole: int) -> int:
    """One of how many is kept there."""
    return 1 << max(0, (number // whole).bit_length()) if number >= whole else 1


class Schedule:
    """Which lines one process writes, step by step. Times are seconds since it began."""

    def __init__(self) -> None:
        self._count = 0  # of steps that are over
        self._last_sample = float("-inf")
        self._slowest = 0.0
        self._slow_ones = 0

    @property
    def count(self) -> int:
        """Steps that are over."""
        return self._count

    def step_over(self) -> None:
        self._count += 1

    def writes_step(self) -> bool:
        """Asked once for every step, before ``step_over``."""
        return keeps(self._count, STEPS)

    def keeps_memory(self) -> bool:
        """Whether the samples of the step under way, one at its fullest and one at its end, are written."""
        return keeps(self._count, MEMORY)

    def sampled(self, now: float) -> None:
        """A sample was written."""
        self._last_sample = now

    def sample_is_due(self, now: float) -> bool:
        """Whether so much time has passed that a sample is written inside a step, whichever step it is."""
        return now - self._last_sample >= max(_SECONDS, now * _SHARE_OF_AGE)

    def in_detail(self) -> bool:
        """Whether the step under way is recorded in detail: the first few, then those at powers of two."""
        return self._count < 4 or self._count & (self._count - 1) == 0

    def slowest_so_far(self, seconds: float) -> bool:
        """Whether a step that has just ended was by far the slowest; the first few, which warm up, are not asked."""
        if self._count < 4:
            return False
        if seconds <= self._slowest * _SLOWER:
            return False
        first, self._slowest = self._slowest == 0.0, seconds
        if first:
            return False
        self._slow_ones += 1
        # Each is a tenth slower than the one before, so there cannot be many; a clock gone wrong could still make them.
        return self._slow_ones <= 64
