"""Homes: where units live for good. A home holds this rank's shard, or the whole unit where parameters are not sharded; it is a
shelf, in memory or on disk. In memory, ranks of one host may have one home in common (runtime/common_homes.py).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lowtide.comm.channel import Channel, Label, Ticket
from lowtide.comm.group import Group
from lowtide.errors import InternalError
from lowtide.runtime.common_homes import Arrival, CommonHomes
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.place import Place, State
from lowtide.runtime.shared_slots import SharedSlots
from lowtide.runtime.unit import Unit
from lowtide.tiers.device import Memory
from lowtide.tiers.shelf import Shelf
from lowtide.tiers.store import Key, Store


class Homes:
    """The places of all units of one rank; the part of ``Residency`` that moves nothing into slots."""

    def __init__(self, units: Sequence[Unit], *, group: Group, channel: Channel, memory: Memory, ledger: Ledger) -> None:
        self._units, self._group, self._channel = units, group, channel
        self._memory, self._ledger = memory, ledger
        self._common: CommonHomes | None = None
        self._shared: SharedSlots | None = None
        self._places: dict[Unit, Place] = {}

    def share(self, common: CommonHomes | None, slots: SharedSlots | None) -> None:
        """Before any home is reserved: where ranks of this host have one copy together, and one of units that are on disk."""
        self._common, self._shared = common, slots

    def reserve(self, unit: Unit, *, resident: bool, store: Store | None) -> None:
        """Take room for the home: the whole unit, in memory, if ``resident``; else the shard, in the store if there is one."""
        layout, rank = unit.layout, self._group.shard.rank
        stays_whole = resident or self._group.shard.size == 1
        covers = (0, layout.nbytes) if stays_whole else (layout.cuts[rank], layout.cuts[rank + 1])
        cuts = (0, covers[1] - covers[0]) if resident else unit.chunk_cuts  # what is resident never moves
        common = None if resident else self._common
        memory = common.plot(unit, covers) if common is not None else self._memory.homes
        home = Shelf(Key(unit.name, "parameters"), cuts, memory=memory, store=store)
        place = self._places[unit] = Place(home, covers)
        place.permanent = resident
        place.common = common.whole(unit) if common is not None and store is None else None
        self._ledger.add("parameters", self._home_bytes(unit))

    def state(self, unit: Unit) -> State:
        return self._places[unit].state

    def pinned(self) -> Unit | None:
        """A unit that somebody uses right now, if any."""
        return next((u for u, place in self._places.items() if place.pins), None)

    @contextmanager
    def holding(self, unit: Unit) -> Generator[None]:
        """Keep a unit's slot, which an update changes, until it is done. Brings nothing: a unit that is at home stays there."""
        place = self._places[unit]
        place.held = True
        try:
            yield
        finally:
            place.held = False

    def held_by_others(self, unit: Unit) -> bool:
        """Whether somebody outside uses the memory that an update of the unit would write."""
        place = self._places[unit]
        blocks = (place.slot or place.home.block, place.common)
        return not place.permanent and (place.state is State.ATTACHED or any(b is not None and b.held for b in blocks))

    @property
    def copies(self) -> int:
        """How many hosts have a copy of what is sharded; one, if ranks hold nothing but their shards."""
        return self._group.shard.size // self._common.sharers if self._common is not None else 1

    def _home_bytes(self, unit: Unit) -> int:
        """What the home takes of memory, counted for this rank; what a host has once is divided between its ranks."""
        place = self._places[unit]
        return place.home.memory_bytes * (self.copies if place.common is not None else 1)

    @property
    def gathers(self) -> bool:
        """Whether bringing a unit whole may take all ranks."""
        return self._group.shard.size > 1 and any(p.common is None and not p.permanent for p in self._places.values())

    def piece(self, unit: Unit, index: int, lo: int, hi: int, shard: Tensor | None = None) -> Tensor:
        """Elements ``lo:hi`` of parameter ``index``, flat, as a view of ``shard``, by default a home in memory."""
        place, param, dtype = self._places[unit], unit.layout.params[index], unit.dtypes[index].param
        if shard is None:
            if place.home.block is None:
                raise InternalError(f"unit {unit.name!r} is on disk")
            shard = place.home.block.tensor
        start = unit.layout.offsets[index] + lo * param.itemsize - place.covers[0] if lo < hi else 0
        return shard[start : start + (hi - lo) * param.itemsize].view(dtype)

    def home(self, unit: Unit) -> Shelf:
        return self._places[unit].home

    def _move(self, unit: Unit, store: Store | None) -> None:
        place, before = self._places[unit], self._home_bytes(unit)
        place.home.move(store)
        place.common = self._common.whole(unit) if self._common is not None and store is None else None
        self._ledger.add("parameters", self._home_bytes(unit) - before)
        self.publish(unit)

    def publish(self, unit: Unit) -> Ticket[None] | None:
        """New values are in this rank's shard: bring other ranks' into a home that holds the whole unit. What goes into common
        homes need not be waited for: readers do."""
        place = self._places[unit]
        if self._group.shard.size == 1:
            return None
        if place.permanent and place.home.block is not None:
            home = place.home.block.tensor[: unit.layout.nbytes]
            return self._channel.submit(
                Label("publish", unit.index, unit.name), lambda wire, _: wire.shard.gather(home, unit.layout.cuts)
            )
        if self._common is not None and place.common is not None:
            self._common.spread(unit, place.common.tensor)
        return None

    def show(self, unit: Unit) -> None:
        """This rank's shard was updated inside backward: who reads the unit before the step is over waits for all ranks of the
        host. What goes to other hosts goes when all ranks do it in one order: see ``publish``."""
        place = self._places[unit]
        if self._common is not None and place.common is not None and self.copies == 1:
            self._common.spread(unit, place.common.tensor)

    def meet(self) -> None:
        """Before values are replaced outside a step: no rank may still read those that are there."""
        if self._common is not None:
            self._channel.run(Label("meet", -1, "before values are replaced"), lambda _, __: None)

    def trim(self) -> None:
        """Between two steps, on all ranks: slots that ranks have in common may have become larger than they will be."""
        if self._shared is not None:
            self._channel.run(Label("trim", -1, "shared slots"), self._shared.giving_back())

    def may_update(self, unit: Unit, *, wait: bool) -> bool:
        """Whether this rank's part may be changed inside a backward pass: no rank of this host reads it any more."""
        place = self._places[unit]
        if self._common is None or place.common is None:
            return True
        return self._common.may_update(unit, wait=wait)

    def _put(self, unit: Unit, whole: Tensor) -> None:
        """Every rank has the whole unit: each puts its parts where all ranks of its host read them."""
        place = self._places[unit]
        if self._common is not None and place.common is not None:
            self._common.put(unit, whole, into=place.common.tensor)

    def _arrival_of(self, unit: Unit) -> Arrival:
        if self._common is None:
            raise InternalError(f"unit {unit.name!r} has no common home")
        return self._common.arrival(unit)
