"""All bytes between memory and a file: short and interrupted transfers go on, odd memory and lengths pass through a buffer.

Memory and lengths at multiples of ``ALIGNMENT`` go to the file as they are; the rest passes through a small aligned buffer
that each thread keeps.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from lowtide.tiers.spool import Spool
from lowtide.tiers.store import ALIGNMENT

Bytes = npt.NDArray[np.uint8]
Call = Callable[[int, Bytes, int], int]
"""A system call: descriptor, memory, offset; how many bytes it moved."""

ENDS_EARLY = errno.ENODATA

_PIECE = 8 << 20  # bytes per system call
_BOUNCE = 1 << 20  # bytes of aligned memory per thread, taken when first needed
_INTERRUPTED_TRIES = 1000  # calls in a row that ask to be made again before it is an error
_STUCK_TRIES = 10  # calls in a row that do not get past a sector before it is an error
_bounce = threading.local()


def write_all(call: Call, spool: Spool, memory: Bytes, offset: int) -> None:
    """Write ``memory``; what lies beyond its end in the last sector is undefined."""
    whole = _move_as_it_lies(call, spool, memory, offset)
    for start in range(whole, memory.nbytes, _BOUNCE):
        part = memory[start : start + _BOUNCE]
        padded = _padded(part.nbytes)
        np.copyto(padded[: part.nbytes], part)
        _repeat(call, spool, padded, offset + start)


def read_all(call: Call, spool: Spool, memory: Bytes, offset: int) -> None:
    """Fill ``memory``."""
    whole = _move_as_it_lies(call, spool, memory, offset)
    for start in range(whole, memory.nbytes, _BOUNCE):
        part = memory[start : start + _BOUNCE]
        padded = _padded(part.nbytes)
        _repeat(call, spool, padded, offset + start)
        np.copyto(part, padded[: part.nbytes])


def digest_of(memory: Bytes) -> int:
    """The checksum of a block."""
    hasher = xxhash.xxh3_64()
    hasher.update(memory.data)  # lets go of the interpreter lock while it hashes: compute goes on next to it
    return hasher.intdigest()


def _move_as_it_lies(call: Call, spool: Spool, memory: Bytes, offset: int) -> int:
    """Move what needs no buffer; how many bytes that were."""
    whole = memory.nbytes
    if spool.direct:
        whole = whole // ALIGNMENT * ALIGNMENT if memory.ctypes.data % ALIGNMENT == 0 else 0
    for start in range(0, whole, _PIECE):
        _repeat(call, spool, memory[start : min(start + _PIECE, whole)], offset + start)
    return whole


def _padded(nbytes: int) -> Bytes:
    found: Bytes | None = getattr(_bounce, "memory", None)
    if found is None:
        found = _bounce.memory = np.frombuffer(mmap.mmap(-1, _BOUNCE), dtype=np.uint8)
    return found[: -(-nbytes // ALIGNMENT) * ALIGNMENT]


def _repeat(call: Call, spool: Spool, memory: Bytes, offset: int) -> None:
    """Call until everything is moved. A part that ends between two sectors is moved again from the last whole one."""
    done = interrupted = stuck = 0
    while done < memory.nbytes:
        try:
            moved = call(spool.fd, memory[done:], offset + done)
        except (InterruptedError, BlockingIOError):
            interrupted += 1
            if interrupted == _INTERRUPTED_TRIES:
                raise
            time.sleep(0.001)
            continue
        if spool.direct and done + moved < memory.nbytes:
            moved -= moved % ALIGNMENT
        interrupted, stuck = 0, 0 if moved else stuck + 1
        if stuck == _STUCK_TRIES:
            raise OSError(ENDS_EARLY, f"the file ends at {offset + done} or inside the sector there")
        done += moved
