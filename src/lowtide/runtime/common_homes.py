"""Homes that lie once per host: units whose shards are in memory lie there whole, in memory that all ranks of the host map.

Every unit has a fixed place. A rank writes its own shard, and what it brings from other hosts, and reads the whole; so a gather
costs nothing, and ranks need not even run the same units. Two counters per unit and rank keep readers and writers apart:

*published*: this rank has put the values of generation n into its part. A reader waits until all ranks of the host have.
*released*: this rank does not read the values of generation n any more. With updates in ``optimizer.step()`` nobody needs it:
  all ranks meet there, and no rank that is there reads. An update inside backward waits until all ranks have released the unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from lowtide.comm.channel import Channel, Label, Ticket, Wire
from lowtide.comm.futex import Counters
from lowtide.comm.group import Group
from lowtide.comm.links import CommonMemory
from lowtide.comm.shared import pages
from lowtide.comm.transport import HostTransport
from lowtide.errors import InternalError
from lowtide.runtime.unit import Unit
from lowtide.tiers.arena import Arena, Block

_SLICE = 0.05  # seconds a wait sleeps at most before it looks at the watch


class CommonHomes:
    """The places of all units, this rank's view of them, and their counters."""

    def __init__(self, units: Sequence[Unit], memory: CommonMemory, *, group: Group, channel: Channel) -> None:
        self._memory, self._channel = memory, channel
        self._watch, self._deadlines = group.watch, group.deadlines
        self._ranks = memory.ranks
        self._offsets = _offsets(units, group.shard.size)
        count = len(units) * memory.here.size
        self._published = memory.segment.counters(0, count)
        self._released = memory.segment.counters(4 * count, count)
        self._generation = dict.fromkeys(units, 0)
        self._updates = dict.fromkeys(units, 0)
        self._between_hosts: dict[Unit, Ticket[None]] = {}  # values on their way

    @staticmethod
    def nbytes(units: Sequence[Unit], shards: int) -> int:
        """Room for everything; none of it is taken before it is used."""
        return _offsets(units, shards)[-1]

    @property
    def sharers(self) -> int:
        """How many ranks hold the memory together."""
        return self._memory.here.size

    def whole(self, unit: Unit) -> Block:
        """The unit as compute reads it."""
        return Block.over(self._memory.segment.tensor(self._offsets[unit.index], unit.layout.nbytes))

    def plot(self, unit: Unit, covers: tuple[int, int]) -> Plot:
        """Where this rank's shard, bytes ``covers`` of the unit, has its home."""
        return Plot(self._memory, self._offsets[unit.index], covers, self.parts(unit))

    def parts(self, unit: Unit) -> list[tuple[int, int]]:
        """The bytes of the unit that this rank puts there: its own, and those that it brings from other hosts."""
        return [(unit.layout.cuts[r], unit.layout.cuts[r + 1]) for r in self._memory.carries]

    # -- readers wait for writers -------------------------------------------------------------------------------------

    def put(self, unit: Unit, whole: Tensor, *, into: Tensor) -> None:
        """Every rank of the job has the whole unit: this one puts its parts ``into`` the common home."""
        for lo, hi in self.parts(unit):
            into[lo:hi].copy_(whole[lo:hi])
        self._publish(unit, self._announce(unit))

    def spread(self, unit: Unit, whole: Tensor) -> None:
        """This rank's shard has new values, in the common home ``whole``: show them here, and send them to other hosts."""
        generation = self._announce(unit)
        if len(self._memory.carries) == 1:
            self._publish(unit, generation)
            return

        def work(wire: Wire, _: list[bytes]) -> None:
            cast("HostTransport", wire.shard).gather_between_hosts(whole, unit.layout.cuts)
            self._publish(unit, generation)

        self._between_hosts[unit] = self._channel.submit(Label("publish", unit.index, unit.name), work)

    def wait_until_spread(self, units: Iterable[Unit]) -> None:
        """What is sent to other hosts must not be changed meanwhile."""
        for unit in units:
            if unit in self._between_hosts:
                self._between_hosts.pop(unit).wait()

    def arrival(self, unit: Unit) -> Arrival:
        """What to wait for before the unit may be read."""
        return Arrival(self, unit, self._generation[unit], self._between_hosts.get(unit))

    def _announce(self, unit: Unit) -> int:
        """New values are on their way, on every rank; returns their generation."""
        self._generation[unit] += 1
        return self._generation[unit]

    def _publish(self, unit: Unit, generation: int) -> None:
        """This rank's part of them is there."""
        self._published.advance(self._index(unit, self._memory.here.rank), generation)

    def wait_published(self, unit: Unit, generation: int) -> None:
        self._wait(self._published, unit, generation, Label("gather", unit.index, unit.name))

    # -- writers wait for readers -------------------------------------------------------------------------------------

    def may_update(self, unit: Unit, *, wait: bool) -> bool:
        """This rank reads the unit's values no more before they are updated; whether that is true of all ranks of the host, or
        has become true, if ``wait``. From then on the unit counts as updated."""
        target = self._updates[unit] + 1
        self._released.advance(self._index(unit, self._memory.here.rank), target)
        if wait:
            self._wait(self._released, unit, target, Label("update", unit.index, unit.name))
        elif not all(self._released.reached(self._index(unit, rank), target) for rank in range(self._memory.here.size)):
            return False
        self.wait_until_spread([unit])
        self._updates[unit] = target
        return True

    def _index(self, unit: Unit, rank: int) -> int:
        return unit.index * self._memory.here.size + rank

    def _wait(self, counters: Counters, unit: Unit, target: int, label: Label) -> None:
        for rank, job_rank in enumerate(self._ranks):
            index = self._index(unit, rank)
            if counters.reached(index, target):
                continue
            with self._watch.waiting(str(label), deadline=self._deadlines.seconds, awaited=job_rank) as look_up:
                while not counters.wait(index, target, _SLICE):
                    look_up()


class Arrival:
    """Values that are on their way into a common home."""

    def __init__(self, homes: CommonHomes, unit: Unit, generation: int, on_its_way: Ticket[None] | None) -> None:
        self._homes, self._unit, self._generation, self._on_its_way = homes, unit, generation, on_its_way

    def wait(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.wait()
        self._homes.wait_published(self._unit, self._generation)


class Plot(Arena):
    """An arena of one block: the place of this rank's shard in a common home."""

    def __init__(self, memory: CommonMemory, offset: int, covers: tuple[int, int], parts: Sequence[tuple[int, int]]) -> None:
        super().__init__(torch.device("cpu"), forked=False)
        self._memory, self._offset, self._covers, self._parts = memory, offset, covers, parts

    def take(self, nbytes: int) -> Block:
        lo, hi = self._covers
        if nbytes > hi - lo:
            raise InternalError(f"{nbytes} bytes asked of a place of {hi - lo}")
        return Block.over(self._memory.segment.tensor(self._offset + lo, hi - lo))

    def give(self, block: Block) -> None:
        for lo, hi in self._parts:
            self._memory.segment.give_back(self._offset + lo, hi - lo)


def _offsets(units: Sequence[Unit], shards: int) -> list[int]:
    """Where each unit begins, and the end; the counters come first."""
    counters = pages(8 * len(units) * shards)
    return list(itertools.accumulate((pages(u.layout.nbytes) for u in units), initial=counters))
