"""Slots that the ranks of one host have together: a unit that lives on disk is whole there once, and each rank reads its own
shard into it. Nothing passes through a window, and nothing is there twice.

[Note: ranks agree on a place] Which memory is free is known to nobody alone: a rank may let go of a unit earlier than another,
and a view of one may be held by somebody outside. So the ranks of a host show each other what they hold, in the gather that all
of them take part in, and every one of them finds the same first gap. Nobody can take another place meanwhile, because places
are only taken there. For the same reason one rank can give back memory that all have let go of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch

from lowtide.comm.channel import Wire
from lowtide.comm.links import CommonMemory
from lowtide.comm.shared import PAGE, pages
from lowtide.comm.transport import HostTransport, Transport
from lowtide.errors import OverBudget
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.unit import Unit
from lowtide.tiers.arena import Block
from lowtide.tiers.shelf import Shelf
from lowtide.tiers.store import Priority

_GRACE = 25  # looks at whether a view of a unit is gone that keeps its memory from being used again
_BETWEEN_LOOKS = 0.02  # seconds

Range = tuple[int, int]
"""Pages ``first:end`` of the memory."""


class SharedSlots:
    """This rank's view of them. Places are taken by the thread of the gather channel, and given back by any."""

    def __init__(self, units: Sequence[Unit], memory: CommonMemory, *, ledger: Ledger) -> None:
        self._memory, self._ledger = memory, ledger
        self.capacity: int | None = None
        """How many bytes they may take, all ranks together; None: there is no end. Set by whoever places bytes."""
        self._most_held = 2 * len(units) + 8
        self._end = SharedSlots.nbytes(units) // PAGE
        self._held: dict[Block, Range] = {}
        self._let_go: set[Block] = set()  # of those, what only views from outside keep
        self._touched: list[Range] = []  # what may have memory; true on the rank that gives it back
        self._lock = threading.Lock()

    @staticmethod
    def nbytes(units: Sequence[Unit]) -> int:
        """Room for everything at once, and as much again twice, so that there is always a gap large enough for what may be
        there; none of it is taken before it is used."""
        return 3 * sum(pages(unit.layout.nbytes) for unit in units)

    @property
    def sharers(self) -> int:
        """How many ranks have them together."""
        return self._memory.here.size

    @property
    def taken_bytes(self) -> int:
        """What they take of the host's memory now."""
        return self._memory.segment.taken_bytes

    def __contains__(self, block: Block | None) -> bool:
        return block is not None and block in self._held

    def bringing(self, unit: Unit, home: Shelf, covers: Range, priority: Priority) -> Callable[[Wire, list[bytes]], Block]:
        """The work that makes ``unit`` whole in a slot, on all ranks: this one reads its shard, bytes ``covers``."""

        def work(wire: Wire, _: list[bytes]) -> Block:
            transport = cast("HostTransport", wire.shard)
            slot = self._take(transport.local, unit)
            lo, hi = covers
            whole = slot.tensor[:]
            if home.block is not None:
                whole[lo:hi].copy_(home.block.tensor[: hi - lo])
            else:
                for ticket in home.fetch(whole[lo:hi], priority):
                    ticket.wait()
            transport.gather_between_hosts(whole, unit.layout.cuts)
            transport.local.all_gather_small(torch.zeros(1))  # everybody's part is there
            return slot

        return work

    def give(self, slot: Block) -> None:
        """This rank needs the slot no more."""
        self._ledger.remove("slots", slot.nbytes // self.sharers)
        with self._lock:
            self._let_go.add(slot)

    def reclaim(self, used: Iterable[Block]) -> None:
        """Calls were broken off, and nothing is under way: this rank needs only ``used``."""
        with self._lock:
            self._let_go |= self._held.keys() - set(used)

    def giving_back(self) -> Callable[[Wire, list[bytes]], None]:
        """The work that returns all memory of slots that no rank uses to the operating system."""

        def work(wire: Wire, _: list[bytes]) -> None:
            local = cast("HostTransport", wire.shard).local
            held = self._everybody_holds(local)
            if local.rank == 0:
                self._give_back(held)
            local.all_gather_small(torch.zeros(1))  # nobody goes on while it is under way

        return work

    def _take(self, local: Transport, unit: Unit) -> Block:
        """Collective over the ranks of this host."""
        nbytes = unit.layout.nbytes
        needed = pages(nbytes) // PAGE
        held: list[Range] = []
        for _ in range(_GRACE):
            held = self._everybody_holds(local)
            first = first_gap(held, needed, self._end)
            if first is not None:
                break
            time.sleep(_BETWEEN_LOOKS)
        else:
            raise OverBudget("slots for units in use", nbytes, self._end * PAGE - _size(held) * PAGE, unit.name)
        taken = (first, first + needed)
        self._touched = merged([*self._touched, taken])
        if local.rank == 0 and self.capacity is not None and _size(self._touched) * PAGE > self.capacity:
            self._give_back(merged([*held, taken]))
        slot = Block.over(self._memory.segment.tensor(first * PAGE, nbytes))
        with self._lock:
            self._held[slot] = taken
        self._ledger.add("slots", slot.nbytes // self.sharers)
        return slot

    def _everybody_holds(self, local: Transport) -> list[Range]:
        with self._lock:
            for slot in [s for s in self._let_go if not s.held]:
                self._let_go.remove(slot)
                del self._held[slot]
            mine = list(self._held.values())
        if len(mine) > self._most_held:
            raise OverBudget("slots for units in use", _size(mine) * PAGE, self._end * PAGE, "views of units long released")
        table = torch.zeros(self._most_held, 2, dtype=torch.int32)
        table[: len(mine)] = torch.tensor(mine, dtype=torch.int32).view(-1, 2)
        rows: list[list[int]] = local.all_gather_small(table).view(-1, 2).tolist()
        return merged([(first, end) for first, end in rows])

    def _give_back(self, used: list[Range]) -> None:
        """Return what is not ``used`` to the operating system. On one rank of a host, while all of them wait for it."""
        for first, end in gaps(used, self._end):
            self._memory.segment.give_back(first * PAGE, (end - first) * PAGE)
        self._touched = used


def _size(ranges: Sequence[Range]) -> int:
    return sum(end - first for first, end in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """In order, those that touch or overlap as one, without empty ones."""
    found: list[Range] = []
    for first, end in sorted(r for r in ranges if r[0] < r[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def gaps(used: Sequence[Range], end: int) -> list[Range]:
    """What ``used``, in order, leaves of ``0:end``."""
    starts = [0, *(last for _, last in used)]
    ends = [*(first for first, _ in used), end]
    return [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]


def first_gap(used: Sequence[Range], needed: int, end: int) -> int | None:
    """Where the first ``needed`` pages in a row begin that are free; 0 if none are needed."""
    return 0 if not needed else next((a for a, b in gaps(used, end) if b - a >= needed), None)
