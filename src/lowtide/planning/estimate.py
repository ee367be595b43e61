"""From a model and a machine to seconds and bytes: what the programme is given, and what it need not place.

Seconds are those of the kernels (spec/probe_step.py), divided by what a step of a small transformer reached of them on this
machine. Nothing is fitted to the model that is planned; benchmarks/plan.py measures how far off the sum is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.planning.formulas import KindBytes, UnitBytes, unit_from_facts
from lowtide.planning.options import Load, Phase, Rates, Resource, UnitNeeds
from lowtide.spec.hardware import Disk, Hardware, Wire
from lowtide.spec.model import ModelSpec, UnitFacts, Work
from lowtide.spec.probe_step import seconds_of
from lowtide.stages import Stage

PROCESS_BYTES = 240 << 20
"""Python, torch and its threads, before there is a model."""
_SPILL_BANDWIDTH = 3e9
_OF_DATA_SHEET = 0.5
"""What large transformers usually reach of the peak that a data sheet gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a machine that one rank has."""

    hardware: Hardware
    world_size: int
    local_ranks: int

    @property
    def hosts(self) -> int:
        return -(-self.world_size // self.local_ranks)

    @property
    def separate(self) -> bool:
        """Whether compute has memory of its own."""
        return self.hardware.compute.memory_bytes is not None

    @property
    def cores_shared_by(self) -> int:
        """Ranks that divide one processor between them; an accelerator is a rank's own."""
        return 1 if self.separate else self.local_ranks

    def seconds(self, work: Work, dtype: str) -> float:
        """Of all kernels; ranks that share a processor wait for each other, but each starts its own."""
        compute = self.hardware.compute
        busy = seconds_of(replace(work, operations=0), compute, dtype) / self._reached
        return busy * self.cores_shared_by + work.operations * compute.op_seconds

    @property
    def _reached(self) -> float:
        """The part of the speed of its kernels that a model reaches: a probe measures it, a data sheet promises more."""
        measured = self.hardware.source.startswith(("measured", "assumed"))
        return self.hardware.compute.reached if measured else _OF_DATA_SHEET

    def moved_seconds(self, nbytes: float) -> float:
        """For a kernel that does nothing but read and write so many bytes."""
        return nbytes / self.hardware.compute.bandwidth * self.cores_shared_by

    def host_seconds(self, nbytes: float) -> float:
        """The same on the host's processor beside a device; a copy counts its bytes once, a kernel both ways."""
        return nbytes / (2 * self.hardware.host_bandwidth) * self.local_ranks if self.separate else 0.0

    @property
    def wire(self) -> Wire:
        """What one rank has of the slowest wire that a collective passes; ranks share the adapters of their host."""
        between = self.hardware.between
        if self.hosts == 1 or between is None:
            return self.hardware.inside
        return replace(between, bandwidth=between.bandwidth / self.local_ranks)

    def collective_seconds(self, nbytes: int, transfers: int = 1) -> float:
        """``transfers`` exchanges in which every rank gets ``nbytes`` from all the others together."""
        if self.world_size == 1 or not nbytes:
            return 0.0
        return transfers * (self.wire.latency + nbytes * (1 - 1 / self.world_size) / self.wire.bandwidth)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of a host hold one copy of their shards together, see runtime/common_homes.py."""
        return not self.separate and self.local_ranks > 1 and self.local_ranks * self.hosts == self.world_size

    @property
    def copies(self) -> int:
        """How many hosts have a copy of parameters that are sharded."""
        return self.hosts if self.shares_memory else 1

    def between_hosts_seconds(self, nbytes: int) -> float:
        """Every byte crosses the network once, and all ranks of a host share in it."""
        between = self.hardware.between
        if self.hosts == 1 or between is None or not nbytes:
            return 0.0
        return between.latency + nbytes * (1 - 1 / self.hosts) / between.bandwidth

    def gather_seconds(self, nbytes: int) -> tuple[float, float]:
        """To have a sharded unit whole in forward, and again in backward."""
        if self.shares_memory:
            return self.between_hosts_seconds(nbytes), 0.0
        seconds = self.collective_seconds(nbytes)
        return seconds, seconds

    def reduce_seconds(self, nbytes: int, transfers: int) -> float:
        """To add gradients; ``transfers`` is 2 if every rank gets the whole sum."""
        if not self.shares_memory or not nbytes:
            return self.collective_seconds(nbytes, transfers)
        # Scaled into the window, and every rank's piece of it added up; each is a read and a write.
        return self.moved_seconds(2 * (1 + transfers) * nbytes) + transfers * self.between_hosts_seconds(nbytes)


def rates_of(share: Share, disk: Disk | None) -> Rates:
    """Seconds per byte for one rank, all ranks of a host moving bytes at once."""
    link = share.hardware.link if share.separate else None
    busy = 0.0 if share.separate else 1.0
    rates = disk_rates([disk], share.local_ranks) if disk is not None else Rates()
    return replace(
        rates,
        disk_busy=rates.disk_busy * busy,
        link=1 / link.bandwidth if link is not None else None,
        network_busy=busy,
        fresh=0.0 if disk is None or share.separate else share.hardware.compute.fault_seconds * share.cores_shared_by,
    )


def disk_rates(disks: Sequence[Disk], ranks: int) -> Rates:
    """Over all folders together, all ranks of a host at once, where the processor that computes also moves the bytes."""
    read, write, mixed = (sum(getattr(d, kind) for d in disks) for kind in ("read", "write", "mixed"))
    # Reads and writes at once get another rate than one after the other would; both are charged by that.
    together = 2 / (1 / read + 1 / write) / mixed
    return Rates(
        disk_read=ranks * together / read,
        disk_write=ranks * together / write,
        disk_busy=sum(d.busy for d in disks) / len(disks),
        spill=1 / _SPILL_BANDWIDTH,
    )


def needs_of(model: ModelSpec, share: Share, stage: Stage, kinds: KindBytes) -> tuple[UnitNeeds, ...]:
    """Every unit's bytes on one rank and the seconds it takes there."""
    return tuple(_unit_needs(u, model, share, stage, kinds) for u in model.units)


