"""The objects that belong to one sharded model: which there are, who knows whom, and how they start."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.comm.channel import Channel
from lowtide.comm.group import Group
from lowtide.config import Config
from lowtide.errors import DiskFull, Refused
from lowtide.runtime import evicted
from lowtide.runtime.activations import Activations
from lowtide.runtime.backward_update import BackwardUpdate
from lowtide.runtime.budget import Budget
from lowtide.runtime.buffers import Buffers
from lowtide.runtime.common_homes import CommonHomes
from lowtide.runtime.due import DueUpdate
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grad_facts import GradFacts
from lowtide.runtime.grad_store import ShelvedGrads
from lowtide.runtime.grads import Grads
from lowtide.runtime.initial import InitialValues
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.placer import Placer, Shelves
from lowtide.runtime.recompute import Pinning
from lowtide.runtime.residency import Residency
from lowtide.runtime.scale import LossScale
from lowtide.runtime.shared_slots import SharedSlots
from lowtide.runtime.stream import UnitStream
from lowtide.runtime.trace import Recording, Trace
from lowtide.runtime.unit import Unit, named
from lowtide.runtime.update import Update
from lowtide.runtime.usage import Usage
from lowtide.spec.limits import default_budget
from lowtide.spec.units import UnitSpec
from lowtide.tiers.device import Memory
from lowtide.tiers.disk import DiskStore, Folder
from lowtide.tiers.host import HostStore
from lowtide.tiers.store import Store, Traffic


class Verbs(evicted.Owner, Pinning, Protocol):
    """What the engine adds: answers for evicted parameters, and pins units."""


def refuse_unproven(compute: torch.device, config: Config) -> None:
    """Raise for what trains to wrong weights on an accelerator: bytes that leave its memory and come back.

    Copies there run on streams of their own, and nothing makes them wait yet for the kernels that still read what they write
    over. The emulated device of a CPU has no streams."""
    if compute.type == "cpu":
        return
    policies = {config.activations.policy, *(policy for _, policy in config.activations.units)}
    moved = sorted(policies & {"host", "disk"})
    asked = [name for name, given in (("disk=", config.disk), ("device_memory=", config.device_memory_bytes)) if given]
    asked += [f"activations={policy!r}" for policy in moved]
    if asked:
        raise Refused(
            f"{' and '.join(asked)} with a model on {compute}: copies to and from an accelerator are not ordered yet with the "
            f"kernels that use them, and weights would be wrong without an error. Train on the CPU, or keep everything on the "
            f"device: several ranks (stage=3), activations='recompute' or precision='bf16' make it smaller."
        )


def _compute_device(specs: Sequence[UnitSpec]) -> torch.device:
    """Where the model's parameters are; those without memory will be on the CPU."""
    device = specs[0].params[0].device if specs else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


