"""Whole or not: where the values of a unit are, and the only code that assigns ``param.data``.

A unit's *home* holds this rank's shard, or all of it where parameters are not sharded (or there is one rank). A unit that
is needed whole is gathered into a block of the arena, unless its home is the whole already: then gathering is free.

States of a unit, and what occupies memory in each:
  HOME       the home only
  GATHERING  home + a block that other ranks' shards are arriving in
  WHOLE      home + a full block, parameters evicted: kept for a while in case the unit comes again
  ATTACHED   home + a full block, parameters usable
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lowtide.comm.channel import Channel, Label, Ticket, Wire
from lowtide.comm.group import Group
from lowtide.errors import InternalError, Refused
from lowtide.runtime.evicted import EvictedParameter, placeholder
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.trace import Trace
from lowtide.runtime.unit import Unit, flat_view
from lowtide.tiers.arena import Arena, Block

_KEEP = 1  # how many unpinned whole units may stay in case they come again; the least recently used goes first


class State(enum.Enum):
    """See the module's docstring."""

    HOME = enum.auto()
    GATHERING = enum.auto()
    WHOLE = enum.auto()
    ATTACHED = enum.auto()


class _Place:
    """Where one unit is."""

    __slots__ = ("block", "covers", "home", "permanent", "pins", "state", "ticket", "versions")

    def __init__(self, home: Block, covers: tuple[int, int]) -> None:
        self.home = home
        self.covers = covers  # bytes lo:hi of the unit that the home holds
        self.state = State.HOME
        self.block: Block | None = None
        self.ticket: Ticket[None] | None = None
        self.pins = 0
        self.permanent = False
        self.versions: list[int] = []  # of the parameters when they were attached


