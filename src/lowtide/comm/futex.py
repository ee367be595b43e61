"""Counters in memory that several processes map, and waiting for them without burning a core: the kernel's futex.

Every counter has one writer, so that adding to it needs no atomic instruction; who waits for it sleeps in the kernel until the
writer wakes it. Counters wrap; a counter has *reached* a number if it is less than half of its range behind.

[Note: order of memory] What a process writes before it advances a counter must be seen by who has seen the counter. A lock that
is taken and given back is a full fence on the processors where Python's own stores and loads would not be enough.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import sys
import threading
from typing import Any

_UNKNOWN = -1
_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_SYSTEM_CALL = _SYSTEM_CALLS.get(platform.machine(), _UNKNOWN)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_RANGE = 1 << 32
_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_fence = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Whether processes can wait for each other's memory here."""
    return _libc is not None and _SYSTEM_CALL != _UNKNOWN


class Counters:
    """``count`` counters at ``offset`` of memory that is mapped by several processes."""

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self._words = (ctypes.c_uint32 * count).from_buffer(memory, offset)
        self._address = ctypes.addressof(self._words)

    def value(self, index: int) -> int:
        value = self._words[index]
        with _fence:
            return value

    def advance(self, index: int, to: int) -> None:
        """Set a counter that only this process writes, and wake who waits for it."""
        with _fence:
            self._words[index] = to % _RANGE
        _libc.syscall(ctypes.c_long(_SYSTEM_CALL), ctypes.c_void_p(self._address + 4 * index), _WAKE, _EVERYBODY, None, None, 0)

    def reached(self, index: int, target: int) -> bool:
        return (self.value(index) - target) % _RANGE < _RANGE // 2

    def wait(self, index: int, target: int, seconds: float) -> bool:
        """Sleep until the counter has reached ``target``, or for about ``seconds``; whether it has. May return early."""
        seen = self._words[index]
        if self.reached(index, target):
            return True
        whole = int(seconds)
        timeout = _Timespec(whole, int((seconds - whole) * 1e9))
        failed = _libc.syscall(
            ctypes.c_long(_SYSTEM_CALL),
            ctypes.c_void_p(self._address + 4 * index),
            _WAIT,
            ctypes.c_uint32(seen),
            ctypes.byref(timeout),
            None,
            0,
        )
        if failed and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, "waiting for a counter in shared memory failed")
        return self.reached(index, target)