def _unit_needs(facts: UnitFacts, model: ModelSpec, share: Share, stage: Stage, kinds: KindBytes) -> UnitNeeds:
    sizes = unit_from_facts(facts, stage, share.world_size, kinds)
    updated = -(-facts.trained_numel // (share.world_size if stage.optimizer else 1))
    moved = updated * (2 * kinds.parameters + kinds.gradients + 2 * kinds.optimizer)
    gather, gather_again = share.gather_seconds(sizes.whole) if stage.parameters else (0.0, 0.0)
    reduce = share.reduce_seconds(sizes.reduction, 1 if stage.gradients else 2)
    publish = share.collective_seconds(sizes.whole) if stage.optimizer and not stage.parameters else 0.0
    return UnitNeeds(
        name=facts.name,
        whole=sizes.whole,
        parameters=sizes.parameters * (share.copies if stage.parameters else 1),
        gradients=sizes.gradients,
        optimizer=sizes.optimizer,
        activations=sizes.activations,
        inputs=sizes.inputs,
        forward_seconds=share.seconds(facts.forward, model.dtype),
        backward_seconds=share.seconds(facts.backward, model.dtype),
        update_seconds=share.moved_seconds(moved),
        host_update_seconds=share.host_seconds(moved),
        forward_network_seconds=gather,
        backward_network_seconds=gather_again + reduce,
        update_network_seconds=publish,
    )


def with_part(unit: UnitNeeds, stage: Stage, times: float) -> UnitNeeds:
    """On a rank whose part of what is sharded is ``times`` an equal one."""
    return replace(
        unit,
        parameters=_times(unit.parameters, times if stage.parameters else 1.0),
        gradients=_times(unit.gradients, times if stage.gradients else 1.0),
        optimizer=_times(unit.optimizer, times if stage.optimizer else 1.0),
        update_seconds=unit.update_seconds * (times if stage.optimizer else 1.0),
    )


def _times(nbytes: int, times: float) -> int:
    return nbytes if times == 1.0 else math.ceil(nbytes * times)


def outside_loads(model: ModelSpec, share: Share) -> tuple[Load, ...]:
    """What a step computes outside of units."""
    passes = (Phase.FORWARD, model.outside_forward), (Phase.BACKWARD, model.outside_backward)
    return tuple(Load(phase, Resource.COMPUTE, share.seconds(work, model.dtype)) for phase, work in passes)


WINDOW_BYTES = 4 << 20
"""What ranks of one host reduce at once, see comm/local.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Memory that passes bytes through, of one rank."""

    slots: int
    """Bytes for whole units."""
    buffers: int
    """For the update by chunks, and for reductions."""
    in_flight: int
    """Whole gradients on their way."""
    transient: int
    """What kernels hold for a moment, and what is saved outside of units."""

    @property
    def total(self) -> int:
        return self.slots + self.buffers + self.in_flight + self.transient


def working_of(
    units: Sequence[UnitBytes],
    model: ModelSpec,
    share: Share,
    *,
    slots: int,
    chunk_bytes: int,
    kinds: KindBytes,
    gradients_pass: bool = False,
) -> Working:
    """For ``slots`` whole units and chunks of ``chunk_bytes`` of parameters. ``gradients_pass``: a gradient does not stay where
    autograd put it: it is copied to where it lives, or used up by an update in backward."""
    largest, world_size = max((u.whole for u in units), default=0), share.world_size
    # To send from and to receive in; where all ranks share memory, one window serves for both.
    windows = share.shares_memory and share.hosts == 1
    reductions = 0 if world_size == 1 else 1 if windows else 2
    reduction = reductions * max((u.reduction for u in units), default=0)
    if windows:  # they are as large as a bucket; what is put on shelves is reduced chunk by chunk, one of every rank
        reduction = min(
            reduction, max(WINDOW_BYTES, world_size * chunk_bytes * kinds.reduction // kinds.parameters if slots else 0)
        )
    chunk = chunk_bytes * kinds.total // kinds.parameters
    largest_update = max((u.optimizer + u.gradients for u in units), default=0)
    buffers = min(largest_update + 2 * chunk, 8 * chunk) if slots else 0
    passing = 2 if world_size > 1 else 1 if slots or gradients_pass else 0
    local = max((u.local_gradients for u in units), default=0) * passing
    transient = max(max((u.transient for u in units), default=0), model.outside_transient_bytes) + model.outside_bytes
    sharers = share.local_ranks if share.shares_memory else 1  # a unit is whole once per host
    return Working(slots=slots * largest // sharers, buffers=buffers + reduction, in_flight=local, transient=transient)
