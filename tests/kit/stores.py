"""Stores that are slow or broken on purpose."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lowtide.tiers.disk import DiskStore
from lowtide.tiers.queue import IOQueue
from lowtide.tiers.spool import Folder
from lowtide.tiers.store import Extent, IOTicket, Key, Priority, Store, Traffic

Bytes = npt.NDArray[np.uint8]


class SlowStore:
    """Another store, with every request delayed in a thread: what is only right by luck of timing goes wrong."""

    def __init__(self, inner: Store, seconds: float, *, threads: int = 8) -> None:
        self.inner = inner
        self.seconds = seconds
        self._queue = IOQueue(threads, traffic=inner.traffic)
        self._lock = threading.RLock()
        self._pending: dict[Extent, int] = {}
        self._freed: set[Extent] = set()

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    def reserve(self, key: Key, cuts: Sequence[int]) -> Extent:
        self._queue.check_process()
        return self.inner.reserve(key, cuts)

    def free(self, extent: Extent) -> None:
        with self._lock:
            if self._pending.get(extent):
                self._freed.add(extent)
                return
        self.inner.free(extent)

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        return self._later(f"slow read of {extent.key}", extent, block, priority, self.inner.read, into)

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        return self._later(f"slow write of {extent.key}", extent, block, priority, self.inner.write, data)

    def drain(self) -> None:
        self._queue.drain()
        self.inner.drain()

    def close(self) -> None:
        self._queue.close()
        self.inner.close()

    def _later(
        self,
        label: str,
        extent: Extent,
        block: int,
        priority: Priority,
        request: Callable[[Extent, int, Tensor, Priority], IOTicket],
        tensor: Tensor,
    ) -> IOTicket:
        def work() -> None:
            time.sleep(self.seconds)
            try:
                request(extent, block, tensor, priority).wait()
            finally:
                self._leave(extent)

        with self._lock:
            self._pending[extent] = self._pending.get(extent, 0) + 1
        try:
            return self._queue.submit((extent, block), label, priority, work, remembered="write" in label)
        except BaseException:
            self._leave(extent)
            raise

    def _leave(self, extent: Extent) -> None:
        with self._lock:
            self._pending[extent] -= 1
            last = not self._pending[extent]
            if last:
                del self._pending[extent]
            free = last and extent in self._freed
            if free:
                self._freed.remove(extent)
        if free:
            self.inner.free(extent)


class Effect(enum.Enum):
    """What a system call does without raising."""

    SHORT = "moves the first part only, and says so"
    RAGGED = "moves a first part that ends inside a sector, and says so"
    FLIP = "one bit changes on the way"
    TORN = "writes the first part only, and says that all was written"


@dataclass(frozen=True)
class Fault:
    """From the ``at``-th call (0: the first) of ``calls`` on, ``times`` calls go wrong: an errno, or an Effect."""

    what: int | Effect
    at: int = 0
    calls: str = "any"
    times: int = 1


class FailingDisk(DiskStore):
    """A disk store whose system calls go wrong when told. Calls count from the last ``arm``."""

    def __init__(self, folders: Sequence[Folder], *, rank: int = 0, threads: int = 4, fault: Fault | None = None) -> None:
        self._fault_lock = threading.Lock()
        self.arm(fault)
        super().__init__(folders, rank=rank, threads=threads)

    def arm(self, fault: Fault | None) -> None:
        with self._fault_lock:
            self._fault = fault
            self.calls = {"read": 0, "write": 0, "any": 0}
            self.failed_calls = 0

    def _pread(self, fd: int, memory: Bytes, offset: int) -> int:
        what = self._now("read")
        if what is Effect.SHORT or what is Effect.RAGGED:
            moved = super()._pread(fd, memory[: _part(memory)], offset)
            return max(1, moved - 100) if what is Effect.RAGGED else moved
        moved = super()._pread(fd, memory, offset)
        if what is Effect.FLIP:
            memory[memory.nbytes // 2] ^= 16
        return moved

    def _pwrite(self, fd: int, memory: Bytes, offset: int) -> int:
        what = self._now("write")
        if what in (Effect.SHORT, Effect.RAGGED, Effect.TORN):
            moved = super()._pwrite(fd, memory[: _part(memory)], offset)
            return {Effect.SHORT: moved, Effect.RAGGED: max(1, moved - 100), Effect.TORN: memory.nbytes}[what]
        if what is Effect.FLIP:
            copy = aligned_bytes(memory.nbytes)
            copy[:] = memory
            copy[0] ^= 1
            return super()._pwrite(fd, copy, offset)
        return super()._pwrite(fd, memory, offset)

    def _now(self, call: str) -> Effect | None:
        with self._fault_lock:
            fault = self._fault
            number = self.calls[fault.calls if fault else "any"]
            matches = fault is not None and fault.calls in ("any", call)
            self.calls[call] += 1
            self.calls["any"] += 1
            if not matches or not fault.at <= number < fault.at + fault.times:
                return None
            self.failed_calls += 1
        if isinstance(fault.what, int):
            raise OSError(fault.what, os.strerror(fault.what))
        return fault.what


def _part(memory: Bytes) -> int:
    """About half, whole sectors; of one sector, all of it (direct I/O knows no less)."""
    return min(memory.nbytes, max(4096, memory.nbytes // 2 // 4096 * 4096))


def aligned_bytes(nbytes: int) -> Bytes:
    """Memory that direct I/O takes."""
    room = np.empty(nbytes + 4096, dtype=np.uint8)
    start = -room.ctypes.data % 4096
    return room[start : start + nbytes]
