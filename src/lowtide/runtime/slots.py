"""Slots: places where units are whole for a while, given back when nothing reads or writes them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from lowtide.comm.channel import Wire
from lowtide.errors import OverBudget
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.unit import Unit
from lowtide.tiers.arena import Arena, ArenaFull, Block
from lowtide.tiers.device import Device
from lowtide.tiers.shelf import Shelf
from lowtide.tiers.store import IOTicket, Priority

_WAIT = 300.0  # seconds to wait for a slot whose unit is being written back
_GRACE = 0.5  # seconds to wait for a slot that somebody still looks at: a thread that is about to let go, or a view for good


class Slots:
    """An arena's blocks, counted in the ledger."""

    def __init__(self, arena: Arena, ledger: Ledger) -> None:
        self._arena, self._ledger = arena, ledger
        self._lock = threading.Lock()
        self.keeps = True
        """Whether memory that is given back stays for the next unit; where that comes rarely, it does not."""
        self._returning = 0  # slots that come back when their last request is done

    def take(self, unit: Unit, make_room: Callable[[], bool], *, urgent: bool) -> Block | None:
        """A slot for ``unit``. ``make_room`` lets go of another one and says whether it could; if it cannot, an urgent request
        waits for slots that are being written back, and another gets none."""
        while True:
            try:
                return self._counted(self._arena.take(unit.layout.nbytes))
            except ArenaFull:
                if make_room():
                    continue
                return self.wait_for(unit) if urgent else None

    def take_alike(
        self, occupied: Callable[[], int], unit: Unit, make_room: Callable[[], bool], *, urgent: bool
    ) -> Block | None:
        """The same on several ranks, which must all decide alike or their exchanges would not meet: what counts is which units
        have a slot now (``occupied``, in bytes), and not whether the disk is done with those that had one."""
        if not room_alike(self._arena.capacity, occupied, unit, make_room) and not urgent:
            return None
        try:
            return self.wait_for(unit)
        except OverBudget:
            if urgent:
                raise
            return None

    def wait_for(self, unit: Unit) -> Block:
        """A slot for ``unit``, when there is one; nobody but the disk can make one free meanwhile."""
        try:
            seconds = _WAIT if self._returning else _GRACE if self._arena.limbo_bytes else 0.0
            return self._counted(self._arena.take_or_wait(unit.layout.nbytes, seconds))
        except ArenaFull as full:
            raise no_room(self._arena.capacity, unit) from full

    def give(self, slot: Block, under_way: Iterable[IOTicket] = ()) -> None:
        """Return a slot once what is under way in it is done."""
        waiting = [t for t in under_way if not t.done]
        left = len(waiting)
        with self._lock:
            self._returning += 1

        def done() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                if left > 0:
                    return
            self._ledger.remove("slots", slot.nbytes)
            self._arena.give(slot)
            if not self.keeps:
                self._arena.trim()
            with self._lock:
                self._returning -= 1

        if not waiting:
            done()
        for ticket in waiting:
            ticket.on_done(done)

    def reclaim(self, used: Iterable[Block]) -> None:
        """Calls were broken off, and nothing is under way: only slots that are ``used`` are taken."""
        self._arena.reclaim(used)
        self._returning = 0

    def _counted(self, slot: Block) -> Block:
        self._ledger.add("slots", slot.nbytes)
        return slot


def room_alike(capacity: int | None, occupied: Callable[[], int], unit: Unit, make_room: Callable[[], bool]) -> bool:
    """Whether slots of ``capacity`` bytes may hold ``unit`` beside those that have one, after others were let go if need be."""
    while capacity is not None and occupied() + unit.layout.nbytes > capacity:
        if not make_room():
            return False
    return True


def no_room(capacity: int | None, unit: Unit) -> OverBudget:
    return OverBudget("slots for units in use", unit.layout.nbytes, capacity or 0, unit.name)


class SlotLease:
    """A lease on a chunk of a unit that is whole in a slot: changes go from there to the home."""

    def __init__(self, home: Shelf, chunk: int, tensor: Tensor, writes: list[IOTicket]) -> None:
        self._home, self._chunk, self._tensor, self._writes = home, chunk, tensor, writes

    def wait(self) -> Tensor:
        return self._tensor

    def close(self, *, changed: bool) -> None:
        if changed:
            self._writes.append(self._home.write(self._chunk, self._tensor))


class Waits(Protocol):
    """Anything that is under way."""

    def wait(self) -> object: ...


def wait_all(tickets: Iterable[Waits]) -> None:
    for ticket in tickets:
        ticket.wait()


class FromCommon:
    """A slot that is filled from a common home as soon as somebody needs it."""

    def __init__(self, arrival: Waits, device: Device, source: Tensor, into: Tensor) -> None:
        self._arrival, self._device, self._source, self._into = arrival, device, source, into

    def wait(self) -> None:
        self._arrival.wait()
        self._device.copy_in(self._source, self._into, Priority.NOW).wait()


def gathering(
    unit: Unit, whole: Tensor, covers: tuple[int, int], home: Block | None, reads: Sequence[IOTicket]
) -> Callable[[Wire, list[bytes]], Block | None]:
    """The work that makes a slot whole: this rank's part from its home (or when it has been read), the rest from others."""
    lo, hi = covers

    def work(wire: Wire, _: list[bytes]) -> Block | None:
        wait_all(reads)
        if home is not None and not reads:
            whole[lo:hi].copy_(home.tensor[: hi - lo])
        wire.shard.gather(whole[: unit.layout.nbytes], unit.layout.cuts)
        return None

    return work
