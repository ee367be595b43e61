"""The bytes of one kind of one unit on this rank, chunk by chunk: in memory for good, or in a store and in memory on loan.

Whoever needs a chunk opens a *lease* on it. On a shelf in memory that is a view and costs nothing; on a shelf in a store it
is a buffer that the chunk is read into, and closing a changed lease writes it back. So the update does not know where bytes
live, and what fits in memory stays there.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from lowtide.errors import InternalError
from lowtide.tiers.arena import Arena, Block
from lowtide.tiers.store import Extent, IOTicket, Key, Priority, Store

_WAIT = 300.0  # seconds that a lease waits for other leases' buffers


class Access(enum.Enum):
    """What a lease is for."""

    READ = enum.auto()
    CHANGE = enum.auto()
    REPLACE = enum.auto()
    """All bytes will be written: what they were need not be read."""


class Lease(Protocol):
    """One chunk, for a while."""

    def wait(self) -> Tensor:
        """The chunk's bytes, valid until ``close``."""
        ...

    def close(self, *, changed: bool) -> None:
        """Give the chunk back; what changed is kept."""
        ...


@contextmanager
def borrowed(lease: Lease, *, changed: bool) -> Generator[Tensor]:
    """The bytes of ``lease``, which is closed at the end; what ``changed`` is kept unless something went wrong."""
    try:
        yield lease.wait()
    except BaseException:
        lease.close(changed=False)
        raise
    lease.close(changed=changed)


