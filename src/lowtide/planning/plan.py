"""A plan: what lives where, what that takes of every tier, how long a step lasts and what it waits for. Frozen data, and JSON.

A plan is made from a description of a model and of a machine, before anything runs; a run reports how far off it was. It goes
through JSON without loss, so that a question about a plan is one file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.errors import ArgumentError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Where the kinds of bytes of one unit live (device, host or disk), and what becomes of its activations."""

    name: str
    parameters: str
    gradients: str
    optimizer: str
    activations: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """What a rank uses of one tier at its fullest moment, by kind of bytes."""

    tier: str
    capacity_bytes: int
    peak_bytes: int
    parts: dict[str, int]
    """Each kind at its own fullest, in bytes; they need not be there at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """How long one phase of a step lasts, and how long every resource works in it."""

    phase: str
    seconds: float
    loads: dict[str, float]

    @property
    def limited_by(self) -> str:
        return max(self.loads, key=lambda name: self.loads[name], default="nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one more of something would change."""

    change: str
    seconds: float
    """Of a step, saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module's docstring. Bytes and seconds are those of one rank; all are alike unless ``shares`` says otherwise."""

    model: str
    parameters: int
    batch: str
    hardware: str
    hardware_source: str
    world_size: int
    hosts: int
    stage: int
    precision: str
    update: str
    update_in: str
    """The phase in which units are updated: ``backward``, ``update``, or ``forward`` where a step is put off."""
    objective: str
    placement: str
    """``plain``: all of it fits and nothing is moved; ``streamed``: units come and go."""
    slots: int
    """Whole units that may be in memory at once beside those that live there."""
    prefetch: int
    chunk_bytes: int
    shares: tuple[float, ...] | None
    states_bytes: int
    """Parameters, gradients and optimizer states of the whole model."""
    states_bytes_per_rank: int
    units: tuple[UnitPlan, ...]
    tiers: tuple[TierPlan, ...]
    phases: tuple[PhasePlan, ...]
    predicted_seconds: float
    """Of one step; 0 if the work of a step is not known."""
    predicted_peak_bytes: int
    """Of the job on one host, all its ranks."""
    traffic_bytes: dict[str, int]
    """Of a step, by resource and direction: ``disk read``, ``disk written``, ``network``, ``link``."""
    reasons: tuple[str, ...] = ()
    prices: tuple[Price, ...] = ()

    @property
    def limited_by(self) -> str:
        """The resource that most of a step waits for."""
        waits: dict[str, float] = {}
        for phase in self.phases:
            waits[phase.limited_by] = waits.get(phase.limited_by, 0.0) + phase.seconds
        return max(waits, key=lambda name: waits[name], default="nothing")

    def tier(self, name: str) -> TierPlan | None:
        return next((t for t in self.tiers if t.tier == name), None)

    def count(self, kind: str) -> dict[str, int]:
        """How many units have ``kind`` in which tier, or with which policy."""
        names = [getattr(u, kind) for u in self.units]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote; anything else is refused with the place that is wrong."""
        from pydantic import TypeAdapter, ValidationError

        try:
            fields: Any = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"this is not a plan: {error}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ArgumentError(f"this is not a plan of format {FORMAT}, which this version of lowtide reads.")
        try:
            return TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ArgumentError(f"this is not a plan: {where}: {first['msg']}") from error

    def __str__(self) -> str:
        from lowtide.planning.text import plan_text

        return plan_text(self)