class Assembly:
    """What the engine moves. Nothing here runs during a step."""

    recorder: Recording | None = None
    """Who writes down what happens, if anybody does."""

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[UnitSpec],
        config: Config,
        group: Group,
        channels: tuple[Channel, Channel],
        *,
        whole_parameters: bool = False,
    ) -> None:
        self.model, self.config, self.group = model, config, group
        self.gathers, self.reductions = channels
        self.exchange = Exchange(group, self.reductions)
        weakref.finalize(self, group.close)  # threads would keep a dropped model's group alive
        device = _compute_device(specs)
        refuse_unproven(device, config)
        shard = (group.shard.rank, group.shard.size)
        self.units = [Unit(i, spec, config, shard, whole_parameters=whole_parameters) for i, spec in enumerate(specs)]
        self.unit_of = {p: u for u in self.units for p in u.params}
        self.name_of = named(self.units)
        self.ledger, self.trace = Ledger(), Trace()
        self.memory = Memory.on(device, config.device_memory_bytes, offloads=bool(config.disk))
        self.homes, self.arena, self.buffers_arena = self.memory.homes, self.memory.slots, self.memory.buffers
        self.local_ranks = len(group.host_ranks)
        self.store: Store | None = _open_disk(_share_of_disk(config, self.local_ranks), group.rank)
        if self.store is not None:
            weakref.finalize(self, self.store.close)
        self.residency = Residency(
            self.units,
            group=group,
            channel=self.gathers,
            memory=self.memory,
            ledger=self.ledger,
            trace=self.trace,
            ahead=config.comm.prefetch,
        )
        self.grad_facts = GradFacts(group, self.exchange, config.stage, self.name_of)
        self.grads = Grads(
            self.units,
            stage=config.stage,
            group=group,
            channel=self.reductions,
            owner=self.grad_facts,
            in_backward=config.update.in_backward,
            ledger=self.ledger,
            trace=self.trace,
        )
        self.grad_facts.grads = self.grads
        self.grads.scratch = self.residency.scratch
        self.buffers = Buffers(model, group, self.gathers)
        self.scale = LossScale(config.precision.scale)
        self.update = Update(
            config=config,
            group=group,
            residency=self.residency,
            grads=self.grads,
            buffers=self.buffers_arena,
            ledger=self.ledger,
        )
        self.budget = self._budget_of_this_rank()
        self.placer = Placer(
            self.units, config, budget=self.budget, store=self.store, memory=self.memory, exchange=self.exchange
        )
        self.activations = Activations(
            self.residency, self.placer, self.budget, self._spill_store(), needed=self.needed_in_backward
        )
        self.due = DueUpdate(self.grads, self.residency, self.update, self.placer)
        self.backward_update: BackwardUpdate | None = None
        if config.update.in_backward:
            self.backward_update = BackwardUpdate(self.grads, self.residency, self.update, self.activations.saved)

    def _common_homes(self) -> CommonHomes | None:
        """Where ranks of one host hold one copy of their shards together, if they do."""
        if not self.config.stage.parameters or self.memory.homes.device.type != "cpu":
            return None
        memory = self.group.share_memory(CommonHomes.nbytes(self.units, self.group.shard.size), self.gathers)
        if memory is None:
            return None
        weakref.finalize(self, memory.segment.close)
        return CommonHomes(self.units, memory, group=self.group, channel=self.gathers)

    def _shared_slots(self) -> SharedSlots | None:
        """Where units that are on disk are whole, for all ranks of this host."""
        if self.store is None or self.memory.device.separate:
            return None
        memory = self.group.share_memory(SharedSlots.nbytes(self.units), self.gathers)
        if memory is None:
            return None
        weakref.finalize(self, memory.segment.close)
        return SharedSlots(self.units, memory, ledger=self.ledger)

    def _spill_store(self) -> Store | None:
        """Where activations go that leave the memory of compute."""
        to_host = self.memory.device.separate and "host" in {self.config.activations.of(u.name) for u in self.units}
        return HostStore() if to_host else self.store

    def needed_in_backward(self, unit: Unit) -> None:
        """Autograd unpacks a view of ``unit``'s parameters."""
        raise NotImplementedError

    def settle(self) -> None:
        """Somebody looks at parameters or states, or moves them: do what was put off."""
        raise NotImplementedError

    @property
    def shelves(self) -> Shelves:
        return Shelves(residency=self.residency, grads=self.grads, update=self.update, settle=self.settle)

    def take_over(self, optimizer: Optimizer | None, verbs: Verbs) -> None:
        """Take room for everything, take over the parameters, and make rank 0's values everybody's."""
        stage = self.config.stage
        common = self._common_homes()
        slots = self._shared_slots() if common is not None else None
        self.residency.share(common, slots)
        hosts = self.residency.copies
        self.placer.shared_slots = slots
        self.placer.begin(optimizer, ranks=self.group.size, local_ranks=self.local_ranks, hosts=hosts)
        try:
            if self.updates_by_chunks:
                for unit in self.units:
                    self._add_stream(unit)
            if optimizer is not None:
                self.reserve_states(optimizer)
            for unit in self.units:
                store = self.placer.store_for(unit, "parameters") if stage.parameters else None
                self.residency.reserve(unit, resident=not stage.parameters, store=store)
        except DiskFull as error:
            error.total_bytes = self.placer.bytes_on_disk
            raise
        initial = InitialValues(self.model, self.units, self.config.weights, self.group.rank, self.arena.device)
        evicted.register(self.unit_of, verbs)
        for unit in self.units:
            values = initial.of(unit)
            self.residency.take_over(unit, values)
            self.update.take_over(unit, values)
            del values
        if self.group.size > 1:
            self.buffers.send()
        if self.activations.handled:
            self.activations.install(self.model, self.units, verbs)
        self.budget.new_step(tidy=True)

    def _budget_of_this_rank(self) -> Budget:
        """The job's number, divided between its ranks on this host. With a disk and no number: what the machine leaves."""
        limit = self.config.memory_bytes
        if limit is None and self.config.disk:
            limit = default_budget()
        return Budget(
            None if limit is None else limit // self.local_ranks,
            shared=self.group.shared_memory,
            pools=[a for a in self.memory.passed_through if a.device.type == "cpu"],
            spare=self.buffers_arena.trim,
        )

    def _add_stream(self, unit: Unit) -> None:
        """Update ``unit`` by chunks, from and to wherever its bytes are."""
        places: Any = {"memory": self.homes, "buffers": self.buffers_arena}
        shelved = None
        if self.store is not None and self.config.stage.gradients and not self.config.update.in_backward:
            store = self.placer.store_for(unit, "gradients")
            shelved = self.grads.shelves[unit] = ShelvedGrads(unit, **places, store=store)
        store = self.placer.store_for(unit, "optimizer")
        self.update.streams[unit] = UnitStream(unit, self.residency, shelved, **places, store=store)

    def reserve_states(self, optimizer: Optimizer) -> None:
        """Take room for the states that ``optimizer`` will have."""
        for stream in self.update.streams.values():
            stream.reserve(optimizer)

    @property
    def handles_gradients(self) -> bool:
        """Whether gradients pass through us at all: on one rank, whole and in one dtype, they are autograd's own."""
        mixed = any(d.gradient is not d.param for u in self.units for d in u.dtypes)
        return self.group.size > 1 or self.config.stage.gradients or mixed or self.scale.used or self.config.update.in_backward

    @property
    def cut_parameters(self) -> set[nn.Parameter]:
        """The parameters that the optimizer sees in pieces, on any rank."""
        out: set[nn.Parameter] = set()
        for unit in self.units:
            if self.config.stage.optimizer:
                out |= {unit.params[i] for i in unit.layout.cut_between_ranks}
            if self.updates_by_chunks:
                out |= {unit.params[i] for i in unit.cut_by_chunks}
        return out

    @property
    def updates_by_chunks(self) -> bool:
        return self.store is not None or self.config.update.in_backward

    @property
    def shared_saved_bytes(self) -> int:
        """What this process maps of memory that other ranks of the host count."""
        taken, ranks = self.group.shared_memory()
        return taken - taken // ranks

    def usage(self) -> Usage:
        """What this rank uses of each tier."""
        traffic = self.store.traffic if self.store is not None else Traffic()
        limits, forecast = [f.limit for f in self.config.disk], self.placer.forecast
        return Usage(
            budget_bytes=self.budget.limit,
            host_bytes=self.budget.read(),
            disk_bytes=self.store.used_bytes if self.store is not None else 0,
            disk_limit_bytes=sum(n for n in limits if n is not None) if limits and None not in limits else None,
            disk_read_bytes=traffic.read_bytes,
            disk_written_bytes=traffic.written_bytes,
            disk_wait_seconds=traffic.wait_seconds,
            step_seconds=self.placer.step_seconds,
            predicted_seconds=forecast.seconds if forecast is not None else None,
            predicted_peak_bytes=forecast.peak_bytes if forecast is not None else None,
            activations=self.placer.describe_activations(),
            update=self.config.update.when,
        )


def _share_of_disk(config: Config, ranks: int) -> Config:
    """The folders' limits are the job's: each rank on this host gets its share."""
    folders = (replace(f, limit=None if f.limit is None else f.limit // ranks) for f in config.disk)
    return replace(config, disk=tuple(folders))


def _open_disk(config: Config, rank: int) -> Store | None:
    if not config.disk:
        return None
    return DiskStore([Folder(f.path, f.limit) for f in config.disk], rank=rank)
