"""The memory number: what the process uses now, as the kernel counts it, held against what it may use.

Anonymous and shared pages count, those of files that the kernel can drop do not; memory that only loader workers have is
added. The meter is read when a unit begins or ends: between two readings memory moves by what one unit computes with, which the
slack of the placement must cover.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable

import psutil

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Bytes in use by this process; shared memory and children are looked at more rarely."""

    def __init__(self, shared: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        self.children_bytes = 0
        self.shared_bytes = 0
        self._shared = shared
        self._pid = os.getpid()

    def read(self) -> int:
        """Now."""
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read(256).split()
        return (int(resident) - int(shared)) * _PAGE + self.shared_bytes + self.children_bytes

    def look_around(self) -> None:
        """Count shared memory, which the quick reading cannot tell from files, and what loader workers have for themselves."""
        with open("/proc/self/status") as file:
            mapped = sum(int(line.split()[1]) * 1024 for line in file if line.startswith("RssShmem:"))
        # What ranks share counts once, a part for each; this one may not have touched all of it.
        common, ranks = self._shared()
        self.shared_bytes = max(mapped - common, 0) + common // ranks
        total = 0
        for child in psutil.Process(self._pid).children(recursive=True):
            try:
                total += child.memory_full_info().uss
            except psutil.Error:  # it has ended, or is not ours to look into: then it is not a worker of ours either
                continue
        self.children_bytes = total


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):  # another C library, which has no such call and keeps less
        return None


_trim = _malloc_trim()


def give_back() -> None:
    """Return what the allocator keeps of freed memory; it keeps a lot after a step (970 MB resident for 546 live: measured)."""
    if _trim is not None:
        _trim(0)


class Budget:
    """One number per rank, and the peak against it."""

    def __init__(self, limit: int | None, *, shared: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        """``shared``: bytes that ranks of this host hold together, and how many they are."""
        self.limit = limit
        self.margin = 0
        """So near to the limit the allocator is asked to give back what it keeps."""
        self.peak = 0
        self._meter = Meter(shared)
        self._tidy_at = 0

    def read(self) -> int:
        """Bytes in use now; remembers the peak."""
        used = self._meter.read()
        if self.limit is not None and used > max(self.limit - self.margin, self._tidy_at):
            used = self._tidy()
        self.peak = max(self.peak, used)
        return used

    def look(self) -> None:
        """Read, if there is a number to hold."""
        if self.limit is not None:
            self.read()

    def make_room(self, nbytes: int) -> None:
        """So much is about to be taken with no reading in between: if it would not fit, what was freed is given back first."""
        if self.limit is not None and self.read() + nbytes > self.limit - self.margin:
            self._tidy()

    def _tidy(self) -> int:
        give_back()
        used = self._meter.read()
        self._tidy_at = used + self.margin // 8  # not again before there can be something to give back
        return used

    def left(self) -> int | None:
        """Bytes that may still be taken; None if there is no limit."""
        return None if self.limit is None else self.limit - self.read()

    def new_step(self, *, tidy: bool) -> None:
        """Begin a new peak; ``tidy``: with a heap that has no freed memory in it, so that the peak is what a step needs. Where
        there is room the heap is better left alone: memory that is given back must be zeroed by the kernel to come again, which
        cost 3 % of a step of gpt-98m (measured, interleaved)."""
        if tidy or (self.limit is not None and self.peak > self.limit - self.margin):
            give_back()
        self._meter.look_around()
        self.peak = self._tidy_at = 0
        self.read()

    def settle(self) -> int:
        """What the process uses when it is at rest."""
        gc.collect()
        give_back()
        self._meter.look_around()
        return self.read()
