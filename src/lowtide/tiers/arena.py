"""Memory that is taken once and reused; the sole owner of its free list.

Fresh large allocations cost ten times the work done in them (page faults), and glibc keeps or returns them as it likes. An
arena takes anonymous private maps (huge pages advised), hands them out as
blocks and gets them back.

[Note: a block is free when nobody holds its storage] Every block has a storage of its own, and torch counts who refers to it.
Autograd, a checkpoint's recomputation or a caller may still hold a view of a unit that was released; such a block must not be
written again. ``give`` therefore looks at the count: a block with views outside waits in limbo until they are gone.
Packing views as recipes (runtime/saved.py) is what lets memory go; this count is what makes forgetting one harmless.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from lowtide.errors import Error
from lowtide.torch_internals import storage_use_count

_HUGE_PAGE = 2 << 20
# A free block may serve a request that is this much smaller, so that units of similar size share blocks.
_SLACK = 1.5
_SLICE = 0.02  # seconds between two looks at whether there is room


class Block:
    """Bytes handed out by an arena: a 1-D uint8 tensor, possibly a little longer than asked."""

    __slots__ = ("_idle_count", "tensor")

    def __init__(self, nbytes: int, arena: Arena) -> None:
        self.tensor = _reserve(nbytes, arena.device, forked=arena.forked)
        self._idle_count = self._count()

    @classmethod
    def over(cls, tensor: Tensor) -> Block:
        """A block of memory that is somebody else's: ``tensor``, which has a storage of its own."""
        block = cls.__new__(cls)
        block.tensor = tensor
        block._idle_count = block._count()
        return block

    def _count(self) -> int:
        return storage_use_count(self.tensor)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()

    @property
    def held(self) -> bool:
        """Whether any tensor outside still refers to this memory."""
        return self._count() > self._idle_count


def _reserve(nbytes: int, device: torch.device, *, forked: bool) -> Tensor:
    with torch.inference_mode(mode=False):
        if device.type != "cpu" or nbytes < mmap.PAGESIZE:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(f"the system gives no {size / 2**20:.1f} MiB more (ulimit -v and -d say how many)") from error
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE_PAGE:
            memory.madvise(mmap.MADV_HUGEPAGE)
        if not forked and hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


class ArenaFull(Error, MemoryError):
    """An arena with a capacity has no room now. Its user makes room, waits for some, or tells the caller what does not fit."""


class Arena:
    """Blocks of one device, at most ``capacity`` bytes of them. Blocks may be given back by any thread.

    ``forked``: whether processes forked from this one (loader workers) see the memory. What is only there for a moment should
    not be theirs: every page written meanwhile would be copied.
    """

    def __init__(self, device: torch.device, *, forked: bool, capacity: int | None = None) -> None:
        self.device = device
        self.forked = forked
        self.capacity = capacity
        self.taken_bytes = 0
        self.reserved_bytes = 0
        self.most_bytes = 0
        """The most that was reserved since somebody set this back."""
        self.takes = 0
        """Blocks handed out so far."""
        self.fresh = 0
        """How many of them were new memory."""
        self.poison = False
        """Fill what is given back with NaN, so that a use of released memory shows. For tests."""
        self._free: list[Block] = []
        self._limbo: list[Block] = []
        self._taken: dict[Block, None] = {}  # blocks on loan
        self._lock = threading.RLock()
        # Released when a block has come back; neither is a Condition, which an interrupt inside can leave taken for good.
        self._given = threading.Lock()
        self._given.acquire()

    def take(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``; its content is undefined."""
        with self._lock:
            self._sweep()
            block = self._fitting(nbytes, _SLACK)
            if block is None and not self._has_room(nbytes):
                block = self._fitting(nbytes, None)  # rather a block far too large than none
                if block is None:
                    self._make_room(nbytes)
            if block is None:
                block = Block(nbytes, self)
                self._taken[block] = None
                self.reserved_bytes += block.nbytes
                self.most_bytes = max(self.most_bytes, self.reserved_bytes)
                self.fresh += 1
            else:
                self._taken[block] = None
                self._free.remove(block)
            self.takes += 1
            self.taken_bytes += block.nbytes
            return block

    def take_or_wait(self, nbytes: int, seconds: float) -> Block:
        """The same, waiting for others to give blocks back if there is no room."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self.take(nbytes)
            except ArenaFull:
                if time.monotonic() > end:
                    raise
            self._given.acquire(timeout=_SLICE)  # a view may be let go without anybody telling

    def give(self, block: Block) -> None:
        """Take ``block`` back. Views that are still held keep it out of use, see the note above."""
        with self._lock:
            if block not in self._taken:
                return  # it was taken back after an interrupt
            self._limbo.append(block)
            del self._taken[block]
            self.taken_bytes -= block.nbytes
            self._sweep()
        with suppress(RuntimeError):  # nobody has waited since the last one
            self._given.release()

    def reclaim(self, used: Iterable[Block]) -> None:
        """Calls were broken off, and nothing is under way: take back all blocks but those ``used``, and count anew."""
        with self._lock:
            keep = set(used)
            given = {*self._limbo, *(block for block in self._taken if block not in keep)}
            self._free = [block for block in self._free if block not in self._taken and block not in given]
            self._limbo = list(given)
            self._taken = dict.fromkeys(block for block in self._taken if block not in given)
            self.taken_bytes = sum(block.nbytes for block in self._taken)
            self.reserved_bytes = sum(block.nbytes for block in (*self._taken, *self._limbo, *self._free))
            self._sweep()

    @property
    def limbo_bytes(self) -> int:
        """Bytes given back that somebody outside still looks at."""
        return sum(b.nbytes for b in self._limbo)

    @property
    def free_sizes(self) -> list[int]:
        """Bytes of every block that could be handed out now."""
        return [b.nbytes for b in self._free]

    def trim(self) -> None:
        """Return every unused block to the operating system."""
        with self._lock:
            self._sweep()
            self.reserved_bytes -= sum(b.nbytes for b in self._free)
            self._free.clear()

    def _has_room(self, nbytes: int) -> bool:
        return self.capacity is None or self.reserved_bytes + nbytes <= self.capacity

    def _fitting(self, nbytes: int, slack: float | None) -> Block | None:
        fitting = [b for b in self._free if nbytes <= b.nbytes and (slack is None or b.nbytes <= nbytes * slack)]
        return min(fitting, key=lambda b: b.nbytes, default=None)

    def _make_room(self, nbytes: int) -> None:
        """Return unused blocks, which are all too small, until a new one fits."""
        while self._free and not self._has_room(nbytes):
            self.reserved_bytes -= self._free.pop().nbytes
        if not self._has_room(nbytes):
            raise ArenaFull(f"{nbytes} bytes asked of an arena of {self.capacity}, {self.reserved_bytes} in use")

    def _sweep(self) -> None:
        held: list[Block] = []
        for block in self._limbo:
            if block in self._taken or block in self._free:
                continue  # an interrupt came between two of these lines
            if block.held:
                held.append(block)
                continue
            if self.poison:
                whole = block.tensor[: block.nbytes // 8 * 8]
                whole.view(torch.float64).fill_(float("nan"))
            self._free.append(block)
        self._limbo = held
