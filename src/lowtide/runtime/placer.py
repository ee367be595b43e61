"""Carries out a placement, and makes a better one from what a step has shown. Bytes move at step boundaries only.

The first step runs with as little in memory as possible, because what its activations take is not known. Afterwards the
measured peak says how much of the budget is left for units, gradients and states to stay in memory.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from lowtide.config import Config
from lowtide.errors import OverBudget
from lowtide.planning.placement import Needs, Placement, Tier, UnitNeeds, UnitPlacement, after_measuring, at_start
from lowtide.runtime.budget import Budget
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grads import Grads
from lowtide.runtime.probe import large_states
from lowtide.runtime.residency import Residency
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.unit import Unit
from lowtide.runtime.update import Update
from lowtide.spec.limits import Mappings
from lowtide.tiers.device import Memory
from lowtide.tiers.store import Store

_log = logging.getLogger("lowtide")

_LEARNING_STEPS = 3  # after so many steps a placement is only changed if it does not hold


class Placer:
    """Where every unit's bytes live now, and why."""

    def __init__(
        self, units: Sequence[Unit], config: Config, *, budget: Budget, store: Store | None, memory: Memory, exchange: Exchange
    ) -> None:
        self._units, self._config, self._budget = units, config, budget
        self._store, self._memory, self._exchange = store, memory, exchange
        self._alone = True
        named = [config.activations.of(u.name) for u in units]
        # Without a device of its own, the host is where activations are anyway.
        self._policies = named if memory.device.separate else ["keep" if p == "host" else p for p in named]
        self._needs: Needs | None = None
        self._activations = [0] * len(units)
        self._steps = 0
        self._first_inputs = 0  # elements that went into the model in the first step
        self._growth = 1.0  # of the inputs of this pass over those
        self._spilling = False
        tier = Tier.HOST
        keep = ["keep" if p == "auto" else p for p in self._policies]
        self.placement = Placement(tuple(_unit_placement(tier, p) for p in keep), None, None)

    # -- before the first step ----------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer | None, group_sizes: tuple[int, int]) -> None:
        """Decide what lives where; raises if nothing fits. ``group_sizes``: (ranks that share the model, ranks in all)."""
        if self._budget.limit is None:
            return
        self._alone = group_sizes[1] == 1
        states = _state_bytes(self._units, optimizer)
        rank_units: list[UnitNeeds] = []
        for unit, optimizer_bytes in zip(self._units, states, strict=True):
            shard = unit.updates[1] - unit.updates[0]
            home = shard if self._config.stage.parameters else unit.layout.nbytes
            trained = any(p.requires_grad for p in unit.params)
            width = max((d.gradient.itemsize / d.param.itemsize for d in unit.dtypes), default=1.0)
            gradients = int((shard if self._config.stage.gradients else unit.layout.nbytes) * width) if trained else 0
            whole = unit.layout.nbytes if self._config.stage.parameters else 0
            rank_units.append(UnitNeeds(unit.name, whole, home, gradients, optimizer_bytes))
        kinds = 2 + max((s / max(u.parameters, 1) for s, u in zip(states, rank_units, strict=True)), default=0)
        self._needs = Needs(
            units=tuple(rank_units),
            budget=-self._largest([-self._budget.limit])[0],
            chunk_bytes=int(self._config.update.chunk_bytes * kinds),
            in_flight_units=1 if group_sizes[1] == 1 else 3,
            has_disk=self._store is not None,
            in_backward=self._config.update.in_backward,
            movable=self._movable(),
        )
        self._budget.margin = self._needs.slack
        base = max(0, self._budget.settle() - _bytes_of_their_own(self._units))
        base = self._largest([base])[0]
        self._use(at_start(self._needs, base, self._policies))

    def _movable(self) -> frozenset[str]:
        if self._store is None:
            return frozenset()
        stage, gradients = self._config.stage, not self._config.update.in_backward
        kinds = {"optimizer": True, "parameters": stage.parameters, "gradients": stage.gradients and gradients}
        return frozenset(kind for kind, can_move in kinds.items() if can_move)

    def _use(self, placement: Placement) -> None:
        self.placement = placement
        self._memory.buffers.capacity = placement.buffer_bytes
        if not self._memory.device.separate:
            self._memory.slots.capacity = placement.slot_bytes

    def store_for(self, unit: Unit, kind: str) -> Store | None:
        """The store that holds a kind of bytes of ``unit``; None for memory."""
        if self._store is None:
            return None
        if self._needs is None:
            return self._store  # no budget: a caller who gives a disk and no number gets everything there
        return self._store if getattr(self.placement.units[unit.index], kind) is Tier.DISK else None

    # -- during a step ------------------------------------------------------------------------------------------------

    def enter_model(self, elements: int) -> None:
        """A forward pass begins with so many elements of input."""
        if self._steps == 0:
            self._first_inputs = max(self._first_inputs, elements)
        self._growth = elements / max(self._first_inputs, 1)
        self._budget.read()

    def should_recompute(self, unit: Unit) -> bool:
        """Asked when a unit's forward begins: whether its activations are to be computed again in backward."""
        policy = self._policy_now(unit)
        self._spilling = policy in ("disk", "host")
        return policy == "recompute"

    def should_spill(self) -> bool:
        """Asked for every tensor that autograd saves in the unit asked for last."""
        return self._spilling

    def outside_units(self) -> None:
        """No unit computes any more."""
        self._spilling = False

    def _policy_now(self, unit: Unit) -> str:
        policy = self.placement.units[unit.index].activations
        if self._policies[unit.index] != "auto" or self._needs is None:
            return policy
        left = self._budget.left()
        if left is None or not self._alone or (self._steps and self._growth <= 1.0):
            return policy  # the placement was made for this, and on several ranks it must be the same on all
        expected = int((self._activations[unit.index] or max(self._activations)) * self._growth)
        reserve = self._needs.largest + self._needs.slack // 2
        if policy == "keep" and expected <= left - reserve - int(max(self._activations) * self._growth):
            return "keep"
        if expected <= left - reserve:
            return "recompute"
        if self._store is not None:
            return "disk"
        raise OverBudget("activations of the next unit", self._budget.read() + expected, self._budget.limit or 0, unit.name)

    def note_activations(self, saved: SavedViews) -> None:
        """A pass is over: remember what each unit's activations take."""
        for unit in self._units:
            self._activations[unit.index] = max(self._activations[unit.index], saved.saved_bytes.get(unit, 0))
        saved.saved_bytes.clear()

    # -- between steps ------------------------------------------------------------------------------------------------

    @property
    def steady(self) -> bool:
        """Whether bytes stay where they are from now on, unless the budget is overdrawn."""
        return self._needs is None or self._steps >= _LEARNING_STEPS

    def after_step(
        self, saved: SavedViews, residency: Residency, grads: Grads, update: Update, settle: Callable[[], None]
    ) -> None:
        """Learn from the step, and move what should live elsewhere."""
        self._steps += 1
        if self._needs is None:
            return
        self.note_activations(saved)
        self._budget.read()
        peak, *self._activations = self._largest([self._budget.peak + self._unused_room(), *self._activations])
        overdrawn = peak > self._needs.budget - self._needs.slack // 2
        if self._steps <= _LEARNING_STEPS or overdrawn:
            settle()  # what is put off needs bytes where they are
            measured = zip(self._needs.units, self._activations, strict=True)
            self._needs = replace(self._needs, units=tuple(replace(u, activations=a) for u, a in measured))
            self._move_to(after_measuring(self._needs, peak, self.placement, self._policies), residency, grads, update)
        self._budget.new_step()

    def _largest(self, numbers: list[int]) -> list[int]:
        """The largest of every number over all ranks, so that all decide alike."""
        layout = f"<{len(numbers)}q"
        everybody = self._exchange.notes("memory", struct.pack(layout, *numbers))
        return [max(row) for row in zip(*(struct.unpack(layout, note) for note in everybody), strict=True)]

    def _unused_room(self) -> int:
        """What the arenas may still take and have not taken yet."""
        arenas = (self._memory.slots, self._memory.buffers)
        return sum(max(0, a.capacity - a.reserved_bytes) for a in arenas if a.capacity is not None)

    def _move_to(self, placement: Placement, residency: Residency, grads: Grads, update: Update) -> None:
        before, self.placement = self.placement, placement
        if self._store is None:
            return
        # What leaves memory goes first, so that there is room for what comes.
        for leaving in (Tier.DISK, Tier.HOST):
            store = self._store if leaving is Tier.DISK else None
            for unit, old, new in zip(self._units, before.units, placement.units, strict=True):
                if old.parameters is not new.parameters is leaving and self._config.stage.parameters:
                    residency.move_home(unit, store)
                if old.gradients is not new.gradients is leaving and unit in grads.shelves:
                    grads.shelves[unit].move(store)
                if old.optimizer is not new.optimizer is leaving and unit in update.streams:
                    update.streams[unit].move(store)
            self._memory.homes.trim()

    def describe_activations(self) -> str:
        """``keep``, or ``keep 20, recompute 6``."""
        names = [p.activations for p in self.placement.units]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        return names[0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _bytes_of_their_own(units: Sequence[Unit]) -> int:
    """What the parameters still take, as they were built; nothing if they were deferred to files, or are on no device."""
    mappings = Mappings()
    params = [p for unit in units for p in unit.params if not p.is_meta]
    return sum(p.nbytes for p in params if not mappings.is_file(p.data_ptr()))


def _unit_placement(tier: Tier, activations: str) -> UnitPlacement:
    return UnitPlacement(tier, tier, tier, activations)


def _state_bytes(units: Sequence[Unit], optimizer: Optimizer | None) -> list[int]:
    """Masters and optimizer states of every unit on this rank, in bytes."""
    if optimizer is None:
        return [0] * len(units)
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    known: dict[tuple[int, object], int] = {}
    out: list[int] = []
    for unit in units:
        total = 0
        for chunk in unit.chunks:
            for part in chunk.parts:
                param, dtypes = unit.params[part.index], unit.dtypes[part.index]
                group = group_of.get(param)
                if group is None or not dtypes.master.is_floating_point:
                    continue
                key = (id(group), dtypes.master)
                if key not in known:
                    states = large_states(optimizer, group, dtypes.master)
                    known[key] = sum(dtypes.moments.itemsize if s.dtype is dtypes.master else s.dtype.itemsize for s in states)
                master = dtypes.master.itemsize if dtypes.master is not dtypes.param else 0
                total += part.numel * (known[key] + master)
        out.append(total)
    return out
