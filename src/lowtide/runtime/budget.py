"""The memory number: what the process uses now, as the kernel counts it, held against what it may use.

Anonymous and shared pages count, those of files that the kernel can drop do not; memory that only loader workers have is
added. The meter is read at moments of a step: when a unit begins or ends, when a gradient arrives. How much memory grows from
one moment to the next is remembered, with what the kernel saw in between, and room is made for it in the steps that follow.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import weakref
from collections.abc import Callable, Container, Hashable, Iterable
from pathlib import Path
from typing import Protocol

import psutil

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ROUNDING = 1 << 20
_HIGHEST = re.compile(rb"VmHWM:\s+(\d+) kB\s+VmRSS:\s+(\d+) kB")


class Meter:
    """Bytes in use by this process; shared memory and children are looked at more rarely."""

    def __init__(self, shared: Callable[[], tuple[int, int]] = lambda: (0, 1)) -> None:
        self.children_bytes = 0
        self.shared_bytes = 0
        self._shared = shared
        self._pid = os.getpid()
        self._most = self._highest = 0
        # Kept open: a reading then costs 2 us instead of 10, and there are hundreds in a step.
        self._statm, self._status = (os.open(f"/proc/self/{name}", os.O_RDONLY) for name in ("statm", "status"))
        for descriptor in (self._statm, self._status):
            weakref.finalize(self, os.close, descriptor).atexit = False

    def risen(self) -> int:
        """How far the highest mark of this process is above what is resident now, if it has risen since this was asked last."""
        most = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )  # quick, but a parent's mark may hide this process's own
        if most == self._most and self._highest >= most - _ROUNDING:
            return 0
        found = _HIGHEST.search(os.pread(self._status, 4096, 0))
        highest, resident = (int(found[1]) * 1024, int(found[2]) * 1024) if found else (0, 0)
        rose = highest > self._highest
        self._most, self._highest = most, highest
        return highest - resident if rose else 0

    def read(self) -> int:
        """Now."""
        _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
        return (int(resident) - int(shared)) * _PAGE + self.shared_bytes + self.children_bytes

    def look_around(self) -> None:
        """Count shared memory, which the quick reading cannot tell from files, and what loader workers have for themselves."""
        lines = os.pread(self._status, 4096, 0).splitlines()  # open already: a process may run out of descriptors
        mapped = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"RssShmem:"))
        # What ranks share counts once, a part for each; this one may not have touched all of it.
        common, ranks = self._shared()
        self.shared_bytes = max(mapped - common, 0) + common // ranks
        total = 0
        for child in children_of(self._pid):
            try:
                total += psutil.Process(child).memory_full_info().uss
            except psutil.Error:  # it has ended, or is not ours to look into: then it is not a worker of ours either
                continue
        self.children_bytes = total


def children_of(pid: int) -> list[int]:
    """All that descend from ``pid``. Asked of the kernel, which knows; psutil would look at every process of the machine."""
    try:
        lists = [Path(f"/proc/{pid}/task/{thread}/children").read_text().split() for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # a thread has ended meanwhile, or the kernel does not show these lists
        return children_by_search(pid)
    direct = [int(child) for listed in lists for child in listed]
    return [*direct, *(further for child in direct for further in children_of(child))]


def children_by_search(pid: int) -> list[int]:
    """The same, the long way."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


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


class Pool(Protocol):
    """An arena, as far as a budget looks at it."""

    reserved_bytes: int


