"""Bytes in the host's memory behind the interface of a store: for what leaves a device, and as the disk's stand-in in tests.

Requests are carried out at once, by the caller: a copy in memory is faster than handing it to a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.errors import DoesNotFit, InternalError, Refused
from lowtide.tiers.requests import DoneTicket, check_request, new_extent
from lowtide.tiers.store import Extent, IOTicket, Key, Priority, Traffic


class HostStore:
    """See ``Store``. Holds at most ``capacity`` bytes (None: as many as there are)."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._traffic = Traffic()
        self._lock = threading.RLock()
        self._memory: dict[Extent, Tensor] = {}
        self._written: set[tuple[Extent, int]] = set()
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    def reserve(self, key: Key, cuts: Sequence[int]) -> Extent:
        extent = new_extent(key, cuts)
        with self._lock:
            self._check_open(key)
            needed = self.used_bytes + extent.nbytes
            if self.capacity is not None and needed > self.capacity:
                fix = f"The {key} ({extent.nbytes / 2**20:.1f} MiB) do not fit beside what is held; allow more or use a disk."
                raise DoesNotFit("host", needed, self.capacity, fix)
            with torch.inference_mode(mode=False):
                self._memory[extent] = torch.empty(extent.nbytes, dtype=torch.uint8)
            self.used_bytes += extent.nbytes  # a garbage collection above may have freed another extent
        return extent

    def free(self, extent: Extent) -> None:
        with self._lock:
            if self._memory.pop(extent, None) is not None:
                self.used_bytes -= extent.nbytes
                self._written.difference_update((extent, block) for block in range(len(extent.cuts) - 1))

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        check_request(extent, block, into)
        with self._lock:
            kept = self._block(extent, block)
            if (extent, block) not in self._written:
                raise InternalError(f"read of block {block} of {extent.key}: it was never written")
            into.copy_(kept)
            self._traffic.read_bytes += into.numel()
        return DoneTicket()

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        check_request(extent, block, data)
        with self._lock:
            self._block(extent, block).copy_(data)
            self._written.add((extent, block))
            self._traffic.written_bytes += data.numel()
        return DoneTicket()

    def drain(self) -> None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._memory.clear()
            self._written.clear()
            self.used_bytes = 0

    def _check_open(self, key: Key) -> None:
        if self._closed:
            raise Refused(f"{key}: the store is closed")

    def _block(self, extent: Extent, block: int) -> Tensor:
        self._check_open(extent.key)
        memory = self._memory.get(extent)
        if memory is None:
            raise InternalError(f"block {block} of {extent.key}: the extent is freed or of another store")
        return memory[extent.cuts[block] : extent.cuts[block + 1]]
