"""The order of events of one step on one rank, as the engine runs a plan: read, gather, compute, reduce, update, write.

A schedule is for looking at a plan and for checking it (``planning/verify.py``): the engine itself follows the model and only
guesses what comes next. All ranks have the same collectives in the same order, whatever their tiers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.planning.options import Kind, Phase
from lowtide.planning.plan import Plan, UnitPlan
from lowtide.stages import STAGES


class Verb(enum.Enum):
    """What can happen."""

    READ = "read"
    WRITE = "write"
    GATHER = "gather"
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    RELEASE = "release"
    REDUCE = "reduce"
    UPDATE = "update"
    PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens to one unit. ``kind``: of the bytes that a read or a write moves."""

    phase: Phase
    verb: Verb
    unit: int
    kind: Kind | None = None


COLLECTIVES = (Verb.GATHER, Verb.REDUCE, Verb.PUBLISH)


def schedule(plan: Plan) -> tuple[Event, ...]:
    """One step, in order. Units run forward in the order of the plan, and backward in the opposite one."""
    return tuple(_Writer(plan).step())


class _Writer:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stage = STAGES[plan.stage]
        self._ranks = plan.world_size > 1
        self._update_in = Phase(plan.update_in)

    def step(self) -> Iterator[Event]:
        units = list(enumerate(self._plan.units))
        for index, unit in units:
            yield from self._forward(index, unit)
        for index, unit in reversed(units):
            yield from self._backward(index, unit)
        if self._update_in is Phase.UPDATE:
            for index, unit in units:
                yield from self._update(index, unit, Phase.UPDATE)
        if self._ranks and self._stage.optimizer and not self._stage.parameters:
            for index, _ in units:
                yield Event(Phase.UPDATE, Verb.PUBLISH, index)

    def _forward(self, index: int, unit: UnitPlan) -> Iterator[Event]:
        phase = Phase.FORWARD
        yield from self._bring(index, unit, phase)
        if self._update_in is phase:
            yield from self._update(index, unit, phase)
        yield Event(phase, Verb.COMPUTE, index)
        if unit.activations == "disk":
            yield Event(phase, Verb.WRITE, index, Kind.ACTIVATIONS)
        yield Event(phase, Verb.RELEASE, index)

    def _backward(self, index: int, unit: UnitPlan) -> Iterator[Event]:
        phase = Phase.BACKWARD
        yield from self._bring(index, unit, phase)
        if unit.activations == "disk":
            yield Event(phase, Verb.READ, index, Kind.ACTIVATIONS)
        if unit.activations == "recompute":
            yield Event(phase, Verb.RECOMPUTE, index)
        yield Event(phase, Verb.COMPUTE, index)
        if self._ranks:
            yield Event(phase, Verb.REDUCE, index)
        if self._update_in is phase:
            yield from self._update(index, unit, phase)
        elif unit.gradients == "disk":
            yield Event(phase, Verb.WRITE, index, Kind.GRADIENTS)
        yield Event(phase, Verb.RELEASE, index)

    def _bring(self, index: int, unit: UnitPlan, phase: Phase) -> Iterator[Event]:
        if unit.parameters == "disk":
            yield Event(phase, Verb.READ, index, Kind.PARAMETERS)
        if self._ranks and self._stage.parameters:
            yield Event(phase, Verb.GATHER, index)

    def _update(self, index: int, unit: UnitPlan, phase: Phase) -> Iterator[Event]:
        in_slot = phase is not Phase.UPDATE and not self._ranks
        if unit.parameters == "disk" and not in_slot:
            yield Event(phase, Verb.READ, index, Kind.PARAMETERS)
        if unit.gradients == "disk" and self._update_in is not Phase.BACKWARD:
            yield Event(phase, Verb.READ, index, Kind.GRADIENTS)
        if unit.optimizer == "disk":
            yield Event(phase, Verb.READ, index, Kind.OPTIMIZER)
        yield Event(phase, Verb.UPDATE, index)
        if unit.optimizer == "disk":
            yield Event(phase, Verb.WRITE, index, Kind.OPTIMIZER)
        if unit.parameters == "disk":
            yield Event(phase, Verb.WRITE, index, Kind.PARAMETERS)