class Budget:
    """One number per rank, and the peak against it."""

    def __init__(
        self,
        limit: int | None,
        *,
        shared: Callable[[], tuple[int, int]] = lambda: (0, 1),
        pools: Iterable[Pool] = (),
        spare: Callable[[], None] = lambda: None,
    ) -> None:
        """``shared``: bytes that ranks of this host hold together, and how many they are. ``pools``: memory that is
        taken once and used again: its growth says nothing about later steps. ``spare`` lets go of what is free there."""
        self.limit = limit
        self.margin = 0
        """So near to the limit the allocator is asked to give back what it keeps."""
        self.peak = 0
        """The most that was used in this step, freed memory that the allocator keeps included."""
        self.needed = 0
        """The most that this step would have used if the allocator kept nothing."""
        self.larger = 1.0
        """How many times larger the batch is than those of which growth is known."""
        self._meter = Meter(shared)
        self.pools, self._spare = list(pools), spare
        self._tidied = 0, 0  # what was used after the last tidying up, and with what was to come
        self._moment: Hashable = None
        self._at_moment = 0  # bytes in use beside those of arenas
        self._growth: dict[Hashable, int] = {}  # from a moment to the next, at most

    def read(self) -> int:
        """Bytes in use now; remembers the peak."""
        used = self._used(0)
        self.needed = max(self.needed, used)
        return used

    def look(self, moment: Hashable) -> None:
        """Read, if there is a number to hold; ``moment`` names this place in the step (None: nothing is known of what follows).
        One thread does this: the one that computes."""
        if self.limit is None:
            return
        used, between = self._meter.read(), self._meter.risen()
        self.peak = max(self.peak, used + between)
        if self._moment is not None:
            growth = used + between - self._pooled() - self._at_moment
            self._growth[self._moment] = max(self._growth.get(self._moment, 0), growth)
            self.needed = max(self.needed, used + between)
        coming = self._coming(moment)
        used = self._used(coming)
        self.needed = max(self.needed, used + coming)
        self._moment, self._at_moment = moment, used - self._pooled()

    def _coming(self, moment: Hashable) -> int:
        """What will be taken from ``moment`` to the next one, by what is known."""
        return int(self._growth.get(moment, 0) * self.larger)

    def _pooled(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools)

    def skip(self) -> None:
        """What happens from the last moment to the next one is no part of a step."""
        self._moment = None

    def room(self) -> int | None:
        """Bytes that may be taken now beside what is known to come before the next moment; None if there is no limit."""
        if self.limit is None:
            return None
        return self.limit - self.margin - self._meter.read() - self._coming(self._moment)

    def make_room(self, nbytes: int) -> None:
        """So much is about to be taken with no reading in between: if it would not fit, what was freed is given back first."""
        if self.limit is not None and self.read() + nbytes > self.limit - self.margin:
            self._tidy(self.limit, nbytes)

    def _used(self, coming: int) -> int:
        """Bytes in use now; what was freed is given back if ``coming`` more would be too near to the limit."""
        used = self._meter.read()
        self.peak = max(self.peak, used)
        if self.limit is not None and used + coming > self.limit - self.margin:
            # Not again before memory has grown, or more is needed than there was with nothing left to give back.
            more = used - self._tidied[0], used + coming - self._tidied[1]
            if max(more) > self.margin // 8:
                used = self._tidy(self.limit, coming)
        return used

    def _tidy(self, limit: int, coming: int) -> int:
        before = self._meter.read() - self._pooled()
        give_back()
        if self._meter.read() + coming > limit - self.margin:
            self._spare()
        used = self._meter.read()
        self._at_moment -= max(0, before - (used - self._pooled()))  # it was there at the moment, and is no part of the growth
        self._tidied = used, used + coming
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
        self.peak = self.needed = 0
        self._tidied = 0, 0
        self._moment = None
        self._meter.risen()
        self.read()

    def forget_growth(self, units: Container[int] | None = None) -> None:
        """What follows the moments of ``units`` (None: of all) is learned anew: they take other memory from now on."""
        self._growth = {m: n for m, n in self._growth.items() if units is not None and not _is_of(units, m)}

    def look_around(self) -> None:
        """Count again what is looked at more rarely: shared memory, and what other processes of this one have."""
        self._meter.look_around()

    def settle(self) -> int:
        """What the process uses when it is at rest."""
        gc.collect()
        give_back()
        self._meter.look_around()
        return self.read()


def _is_of(units: Container[int], moment: Hashable) -> bool:
    return isinstance(moment, tuple) and moment[0] in ("begins", "ends") and moment[1] in units
