"""Bytes on disk: an extent table over spool files, with a checksum for every block.

Where a block lies and what its bytes hash to is known only here, in memory. A disk that loses, swaps, keeps back or flips bytes
therefore cannot hand over anything but what was written last: the hash would differ. A bad read is tried once more (the second
one may come from another mirror, or past a loose cable), then it is an error.

[Note: free from a finalizer] An extent may be freed by a garbage collection, which can run in the middle of any method here,
in the same thread. ``free`` therefore only notes the extent, and whoever enters the table next looks after it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from lowtide.errors import ArgumentError, DiskCorrupted, DiskError, DiskFull, InternalError, Refused
from lowtide.tiers.pins import Pin, PinnedBlock, Place
from lowtide.tiers.queue import IOQueue
from lowtide.tiers.requests import check_request, new_extent
from lowtide.tiers.spool import Folder, Spool
from lowtide.tiers.store import ALIGNMENT, Extent, IOTicket, Key, Priority, Traffic
from lowtide.tiers.transfer import ENDS_EARLY, Bytes, digest_of, read_all, write_all

__all__ = ["DiskStore", "Folder"]

_log = logging.getLogger(__name__)

_PROBE = 4 << 20  # bytes written to each of several folders to see how fast it is


@dataclass(slots=True, eq=False)
class _Block:
    """Where a block lies and what it holds. Only the request that is at it changes it; the queue runs one at a time."""

    place: Place
    nbytes: int
    spare: Place | None = None
    """Where the next write goes if the place is pinned; reserved with the pin."""
    generation: int = 0
    digest: int | None = None
    lost: DiskError | None = None
    asked: bool = False
    """Whether a write was ever asked for."""


@dataclass(slots=True, eq=False)
class _Record:
    extent: Extent
    blocks: list[_Block]
    pending: int = 0
    freed: bool = False


@dataclass(slots=True)
class _Share:
    """How much of all bytes a spool should get, and how much it has got."""

    spool: Spool
    speed: float
    dealt_bytes: int = field(default=0)

    def load_with(self, nbytes: int) -> float:
        return (self.dealt_bytes + nbytes) / self.speed


class DiskStore:
    """See ``Store``. The folders' limits hold for this rank alone; ``threads`` is how many requests run at a time.

    A failed write loses the block: reads of it raise the same error until it is written again. If nobody waited for that
    write, the next read, write or drain of anything raises it.
    """

    def __init__(self, folders: Sequence[Folder], *, rank: int, threads: int = 4, deadline: float = 300.0) -> None:
        if not folders:
            raise ArgumentError("the disk tier needs at least one folder")
        self.rank = rank
        self._traffic = Traffic()
        self._queue = IOQueue(threads, traffic=self._traffic, deadline=deadline)
        self._table_lock = threading.Lock()
        self._records: dict[Extent, _Record] = {}
        self._dropped: deque[Extent] = deque()
        self._retiring = 0
        self._spools: list[Spool] = []
        self._finalizer = weakref.finalize(self, _close_spools, self._spools)
        try:
            for folder in folders:
                self._spools.append(Spool(folder, rank=rank))
            several = len(self._spools) > 1
            self._shares = [_Share(spool, self._measure(spool) if several else 1.0) for spool in self._spools]
        except BaseException:
            self._finalizer()
            raise

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    @property
    def used_bytes(self) -> int:
        with self._table_lock:
            self._sweep()
            return sum(share.dealt_bytes for share in self._shares)

    def extents(self) -> list[Extent]:
        """Everything that room is reserved for."""
        with self._table_lock:
            self._sweep()
            return list(self._records)

    # ---- room ----

    def reserve(self, key: Key, cuts: Sequence[int]) -> Extent:
        self._check_usable(str(key))
        extent = new_extent(key, cuts)
        sizes = [extent.block_bytes(i) for i in range(len(cuts) - 1)]
        try:
            blocks = self._place(key, sizes)
        except DiskFull:
            with self._table_lock:
                self._sweep()
                if not self._retiring:
                    raise
            self._queue.settle()  # room that was given back is not back before its last requests are done
            blocks = self._place(key, sizes)
        with self._table_lock:
            self._sweep()
            self._records[extent] = _Record(extent, blocks)
        return extent

    def free(self, extent: Extent) -> None:
        if self._queue.foreign:
            return  # a forked process drops its copy; the room belongs to the parent
        self._dropped.append(extent)  # [Note: free from a finalizer]

    def _sweep(self) -> None:
        while self._dropped:
            record = self._records.pop(self._dropped.popleft(), None)
            if record is not None:
                record.freed = True
                self._retiring += 1
                self._retire(record)

    def _retire(self, record: _Record) -> None:
        """Give the room back if it is freed and nothing is under way there. Under the lock."""
        if record.freed and not record.pending:
            self._retiring -= 1
            self._give_back(record.blocks)

    def _give_back(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            block.place.is_block = False
            self._give_unused(block.place)
            self._drop_spare(block)

    def _give_unused(self, place: Place) -> None:
        if place.is_block or place.pins:
            return
        place.spool.give(place.offset, place.room)
        next(share for share in self._shares if share.spool is place.spool).dealt_bytes -= place.room

    def _drop_spare(self, block: _Block) -> None:
        if block.spare is not None:
            block.spare.is_block, spare, block.spare = False, block.spare, None
            self._give_unused(spare)

    def _place(self, key: Key, sizes: list[int]) -> list[_Block]:
        """Room for each block, on the folder that is furthest behind its share and has room."""
        blocks: list[_Block] = []
        with self._table_lock:
            self._sweep()
            try:
                for nbytes in sizes:
                    blocks.append(_Block(self._take_place(nbytes), nbytes))
            except BaseException as error:
                self._give_back(blocks)
                if not isinstance(error, DiskFull):
                    raise
                needed = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)
                free = sum(spool.free_bytes() for spool in self._spools)
                where = ", ".join(spool.folder.path for spool in self._spools)
                raise DiskFull(error.problem, where, None, key.unit, key.kind, self.rank, needed, free) from error
        return blocks

    def _take_place(self, nbytes: int) -> Place:
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        share, offset = self._find_room(room)
        share.dealt_bytes += room
        return Place(share.spool, offset, room)

    def _find_room(self, room: int) -> tuple[_Share, int]:
        ranked = sorted(self._shares, key=lambda share: share.load_with(room))
        for share in ranked[:-1]:
            try:
                return share, share.spool.take(room)
            except DiskFull:
                continue
        return ranked[-1], ranked[-1].spool.take(room)

    def _measure(self, spool: Spool) -> float:
        """Bytes per second of a short write."""
        nbytes = min(_PROBE, spool.free_bytes()) // ALIGNMENT * ALIGNMENT
        try:
            offset = spool.take(nbytes)
        except DiskFull:
            nbytes = offset = 0
        if not nbytes:
            return 1.0  # as good as never chosen while others have room
        memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        try:
            start = time.perf_counter()
            for _ in range(2):
                write_all(self._pwrite, spool, memory, offset)
            return 2 * nbytes / max(time.perf_counter() - start, 1e-6)
        except OSError as cause:
            problem = f"the first write failed: {cause.strerror or cause}"
            raise DiskError(problem, spool.folder.path, offset, rank=self.rank) from cause
        finally:
            spool.give(offset, nbytes)

    # ---- pins: see tiers/pins.py ----

    def pin(self, extents: Iterable[Extent]) -> Pin:
        """Keep what these extents hold now, whatever is written to them later. Nothing may be under way; DiskFull, with
        nothing pinned, if there is no room for what will be written meanwhile."""
        self._check_usable("a pin")
        with self._table_lock:
            self._sweep()
            records = [self._records[extent] for extent in extents]
            blocks = [b for record in records for b in record.blocks if b.digest is not None]
            added: list[_Block] = []
            try:
                for block in blocks:
                    if block.spare is None:
                        block.spare = self._take_place(block.nbytes)
                        added.append(block)
            except BaseException:
                for block in added:
                    self._drop_spare(block)
                raise
            for block in blocks:
                block.place.pins += 1
            rows = {r.extent: [_pinned(b) for b in r.blocks] for r in records}
        return Pin(self, rows)

    def unpin(self, pin: Pin) -> None:
        """Undo a pin; by way of ``Pin.release``."""
        if self._queue.foreign or not self._finalizer.alive:
            return
        with self._table_lock:
            self._sweep()
            for place in pin.places():
                place.pins -= 1
                place.spool.let_go(place.offset)
                self._give_unused(place)
            for extent in pin.blocks:
                record = self._records.get(extent)
                for block in record.blocks if record is not None else ():
                    if not block.place.pins:
                        self._drop_spare(block)

    def read_pinned(self, block: PinnedBlock, into: Tensor, label: str) -> IOTicket:
        """Read a block as it was when it was pinned, behind everything else."""
        self._check_usable(label)
        memory: Bytes = into.detach().numpy()
        unit, _, kind = label.partition("/")

        def work() -> None:
            self._read_block(Key(unit, kind), _Block(block.place, block.nbytes, digest=block.digest), memory)

        return self._queue.submit((block, 0), label, Priority.CHECKPOINT, work)

    def _move_if_pinned(self, block: _Block) -> None:
        """A block that is about to be written leaves its place to the pins."""
        with self._table_lock:
            self._sweep()
            if not block.place.pins:
                return
            if block.spare is None:
                raise InternalError("a pinned block has no spare place")
            block.place.is_block = False
            block.place, block.spare = block.spare, None

    # ---- requests ----

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        return self._submit("read", extent, block, into, priority)

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        return self._submit("write", extent, block, data, priority)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        if self._queue.foreign:
            return
        self._queue.close()
        with self._table_lock:
            self._sweep()
            self._records.clear()
        self._finalizer()

    def _check_usable(self, label: str) -> None:
        self._queue.check_process()
        if not self._finalizer.alive:
            raise Refused(f"{label}: the store is closed")

    def _submit(self, verb: str, extent: Extent, index: int, tensor: Tensor, priority: Priority) -> IOTicket:
        label = f"{verb} of block {index} of {extent.key}"
        self._check_usable(label)
        check_request(extent, index, tensor)
        memory: Bytes = tensor.detach().numpy()  # keeps the tensor's storage alive until the request is done
        with self._table_lock:
            self._sweep()
            record = self._records.get(extent)
            if record is None:
                raise InternalError(f"{label}: the extent is freed or of another store")
            block = record.blocks[index]
            if verb == "write":
                carry_out = self._write_block
                block.asked = True
            elif not block.asked:
                raise InternalError(f"{label}: it was never written")
            else:
                carry_out = self._read_block
            record.pending += 1
        work = functools.partial(self._run, record, carry_out, block, memory)
        try:
            return self._queue.submit((extent, index), label, priority, work, remembered=verb == "write")
        except BaseException:
            self._leave(record)
            raise

    def _run(self, record: _Record, carry_out: Callable[[Key, _Block, Bytes], None], block: _Block, memory: Bytes) -> None:
        try:
            carry_out(record.extent.key, block, memory)
        finally:
            self._leave(record)

    def _leave(self, record: _Record) -> None:
        with self._table_lock:
            self._sweep()
            record.pending -= 1
            self._retire(record)

    def _write_block(self, key: Key, block: _Block, memory: Bytes) -> None:
        self._move_if_pinned(block)
        block.digest = None
        block.generation += 1
        try:
            digest = digest_of(memory)
            write_all(self._pwrite, block.place.spool, memory, block.place.offset)
        except BaseException as cause:
            reason = cause.strerror if isinstance(cause, OSError) else None
            error = self._error(DiskError, f"a write failed: {reason or repr(cause)}", key, block)
            block.lost = dataclasses.replace(error)  # a copy: the one that is raised will hold its callers' frames
            raise error from cause
        block.digest, block.lost = digest, None
        with self._queue.lock:
            self._traffic.written_bytes += block.nbytes

    def _read_block(self, key: Key, block: _Block, memory: Bytes) -> None:
        if block.lost is not None:
            raise dataclasses.replace(block.lost)
        if block.digest is None:
            raise InternalError(f"read of {key}: the write before it was refused")
        error = self._try_read(key, block, memory)
        if error is not None:
            _log.warning("%s Reading once more.", str(error))  # its text only: the frames of an error hold the memory
            error = self._try_read(key, block, memory)
        if error is not None:
            raise error
        with self._queue.lock:
            self._traffic.read_bytes += block.nbytes

    def _try_read(self, key: Key, block: _Block, memory: Bytes) -> DiskError | None:
        try:
            read_all(self._pread, block.place.spool, memory, block.place.offset)
        except OSError as cause:
            kind = DiskCorrupted if cause.errno == ENDS_EARLY else DiskError
            error = self._error(kind, f"a read failed: {cause.strerror or cause}", key, block)
            error.__cause__ = cause
            return error
        if digest_of(memory) != block.digest:
            problem = f"the bytes of write {block.generation} of this block did not come back"
            return self._error(DiskCorrupted, problem, key, block)
        return None

    def _error(self, kind: type[DiskError], problem: str, key: Key, block: _Block) -> DiskError:
        return kind(problem, block.place.spool.folder.path, block.place.offset, key.unit, key.kind, self.rank)

    # ---- bytes ----

    def _pread(self, fd: int, memory: Bytes, offset: int) -> int:
        return os.preadv(fd, [memory.data], offset)

    def _pwrite(self, fd: int, memory: Bytes, offset: int) -> int:
        return os.pwritev(fd, [memory.data], offset)


def _pinned(block: _Block) -> PinnedBlock | None:
    return None if block.digest is None else PinnedBlock(block.place, block.nbytes, block.digest)


def _close_spools(spools: list[Spool]) -> None:
    for spool in spools:
        spool.close()
