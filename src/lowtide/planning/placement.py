"""What lives where: a frozen table, and the rule that makes it. No bytes move here.

The rule is simple and deterministic. Fixed first: what the process is, slots for the units in use, buffers for the update.
Then, while the budget lasts: activations are kept rather than recomputed, the last units first; parameters stay in memory
(a unit on disk is read twice and written once a step), then gradients, then optimizer states (read once and written once
each). More memory therefore never means more traffic.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import DoesNotFit

_SLACK_SHARE = 0.02
_SLACK_BYTES = 48 << 20
"""What the allocator, Python and the kernel take on top of what we count: a share of the budget and a fixed part."""


class Tier(enum.Enum):
    """Where bytes live between two uses."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class UnitNeeds:
    """The bytes of one unit on one rank."""

    name: str
    whole: int
    """All its parameters, as compute needs them."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    """What autograd saves in its forward; 0 before the first step."""


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
    movable: frozenset[str] = frozenset()
    """Kinds of bytes that can be on disk: parameters, gradients, optimizer."""

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
        return _SLACK_BYTES + int(self.budget * _SLACK_SHARE)


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """Where the kinds of bytes of one unit live, and what becomes of its activations: keep, recompute or disk."""

    parameters: Tier
    gradients: Tier
    optimizer: Tier
    activations: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The table, and the size of the two arenas that everything else passes through."""

    units: tuple[UnitPlacement, ...]
    slot_bytes: int | None
    buffer_bytes: int | None


def working_bytes(needs: Needs, *, slots: int, chunks: int) -> int:
    """Memory that passes bytes through: slots, buffers, gradients on their way."""
    return needs.largest * (slots + needs.in_flight_units) + needs.chunk_bytes * chunks


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
    resolved = ["recompute" if p == "auto" else p for p in policies]
    parameters, gradients, optimizer = (
        [Tier.HOST if fits or kind not in needs.movable else Tier.DISK] * len(needs.units)
        for kind in ("parameters", "gradients", "optimizer")
    )
    return _placement(needs, parameters, gradients, optimizer, resolved, base)


def after_measuring(needs: Needs, peak: int, now: Placement, policies: Sequence[str]) -> Placement:
    """After a step whose peak was ``peak``: use what is left of the budget, in the order of this file's first lines."""
    left = needs.budget - needs.slack - peak
    kept = [u.activations if p.activations == "keep" else 0 for u, p in zip(needs.units, now.units, strict=True)]
    left += sum(kept)
    activations = [p.activations for p in now.units]
    for i in reversed(range(len(needs.units))):
        if policies[i] == "auto":
            activations[i] = "keep" if needs.units[i].activations <= left else "recompute"
        left -= needs.units[i].activations if activations[i] == "keep" else 0
    parameters, gradients, optimizer = ([getattr(p, k) for p in now.units] for k in ("parameters", "gradients", "optimizer"))
    kinds = [
        (k, t)
        for k, t in (("parameters", parameters), ("gradients", gradients), ("optimizer", optimizer))
        if k in needs.movable
    ]
    if left < 0:
        for kind, tiers in reversed(kinds):
            left = _move(tiers, Tier.DISK, [getattr(u, kind) for u in needs.units], left)
    else:
        for kind, tiers in kinds:
            left = _move(tiers, Tier.HOST, [getattr(u, kind) for u in needs.units], left)
    return Placement(
        tuple(UnitPlacement(*row) for row in zip(parameters, gradients, optimizer, activations, strict=True)),
        now.slot_bytes,
        now.buffer_bytes,
    )


def _move(tiers: list[Tier], to: Tier, sizes: Sequence[int], left: int) -> int:
    """Move units to memory while they fit, or to disk while the budget is overdrawn. Returns what is left."""
    for i, size in enumerate(sizes):
        if tiers[i] is to or not size:
            continue
        if to is Tier.HOST and size <= left:
            tiers[i], left = to, left - size
        elif to is Tier.DISK and left < 0:
            tiers[i], left = to, left + size
    return left


def _placement(
    needs: Needs, parameters: list[Tier], gradients: list[Tier], optimizer: list[Tier], activations: list[str], base: int
) -> Placement:
    units = tuple(UnitPlacement(*row) for row in zip(parameters, gradients, optimizer, activations, strict=True))
    if not needs.has_disk:
        return Placement(units, None, None)
    free = needs.budget - needs.slack - base
    slots = 3 if working_bytes(needs, slots=3, chunks=4) <= 0.5 * free else 2
    # All that the update of one unit reads, so that it can be there before the unit is, and what is being written.
    largest_update = max((u.optimizer + (0 if needs.in_backward else u.gradients) for u in needs.units), default=0)
    wanted = max(largest_update + 2 * needs.chunk_bytes, 8 * needs.chunk_bytes)
    room = int(0.5 * free) - working_bytes(needs, slots=slots, chunks=0)
    return Placement(units, slots * needs.largest, max(2 * needs.chunk_bytes, min(wanted, room)))
