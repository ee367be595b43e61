"""What may be done with every unit's bytes, and what each choice costs: memory in a tier, and seconds of a resource.

This is the whole cost model of a step. A step has three phases; in each, every resource works through its load, all of them at
once, so a phase takes as long as its busiest resource. Choosing one option for every kind of bytes of every unit gives the
seconds and the peak of a step by adding up. The programme (``planning/programme.py``) searches over the options, the tests
search by brute force, and reports add up what was chosen: one table for all.

When bytes move, per unit and step:

======================  ===========================  ===========================  =============================
kind, where it lives    forward                      backward                     with the update
======================  ===========================  ===========================  =============================
parameters on disk      read                         read                         written (and read, if apart)
gradients on disk       –                            written                      read
optimizer on disk       –                            –                            read and written
activations kept        –                            –                            –
activations recomputed  –                            forward computed again       –
activations on disk     written                      read                         –
======================  ===========================  ===========================  =============================

The update is in backward (``update="backward"``), in a phase of its own, or, where a step may be put off, in the next forward.
With a device of its own, parameters and gradients that live on the host or the disk also pass the link, and states that live
there are updated by the host's processor.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

_CHUNK_SECONDS = 5e-4
"""To lease, update and give back one chunk, whatever its size."""


class Tier(enum.Enum):
    """Where bytes live between two uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Phase(enum.Enum):
    """Of a step, in their order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Resource(enum.Enum):
    """What works beside the others."""

    COMPUTE = "compute"
    HOST = "host"
    DISK = "disk"
    LINK = "link"
    NETWORK = "network"


class Lasting(enum.Enum):
    """How long bytes are there."""

    ALWAYS = "always"
    FROM_FORWARD = "from its forward to its backward"
    FROM_BACKWARD = "from its backward to the update"


class Kind(enum.Enum):
    """Of bytes, as a placement names them."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitNeeds:
    """The bytes of one unit on one rank, and the seconds it computes."""

    name: str
    whole: int = 0
    """All its parameters, as compute needs them."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What autograd saves in its forward; 0 if it is not known."""
    inputs: int = 0
    """What is kept of that if it is computed again."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    host_update_seconds: float = 0.0
    """Of the host's processor, if states are not on a device that computes; 0 where the two are one."""
    forward_network_seconds: float = 0.0
    backward_network_seconds: float = 0.0
    update_network_seconds: float = 0.0

    def same_as(self, other: UnitNeeds) -> bool:
        """Whether a plan may treat the two alike: all but the name."""
        return all(getattr(self, f) == getattr(other, f) for f in self.__slots__ if f != "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per byte of what moves. ``busy`` is the part of them in which the processor is kept from computing."""

    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_busy: float = 0.0
    spill: float = 0.0
    """Of the processor, per byte of activations that leave memory or come back: many small tensors are copied and packed."""
    link: float | None = None
    """``None``: the device is the host, nothing is copied."""
    network_busy: float = 0.0
    fresh: float = 0.0
    """Of the processor, per byte of saved activations, where a memory number is filled: what a step has freed is given back to
    the system, and has to be zeroed when the next one takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a step runs."""

    update_in: Phase = Phase.UPDATE
    """The phase in which units are updated."""
    slots_in_update: bool = True
    """Whether an update finds the unit's parameters in its slot, so that they need not be read for it."""
    slots: int = 3
    """Whole units in memory at once. Two are the one in use and the next; with three, one more may still be written back."""
    chunk_bytes: int = 8 << 20
    """What an update reads and writes at once, in bytes of parameters."""
    gradients_stay: bool = True
    """Whether gradients keep their room from step to step, or have it only from backward to the update, as in PyTorch."""


@dataclass(frozen=True, slots=True)
class Load:
    """Seconds of one resource in one phase."""

    phase: Phase
    resource: Resource
    seconds: float


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for one kind of bytes of one unit."""

    kind: Kind
    name: str
    tier: Tier
    nbytes: int
    lasting: Lasting
    loads: tuple[Load, ...] = ()
    again: int = 0
    """Bytes that appear in memory for the length of this unit's backward: activations that are computed again."""


def fixed_loads(unit: UnitNeeds, rates: Rates, way: Way) -> tuple[Load, ...]:
    """What a unit costs wherever its bytes are."""
    loads = [
        Load(Phase.FORWARD, Resource.COMPUTE, unit.forward_seconds),
        Load(Phase.BACKWARD, Resource.COMPUTE, unit.backward_seconds),
        Load(way.update_in, Resource.COMPUTE, unit.update_seconds),
    ]
    seconds = unit.forward_network_seconds, unit.backward_network_seconds, unit.update_network_seconds
    for phase, network in zip(Phase, seconds, strict=True):
        loads.append(Load(phase, Resource.NETWORK, network))
        loads.append(Load(phase, Resource.COMPUTE, network * rates.network_busy))
    return tuple(load for load in loads if load.seconds)


def options_of(
    unit: UnitNeeds, rates: Rates, way: Way, tiers: tuple[Tier, ...], policies: tuple[str, ...]
) -> list[list[Option]]:
    """The choices for each kind of bytes of ``unit``. ``tiers``: where states may live; ``policies``: for activations."""
    kinds = [
        [
            _state_option(Kind.PARAMETERS, unit.parameters, t, Lasting.ALWAYS, _parameter_loads(unit, t, rates, way))
            for t in tiers
        ],
        [
            _state_option(Kind.OPTIMIZER, unit.optimizer, t, Lasting.ALWAYS, _optimizer_loads(unit, t, rates, way))
            for t in tiers
        ],
    ]
    if way.update_in is not Phase.BACKWARD:  # else no gradient outlives its unit
        lasting = Lasting.ALWAYS if way.gradients_stay else Lasting.FROM_BACKWARD
        kinds.append(
            [_state_option(Kind.GRADIENTS, unit.gradients, t, lasting, _gradient_loads(unit, t, rates, way)) for t in tiers]
        )
    kinds.append([_activation_option(unit, policy, rates, tiers) for policy in policies])
    return [options for options in kinds if options]


def _state_option(kind: Kind, nbytes: int, tier: Tier, lasting: Lasting, loads: Iterator[Load]) -> Option:
    return Option(kind, tier.value, tier, nbytes, lasting, tuple(load for load in loads if load.seconds))


def _parameter_loads(unit: UnitNeeds, tier: Tier, rates: Rates, way: Way) -> Iterator[Load]:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        if tier is not Tier.DEVICE:
            yield from _link(unit.parameters, phase, rates)
        if tier is Tier.DISK:
            yield from _disk(unit.parameters, 0, phase, rates)
    if tier is Tier.DISK and unit.update_seconds:
        apart = way.update_in is Phase.UPDATE or not way.slots_in_update
        yield from _disk(unit.parameters if apart else 0, unit.parameters, way.update_in, rates)
        if not apart and way.slots < 3:  # the next unit waits for the slot that is being written back
            yield Load(way.update_in, Resource.COMPUTE, unit.parameters * rates.disk_write)


def _gradient_loads(unit: UnitNeeds, tier: Tier, rates: Rates, way: Way) -> Iterator[Load]:
    if tier is not Tier.DEVICE:
        yield from _link(unit.gradients, Phase.BACKWARD, rates)
    if tier is Tier.DISK:
        yield from _disk(0, unit.gradients, Phase.BACKWARD, rates)
        yield from _disk(unit.gradients, 0, way.update_in, rates)


def _optimizer_loads(unit: UnitNeeds, tier: Tier, rates: Rates, way: Way) -> Iterator[Load]:
    if tier is not Tier.DEVICE:
        yield Load(way.update_in, Resource.HOST, unit.host_update_seconds)
    if tier is Tier.DISK:
        yield from _disk(unit.optimizer, unit.optimizer, way.update_in, rates)
        yield Load(way.update_in, Resource.COMPUTE, -(-unit.parameters // way.chunk_bytes) * _CHUNK_SECONDS)


def _activation_option(unit: UnitNeeds, policy: str, rates: Rates, tiers: tuple[Tier, ...]) -> Option:
    near = Tier.DEVICE if Tier.DEVICE in tiers else Tier.HOST
    if policy == "keep":
        fresh = Load(Phase.FORWARD, Resource.COMPUTE, unit.activations * rates.fresh)
        return Option(Kind.ACTIVATIONS, policy, near, unit.activations, Lasting.FROM_FORWARD, (fresh,) if rates.fresh else ())
    if policy == "recompute":
        loads = (Load(Phase.BACKWARD, Resource.COMPUTE, unit.forward_seconds),)  # the gather of backward serves both
        again = max(unit.activations - unit.inputs, 0)
        return Option(Kind.ACTIVATIONS, policy, near, unit.inputs, Lasting.FROM_FORWARD, loads, again)
    tier = Tier.HOST if policy == "host" else Tier.DISK
    loads = [*_link(unit.activations, Phase.FORWARD, rates), *_link(unit.activations, Phase.BACKWARD, rates)]
    loads += [Load(phase, Resource.COMPUTE, unit.activations * rates.spill) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    if tier is Tier.DISK:
        loads += _disk(0, unit.activations, Phase.FORWARD, rates)
        loads += _disk(unit.activations, 0, Phase.BACKWARD, rates)
    return Option(Kind.ACTIVATIONS, policy, tier, unit.activations, Lasting.FROM_FORWARD, tuple(loads))


def _disk(read: int, written: int, phase: Phase, rates: Rates) -> Iterator[Load]:
    seconds = read * rates.disk_read + written * rates.disk_write
    yield Load(phase, Resource.DISK, seconds)
    yield Load(phase, Resource.COMPUTE, seconds * rates.disk_busy)


def _link(nbytes: int, phase: Phase, rates: Rates) -> Iterator[Load]:
    if rates.link is not None:
        yield Load(phase, Resource.LINK, nbytes * rates.link)
