"""Carries out a placement, and makes a better one when a step has shown more or the world has changed.

The first step runs with as little in memory as possible, because what its activations take is not known. After it, and after
the next few, the measured peak says how much of the budget is left, and the programme places the rest. From then on the
placement stays until it does not hold any more: a peak above the budget, another number (``lowtide.set_memory``), a machine
that leaves less memory, a disk that has become slower or faster. Bytes move at step boundaries only, and never change a bit.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from lowtide.config import Config
from lowtide.planning.options import Rates, Tier
from lowtide.planning.placement import (
    Forecast,
    Needs,
    Placement,
    UnitPlacement,
    after_measuring,
    arenas,
    as_it_is,
    at_start,
    refuse_infeasible,
    slack_of,
)
from lowtide.runtime.budget import Budget
from lowtide.runtime.clock import StepClock
from lowtide.runtime.conditions import DiskSpeed, memory_allowed
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grads import Grads
from lowtide.runtime.guard import ActivationGuard
from lowtide.runtime.needs import (
    backward_alone,
    bytes_of_their_own,
    needs_at_start,
    with_gradients_that_stay,
    with_measurements,
    with_rates,
)
from lowtide.runtime.residency import Residency
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.shared_slots import SharedSlots
from lowtide.runtime.switching import Reason, switch_between
from lowtide.runtime.unit import Unit
from lowtide.runtime.update import Update
from lowtide.tiers.device import Memory
from lowtide.tiers.store import Store

_log = logging.getLogger("lowtide")

_LEARNING_STEPS = 3
_POLICIES = ("keep", "recompute", "disk", "host")
_MICRO = 1_000_000
_ATTO = 10**18  # seconds per byte as whole numbers
_NOISE = 0.02  # of the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelves:
    """Those who have bytes that can move."""

    residency: Residency
    grads: Grads
    update: Update
    settle: Callable[[], None]
    """Does what was put off: it needs bytes where they are."""

    def move(self, unit: Unit, kind: str, store: Store | None) -> None:
        """Bring one kind of bytes of ``unit`` into ``store``, or into memory (None)."""
        if kind == "parameters":
            self.residency.move_home(unit, store)
        elif kind == "gradients" and unit in self.grads.shelves:
            self.grads.shelves[unit].move(store)
        elif kind == "optimizer" and unit in self.update.streams:
            self.update.streams[unit].move(store)


class Placer:
    """Where every unit's bytes live now, and why."""

    def __init__(
        self, units: Sequence[Unit], config: Config, *, budget: Budget, store: Store | None, memory: Memory, exchange: Exchange
    ) -> None:
        self._units, self._config, self._budget = units, config, budget
        self._store, self._memory, self._exchange = store, memory, exchange
        named = [config.activations.of(u.name) for u in units]
        # Without a device of its own, the host is where activations are anyway.
        self._policies = named if memory.device.separate else ["keep" if p == "host" else p for p in named]
        self._needs: Needs | None = None
        self._base = 0  # what the process uses beside the model
        self._to_learn = _LEARNING_STEPS  # steps after which the placement is made anew without another reason
        self._local_ranks = 1
        self._began_tidy = True  # this step, with a heap that had nothing freed in it
        self._asked = budget.limit  # what the caller allows; the machine may leave less
        self._changed: str | None = None  # why the placement has to be made anew, if it has
        self._speed: DiskSpeed | None = None
        self.shared_slots: SharedSlots | None = None
        """Those that ranks of this host have together; None: each has its own."""
        self.clock = StepClock()
        self.forecast: Forecast | None = None
        """What the placement in force should take; None before the first step."""
        self.why = ""
        """Why the placement in force was made; empty while learning."""
        self.step_seconds: float | None = None
        """Measured, of the last step."""
        keep = ("keep" if p == "auto" else p for p in self._policies)
        self.placement = Placement(tuple(UnitPlacement(Tier.HOST, Tier.HOST, Tier.HOST, p) for p in keep), None, None)
        self.guard = ActivationGuard(
            units,
            self._policies,
            lambda unit: self.placement.units[unit.index].activations,
            budget=budget,
            may_spill=store is not None,
        )

    # -- before the first step ----------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer | None, *, ranks: int, local_ranks: int, hosts: int) -> None:
        """Decide what lives where; raises if nothing fits. ``hosts``: how many have a copy of the parameters."""
        if self._budget.limit is None:
            return
        self._local_ranks = local_ranks
        self.guard.alone = ranks == 1
        budget = -self._largest([-self._budget.limit])[0]
        self._speed = DiskSpeed(self._config.disk, self._store, ranks=local_ranks)
        needs = needs_at_start(
            self._units,
            self._config,
            optimizer,
            budget=budget,
            ranks=ranks,
            hosts=hosts,
            slot_sharers=self.shared_slots.sharers if self.shared_slots is not None else 1,
        )
        self._use_needs(with_rates(needs, self._speed.rates))
        base = max(0, self._budget.settle() - bytes_of_their_own(self._units))
        self._base = self._largest([base])[0]
        self._use(at_start(needs, self._base, self._policies))

    @property
    def bytes_on_disk(self) -> int:
        """What is to be kept on disk as things are placed now, of all units; 0 if that was not worked out."""
        if self._needs is None or self._store is None:
            return 0
        kinds = ("parameters", "optimizer") if self._config.update.in_backward else ("parameters", "gradients", "optimizer")
        pairs = zip(self._needs.units, self.placement.units, strict=True)
        return sum(getattr(need, kind) for need, place in pairs for kind in kinds if getattr(place, kind) is Tier.DISK)

    def _use_needs(self, needs: Needs) -> None:
        self._needs = self.guard.needs = needs
        self._budget.margin = needs.slack

    def _use(self, placement: Placement) -> None:
        self.placement = placement
        self._memory.buffers.capacity = placement.buffer_bytes
        if not self._memory.device.separate:
            self._memory.slots.capacity = placement.slot_bytes
        if self.shared_slots is not None:
            self.shared_slots.capacity = placement.slot_bytes

    def store_for(self, unit: Unit, kind: str) -> Store | None:
        """The store that holds a kind of bytes of ``unit``; None for memory."""
        if self._store is None:
            return None
        if self._needs is None:
            return self._store  # no budget: a caller who gives a disk and no number gets everything there
        return self._store if getattr(self.placement.units[unit.index], kind) is Tier.DISK else None

    # -- between steps ------------------------------------------------------------------------------------------------

    @property
    def steady(self) -> bool:
        """Whether bytes stay where they are from now on, unless something changes."""
        return self._needs is None or not self._to_learn

    def set_memory(self, limit: int) -> None:
        """From the next step on this rank may use ``limit`` bytes. Raises, and changes nothing, if the model cannot be trained
        in that."""
        if self._needs is not None:
            refuse_infeasible(replace(self._needs, budget=limit), self._base)
            self._changed = f"the caller allows {_mib(limit)} instead of {_mib(self._needs.budget)}"
        self._asked = limit

    def before_update(self) -> None:
        """All units are about to be updated; buffers, and in the first step without a disk states, may not be there yet."""
        needs = self._needs
        states = sum(u.optimizer for u in needs.units) if needs is not None and not needs.has_disk and not self.forecast else 0
        self._budget.make_room(self._unused_room() + states)
        self._budget.look("update")

    def after_step(self, saved: SavedViews, shelves: Shelves, *, put_off: bool) -> None:
        """Learn from the step, and move what should live elsewhere. ``put_off``: its update comes with the next forward pass,
        whose first units leave room for its buffers."""
        forward, backward = self.clock.forward, self.clock.backward
        self.step_seconds = self.clock.end_step()
        if self._needs is None:
            return
        self.guard.note(saved)
        self._budget.look(None)
        if self.guard.learning:
            self.guard.learning = False
            self._budget.forget_growth()  # of the update, too: the states that the first one made are not made again
        if self._to_learn == _LEARNING_STEPS - 1:
            self._fit_buffers(self._needs)
            self._budget.read()
        stay, shelves.grads.kept_in_forward = shelves.grads.kept_in_forward, None
        peak = self._budget.needed + (0 if put_off else self._unused_room())
        peak = self._learn(self._needs, peak, forward, backward, stay=stay)
        why = self._why_anew(self._needs, peak)
        if why is not None:
            self._place_anew(self._needs, why, peak, shelves)
        self.guard.kept.clear()
        self._to_learn = max(0, self._to_learn - 1)
        self._began_tidy = not self.steady
        self._memory.buffers.most_bytes = self._memory.buffers.reserved_bytes
        self._budget.new_step(tidy=self._began_tidy)

    def apply_now(self, shelves: Shelves) -> None:
        """Between two steps: make the placement anew if the caller has set another number."""
        if self._needs is None or self._changed is None or self.forecast is None:
            return  # or after the first step, which shows what there is to place
        why, self._changed = self._changed, None
        self._place_between_steps(self._needs, self._asked or self._needs.budget, Reason(why), self.forecast, shelves)

    def before_forward(self, shelves: Shelves) -> None:
        """A control group that has become smaller since the last step would not survive the next one in this placement. On
        several ranks that waits for the end of a step, the only place where all are sure to meet."""
        if self._needs is None or self.forecast is None or not self.guard.alone:
            return
        if self._needs.budget - self._allowed(self._needs) > _NOISE * self._needs.budget:
            self._budget.look_around()  # loader workers may have been started since the last step
            if self._needs.budget - (allowed := self._allowed(self._needs)) > _NOISE * self._needs.budget:
                why = Reason(_leaves(allowed, self._needs.budget))
                self._place_between_steps(self._needs, allowed, why, self.forecast, shelves)

    def _allowed(self, needs: Needs) -> int:
        """What this rank may use by its own reading of the limits."""
        return max(memory_allowed(needs.budget, self._budget.read(), ranks=self._local_ranks), self._least_limit)

    def _place_between_steps(self, needs: Needs, limit: int, why: Reason, forecast: Forecast, shelves: Shelves) -> None:
        peak = max(forecast.peak_bytes, self._budget.read())
        self._place_anew(self._limited(needs, limit), why, peak, shelves)
        self._began_tidy = True
        self._budget.new_step(tidy=True)

    def _learn(self, needs: Needs, peak: int, forward: Mapping[Unit, float], backward: float, *, stay: bool | None) -> int:
        """Remember the largest of every measurement over all ranks, so that all decide alike. Returns the peak."""
        policies = [place.activations for place in self._as_it_ran().units]
        backward = backward_alone(needs, policies, [forward.get(u, 0.0) for u in self._units], backward)
        seconds = [int(forward.get(u, 0.0) * _MICRO) for u in self._units]
        stays = needs.way.gradients_stay if stay is None else stay
        changes = [int(u in self.guard.changes) for u in self._units]
        numbers = [peak, int(stays), int(backward * _MICRO), *self.guard.activations, *seconds, *changes]
        peak, any_stay, micro, *rest = self._largest(numbers)
        needs = with_gradients_that_stay(needs, stay=bool(any_stay))
        count = len(self._units)
        self.guard.activations = rest[:count]
        self._never_again([unit for unit, changes in zip(self._units, rest[2 * count :], strict=True) if changes])
        measured = {u: s / _MICRO for u, s in zip(self._units, rest[count : 2 * count], strict=True) if s}
        self._use_needs(with_measurements(needs, self._units, self.guard.activations, measured, micro / _MICRO))
        return peak

    def _never_again(self, units: Sequence[Unit]) -> None:
        """The forward of ``units`` changes something on some rank: no rank plans any more to compute them again."""
        for unit in units:
            if self._policies[unit.index] == "auto":
                self._policies[unit.index] = "stay"
                if self.placement.units[unit.index].activations == "recompute":
                    self._note(unit, "activations", self.guard.kept.get(unit, "keep"))

    def _as_it_ran(self) -> Placement:
        """The placement in force, with what has become of activations instead."""
        units = list(self.placement.units)
        for unit, policy in self.guard.kept.items():
            if units[unit.index].activations == "recompute":
                units[unit.index] = replace(units[unit.index], activations=policy)
        return replace(self.placement, units=tuple(units))

    def _why_anew(self, needs: Needs, peak: int) -> Reason | None:
        """The reason to place anew, if there is one; the same on all ranks."""
        speed = self._speed.look(self.step_seconds) if self._speed is not None else None
        asked = self._asked or needs.budget
        allowed = memory_allowed(asked, self._budget.read(), ranks=self._local_ranks)
        less, other_speed = self._largest([asked - allowed, int(speed is not None)])
        limit = asked - less if less > _NOISE * asked else asked
        reason, self._changed = self._changed, None
        if reason is None and abs(limit - needs.budget) > _NOISE * asked:
            reason = _leaves(limit, needs.budget)
        if reason is not None:
            self._limited(needs, limit)
            return Reason(reason)
        too_much = peak > needs.budget - needs.slack // 2
        if other_speed:
            words = speed or "the disk of another rank gives another speed than before"
            return Reason(words, may_stay=not too_much and not self._to_learn)
        if too_much:
            if self._began_tidy:
                return Reason(f"a step took {_mib(peak)} of {_mib(needs.budget)}")
            self._to_learn = 2  # some of that is what the allocator keeps: one step without it, and then decide
            return None
        return Reason("") if self._to_learn else None

    @property
    def _least_limit(self) -> int:
        return self._base + slack_of(self._base)

    def _limited(self, needs: Needs, limit: int) -> Needs:
        """Hold another limit from now on, but never less than what the process has without a model."""
        limit = max(limit, self._least_limit)
        needs = replace(needs, budget=limit)
        self._use_needs(needs)
        self._budget.limit = limit
        slot_bytes, buffer_bytes = arenas(needs, self._base)
        self._use(replace(self.placement, slot_bytes=slot_bytes, buffer_bytes=buffer_bytes))
        self._trim_arenas()
        self._to_learn = _LEARNING_STEPS
        return needs

    def _place_anew(self, needs: Needs, why: Reason, peak: int, shelves: Shelves) -> None:
        shelves.settle()
        if self._speed is not None:
            needs = with_rates(needs, self._slowest(self._speed.rates))
            self._use_needs(needs)
        found, self.forecast = after_measuring(needs, peak, self._as_it_ran(), self._policies)
        if why.may_stay:
            found, self.forecast = self._if_it_pays(needs, why, peak, (found, self.forecast))
        placement = self._as_rank_0(found)  # also if it is the one in force, because moving does not pay there
        pairs = list(zip(self.placement.units, placement.units, strict=True))
        changed = sum(old != new for old, new in pairs)
        if why.may_stay and not changed:
            return
        self._budget.forget_growth({i for i, (old, new) in enumerate(pairs) if old.activations != new.activations})
        if why.words:
            _log.info("%s: %d of %d units are placed anew", why.words, changed, len(self._units))
        self._trim_arenas()  # what the old placement needed of them, this one may not, and bytes that move need room
        self._move_to(placement, shelves)
        self.why = why.words
        self._trim_arenas()
        shelves.residency.trim()

    def _if_it_pays(self, needs: Needs, why: Reason, peak: int, new: tuple[Placement, Forecast]) -> tuple[Placement, Forecast]:
        """``new``, or all as it is if what that saves does not pay for the bytes that would move."""
        now = self.placement, as_it_is(needs, peak, self.placement)
        switch = switch_between(needs, now, new)
        if switch.pays:
            return new
        _log.debug("%s: the placement stays as it is; %s", why.words, switch)
        return now

    def _as_rank_0(self, placement: Placement) -> Placement:
        """All ranks use one placement, also if a search that was stopped found different ones."""
        tiers = list(Tier)
        rows = [
            (tiers.index(u.parameters), tiers.index(u.gradients), tiers.index(u.optimizer), _POLICIES.index(u.activations))
            for u in placement.units
        ]
        first = self._exchange.notes("the placement", bytes(n for row in rows for n in row))[0]
        units = tuple(
            UnitPlacement(tiers[first[i]], tiers[first[i + 1]], tiers[first[i + 2]], _POLICIES[first[i + 3]])
            for i in range(0, len(first), 4)
        )
        return replace(placement, units=units)

    def _slowest(self, rates: Rates) -> Rates:
        """Of the disks of all ranks: a step lasts as long as that of the slowest."""
        read, write = self._largest([int(rates.disk_read * _ATTO), int(rates.disk_write * _ATTO)])
        return replace(rates, disk_read=read / _ATTO, disk_write=write / _ATTO)

    def _largest(self, numbers: list[int]) -> list[int]:
        """The largest of every number over all ranks."""
        layout = f"<{len(numbers)}q"
        everybody = self._exchange.notes("memory", struct.pack(layout, *numbers))
        return [max(row) for row in zip(*(struct.unpack(layout, note) for note in everybody), strict=True)]

    def _unused_room(self) -> int:
        """What the arenas may still take and have not taken yet."""
        slots, buffers, shared = self._memory.slots, self._memory.buffers, self.shared_slots
        of_buffers = _unused(buffers.capacity, buffers.reserved_bytes)
        if shared is None:
            return of_buffers + _unused(slots.capacity, slots.reserved_bytes)
        return of_buffers + _unused(shared.capacity, shared.taken_bytes) // shared.sharers

    def buffers_within_room(self) -> None:
        """Updates that were put off run beside activations: their buffers take what those leave, two chunks at least."""
        room, planned, buffers = self._budget.room(), self.placement.buffer_bytes, self._memory.buffers
        if room is not None and planned is not None and self._needs is not None:
            buffers.capacity = min(planned, max(2 * self._needs.chunk_bytes, buffers.reserved_bytes + room))

    def buffers_as_planned(self) -> None:
        """Nothing is put off any more."""
        self._memory.buffers.capacity = self.placement.buffer_bytes

    def _trim_arenas(self) -> None:
        self._memory.slots.trim()
        self._memory.buffers.trim()

    def _fit_buffers(self, needs: Needs) -> None:
        """Two steps have shown how many buffers the update uses: what it leaves is better used for bytes that stay."""
        now, used = self.placement.buffer_bytes, self._memory.buffers.most_bytes
        if now is not None:
            self._use(replace(self.placement, buffer_bytes=min(now, max(used, 2 * needs.chunk_bytes))))

    def _move_to(self, placement: Placement, shelves: Shelves) -> None:
        """Move shelf by shelf, and note each move when it is done: an error leaves a table that is true."""
        self._budget.make_room(self._coming(placement))
        # What leaves memory goes first, so that there is room for what comes.
        for target in (Tier.DISK, Tier.HOST):
            store = self._store if target is Tier.DISK else None
            for unit in self._units:
                now, new = self.placement.units[unit.index], placement.units[unit.index]
                for kind in ("parameters", "gradients", "optimizer"):
                    if getattr(now, kind) is not getattr(new, kind) is target:
                        shelves.move(unit, kind, store)
                        self._note(unit, kind, target)
            self._memory.homes.trim()
        self.placement = placement

    def _coming(self, placement: Placement) -> int:
        """Bytes that another placement has in memory and the one in force has not."""
        total, needs = 0, self._needs.units if self._needs is not None else ()
        for unit, now, new in zip(needs, self.placement.units, placement.units, strict=False):
            kinds = (k for k in ("parameters", "gradients", "optimizer") if getattr(new, k) is Tier.HOST is not getattr(now, k))
            total += sum(getattr(unit, kind) for kind in kinds)
        return total

    def _note(self, unit: Unit, kind: str, where: Tier | str) -> None:
        units = list(self.placement.units)
        units[unit.index] = replace(units[unit.index], **{kind: where})
        self.placement = replace(self.placement, units=tuple(units))

    def describe_activations(self) -> str:
        """``keep``, or ``keep 20, recompute 6``."""
        names = [p.activations for p in self.placement.units]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        return names[0] if len(counts) == 1 else ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _unused(capacity: int | None, taken: int) -> int:
    return max(0, capacity - taken) if capacity is not None else 0


def _leaves(limit: int, before: int) -> str:
    return f"the machine leaves {_mib(limit)}, the placement was made for {_mib(before)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
