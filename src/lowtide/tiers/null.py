"""A store that counts bytes and moves none, to see what a schedule would do with a model that is not there."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from lowtide.errors import InternalError, Refused
from lowtide.tiers.requests import DoneTicket, check_request, new_extent
from lowtide.tiers.store import Extent, IOTicket, Key, Priority, Traffic


class NullStore:
    """See ``Store``. A read leaves the memory as it is."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._traffic = Traffic()
        self._lock = threading.RLock()
        self._extents: set[Extent] = set()
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    def reserve(self, key: Key, cuts: Sequence[int]) -> Extent:
        extent = new_extent(key, cuts)
        with self._lock:
            if self._closed:
                raise Refused(f"{key}: the store is closed")
            self._extents.add(extent)
            self.used_bytes += extent.nbytes
        return extent

    def free(self, extent: Extent) -> None:
        with self._lock:
            if extent in self._extents:
                self._extents.remove(extent)
                self.used_bytes -= extent.nbytes

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        with self._lock:
            self._check(extent, block, into)
            self._traffic.read_bytes += into.numel()
        return DoneTicket()

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        with self._lock:
            self._check(extent, block, data)
            self._traffic.written_bytes += data.numel()
        return DoneTicket()

    def drain(self) -> None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._extents.clear()
            self.used_bytes = 0

    def _check(self, extent: Extent, block: int, tensor: Tensor) -> None:
        check_request(extent, block, tensor)
        if self._closed:
            raise Refused(f"block {block} of {extent.key}: the store is closed")
        if extent not in self._extents:
            raise InternalError(f"block {block} of {extent.key}: the extent is freed or of another store")
