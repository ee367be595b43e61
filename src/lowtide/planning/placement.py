"""What lives where on one rank while it runs: a frozen table, made anew when a step has shown more. No bytes move here.

Before the first step activations are not known, so as little as possible is in memory. Afterwards the measured peak says what
the process needs beside the bytes that can be placed, and the programme (``planning/programme.py``) places those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lowtide.errors import DoesNotFit
from lowtide.planning.options import Kind, Option, Rates, Tier, UnitNeeds, Way
from lowtide.planning.programme import Infeasible, Problem, Solution, evaluate, options_for, solve

_SLACK_SHARE = 0.02
_SLACK_BYTES = 48 << 20
_MOST_SLACK = 1 << 30
_NO_END = 1 << 60
_KINDS = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model needs on one rank, and what it may have."""

    units: tuple[UnitNeeds, ...]
    budget: int
    chunk_bytes: int
    """Of all kinds of one chunk together."""
    in_flight_units: int
    """Gradients and reduction buffers, in units of the largest unit."""
    has_disk: bool
    in_backward: bool
    slot_sharers: int = 1
    """Ranks that have their slots together."""
    movable: frozenset[Kind] = frozenset()
    """Kinds of bytes that can be on disk."""
    rates: Rates = field(default_factory=Rates)
    way: Way = field(default_factory=Way)

    @property
    def largest(self) -> int:
        return max((u.whole for u in self.units), default=0)

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states together."""
        gradients = [u.gradients for u in self.units]
        at_once = max(gradients, default=0) if self.in_backward else sum(gradients)
        return sum(u.parameters + u.optimizer for u in self.units) + at_once

    @property
    def slack(self) -> int:
        return slack_of(self.budget)


def slack_of(budget: int) -> int:
    """What the allocator, Python and the kernel take on top of what is counted: a fixed part and a share, which has an end."""
    return _SLACK_BYTES + min(int(budget * _SLACK_SHARE), _MOST_SLACK)


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """Where the kinds of bytes of one unit live, and what becomes of its activations: keep, recompute or disk."""

    parameters: Tier
    gradients: Tier
    optimizer: Tier
    activations: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The table, and the size of the two arenas that everything else passes through. Slots that ranks have together count as
    a whole."""

    units: tuple[UnitPlacement, ...]
    slot_bytes: int | None
    buffer_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a placement is expected to take: seconds of a step, and bytes of this rank at its fullest."""

    seconds: float
    peak_bytes: int


def working_bytes(needs: Needs, *, slots: int, chunks: int) -> int:
    """Memory that passes bytes through: slots, buffers, gradients on their way."""
    return needs.largest * slots // needs.slot_sharers + needs.largest * needs.in_flight_units + needs.chunk_bytes * chunks


def refuse_infeasible(needs: Needs, base: int) -> None:
    """Raise if the model cannot be trained in this budget whatever is moved to the disk. ``base`` is what the process has."""
    least = base + needs.slack + working_bytes(needs, slots=2, chunks=2)
    if needs.has_disk and least > needs.budget:
        fix = (
            f"The largest unit has {needs.largest / 2**20:.0f} MiB and needs two places, and the process has "
            f"{base / 2**20:.0f} MiB: raise memory to at least {least / 2**20:.0f} MiB, or split the unit (units=)"
        )
        raise DoesNotFit("host", least, needs.budget, fix)
    if not needs.has_disk and (needed := base + needs.slack + needs.states) > needs.budget:
        least_memory = f"raise memory to at least {needed / 2**20:.0f} MiB"
        fix = f"Give disk='/a/folder' to keep states there, use stage 3 on more ranks, or {least_memory}"
        raise DoesNotFit("host", needed, needs.budget, fix)


def at_start(needs: Needs, base: int, policies: Sequence[str]) -> Placement:
    """Before the first step, when activations are not known: as little as possible in memory, or all if that is little."""
    refuse_infeasible(needs, base)
    fits = base + needs.slack + needs.states + working_bytes(needs, slots=0, chunks=0) <= needs.budget // 2
    parameters, gradients, optimizer = (Tier.HOST if fits or kind not in needs.movable else Tier.DISK for kind in _KINDS)
    resolved = ("recompute" if p == "auto" else p for p in policies)
    units = tuple(UnitPlacement(parameters, gradients, optimizer, policy) for policy in resolved)
    slot_bytes, buffer_bytes = arenas(needs, base)
    return Placement(units, slot_bytes, buffer_bytes)


def arenas(needs: Needs, base: int) -> tuple[int | None, int | None]:
    """How large slots and buffers may become; ``None``: there is no need for an end."""
    if not needs.has_disk:
        return None, None
    free = needs.budget - needs.slack - base
    slots = 3 if working_bytes(needs, slots=3, chunks=4) <= 0.5 * free else 2
    # All that the update of one unit reads, so that it can be there before the unit is, and what is being written.
    largest_update = max((u.optimizer + (0 if needs.in_backward else u.gradients) for u in needs.units), default=0)
    wanted = max(largest_update + 2 * needs.chunk_bytes, 8 * needs.chunk_bytes)
    room = int(0.5 * free) - working_bytes(needs, slots=slots, chunks=0)
    return slots * needs.largest, max(2 * needs.chunk_bytes, min(wanted, room))


def after_measuring(needs: Needs, peak: int, now: Placement, policies: Sequence[str]) -> tuple[Placement, Forecast]:
    """After a step whose peak was ``peak`` with the placement ``now``: the best for the budget. Where nothing fits, as little
    as possible stays in memory; without a disk only activations can make room, and no more of them go than are too many. Of
    ``policies``, "auto" is open to all, "stay" to those that do not compute again."""
    placed = _placed(needs, now)
    beside = max(0, peak - placed.peaks[Tier.HOST])
    room = needs.budget - needs.slack - beside
    every = ("keep", "recompute", "disk") if needs.has_disk else ("keep", "recompute")
    open_to = {"auto": every, "stay": tuple(p for p in every if p != "recompute")}
    try:
        solution = solve(_problem(needs, room, [open_to.get(p, (p,)) for p in policies]))
    except Infeasible:
        over = peak - (needs.budget - needs.slack)
        solution = _least_in_memory(needs, policies) if needs.has_disk else _fewer_activations(needs, now, policies, over)
    units = tuple(_unit_placement(row, p) for row, p in zip(solution.chosen, now.units, strict=True))
    forecast = Forecast(seconds=solution.seconds, peak_bytes=beside + solution.peaks[Tier.HOST])
    return Placement(units, now.slot_bytes, now.buffer_bytes), forecast


def as_it_is(needs: Needs, peak: int, now: Placement) -> Forecast:
    """What a step takes if everything stays where it is."""
    return Forecast(seconds=_placed(needs, now).seconds, peak_bytes=peak)


def _placed(needs: Needs, now: Placement) -> Solution:
    return evaluate(_problem(needs, 0, [(p.activations,) for p in now.units]), _as_chosen(needs, now))


def _problem(needs: Needs, room: int, allowed: Sequence[tuple[str, ...]]) -> Problem:
    tiers = {Tier.HOST: room} | ({Tier.DISK: _NO_END} if needs.has_disk else {})
    stuck = frozenset(kind for kind in _KINDS if kind not in needs.movable)
    return Problem(units=needs.units, rates=needs.rates, way=needs.way, room=tiers, policies=tuple(allowed), fixed=stuck)


def _as_chosen(needs: Needs, now: Placement) -> tuple[tuple[Option, ...], ...]:
    """The options that a placement stands for."""
    problem = _problem(needs, 0, [(p.activations,) for p in now.units])
    rows: list[tuple[Option, ...]] = []
    for kinds, unit in zip(options_for(problem), now.units, strict=True):
        names = {k: getattr(unit, k.value) for k in _KINDS}
        rows.append(
            tuple(next((o for o in options if o.tier is names.get(o.kind, o.tier)), options[0]) for options in kinds if options)
        )
    return tuple(rows)


def _least_in_memory(needs: Needs, policies: Sequence[str]) -> Solution:
    """Everything that can be elsewhere is."""
    least = {"auto": ("recompute",), "stay": ("disk",)}
    problem = _problem(needs, 0, [least.get(p, (p,)) for p in policies])
    rows = tuple(tuple(options[-1] for options in kinds if options) for kinds in options_for(problem))
    return evaluate(problem, rows)


def _fewer_activations(needs: Needs, now: Placement, policies: Sequence[str], over: int) -> Solution:
    """``now`` with ``over`` bytes of activations less, those first that are computed again in the least time; and one unit
    more, because one at a time is back in memory while it is computed again."""
    kept = [i for i, p in enumerate(policies) if p == "auto" and now.units[i].activations == "keep"]
    frees = {i: needs.units[i].activations - needs.units[i].inputs for i in kept}
    chosen = [p.activations for p in now.units]
    over += max(frees.values(), default=0)
    for i in sorted((i for i in kept if frees[i] > 0), key=lambda i: needs.units[i].forward_seconds / frees[i]):
        if over <= 0:
            break
        chosen[i] = "recompute"
        over -= frees[i]
    fewer = replace(now, units=tuple(replace(p, activations=policy) for p, policy in zip(now.units, chosen, strict=True)))
    return _placed(needs, fewer)


def _unit_placement(row: tuple[Option, ...], now: UnitPlacement) -> UnitPlacement:
    found = {o.kind: o for o in row}
    parameters, gradients, optimizer = (found[k].tier if k in found else getattr(now, k.value) for k in _KINDS)
    policy = found[Kind.ACTIVATIONS].name if Kind.ACTIVATIONS in found else now.activations
    return UnitPlacement(parameters, gradients, optimizer, policy)
