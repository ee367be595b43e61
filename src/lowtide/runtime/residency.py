"""Whole or not: where the values of a unit are, and the only code that assigns ``param.data``.

A unit's *home* holds this rank's shard, or all of it where parameters are not sharded (or there is one rank); it is a shelf,
in memory or on disk. A unit that is needed whole is brought into a *slot*, a block of the slots' arena: fetched from the
disk, gathered from the other ranks, or both. If its home is the whole unit in memory, that is the slot, and nothing moves.

States of a unit, and what occupies memory in each:
  HOME       the home only, if it is in memory
  ARRIVING   home + a slot that is being filled
  WHOLE      home + a full slot, parameters evicted: kept for a while in case the unit comes again
  ATTACHED   home + a full slot, parameters usable
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.comm.group import Group
from lowtide.errors import InternalError, Refused
from lowtide.runtime.common_homes import CommonHomes
from lowtide.runtime.evicted import EvictedParameter, placeholder
from lowtide.runtime.homes import Homes
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.place import Place, State
from lowtide.runtime.shared_slots import SharedSlots
from lowtide.runtime.slots import FromCommon, SlotLease, Slots, gathering, no_room, room_alike, wait_all
from lowtide.runtime.trace import Trace
from lowtide.runtime.unit import Unit
from lowtide.runtime.writes import Left, differing, lost_through, prints_of
from lowtide.tiers.arena import Arena, Block
from lowtide.tiers.device import Memory
from lowtide.tiers.shelf import Lease, View
from lowtide.tiers.store import IOTicket, Priority, Store
from lowtide.torch_internals import mark_changed, storage_of

_KEEP = 1  # how many unpinned whole units may stay in case they come again; the least recently used goes first


class Residency(Homes):
    """Moves units between home and whole. Only the thread that runs the step calls it."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        group: Group,
        channel: Channel,
        memory: Memory,
        ledger: Ledger,
        trace: Trace,
        ahead: int,
    ) -> None:
        super().__init__(units, group=group, channel=channel, memory=memory, ledger=ledger)
        self._slots = Slots(memory.slots, ledger)
        self._host_slots = Slots(memory.staging, ledger) if memory.device.separate else self._slots
        self._trace = trace
        self._ahead = max(ahead, 1)  # how many units may be whole, or on their way, on a guess
        self._guessed: OrderedDict[Unit, None] = OrderedDict()
        self._wanted: OrderedDict[Unit, None] = OrderedDict()  # guesses for which there was no slot
        self._recent: OrderedDict[Unit, None] = OrderedDict()
        self._by_address: dict[int, Unit] = {}
        self.before_gather: Callable[[Unit], None] = lambda _: None
        """Called before a gather is begun that all ranks must take part in."""
        self.damaged_by: str | None = None
        """Who changed values that several ranks read, if anybody did."""
        self.before_replaced: Callable[[Unit, Sequence[int]], None] = lambda _, __: None
        """Called before parameters, by index, get the values of memory that a caller gave them: graphs may need the old."""
        self.written: Callable[[Unit, Sequence[int]], None] = lambda _, __: None
        """Called when values that a caller has written to parameters, by index, have been kept."""
        self._left = Left()
        self._lost: Refused | None = None  # what could not be kept, until it is told

    def share(self, common: CommonHomes | None, slots: SharedSlots | None) -> None:
        super().share(common, slots)
        # Where ranks have one copy together, a slot of one's own is for a moment: at the start, and outside of passes.
        self._host_slots.keeps = common is None or self._memory.device.separate

    # -- set-up -------------------------------------------------------------------------------------------------------

    def take_over(self, unit: Unit, values: Sequence[Tensor]) -> None:
        """Move ``unit``'s parameters, flat ``values``, into its home. They become those of rank 0, as in DDP."""

        def send(wire: Wire, _: list[bytes]) -> None:
            for value in values:
                wire.world.broadcast(value.view(torch.uint8))

        self._channel.run(Label("start", unit.index, unit.name), send)
        place = self._places[unit]
        home, (lo, hi) = place.home.block, place.covers
        if home is not None and hi - lo == unit.layout.nbytes:
            _fill(unit.views(home.tensor), values)
            self._put(unit, home.tensor)
        else:
            slot = self._host_slots.wait_for(unit)
            _fill(unit.views(slot.tensor), values)
            if home is not None:
                home.tensor[: hi - lo].copy_(slot.tensor[lo:hi])
                self._put(unit, slot.tensor)
            self._host_slots.give(slot, place.home.save(slot.tensor[lo:hi]) if home is None else [])
        if home is not None:
            place.home.mark_written()
        if place.permanent and home is not None:
            self._attach(unit, place, home)
        else:
            _evict(unit, place)

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Start bringing ``unit`` if it is not whole or on its way; later, if there is no slot for it now."""
        if self._places[unit].state is not State.HOME:
            return
        self._trace("prefetch", unit.name)
        self._guessed[unit] = None
        while len(self._guessed) > self._ahead:
            self._drop(next(iter(self._guessed)))  # a guess that was wrong
        if not self._bring(unit, Priority.NEXT):
            self._wanted[unit] = None

    def retry(self) -> None:
        """Start what waited for a slot, now that time has passed."""
        while self._wanted:
            unit = next(iter(self._wanted))
            if self._places[unit].state is State.HOME and not self._bring(unit, Priority.NEXT):
                return
            del self._wanted[unit]

    def _bring(self, unit: Unit, priority: Priority, *, private: bool = False) -> bool:
        """Start filling a slot with ``unit``; whether there was one. ``private``: not the memory that other ranks read."""
        self.look_at_views(at_all=False)  # or memory that only we refer to would not be free
        place = self._places[unit]
        home, alone = place.home, self._group.shard.size == 1
        whole = home.block if alone else place.common
        if whole is not None and not self._memory.device.separate and not private:
            place.slot, place.state = whole, State.WHOLE
            if not alone:
                place.ready, place.state = self._arrival_of(unit), State.ARRIVING
            self._by_address[whole.tensor.data_ptr()] = unit
            return True
        urgent = priority is Priority.NOW
        if self._shared is not None and whole is None and not private:
            return self._bring_together(unit, self._shared, priority)
        take = self._slots.take if alone else functools.partial(self._slots.take_alike, self._occupied)
        slot = take(unit, lambda: self._make_room(guesses_too=urgent), urgent=urgent)
        if slot is None:
            return False
        self._by_address[slot.tensor.data_ptr()] = unit
        place.slot, place.state = slot, State.ARRIVING
        lo, hi = place.covers
        try:
            if whole is not None and not alone:
                place.ready = FromCommon(self._arrival_of(unit), self._memory.device, whole.tensor, slot.tensor[: whole.nbytes])
                return True
            place.reads = self._memory.fill_slot(home, slot.tensor[lo:hi], priority)
            if not alone:
                work = gathering(unit, slot.tensor[:], place.covers, home.block, place.reads)
                self.before_gather(unit)
                place.gather = self._channel.submit(Label("gather", unit.index, unit.name), work)
        except BaseException:
            self._drop(unit)  # or it would look as if it were on its way
            raise
        return True

    def _bring_together(self, unit: Unit, slots: SharedSlots, priority: Priority) -> bool:
        """The same with a slot that all ranks of this host have in common; which one it is, they agree on meanwhile."""
        place, urgent = self._places[unit], priority is Priority.NOW
        if not room_alike(slots.capacity, self._occupied, unit, lambda: self._make_room(guesses_too=urgent)):
            if urgent:
                raise no_room(slots.capacity, unit)
            return False
        self.before_gather(unit)
        work = slots.bringing(unit, place.home, place.covers, priority)
        place.gather = self._channel.submit(Label("gather", unit.index, unit.name), work)
        place.state = State.ARRIVING
        return True

    @property
    def updates_in_slots(self) -> bool:
        """Whether a slot may be updated and written back from: it is host memory, and all of it is this rank's."""
        return not self._memory.device.separate and self._group.shard.size == 1

    def whole(self, unit: Unit) -> Tensor:
        """The unit's bytes, all of them, now. Valid until the unit is released and something else needs the memory."""
        place = self._places[unit]
        if place.state is State.HOME:
            self._trace("prefetch", unit.name)
            self._bring(unit, Priority.NOW)
        if place.state is State.ARRIVING:
            try:
                wait_all([*place.reads, *(t for t in (place.gather, place.ready) if t is not None)])
            except BaseException:
                place.gather = None
                self._drop(unit)  # the next who needs it tries again
                raise
            self._accept_slot(unit, place)
            place.reads, place.gather, place.ready = [], None, None
            place.state = State.WHOLE
            self._trace("gathered", unit.name)
        self._guessed.pop(unit, None)
        self._wanted.pop(unit, None)
        self._recent[unit] = None
        self._recent.move_to_end(unit)
        self._shrink(protect=unit)
        return place.full_slot().tensor

    def pin(self, unit: Unit, *, private: bool = False) -> None:
        """Make ``unit``'s parameters usable until as many ``unpin`` follow. ``private``: where writes are this rank's own."""
        place = self._places[unit]
        if place.permanent:
            return
        if private and (place.common is not None or self._shared is not None) and not place.pins:
            self.forget([unit])
            self._bring(unit, Priority.NOW, private=True)
        if place.state is not State.ATTACHED:
            self.whole(unit)
            self._attach(unit, place, place.full_slot())
        place.pins += 1

    def unpin(self, unit: Unit, *, keep: bool = True) -> None:
        """Undo one ``pin``. The last one evicts the parameters; the bytes stay for a while, or not at all unless ``keep``."""
        place = self._places[unit]
        if place.permanent:
            return
        if place.pins > 1:
            place.pins -= 1
            return
        place.replaced = unit.replaced(place.full_slot().tensor.data_ptr()) if keep else {}
        in_place = _rewritten(unit, place) if keep else []
        _evict(unit, place)
        place.pins, place.state = 0, State.WHOLE
        self._trace("release", unit.name)
        if not keep and place.slot is not place.home.block:
            place.exposed = False
            self._drop(unit)
        elif place.replaced:
            self._take_in(unit, place, place.replaced)
        elif in_place:
            self._found(unit, place, in_place)
        place.replaced = {}
        self._shrink()
        self.tell_lost()

    def recover(self, pins: Mapping[Unit, int], *, everything: bool) -> None:
        """Calls were broken off, at any line of this file: from here on units are pinned as often as ``pins`` says.

        ``everything``: nobody computes, and nothing is on its way to or from the disk; no unit need be whole.
        """
        if not everything:
            for unit, place in self._places.items():
                self._recover(unit, place, pins.get(unit, 0))
            return
        self._wanted.clear()
        for unit, place in self._places.items():
            place.held = False
            if place.state is State.ARRIVING:
                with suppress(Exception):  # who needs it next tries again
                    wait_all([*place.reads, *(t for t in (place.gather, place.ready) if t is not None)])
                    self._accept_slot(unit, place)
                place.reads, place.gather, place.ready = [], None, None
            self._recover(unit, place, pins.get(unit, 0))
        self.forget()
        for place in self._places.values():
            if place.state is State.HOME:
                place.slot, place.gather, place.ready, place.reads, place.writes = None, None, None, [], []
                place.exposed, place.prints = False, []
        there = {unit: place.slot for unit, place in self._places.items() if place.slot is not None}
        # Views of what is here for good are saved as they are: such a unit is never brought, nor let go.
        self._by_address = {s.tensor.data_ptr(): unit for unit, s in there.items() if not self._places[unit].permanent}
        for order in (self._guessed, self._recent):
            for unit in [unit for unit in order if unit not in there]:
                del order[unit]
        for slots in {id(s): s for s in (self._slots, self._host_slots)}.values():
            slots.reclaim(there.values())
        if self._shared is not None:
            self._shared.reclaim(there.values())
        taken = [slot for unit, slot in there.items() if slot not in (self._places[unit].home.block, self._places[unit].common)]
        sharers = self._shared.sharers if self._shared is not None else 1
        self._ledger.set("slots", sum(slot.nbytes // (sharers if self._is_shared(slot) else 1) for slot in taken))

    def _recover(self, unit: Unit, place: Place, pins: int) -> None:
        if place.permanent:
            return
        if pins and place.state is not State.ATTACHED:
            place.pins = 0
            self.pin(unit)
        elif not pins and (place.state is State.ATTACHED or place.pins or place.replaced or _any_attached(unit, place)):
            block = place.slot
            if place.state is State.ATTACHED and not place.replaced and block is not None:
                evicted = {index for index in range(len(unit.params)) if _is_evicted(unit, place, index)}
                place.replaced = unit.replaced(block.tensor.data_ptr(), evicted)
            _evict(unit, place)
            if place.state is State.ATTACHED:
                place.pins, place.state = 0, State.WHOLE
            if place.replaced and place.state is State.WHOLE:
                self._take_in(unit, place, place.replaced)
            place.replaced = {}
        place.pins = pins

    def accept_writes(self, unit: Unit) -> None:
        """The values of the unit are new, and kept."""
        place = self._places[unit]
        place.versions = [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]
        place.prints, place.exposed = [], False
        if place.pins and self._alone:  # elsewhere other ranks may still be at it
            self._note(unit, place)

    def forget(self, units: Iterable[Unit] | None = None) -> None:
        """Let go of whole copies that are not pinned: their values are about to be, or were, replaced."""
        if units is None and self._common is not None:
            self._common.wait_until_spread(self._units)
        for unit in self._units if units is None else units:
            place = self._places[unit]
            if not place.pins and not place.held and not place.permanent and place.state is not State.HOME:
                self._drop(unit)

    def unit_at(self, address: int) -> Unit | None:
        """The unit whose whole copy lies in the storage that begins at ``address``."""
        return self._by_address.get(address)

    # -- the home, for updates and loading ----------------------------------------------------------------------------

    def open_chunk(
        self, unit: Unit, index: int, buffers: Arena, priority: Priority, *, wait: bool = True, fresh: bool = False
    ) -> Lease:
        """A lease on chunk ``index`` of this rank's part of ``unit``: in the home's memory, in the slot, or from the disk."""
        place, chunk = self._places[unit], unit.chunks[index]
        lo, hi = unit.updates[0] + chunk.lo, unit.updates[0] + chunk.hi
        if place.home.block is not None:
            return View(place.home.block.tensor[lo - place.covers[0] : hi - place.covers[0]])
        if self._is_shared(place.slot) and place.state is not State.ARRIVING:
            # Other ranks may still read it: this one changes a copy.
            lease = place.home.open(index, buffers, priority, wait=wait, fresh=True)
            if not fresh:
                lease.wait().copy_(place.full_slot().tensor[lo:hi])
            return lease
        if place.slot is not None and place.state is not State.ARRIVING and not self._memory.device.separate:
            return SlotLease(place.home, index, place.slot.tensor[lo:hi], place.writes)
        return place.home.open(index, buffers, priority, wait=wait, fresh=fresh)

    @contextmanager
    def shard(self, unit: Unit, *, write: bool, read: bool = True) -> Generator[Tensor]:
        """The bytes that the home holds (undefined unless ``read``); what is written to them is kept if ``write``."""
        place = self._places[unit]
        if place.home.block is not None:
            yield place.home.block.tensor[: place.home.nbytes]
            return
        self.forget([unit])
        block = self._host_slots.take(unit, lambda: self._make_room(guesses_too=True), urgent=True)
        if block is None:
            raise InternalError("no slot for an urgent request")
        bytes_ = block.tensor[: place.home.nbytes]
        writes: list[IOTicket] = []
        try:
            wait_all(place.home.fetch(bytes_, Priority.NOW) if read else [])
            yield bytes_
            writes = place.home.save(bytes_) if write else []
        finally:
            del bytes_
            self._host_slots.give(block, writes)

    @contextmanager
    def scratch(self, unit: Unit, nbytes: int) -> Generator[Tensor]:
        """Memory for ``nbytes`` of something of ``unit``: a slot, which is paid for, if that is large enough."""
        if nbytes > unit.layout.nbytes:
            yield torch.empty(nbytes, dtype=torch.uint8)
            return
        block = self._host_slots.take(unit, lambda: self._make_room(guesses_too=True), urgent=True)
        if block is None:
            raise InternalError("no slot for an urgent request")
        try:
            yield block.tensor[:nbytes]
        finally:
            self._host_slots.give(block, [])

    def move_home(self, unit: Unit, store: Store | None) -> None:
        """Between two steps: into memory (``None``) or into ``store``."""
        self.forget([unit])
        self._move(unit, store)

    def write_back(self, unit: Unit) -> None:
        """Make rank 0's view of a pinned unit the values of every rank."""
        place = self._places[unit]
        whole = place.full_slot().tensor[: unit.layout.nbytes]
        self._channel.run(Label("write", unit.index, unit.name), lambda wire, _: wire.world.broadcast(whole))
        if place.home.block is not place.slot:
            self._save(place, whole)
        if place.home.block is not None and place.home.block is not place.slot:
            self._put(unit, whole)

    # -- what callers write -------------------------------------------------------------------------------------------

    def look_for_writes(self, units: Iterable[Unit] | None = None) -> None:
        """Keep what callers have written to units that are whole, or raise if it cannot be kept."""
        for unit in self._units if units is None else units:
            self._look(unit, self._places[unit])
        self.look_at_views()
        self.tell_lost()

    def look_at_views(self, *, at_all: bool = True) -> None:
        """The same for memory that parameters have left (or only for what nobody refers to any more): noted, to be told."""
        if self._left:
            self._lost = self._left.look(at_all=at_all) or self._lost

    def tell_lost(self) -> None:
        """Raise if something that a caller has written could not be kept."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def values_replaced(self) -> None:
        """All values have been loaded anew: what was written to the former ones is nobody's loss any more."""
        for place in self._places.values():
            place.prints, place.exposed = [], False
        self._lost = None

    @contextmanager
    def holding(self, unit: Unit) -> Generator[None]:
        self._look(unit, self._places[unit])  # the update begins with what the caller has made of the values
        with super().holding(unit):
            yield

    def may_update(self, unit: Unit, *, wait: bool) -> bool:
        place = self._places[unit]
        self._look(unit, place)
        if not self._alone:
            place.prints, place.exposed = [], False  # from here on other ranks may write
        return super().may_update(unit, wait=wait)

    def prints(self, unit: Unit) -> list[int]:
        """What tells whether the values of a pinned unit change, see runtime/writes.py."""
        return prints_of(unit, self._places[unit].full_slot().tensor)

    def take_in(self, unit: Unit) -> None:
        """Make memory that a caller gave to pinned parameters (``param.data = x``) the values of the unit."""
        place = self._places[unit]
        block = place.full_slot()
        replaced = unit.replaced(block.tensor.data_ptr())
        if not replaced:
            return
        unit.refuse_converted(replaced, block.tensor.device)
        self.before_replaced(unit, list(replaced))
        self._copy_in(unit, replaced, block.tensor)
        _point(unit, block.tensor)
        if place.permanent:
            mark_changed(unit.params[index] for index in replaced)  # graphs may have saved what lay in that memory

    def put_back(self, unit: Unit) -> list[int]:
        """Let pinned parameters be views of the unit again. Returns those, by index, that were not."""
        block = self._places[unit].full_slot()
        replaced = unit.replaced(block.tensor.data_ptr())
        _point(unit, block.tensor)
        return list(replaced)

    def adopt(self) -> None:
        """The same for parameters that are here for good, whenever a caller may have given them other memory."""
        for unit, place in self._places.items():
            if place.permanent and (replaced := unit.replaced(place.full_slot().tensor.data_ptr())):
                self.take_in(unit)
                self.written(unit, list(replaced))

    def _note(self, unit: Unit, place: Place) -> None:
        """The parameters become usable: what may be written from now on?"""
        place.versions = [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]
        if place.slot is not place.home.block:
            place.prints = place.prints or prints_of(unit, place.full_slot().tensor)
            place.exposed = True

    def _look(self, unit: Unit, place: Place) -> None:
        """Before a slot is given up or written: keep what a caller has written to it, or note that it is lost."""
        if not place.exposed or place.slot is None:
            return
        now = prints_of(unit, place.slot.tensor)
        changed = differing(unit, place.prints, now)
        if changed:
            self._found(unit, place, changed)
        place.exposed = bool(place.pins) or (self._alone and _is_held(place))
        if not self._alone and not place.pins:
            place.prints = []  # other ranks may write now

    def _found(self, unit: Unit, place: Place, changed: Sequence[int]) -> None:
        """A caller has changed these parameters in the slot."""
        if self._alone:
            self._keep_slot(unit, place)
            self.written(unit, changed)
            return
        self._lost = lost_through(unit, changed[0])
        if place.slot is place.common or self._is_shared(place.slot):
            name = unit.names[changed[0]]
            self.damaged_by = f"parameter {name!r} was changed in memory that the ranks of this host share"
        elif place.state is State.WHOLE:
            place.exposed = False
            self._drop(unit)  # the home has the values that it had

    def _take_in(self, unit: Unit, place: Place, replaced: Mapping[int, Tensor]) -> None:
        """The same for parameters that were given other memory, after they were evicted."""
        block = place.full_slot()
        if not self._alone:
            self._lost = lost_through(unit, next(iter(replaced)))
            return
        unit.refuse_converted(replaced, block.tensor.device)
        self.before_replaced(unit, list(replaced))
        if block is not place.home.block and block.held:  # views of the old values stay as they are
            into = block.tensor.clone()
            self._copy_in(unit, replaced, into)
            self._save(place, into)
            wait_all(place.writes)
            place.exposed = False
            self._drop(unit)
        else:
            self._copy_in(unit, replaced, block.tensor)
            self._keep_slot(unit, place)
        self.written(unit, list(replaced))

    def _copy_in(self, unit: Unit, values: Mapping[int, Tensor], whole: Tensor) -> None:
        views = unit.views(whole)
        for index, value in values.items():
            self._left.refuse_again(unit, index, value)
        with torch.inference_mode(mode=False), torch.no_grad():
            for index, value in values.items():
                views[index].copy_(value)
                self._left.forget(unit, index)
                self._left.watch(unit, index, value.detach(), ours=0)

    def _keep_slot(self, unit: Unit, place: Place) -> None:
        if place.slot is not place.home.block:
            whole = place.full_slot().tensor
            self._save(place, whole)
            place.prints = prints_of(unit, whole)

    def _save(self, place: Place, whole: Tensor) -> None:
        """Make ``whole`` what the home holds."""
        lo, hi = place.covers
        if place.home.block is None:
            place.writes += place.home.save(whole[lo:hi].cpu())
        else:
            place.home.block.tensor[: hi - lo].copy_(whole[lo:hi])

    @property
    def _alone(self) -> bool:
        """Whether no other rank has these parameters: what a caller writes is then the one truth."""
        return self._group.size == 1

    # -- param.data ---------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, place: Place, block: Block) -> None:
        _point(unit, block.tensor)
        place.slot, place.state = block, State.ATTACHED
        self._note(unit, place)
        self._trace("attach", unit.name)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _idle(self, protect: Unit | None = None) -> list[Unit]:
        """Whole units that nobody uses, the one not used for longest first."""
        return [u for u in self._recent if not self._places[u].pins and not self._places[u].held and u is not protect]

    def _shrink(self, protect: Unit | None = None) -> None:
        idle = self._idle(protect)
        for unit in idle[: max(0, len(idle) - _KEEP)]:
            self._drop(unit)

    def _occupied(self) -> int:
        """Bytes of the units that have a slot, or will get the one that their gather finds."""
        there = ((u, p) for u, p in self._places.items() if p.state is not State.HOME)
        return sum(u.layout.nbytes for u, p in there if p.slot is None or p.slot not in (p.home.block, p.common))

    def _is_shared(self, slot: Block | None) -> bool:
        return self._shared is not None and slot in self._shared

    def _accept_slot(self, unit: Unit, place: Place) -> None:
        """Take over the slot that the ranks of this host have agreed on, if the unit came to one of theirs."""
        slot = place.gather.wait() if place.gather is not None else None
        if slot is not None:
            place.slot = slot
            self._by_address[slot.tensor.data_ptr()] = unit

    def _make_room(self, *, guesses_too: bool) -> bool:
        """Let go of a whole unit that nobody uses, or of a guess; whether there was one. A guess never costs the unit that was
        used last: backward is still at it, and would fetch it again."""
        latest = None if guesses_too else next(reversed(self._recent), None)
        guesses = (u for u in self._guessed if guesses_too and self._places[u].state is not State.HOME)
        victim = next(iter((*self._idle(latest), *guesses)), None)
        if victim is not None:
            self._drop(victim)
        return victim is not None

    def _drop(self, unit: Unit) -> None:
        place = self._places[unit]
        self._look(unit, place)
        for order in (self._recent, self._guessed, self._wanted):
            order.pop(unit, None)
        self._accept_slot(unit, place)
        under_way = place.reads + place.writes
        slot, place.slot, place.state = place.slot, None, State.HOME
        was_exposed, place.exposed, place.prints = bool(place.prints), False, []
        place.gather, place.ready, place.reads, place.writes = None, None, [], []
        if slot is None:
            return
        self._by_address.pop(slot.tensor.data_ptr(), None)
        if self._shared is not None and slot in self._shared:
            self._shared.give(slot)
            self._trace("drop", unit.name)
        elif slot is not place.home.block and slot is not place.common:
            if was_exposed and slot.held:
                self._left.watch(unit, None, slot.tensor[: unit.layout.nbytes], ours=1)
            self._slots.give(slot, under_way)
            self._trace("drop", unit.name)


def _point(unit: Unit, whole: Tensor) -> None:
    """Let the parameters be views of ``whole``."""
    with torch.inference_mode(mode=False), torch.no_grad():
        for param, view in zip(unit.params, unit.views(whole), strict=True):
            param.__class__ = nn.Parameter
            param.data = view


def _evict(unit: Unit, place: Place) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        if not place.placeholders:
            place.placeholders = [placeholder(p, d.param) for p, d in zip(unit.params, unit.dtypes, strict=True)]
        for param, nothing in zip(unit.params, place.placeholders, strict=True):
            if param.__class__ is not EvictedParameter:  # or it was broken off, and is done again
                param.data = nothing
                param.__class__ = EvictedParameter


def _is_held(place: Place) -> bool:
    return place.slot is not None and place.slot.held


def _is_evicted(unit: Unit, place: Place, index: int) -> bool:
    """Whether a parameter has no values, though it may look as if it had: it was about to get or to lose them."""
    param = unit.params[index]
    if param.__class__ is EvictedParameter:
        return True
    return bool(place.placeholders) and storage_of(param) == storage_of(place.placeholders[index])


def _any_attached(unit: Unit, place: Place) -> bool:
    return any(p.__class__ is not EvictedParameter for p in unit.params) and bool(place.placeholders)


def _rewritten(unit: Unit, place: Place) -> list[int]:
    """The parameters, by index, that were changed in the slot as autograd knows it."""
    if place.slot is place.home.block:
        return []
    now = [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]
    return [index for index, (was, is_) in enumerate(zip(place.versions, now, strict=True)) if was != is_]


def _fill(views: Sequence[Tensor], flat_values: Sequence[Tensor]) -> None:
    for view, value in zip(views, flat_values, strict=True):
        view.copy_(value.as_strided(view.shape, view.stride()))