class Residency:
    """Moves units between shard and whole. Only the thread that runs the step calls it."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        group: Group,
        channel: Channel,
        homes: Arena,
        slots: Arena,
        ledger: Ledger,
        trace: Trace,
        ahead: int,
    ) -> None:
        self._units = units
        self._group = group
        self._channel = channel
        self._homes, self._slots = homes, slots
        self._ledger = ledger
        self._trace = trace
        self._places: dict[Unit, _Place] = {}
        self._ahead = max(ahead, 1)  # how many units may be whole, or on their way, on a guess
        self._guessed: OrderedDict[Unit, None] = OrderedDict()
        self._recent: OrderedDict[Unit, None] = OrderedDict()
        self._by_address: dict[int, Unit] = {}

    # -- set-up -------------------------------------------------------------------------------------------------------

    def take_over(self, unit: Unit, *, resident: bool) -> list[Tensor]:
        """Move ``unit``'s parameters into memory of ours: whole and for good if ``resident``, else this rank's shard.

        Rank 0's values win, as in DDP. Returns them as they were built, flat, for whoever keeps a more precise copy.
        """
        layout, rank = unit.layout, self._group.shard.rank
        values = [flat_view(p, spec.stride) for p, spec in zip(unit.params, layout.params, strict=True)]

        def send(wire: Wire, _: list[bytes]) -> None:
            for value in values:
                wire.world.broadcast(value.view(torch.uint8))

        self._channel.run(Label("start", unit.index, unit.name), send)
        stays_whole = resident or self._group.shard.size == 1
        block = (self._homes if stays_whole else self._slots).take(layout.nbytes)
        _fill(unit.views(block.tensor), values)
        covers = (0, layout.nbytes) if stays_whole else (layout.cuts[rank], layout.cuts[rank + 1])
        home = block
        if not stays_whole:
            home = self._homes.take(covers[1] - covers[0])
            home.tensor[: covers[1] - covers[0]].copy_(block.tensor[covers[0] : covers[1]])
            self._slots.give(block)
        place = self._places[unit] = _Place(home, covers)
        self._ledger.add("parameters", home.nbytes)
        if resident:
            self._attach(unit, place, home)
            place.permanent = True
        else:
            self._evict(unit)
        return values

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def state(self, unit: Unit) -> State:
        return self._places[unit].state

    def pinned(self) -> Unit | None:
        """A unit that somebody uses right now, if any."""
        return next((u for u in self._units if self._places[u].pins), None)

    def prefetch(self, unit: Unit) -> None:
        """Start gathering ``unit`` if it is not whole or on its way."""
        place = self._places[unit]
        if place.state is not State.HOME:
            return
        self._trace("prefetch", unit.name)
        self._guessed[unit] = None
        while len(self._guessed) > self._ahead:
            self._drop(next(iter(self._guessed)))  # a guess that was wrong
        if self._group.shard.size == 1:
            place.block, place.state = place.home, State.WHOLE
            self._by_address[place.home.tensor.data_ptr()] = unit
            return
        place.block = self._slots.take(unit.layout.nbytes)
        self._by_address[place.block.tensor.data_ptr()] = unit
        self._ledger.add("slots", place.block.nbytes)
        place.state = State.GATHERING
        place.ticket = self._channel.submit(
            Label("gather", unit.index, unit.name), _gather(unit, place.block.tensor, place.home.tensor, place.covers)
        )

    def whole(self, unit: Unit) -> Tensor:
        """The unit's bytes, all of them, now. Valid until the unit is released and something else needs the memory."""
        place = self._places[unit]
        self.prefetch(unit)
        if place.state is State.GATHERING:
            if place.ticket is None:
                raise InternalError(f"unit {unit.name!r} is being gathered without a ticket")
            place.ticket.wait()
            place.ticket = None
            place.state = State.WHOLE
            self._trace("gathered", unit.name)
        self._guessed.pop(unit, None)
        self._recent[unit] = None
        self._recent.move_to_end(unit)
        self._shrink(protect=unit)
        if place.block is None:
            raise InternalError(f"unit {unit.name!r} is whole without a block")
        return place.block.tensor

    def pin(self, unit: Unit) -> None:
        """Make ``unit``'s parameters usable until as many ``unpin`` calls follow."""
        place = self._places[unit]
        if place.permanent:
            return
        place.pins += 1
        if place.state is State.ATTACHED:
            return
        try:
            self.whole(unit)
        except BaseException:
            place.pins -= 1
            raise
        if place.block is None:
            raise InternalError(f"unit {unit.name!r} is whole without a block")
        self._attach(unit, place, place.block)

    def unpin(self, unit: Unit) -> None:
        """Undo one ``pin``. The last one evicts the parameters; the bytes stay for a while."""
        place = self._places[unit]
        if place.permanent:
            return
        place.pins -= 1
        if place.pins:
            return
        lost = self._lost_write(unit, place)
        self._evict(unit)
        place.state = State.WHOLE
        self._trace("release", unit.name)
        self._shrink()
        if lost is not None:
            raise Refused(
                f"parameter {lost!r} was changed while its unit {unit.name!r} was gathered; the change would be lost when the "
                f"unit is released. Change parameters with `with lowtide.gathered(module, write=True):`, or use stage 2."
            )

    def unpin_all(self) -> None:
        """Evict every unit, whoever had pinned it."""
        for unit in self._units:
            place = self._places[unit]
            if place.pins:
                place.pins = 0
                self._evict(unit)
                place.state = State.WHOLE
        self.forget()

    def accept_writes(self, unit: Unit) -> None:
        """What was written to a pinned unit has been kept."""
        self._places[unit].versions = [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]

    def _lost_write(self, unit: Unit, place: _Place) -> str | None:
        if place.block is place.home:
            return None
        now = [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]
        return next((n for n, was, is_ in zip(unit.names, place.versions, now, strict=True) if was != is_), None)

    def forget(self, units: Iterable[Unit] | None = None) -> None:
        """Let go of whole copies that are not pinned: their values are about to be, or were, replaced."""
        for unit in self._units if units is None else units:
            place = self._places[unit]
            if not place.pins and not place.permanent and place.state is not State.HOME:
                self._drop(unit)

    def unit_at(self, address: int) -> Unit | None:
        """The unit whose whole copy lies in the storage that begins at ``address``."""
        return self._by_address.get(address)

    def piece(self, unit: Unit, index: int, lo: int, hi: int) -> Tensor:
        """Elements ``lo:hi`` of parameter ``index``, flat, as a view of the home, which must hold them."""
        place, param, dtype = self._places[unit], unit.layout.params[index], unit.dtypes[index].param
        start = unit.layout.offsets[index] + lo * param.itemsize - place.covers[0] if lo < hi else 0
        return place.home.tensor[start : start + (hi - lo) * param.itemsize].view(dtype)

    def publish(self, unit: Unit) -> Ticket[None] | None:
        """After an update: bring other ranks' new shards into a home that holds the whole unit."""
        place = self._places[unit]
        if not place.permanent or self._group.shard.size == 1:
            return None
        home = place.home.tensor
        return self._channel.submit(
            Label("publish", unit.index, unit.name),
            lambda wire, _: wire.shard.gather(home[: unit.layout.nbytes], unit.layout.cuts),
        )

    def write_back(self, unit: Unit) -> None:
        """Make rank 0's view of a pinned unit the values of every rank."""
        place = self._places[unit]
        whole = (place.home if place.block is None else place.block).tensor[: unit.layout.nbytes]
        self._channel.run(Label("write", unit.index, unit.name), lambda wire, _: wire.world.broadcast(whole))
        lo, hi = place.covers
        home = place.home.tensor[: hi - lo]
        if home.data_ptr() != whole[lo:].data_ptr():
            home.copy_(whole[lo:hi])

    def refuse_replaced(self, unit: Unit) -> None:
        """Raise if somebody replaced the memory of an attached parameter (``.to()``, ``.half()``, ``param.data = ...``)."""
        place = self._places[unit]
        if place.state is not State.ATTACHED:
            return
        base = (place.block or place.home).tensor.data_ptr()
        for name, param, shape, offset in zip(unit.names, unit.params, unit.layout.params, unit.layout.offsets, strict=True):
            if shape.numel and param.data_ptr() != base + offset:
                raise Refused(
                    f"the memory of parameter {name!r} was replaced after lowtide.shard (.to(), .half(), `param.data = ...`). "
                    f"Convert the model before sharding it; change values with `with lowtide.gathered(module, write=True):`."
                )

    # -- param.data ---------------------------------------------------------------------------------------------------

    def _attach(self, unit: Unit, place: _Place, block: Block) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            for param, view in zip(unit.params, unit.views(block.tensor), strict=True):
                param.__class__ = nn.Parameter
                param.data = view
        place.block = block
        place.state = State.ATTACHED
        self.accept_writes(unit)
        self._trace("attach", unit.name)

    def _evict(self, unit: Unit) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            for param, dtype in zip(unit.params, unit.dtypes, strict=True):
                param.data = placeholder(param.shape, dtype.param, param.device)
                param.__class__ = EvictedParameter

    # -- memory -------------------------------------------------------------------------------------------------------

    def _shrink(self, protect: Unit | None = None) -> None:
        idle = [u for u in self._recent if not self._places[u].pins and u is not protect]
        for unit in idle[: max(0, len(idle) - _KEEP)]:
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        place = self._places[unit]
        self._recent.pop(unit, None)
        self._guessed.pop(unit, None)
        if place.ticket is not None:
            place.ticket.wait()
            place.ticket = None
        block, place.block, place.state = place.block, None, State.HOME
        if block is not None:
            self._by_address.pop(block.tensor.data_ptr(), None)
        if block is not None and block is not place.home:
            self._ledger.remove("slots", block.nbytes)
            self._slots.give(block)
            self._trace("drop", unit.name)


def _fill(views: Sequence[Tensor], flat_values: Sequence[Tensor]) -> None:
    for view, value in zip(views, flat_values, strict=True):
        view.copy_(value.as_strided(view.shape, view.stride()))


def _gather(unit: Unit, whole: Tensor, home: Tensor, covers: tuple[int, int]) -> Callable[[Wire, list[bytes]], None]:
    lo, hi = covers

    def work(wire: Wire, _: list[bytes]) -> None:
        whole[lo:hi].copy_(home[: hi - lo])
        wire.shard.gather(whole[: unit.layout.nbytes], unit.layout.cuts)

    return work
