"""Does a schedule hold? Walks it event by event, with the sizes of the plan, and names the first thing that is wrong.

Checked: a unit is whole when it computes and when it is updated; what is on disk is read before it is used and written after it
was changed; never more units are whole at once than there are slots; every rank has the same collectives in the same order; the
traffic is what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.errors import InternalError
from lowtide.planning.options import Kind, Phase, UnitNeeds
from lowtide.planning.plan import Plan, UnitPlan
from lowtide.planning.schedule import COLLECTIVES, Event, Verb
from lowtide.stages import STAGES

Move = Callable[[int, Kind, int, Verb], None]
"""Carries out a read or a write of so many bytes: with the null store, counts them."""


def verify(plan: Plan, sizes: Sequence[UnitNeeds], events: Sequence[Event], move: Move | None = None) -> dict[str, int]:
    """Raise :class:`~lowtide.errors.InternalError` if the schedule does not hold; returns the bytes it moves."""
    walk = _Walk(plan, sizes)
    for event in events:
        nbytes = walk.take(event)
        if event.kind is not None and move is not None:
            move(event.unit, event.kind, nbytes, event.verb)
    walk.finish()
    moved = {name: size for name, size in walk.moved.items() if size}
    planned = {name: size for name, size in plan.traffic_bytes.items() if name.startswith("disk")}
    if moved != planned:
        raise InternalError(f"the schedule moves {moved}, the plan says {planned}")
    return moved


def same_collectives(schedules: Sequence[Sequence[Event]]) -> None:
    """Raise if two ranks would meet in different collectives."""
    orders = [[(e.verb, e.unit) for e in events if e.verb in COLLECTIVES] for events in schedules]
    for rank, order in enumerate(orders[1:], start=1):
        if order != orders[0]:
            raise InternalError(f"rank {rank} has other collectives than rank 0")


class _Walk:
    def __init__(self, plan: Plan, sizes: Sequence[UnitNeeds]) -> None:
        self._plan, self._sizes = plan, sizes
        self._gathers = STAGES[plan.stage].parameters and plan.world_size > 1
        self._whole: set[int] = set()  # in slots
        self._read: set[tuple[int, Kind]] = set()  # in memory for now, from the disk
        self._dirty: set[tuple[int, Kind]] = set()
        self._updated: set[int] = set()
        self._computed: dict[int, int] = {}
        self.moved = {"disk read": 0, "disk written": 0}

    def take(self, event: Event) -> int:
        """One event; returns the bytes that it moves."""
        nbytes = self._bytes(event)
        check = {
            Verb.READ: self._reads,
            Verb.WRITE: self._writes,
            Verb.GATHER: self._gathered,
            Verb.COMPUTE: self._computes,
            Verb.RECOMPUTE: self._needs_whole,
            Verb.UPDATE: self._updates,
            Verb.RELEASE: self._releases,
        }.get(event.verb)
        if check is not None:
            check(event)
        if event.verb is Verb.READ:
            self.moved["disk read"] += nbytes
        if event.verb is Verb.WRITE:
            self.moved["disk written"] += nbytes
        return nbytes

    def finish(self) -> None:
        for unit, kind in self._dirty:
            self._fail(unit, f"its {kind.value} were changed and not written")
        for unit in range(len(self._plan.units)):
            if self._sizes[unit].update_seconds and unit not in self._updated:
                self._fail(unit, "it was not updated")
            if self._computed.get(unit) != 2:
                self._fail(unit, "it does not compute once forward and once backward")

    def _bytes(self, event: Event) -> int:
        return getattr(self._sizes[event.unit], event.kind.value) if event.kind is not None else 0

    def _unit(self, event: Event) -> UnitPlan:
        return self._plan.units[event.unit]

    def _reads(self, event: Event) -> None:
        if event.kind is None:
            return
        if event.kind is not Kind.ACTIVATIONS and getattr(self._unit(event), event.kind.value) != "disk":
            self._fail(event.unit, f"it reads {event.kind.value} that are not on disk")
        self._read.add((event.unit, event.kind))
        if event.kind is Kind.PARAMETERS and not self._gathers and event.phase is not Phase.UPDATE:  # that one reads by chunks
            self._take_slot(event.unit)

    def _gathered(self, event: Event) -> None:
        if self._unit(event).parameters == "disk" and (event.unit, Kind.PARAMETERS) not in self._read:
            self._fail(event.unit, "it is gathered before this rank's shard was read")
        self._take_slot(event.unit)

    def _take_slot(self, unit: int) -> None:
        self._whole.add(unit)
        if len(self._whole) > self._plan.slots > 0:  # without slots units are read where they live
            self._fail(unit, f"{len(self._whole)} units are whole at once, and there are {self._plan.slots} slots")

    def _needs_whole(self, event: Event) -> None:
        away = self._unit(event).parameters == "disk" or self._gathers
        if away and event.unit not in self._whole:
            self._fail(event.unit, "it computes while it is not whole")

    def _computes(self, event: Event) -> None:
        self._needs_whole(event)
        self._computed[event.unit] = self._computed.get(event.unit, 0) + 1
        if self._unit(event).gradients == "disk" and event.phase.value == "backward" and self._plan.update_in != "backward":
            self._dirty.add((event.unit, Kind.GRADIENTS))

    def _updates(self, event: Event) -> None:
        unit = self._unit(event)
        for kind in (Kind.OPTIMIZER, Kind.PARAMETERS):
            if getattr(unit, kind.value) == "disk":
                if (event.unit, kind) not in self._read:
                    self._fail(event.unit, f"it is updated before its {kind.value} were read")
                self._dirty.add((event.unit, kind))
        self._updated.add(event.unit)

    def _writes(self, event: Event) -> None:
        if event.kind is not None:
            self._dirty.discard((event.unit, event.kind))

    def _releases(self, event: Event) -> None:
        self._whole.discard(event.unit)
        self._read = {(unit, kind) for unit, kind in self._read if unit != event.unit}

    def _fail(self, unit: int, what: str) -> None:
        raise InternalError(f"the schedule of unit {self._plan.units[unit].name!r} does not hold: {what}")
