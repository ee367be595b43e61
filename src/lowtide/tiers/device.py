"""Where compute happens, and how a unit gets there: the one seam that an accelerator goes through.

On a CPU the device is the host: what is in memory is where compute reads it, and nothing is copied. An *emulated* device has
memory of its own, of a given size, and real copies into it on a thread; it is there for tests and what-if, so that the code
that runs with an accelerator runs here too. An accelerator is reached through ``torch.accelerator`` only; that part has not
been run on one yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.tiers.arena import Arena
from lowtide.tiers.queue import IOQueue
from lowtide.tiers.requests import DoneTicket
from lowtide.tiers.shelf import Shelf
from lowtide.tiers.store import IOTicket, Priority


class Device(Protocol):
    """What the runtime must know of the place where compute happens."""

    @property
    def separate(self) -> bool:
        """Whether its memory is another than the host's."""
        ...

    def copy_in(self, source: Tensor, into: Tensor, priority: Priority) -> IOTicket:
        """Start copying host memory into memory of the device."""
        ...


class SameMemory:
    """Compute reads the memory in which units live."""

    separate = False

    def copy_in(self, source: Tensor, into: Tensor, priority: Priority) -> IOTicket:
        into.copy_(source)
        return DoneTicket()


class EmulatedDevice:
    """Memory apart, and a thread that copies into it as an engine of its own would."""

    separate = True

    def __init__(self) -> None:
        self._copies = IOQueue(threads=1)

    def copy_in(self, source: Tensor, into: Tensor, priority: Priority) -> IOTicket:
        return self._copies.submit(into.data_ptr(), "a copy to the device", priority, lambda: _copy(source, into))


class Accelerator:
    """Copies on a stream of their own; compute waits for the event, not for the host."""

    separate = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def copy_in(self, source: Tensor, into: Tensor, priority: Priority) -> IOTicket:
        with self._stream:
            into.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        return _EventTicket(event, source)


class _EventTicket:
    def __init__(self, event: torch.Event, source: Tensor) -> None:
        self._event = event
        self._source: Tensor | None = source  # must live until the copy has read it

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._event)

    def on_done(self, callback: Callable[[], None]) -> None:
        self._event.synchronize()
        self._source = None
        callback()


class Staged:
    """A shelf on its way from a store to a device, by way of host memory."""

    def __init__(self, shelf: Shelf, device: Device, into: Tensor, staging: Arena, priority: Priority) -> None:
        self._device, self._into, self._priority, self._staging = device, into, priority, staging
        self._block = staging.take(shelf.nbytes)
        self._bytes = self._block.tensor[: shelf.nbytes]
        self._reads = shelf.fetch(self._bytes, priority)
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._left = len(self._reads)
        self._arrived = False

    @property
    def done(self) -> bool:
        return self._arrived

    def wait(self) -> None:
        for read in self._reads:
            read.wait()
        with self._copying:  # on several ranks two threads wait for it
            if not self._arrived:
                self._device.copy_in(self._bytes, self._into, self._priority).wait()
                self._finish()

    def on_done(self, callback: Callable[[], None]) -> None:
        """For a unit that was dropped before anybody waited: nothing writes to the device then, only the staging must go."""
        if self._arrived:
            callback()
            return

        def one_read() -> None:
            with self._lock:
                self._left -= 1
                if self._left > 0:
                    return
            self._finish()
            callback()

        for read in self._reads:
            read.on_done(one_read)

    def _finish(self) -> None:
        self._arrived = True
        del self._bytes
        self._staging.give(self._block)


def _copy(source: Tensor, into: Tensor) -> None:
    into.copy_(source)


@dataclass(frozen=True)
class Memory:
    """The arenas of one rank: homes of units, slots where compute reads them, buffers for updates, and host memory for a
    moment (the slots themselves, unless they are on a device of their own)."""

    device: Device
    homes: Arena
    slots: Arena
    buffers: Arena
    staging: Arena

    @classmethod
    def on(cls, compute: torch.device, device_bytes: int | None, *, offloads: bool) -> Memory:
        """For a model whose parameters are on ``compute``; ``offloads``: units live elsewhere between uses."""
        device: Device = SameMemory()
        if compute.type != "cpu" and (offloads or device_bytes is not None):
            device = Accelerator(compute)
        elif device_bytes is not None:
            device = EmulatedDevice()
        host = torch.device("cpu") if device.separate else compute
        slots = Arena(compute, forked=False, capacity=device_bytes)
        staging = Arena(host, forked=False) if device.separate else slots
        return cls(device, Arena(host, forked=True), slots, Arena(host, forked=False), staging)

    @property
    def passed_through(self) -> list[Arena]:
        """All but the homes."""
        return [self.slots, self.buffers] + ([self.staging] if self.staging is not self.slots else [])

    def fill_slot(self, home: Shelf, into: Tensor, priority: Priority) -> list[IOTicket]:
        """Start bringing a unit's home to where compute reads it. A home in the same memory is left to the caller."""
        if home.block is not None:
            return [self.device.copy_in(home.block.tensor[: into.numel()], into, priority)] if self.device.separate else []
        if self.device.separate:
            return [Staged(home, self.device, into, self.staging, priority)]
        return home.fetch(into, priority)