class View:
    """A lease on bytes that are in memory anyway."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor

    def close(self, *, changed: bool) -> None:
        return None


class _Loan:
    """A lease on a buffer that was filled from a store."""

    __slots__ = ("_block", "_buffers", "_chunk", "_reading", "_shelf", "_tensor")

    def __init__(self, shelf: Shelf, chunk: int, block: Block, buffers: Arena) -> None:
        self._shelf, self._chunk, self._block, self._buffers = shelf, chunk, block, buffers
        self._tensor = block.tensor[: shelf.cuts[chunk + 1] - shelf.cuts[chunk]]
        self._reading: IOTicket | None = None

    def start_reading(self, priority: Priority) -> None:
        self._reading = self._shelf.read(self._chunk, self._tensor, priority)

    def wait(self) -> Tensor:
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self._tensor

    def close(self, *, changed: bool) -> None:
        tensor, block, buffers = self._tensor, self._block, self._buffers
        del self._tensor, self._block
        try:
            last = self._shelf.write(self._chunk, tensor) if changed else self._reading
        except BaseException:
            buffers.give(block)
            raise
        del tensor
        if last is None:
            buffers.give(block)
        else:
            last.on_done(lambda: buffers.give(block))


class Shelf:
    """See the module's docstring. ``cuts`` divide the bytes into chunks."""

    def __init__(self, key: Key, cuts: Sequence[int], *, memory: Arena, store: Store | None) -> None:
        self.key, self.cuts = key, tuple(cuts)
        self._memory = memory
        self._store = store
        self._written = [False] * (len(self.cuts) - 1)
        self._extent: Extent | None = store.reserve(key, self.cuts) if store is not None and self.nbytes else None
        self.block: Block | None = None if self._extent is not None else memory.take(self.nbytes)
        """The whole shelf, if it is in memory."""

    @property
    def nbytes(self) -> int:
        return self.cuts[-1]

    @property
    def in_memory(self) -> bool:
        return self.block is not None

    @property
    def memory_bytes(self) -> int:
        """What it takes of memory for good."""
        return self.block.nbytes if self.block is not None else 0

    @property
    def touched_bytes(self) -> int:
        """The part of it that was ever written: before that, the kernel has given no memory for it."""
        if self.block is None:
            return 0
        if all(self._written):
            return self.block.nbytes
        return sum(b - a for i, (a, b) in self._ranges() if self._written[i])

    @property
    def extent(self) -> Extent | None:
        """Where it is in its store; None if it is in memory."""
        return self._extent

    def has(self, chunk: int) -> bool:
        """Whether the chunk was ever written."""
        return self._written[chunk]

    def mark_written(self) -> None:
        """Somebody has filled the memory of a shelf that is in memory."""
        self._written = [True] * len(self._written)

    def forget(self, chunk: int) -> None:
        """The chunk's bytes will be replaced before anybody needs them: it need not be read, even if it could not be."""
        self._written[chunk] = False

    # -- one chunk on loan --------------------------------------------------------------------------------------------

    def open(self, chunk: int, buffers: Arena, priority: Priority, *, fresh: bool = False, wait: bool = True) -> Lease:
        """Borrow a chunk; ``fresh`` if its bytes do not matter because all of them will be replaced. ``wait`` for a buffer if
        there is none: whoever holds leases and only reads ahead must not, because nobody else would give any back."""
        if self.block is not None:
            self._written[chunk] = True
            return View(self.block.tensor[self.cuts[chunk] : self.cuts[chunk + 1]])
        nbytes = self.cuts[chunk + 1] - self.cuts[chunk]
        block = buffers.take_or_wait(nbytes, _WAIT) if wait else buffers.take(nbytes)
        loan = _Loan(self, chunk, block, buffers)
        if not fresh:
            try:
                loan.start_reading(priority)
            except BaseException:
                loan.close(changed=False)
                raise
        return loan

    # -- straight to and from memory of somebody else -----------------------------------------------------------------

    def read(self, chunk: int, into: Tensor, priority: Priority) -> IOTicket:
        """Start reading a chunk from the store."""
        store, extent = self._stored()
        return store.read(extent, chunk, into, priority)

    def write(self, chunk: int, data: Tensor, priority: Priority = Priority.WRITE_BACK) -> IOTicket:
        """Start writing a chunk to the store."""
        store, extent = self._stored()
        self._written[chunk] = True
        return store.write(extent, chunk, data, priority)

    def fetch(self, into: Tensor, priority: Priority) -> list[IOTicket]:
        """Start reading all chunks into ``into``, which is as long as the shelf."""
        return [self.read(i, into[a:b], priority) for i, (a, b) in self._ranges()]

    def save(self, data: Tensor) -> list[IOTicket]:
        """Start writing all chunks."""
        return [self.write(i, data[a:b]) for i, (a, b) in self._ranges()]

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, store: Store | None) -> None:
        """Into memory (``None``) or into ``store``. Nobody may hold a lease or a view."""
        if store is None:
            self.bring()
        else:
            self.send(store)

    def bring(self) -> None:
        """Move the shelf into memory, for good."""
        if self.block is not None:
            return
        store, extent = self._stored()
        block = self._memory.take(self.nbytes)
        try:
            _carry_out(self.read(i, block.tensor[a:b], Priority.NEXT) for i, (a, b) in self._ranges() if self._written[i])
        except BaseException:
            self._memory.give(block)
            raise
        store.free(extent)
        self._extent, self.block = None, block

    def send(self, store: Store) -> None:
        """Move the shelf into ``store``."""
        if self.block is None:
            return
        block, before = self.block, self._store
        self._store, self._extent, self.block = store, store.reserve(self.key, self.cuts), None
        try:
            _carry_out(self.write(i, block.tensor[a:b]) for i, (a, b) in self._ranges() if self._written[i])
        except BaseException:
            store.free(self._extent)  # the bytes are still in memory: nothing has moved
            self._store, self._extent, self.block = before, None, block
            raise
        self._memory.give(block)

    def _ranges(self) -> list[tuple[int, tuple[int, int]]]:
        return list(enumerate(itertools.pairwise(self.cuts)))

    def _stored(self) -> tuple[Store, Extent]:
        if self._store is None or self._extent is None:
            raise InternalError(f"the {self.key} is in memory, not in a store")
        return self._store, self._extent


def _carry_out(requests: Iterable[IOTicket]) -> None:
    """Start all requests and wait until none touches the memory any more; raises the first failure."""
    tickets: list[IOTicket] = []
    failures: list[BaseException] = []
    try:
        tickets.extend(requests)
    except BaseException as failure:  # raised below, when those that were started are done
        failures.append(failure)
    for ticket in tickets:
        try:
            ticket.wait()
        except BaseException as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
