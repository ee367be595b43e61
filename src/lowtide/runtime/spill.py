"""Saved activations that wait in a store for their backward pass.

What is spilled is memory, not tensors: a saved tensor is a view of some bytes, and those are written once, however many
views of them are saved. A small handle takes the tensor's place in the graph. Unpacking it reads the bytes back, and starts
reading those that were saved just before, because backward comes in reverse order.

[Note: how long two saves are the same] The same bytes saved again are not written again while they cannot have become other
bytes: as long as we hold the memory for its write, and afterwards if torch allocated it (then the storage dies with its
bytes; a block of an arena is a storage that is filled again and again). A change in place in between raises the version.

[Note: versions] With saved-tensor hooks torch no longer checks whether a tensor was changed in place after it was saved. A
handle therefore shares the tensor's version counter, without its memory, and raises as torch would. This holds whether the
tensor is still alive or not. Writes that pass by the counter (``.data``, numpy) are as invisible as in plain torch.

Only the thread that runs the step calls a ``Spill``; handles may die anywhere.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import ChangedInPlace
from lowtide.tiers.arena import Arena, Block
from lowtide.tiers.store import ALIGNMENT, Extent, IOTicket, Key, Priority, Store
from lowtide.torch_internals import version_counter

_NOTHING = torch.empty(0, dtype=torch.uint8)
_BLOCK = 1 << 20  # bytes per request; only the last, partial one of a tensor is copied before it is written
_CLASSES_PER_DOUBLING = 8  # room is reserved in sizes that differ by at most an eighth, so that other shapes reuse it


def check_version(now: int, expected: int, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raise as torch does if a saved tensor is not what it was."""
    if now != expected:
        raise ChangedInPlace(f"{dtype} of shape {list(shape)}", now, expected)


class _Move:
    """Bytes on their way between memory and the store."""

    __slots__ = ("memory", "nbytes", "tickets")

    def __init__(self, memory: Tensor, tickets: list[IOTicket]) -> None:
        self.memory: Tensor = memory
        self.tickets = tickets
        self.nbytes = memory.numel()

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    @property
    def holds_memory(self) -> bool:
        return self.memory is not _NOTHING

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()


class _Load(_Move):
    """Bytes read back, until every handle that was there has had them."""

    __slots__ = ("block", "waiting")

    def __init__(self, block: Block, memory: Tensor, tickets: list[IOTicket], waiting: weakref.WeakSet[Spilled]) -> None:
        super().__init__(memory, tickets)
        self.block = block
        self.waiting = waiting


@dataclass(slots=True)
class _Remains:
    """What a dead ``_Stored`` leaves to be given back."""

    extent: Extent
    nbytes: int
    load: _Load | None


class _Stored:
    """Bytes in the store that at least one handle refers to."""

    __slots__ = ("__weakref__", "_remains", "extent", "handles", "index", "load", "nbytes", "source", "version", "write")

    def __init__(self, source: StorageWeakRef, version: int, extent: Extent, write: _Move, remains: deque[_Remains]) -> None:
        self.source = source  # keeps the storage's identity, not its memory
        self.version = version
        self.extent = extent
        self.nbytes = write.nbytes
        self.write: _Move = write
        self.load: _Load | None = None
        self.handles: weakref.WeakSet[Spilled] = weakref.WeakSet()
        self.index = -1
        self._remains = remains

    def __del__(self) -> None:
        # in any thread, at any moment: only note it
        self._remains.append(_Remains(self.extent, self.nbytes, self.load))


class Spilled:
    """The handle that stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "_spill", "counter", "dtype", "is_first", "offset", "shape", "stored", "stride", "version")

    def __init__(self, spill: Spill, tensor: Tensor, stored: _Stored, first_byte: int) -> None:
        self._spill = spill
        self.stored = stored
        self.is_first = not stored.handles
        self.dtype = tensor.dtype
        self.offset = int(tensor.storage_offset()) - first_byte // tensor.itemsize
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.version = tensor._version  # pyright: ignore[reportPrivateUsage]
        self.counter = version_counter(tensor)
        stored.handles.add(self)

    def unpack(self) -> Tensor:
        return self._spill.unpack(self)


def _always(_: Tensor) -> bool:
    return True


class Spill:
    """Moves saved tensors to a store and back. See the module's docstring."""

    def __init__(
        self,
        store: Store,
        *,
        least_bytes: int = 1 << 20,
        in_flight_bytes: int = 256 << 20,
        should_spill: Callable[[Tensor], bool] = _always,
    ) -> None:
        self.store = store
        self._least_bytes = max(least_bytes, 1)
        self._in_flight_bytes = in_flight_bytes  # of writes, and again of reads
        self._should_spill = should_spill
        self.arena = Arena(torch.device("cpu"), forked=False)
        """What is read back lies here; its ``reserved_bytes`` stay below the bound and what backward itself holds."""
        self._pool: defaultdict[int, list[Extent]] = defaultdict(list)
        self._reserved = 0  # extents so far, for their names
        self._known: weakref.WeakValueDictionary[tuple[int, int, int], _Stored] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_Stored]] = []
        self._writing: deque[_Move] = deque()
        self._writing_bytes = 0
        self._loads: weakref.WeakKeyDictionary[_Stored, None] = weakref.WeakKeyDictionary()  # oldest first
        self._loaded_bytes = 0
        self._leaving: list[_Load] = []  # dropped while the store may still write into them
        self._remains: deque[_Remains] = deque()
        self._live_bytes = 0

    @property
    def spilled_bytes_live(self) -> int:
        """Bytes in the store that some graph still refers to."""
        self._sweep()
        return self._live_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of activations whose writes are under way."""
        self._sweep()
        return self._writing_bytes

    # -- forward ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Spilled | None:
        """Send ``tensor``'s bytes to the store, if they are of the kind that goes there."""
        if type(tensor) is not Tensor or not _is_plain(tensor):
            return None
        span = _span(tensor)
        if span is None or span[1] - span[0] < self._least_bytes or not self._should_spill(tensor):
            return None
        self._sweep()
        storage = tensor.untyped_storage()
        source = StorageWeakRef(storage)
        version = tensor._version  # pyright: ignore[reportPrivateUsage]
        key = (int(source.cdata), *span)
        stored = self._known.get(key)
        if stored is None or stored.version != version or not (storage.resizable() or stored.write.holds_memory):
            stored = self._known[key] = self._write(_bytes_of(storage, *span), source, version)
        return Spilled(self, tensor, stored, span[0])

    def _write(self, data: Tensor, source: StorageWeakRef, version: int) -> _Stored:
        extent = self._take_extent(data.numel())
        tickets: list[IOTicket] = []
        for block in range(_blocks(extent, data.numel())):
            part = data[extent.cuts[block] : extent.cuts[block + 1]]
            if part.numel() < extent.block_bytes(block):
                part = torch.cat([part, torch.zeros(extent.block_bytes(block) - part.numel(), dtype=torch.uint8)])
            tickets.append(self.store.write(extent, block, part, Priority.WRITE_BACK))
        write = _Move(data, tickets)
        self._writing.append(write)
        self._writing_bytes += write.nbytes
        stored = _Stored(source, version, extent, write, self._remains)
        self._live_bytes += stored.nbytes
        self._append(stored)
        while self._writing_bytes > self._in_flight_bytes:
            self._finish(self._writing[0])
        return stored

    def flush(self) -> None:
        """Wait for all writes, so that no activation that was spilled is in memory because of us."""
        while self._writing:
            self._finish(self._writing[0])

    def trim(self) -> None:
        """Give unused memory and unused room in the store back."""
        self._sweep()
        self.arena.trim()
        for extents in self._pool.values():
            for extent in extents:
                self.store.free(extent)
        self._pool.clear()

    def _finish(self, write: _Move) -> None:
        try:
            write.wait()
        finally:
            self._writing.remove(write)
            self._writing_bytes -= write.nbytes
            write.memory = _NOTHING

    def recover(self) -> None:
        """Calls were broken off: count anew, and take back what nobody refers to."""
        self._writing_bytes = sum(write.nbytes for write in self._writing)
        for stored in list(self._loads):
            if stored.load is None:
                del self._loads[stored]
        loads = [stored.load for stored in self._loads if stored.load is not None]
        self._loaded_bytes = sum(load.nbytes for load in loads)
        self._sweep()
        self.arena.reclaim([load.block for load in (*loads, *self._leaving)])

    # -- backward -----------------------------------------------------------------------------------------------------

    def unpack(self, handle: Spilled) -> Tensor:
        """The tensor that ``handle`` stands for."""
        now = handle.counter._version  # pyright: ignore[reportPrivateUsage]
        check_version(now, handle.version, handle.shape, handle.dtype)
        self._sweep()
        stored = handle.stored
        if stored.write.holds_memory:
            memory = stored.write.memory
        else:
            stored.write.wait()  # done; raises if it failed
            memory = self._read(handle)
        self._read_ahead(stored.index)
        with torch.no_grad():
            view = torch.empty(0, dtype=handle.dtype)
            offset = int(memory.storage_offset()) // handle.dtype.itemsize + handle.offset
            return view.set_(memory.untyped_storage(), offset, handle.shape, handle.stride)

    def _read(self, handle: Spilled) -> Tensor:
        stored = handle.stored
        load = stored.load
        if load is None:
            for other in list(self._loads):
                if self._loaded_bytes + stored.nbytes <= self._in_flight_bytes:
                    break
                self._drop(other)
            load = self._start_read(stored, Priority.NOW)
        try:
            load.wait()
        except BaseException:
            self._drop(stored)
            raise
        load.waiting.discard(handle)
        if not load.waiting:
            self._drop(stored)
        return load.memory

    def _read_ahead(self, index: int) -> None:
        while index > 0:
            index -= 1
            stored = self._order[index]()
            if stored is None or stored.load is not None or stored.write.holds_memory:
                continue
            if self._loaded_bytes + stored.nbytes > self._in_flight_bytes:
                return
            self._start_read(stored, Priority.NEXT)

    def _start_read(self, stored: _Stored, priority: Priority) -> _Load:
        extent = stored.extent
        count = _blocks(extent, stored.nbytes)
        block = self.arena.take(extent.cuts[count])
        tickets = [
            self.store.read(extent, i, block.tensor[extent.cuts[i] : extent.cuts[i + 1]], priority) for i in range(count)
        ]
        load = stored.load = _Load(block, block.tensor[: stored.nbytes], tickets, weakref.WeakSet(stored.handles))
        self._loads[stored] = None
        self._loaded_bytes += stored.nbytes
        return load

    def _drop(self, stored: _Stored) -> None:
        load, stored.load = stored.load, None
        del self._loads[stored]
        if load is not None:
            self._let_go(load)

    def _let_go(self, load: _Load) -> None:
        self._loaded_bytes -= load.nbytes
        self._leaving.append(load)

    # -- what came to its end -----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        while self._remains:
            remains = self._remains.popleft()
            self._live_bytes -= remains.nbytes
            # a write or read of the old bytes may be pending; a store keeps the order of requests for one block
            self._pool[remains.extent.nbytes].append(remains.extent)
            if remains.load is not None:
                self._let_go(remains.load)
        while self._writing and self._writing[0].done:
            write = self._writing.popleft()
            self._writing_bytes -= write.nbytes
            write.memory = _NOTHING
        leaving, self._leaving = self._leaving, []
        for load in leaving:
            if load.done:
                load.memory = _NOTHING
                self.arena.give(load.block)  # autograd may hold views: the arena waits for them
            else:
                self._leaving.append(load)

    def _append(self, stored: _Stored) -> None:
        while self._order and self._order[-1]() is None:
            self._order.pop()
        if len(self._order) > 64 and len(self._order) > 2 * len(self._known):
            alive = [reference for reference in self._order if reference() is not None]
            self._order = alive
            for index, reference in enumerate(alive):
                if (other := reference()) is not None:
                    other.index = index
        stored.index = len(self._order)
        self._order.append(weakref.ref(stored))

    def _take_extent(self, nbytes: int) -> Extent:
        cuts = _cuts(nbytes)
        free = self._pool[cuts[-1]]
        if free:
            return free.pop()
        self._reserved += 1
        return self.store.reserve(Key("activations", f"saved tensor {self._reserved}"), cuts)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Which bytes of its storage stand for ``tensor``: all if it reaches over most of them, else its own if it is dense."""
    itemsize, nbytes = tensor.itemsize, tensor.untyped_storage().nbytes()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 2 * elements * itemsize >= nbytes:
        return 0, nbytes
    if elements != tensor.numel():
        return None
    first = int(tensor.storage_offset()) * itemsize
    return first, first + elements * itemsize


def _bytes_of(storage: torch.UntypedStorage, lo: int, hi: int) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8).set_(storage, lo, (hi - lo,), (1,))


def _cuts(nbytes: int) -> tuple[int, ...]:
    """The cuts of the smallest size class that holds ``nbytes``."""
    if nbytes <= _BLOCK:
        return 0, max(ALIGNMENT, 1 << (nbytes - 1).bit_length())
    count = -(-nbytes // _BLOCK)
    step = max(1, (1 << (count.bit_length() - 1)) // _CLASSES_PER_DOUBLING)
    return tuple(i * _BLOCK for i in range(-(-count // step) * step + 1))


def _blocks(extent: Extent, nbytes: int) -> int:
    """How many blocks of ``extent`` ``nbytes`` reach into."""
    return next(i for i, cut in enumerate(extent.cuts) if cut >= nbytes)
