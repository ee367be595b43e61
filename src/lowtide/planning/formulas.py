"""Memory formulas: how many bytes of what are in which tier, in every phase of a step, on one rank. Arithmetic only.

Two levels. The states as the ZeRO paper counts them: bytes per parameter, divided by the ranks where a stage shards a kind
(``states_bytes_per_rank``). And the phases of a step as this engine runs it: unit by unit, with its slots, buffers and
activations (``phase_table``). Tests hold the ledger of real runs to the second, and the published tables to the first.

Not counted: the process itself (Python, torch), what the allocator keeps, and temporaries of the caller's optimizer (a fused
one has none). A plan adds these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide.errors import ArgumentError
from lowtide.planning.placement import Tier, UnitPlacement
from lowtide.stages import STAGES, Stage

if TYPE_CHECKING:
    from lowtide.spec.layout import UnitLayout
    from lowtide.spec.model import UnitFacts

# -- states, as the paper counts them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    """Bytes per element of every kind of state."""

    parameters: int
    """What forward and backward compute with."""
    gradients: int
    """As they are kept until the update."""
    masters: int
    """A wider copy of the parameters that the optimizer updates; 0: it updates the parameters themselves."""
    moment: int
    """One state of the optimizer."""
    moments: int = 2
    """How many such states there are."""
    counter: int = 4
    """Per parameter, not per element: Adam counts steps in a small tensor. Only the exact formulas know parameters."""
    reduction: int = 4
    """What gradients are added in between ranks."""

    @property
    def optimizer(self) -> int:
        """Masters and states together: K in the paper."""
        return self.masters + self.moment * self.moments

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


PRECISIONS: Mapping[str, KindBytes] = {
    "fp32": KindBytes(parameters=4, gradients=4, masters=0, moment=4),
    "mixed": KindBytes(parameters=2, gradients=2, masters=4, moment=4, reduction=2),
    "bf16": KindBytes(parameters=2, gradients=4, masters=4, moment=4),
    "fp16": KindBytes(parameters=2, gradients=4, masters=4, moment=4),
    "pure-bf16": KindBytes(parameters=2, gradients=2, masters=0, moment=2, reduction=2),
}
"""For Adam. ``mixed`` is the ZeRO paper's: 2 + 2 + 4 + 8 = 16 bytes. ``bf16`` and ``fp16`` are what ``Precision(param=...)``
does by default, which keeps gradients in fp32: 18 bytes. ``pure-bf16`` is a model that was built in bf16."""

OPTIMIZERS: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd": 0, "sgd-momentum": 1, "adam-amsgrad": 3}
"""States per element."""


def from_precision(word: str, optimizer: str = "adam") -> KindBytes:
    """The bytes of a precision and an optimizer by name."""
    if word not in PRECISIONS:
        raise ArgumentError(f"precision is {word!r}; use one of {', '.join(PRECISIONS)}.")
    if optimizer not in OPTIMIZERS:
        raise ArgumentError(f"optimizer is {optimizer!r}; use one of {', '.join(OPTIMIZERS)}.")
    counts_steps = optimizer.startswith("adam")
    return replace(PRECISIONS[word], moments=OPTIMIZERS[optimizer], counter=4 if counts_steps else 0)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The states of a model on one rank. Exact quotients, rounded only when they are shown."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def states_bytes_per_rank(
    numel: float, stage: Stage, world_size: int, kinds: KindBytes, *, trained_numel: float | None = None
) -> StateBytes:
    """What one of ``world_size`` ranks keeps. Parameters that are not trained have neither gradients nor states."""
    _refuse_wrong(numel, world_size)
    trained = numel if trained_numel is None else trained_numel
    return StateBytes(
        parameters=numel * kinds.parameters / (world_size if stage.parameters else 1),
        gradients=trained * kinds.gradients / (world_size if stage.gradients else 1),
        optimizer=trained * kinds.optimizer / (world_size if stage.optimizer else 1),
    )


def describe_states(
    params: float, world_size: int, stage: int, precision: str, optimizer: str = "adam"
) -> dict[str, int | str]:
    """``states_bytes_per_rank`` and its parts, whole bytes, for a program or a command line."""
    if stage not in STAGES:
        raise ArgumentError(f"stage is {stage!r}; use one of {', '.join(map(str, STAGES))}.")
    kinds = from_precision(precision, optimizer)
    numel = math.ceil(params) if math.isfinite(params) else -1
    _refuse_wrong(numel, world_size)
    sharded = STAGES[stage]

    def kept(width: int, *, cut: bool) -> int:
        return _share(numel * width, world_size if cut else 1)  # whole numbers: a float would be off by some bytes at 1e16

    parts = {
        "parameters_bytes_per_rank": kept(kinds.parameters, cut=sharded.parameters),
        "gradients_bytes_per_rank": kept(kinds.gradients, cut=sharded.gradients),
        "optimizer_bytes_per_rank": kept(kinds.optimizer, cut=sharded.optimizer),
    }
    return {
        "params": numel,
        "world_size": world_size,
        "stage": stage,
        "precision": precision,
        "optimizer": optimizer,
        "bytes_per_param": kinds.total,
        "states_bytes": numel * kinds.total,
        "states_bytes_per_rank": sum(parts.values()),
        **parts,
    }


# -- one unit on one rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """One unit on one rank."""

    name: str
    whole: int
    """All its parameters as compute reads them: what a slot holds."""
    parameters: int
    """What its home holds: this rank's shard, or all of it."""
    gradients: int
    """Reduced gradients that this rank keeps."""
    optimizer: int
    """Masters and states that this rank updates."""
    local_gradients: int = 0
    """Whole gradients as autograd makes them."""
    reduction: int = 0
    """Whole gradients as they are added between ranks: one of the two buffers of a reduction."""
    activations: int = 0
    """What autograd saves in its forward, parameters aside."""
    inputs: int = 0
    """What must be kept to compute it again."""
    transient: int = 0
    """The most that its forward or backward holds for a moment, beside what is saved."""


def unit_from_facts(facts: UnitFacts, stage: Stage, world_size: int, kinds: KindBytes) -> UnitBytes:
    """From counts alone, without the engine's padding (below 64 elements per parameter and rank)."""
    ranks = world_size
    trained = facts.trained_numel
    return UnitBytes(
        name=facts.name,
        whole=facts.numel * kinds.parameters,
        parameters=_share(facts.numel * kinds.parameters, ranks if stage.parameters else 1),
        gradients=_share(trained * kinds.gradients, ranks if stage.gradients else 1),
        optimizer=_share(trained * kinds.optimizer, ranks if stage.optimizer else 1),
        local_gradients=trained * kinds.parameters,
        reduction=trained * kinds.reduction,
        activations=facts.activation_bytes,
        inputs=facts.input_bytes,
        transient=facts.transient_bytes,
    )


def unit_from_layout(name: str, layout: UnitLayout, rank: int, stage: Stage, kinds: KindBytes) -> UnitBytes:
    """With the engine's own padding and cuts, to the byte, for a unit that is trained and has one dtype."""
    numels = [p.numel for p in layout.params]
    mine = [hi - lo for lo, hi in (layout.piece(i, rank) for i in range(len(numels)))]
    updated = mine if stage.optimizer else numels
    return UnitBytes(
        name=name,
        whole=layout.nbytes,
        parameters=layout.shard_bytes(rank) if stage.parameters else layout.nbytes,
        gradients=kinds.gradients * sum(mine if stage.gradients else numels),
        optimizer=kinds.optimizer * sum(updated) + kinds.counter * sum(1 for n in updated if n),
        local_gradients=kinds.parameters * sum(numels),
        reduction=kinds.reduction * max(sum(numels), layout.ranks * sum(mine)),
    )


# -- the phases of a step ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a unit lives between uses: the share of each kind that is in memory, the rest being on disk; and what becomes of
    its activations: ``keep``, ``recompute``, ``disk``, or ``host`` (of use only beside a device with memory of its own)."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    activations: str = "keep"

    @classmethod
    def of(cls, placement: UnitPlacement) -> Home:
        """From a placement, which has all of a kind in one tier."""
        tiers = (placement.parameters, placement.gradients, placement.optimizer)
        parameters, gradients, optimizer = (1.0 if tier is Tier.HOST else 0.0 for tier in tiers)
        return cls(parameters=parameters, gradients=gradients, optimizer=optimizer, activations=placement.activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the engine runs, as far as memory depends on it."""

    stage: Stage
    world_size: int = 1
    slots: int = 3
    """Units that are whole at once: one in use, one kept in case it comes again, and the guesses (``Comm.prefetch``, at
    least one)."""
    in_backward: bool = False
    """``update="backward"``: no gradient outlives its unit."""
    gradients_stay: bool = True
    """Whether gradients keep their room from step to step, as they do beside a disk. Else a forward has it, if the caller has
    set gradients to None, as in PyTorch."""
    chunk_buffers: int = 0
    """Bytes of the arena through which the update streams what is not in memory (``Placement.buffer_bytes``)."""
    spill_buffers: int = 0
    """Bytes of activations that may be on their way to the disk; and again on their way back, in backward."""
    outside_activations: int = 0
    """Saved by autograd outside of units."""
    apart: bool = False
    """Whether compute has memory of its own, so that units live on the host and are copied to the device for use. An
    accelerator without offloading is not apart: read ``host`` as its memory then."""


TIERS = ("device", "host", "disk")
PHASES = ("rest", "forward", "backward", "reduce", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes:
    """One tier in one phase, after the first step: arenas keep the room that they have taken once."""

    phase: str
    """``rest`` between steps, ``forward``, ``backward`` and ``reduce`` of a unit, ``update``."""
    unit: str
    """Empty for phases of the whole model."""
    tier: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    slots: int = 0
    """Where units are whole for a while; on a host beside a device, where they pass through on their way there."""
    buffers: int = 0
    """Of reductions and of updates."""
    in_flight: int = 0
    """Whole local gradients, and with updates in backward the reduced ones of one unit."""
    activations: int = 0
    """Saved ones, and what a unit computes with for a moment."""

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.slots + self.buffers + self.in_flight + self.activations


def phase_table(units: Sequence[UnitBytes], homes: Sequence[Home], setting: Setting) -> tuple[PhaseBytes, ...]:
    """Every phase of a step and every tier in use, in the order of the step. ``units`` are in the order of forward."""
    if len(units) != len(homes):
        raise ArgumentError(f"{len(units)} units and {len(homes)} homes; give one home for each unit.")
    _refuse_wrong(0, setting.world_size)
    fixed = _fixed(units, homes, setting)
    compute = "device" if setting.apart else "host"
    rows = list(fixed.values())
    in_forward = fixed if setting.gradients_stay else {tier: replace(row, gradients=0) for tier, row in fixed.items()}
    saved = [_Saved()]  # before each unit, and after the last
    for unit, home in zip(units, homes, strict=True):
        saved.append(saved[-1].plus(unit, home.activations, apart=setting.apart))
        held = saved[-1].memory + unit.transient + min(setting.spill_buffers, saved[-1].away)
        rows += _rows("forward", unit, in_forward, saved[-1], {compute: held + setting.outside_activations})
    for i in reversed(range(len(units))):
        unit, policy = units[i], _policy(homes[i].activations, apart=setting.apart)
        coming_back = min(setting.spill_buffers, saved[i + 1].away)
        computing = unit.transient + (unit.activations if policy in ("keep", "recompute") else 0)
        computing += unit.inputs if policy == "recompute" else 0
        waiting = setting.outside_activations + saved[i].memory + coming_back
        # On several ranks the unit before may still wait for its turn on the channel.
        arriving = units[i : i + (2 if setting.world_size > 1 else 1)]
        local = sum(u.local_gradients for u in arriving if _are_copied(u, setting))
        reduced = unit.gradients if setting.in_backward and setting.world_size > 1 else 0
        rows += _rows("backward", unit, fixed, saved[i + 1], {compute: waiting + computing}, {compute: local})
        rows += _rows("reduce", unit, fixed, saved[i], {compute: waiting}, {compute: local + reduced})
    return (*rows, *(replace(row, phase="update") for row in fixed.values()))


def peak(table: Sequence[PhaseBytes], tier: str = "host") -> PhaseBytes:
    """The phase in which ``tier`` holds most; the first of several."""
    rows = [row for row in table if row.tier == tier]
    return max(rows, key=lambda row: row.total, default=PhaseBytes(phase="rest", unit="", tier=tier))


@dataclass(frozen=True, slots=True)
class _Saved:
    """Saved activations: in the memory of compute, on the host beside a device, on disk."""

    memory: int = 0
    host: int = 0
    disk: int = 0

    @property
    def away(self) -> int:
        return self.host + self.disk

    def plus(self, unit: UnitBytes, word: str, *, apart: bool) -> _Saved:
        policy = _policy(word, apart=apart)
        if policy == "disk":
            return replace(self, disk=self.disk + unit.activations)
        if policy == "host":
            return replace(self, host=self.host + unit.activations)
        return replace(self, memory=self.memory + (unit.inputs if policy == "recompute" else unit.activations))


def _policy(word: str, *, apart: bool) -> str:
    if word not in ("keep", "recompute", "disk", "host"):
        raise ArgumentError(f"activations are {word!r}; use keep, recompute, disk or host.")
    return "keep" if word == "host" and not apart else word


def _rows(
    phase: str,
    unit: UnitBytes,
    fixed: Mapping[str, PhaseBytes],
    saved: _Saved,
    activations: Mapping[str, int],
    in_flight: Mapping[str, int] | None = None,
) -> list[PhaseBytes]:
    elsewhere = {"device": 0, "host": saved.host, "disk": saved.disk}
    return [
        replace(
            row,
            phase=phase,
            unit=unit.name,
            activations=activations.get(tier, 0) + elsewhere[tier],
            in_flight=(in_flight or {}).get(tier, 0),
        )
        for tier, row in fixed.items()
    ]


def _fixed(units: Sequence[UnitBytes], homes: Sequence[Home], setting: Setting) -> dict[str, PhaseBytes]:
    """What every phase has: states where they live, and the arenas that everything else passes through."""
    pairs = list(zip(units, homes, strict=True))
    kept_gradients = 0 if setting.in_backward else 1
    sizes = {
        "parameters": [(u.parameters, h.parameters) for u, h in pairs],
        "gradients": [(u.gradients * kept_gradients, h.gradients) for u, h in pairs],
        "optimizer": [(u.optimizer, h.optimizer) for u, h in pairs],
    }
    if any(not 0 <= share <= 1 for kind in sizes.values() for _, share in kind):
        raise ArgumentError("a share of a home is not between 0 and 1.")
    here = {kind: sum(math.ceil(size * share) for size, share in rows) for kind, rows in sizes.items()}
    away = {kind: sum(size for size, _ in rows) - here[kind] for kind, rows in sizes.items()}
    reduction = 2 * max((u.reduction for u in units), default=0) if setting.world_size > 1 else 0
    in_slots = [u.whole for u, h in pairs if _needs_slot(h, setting)]
    slots = min(setting.slots, len(in_slots)) * max(in_slots, default=0)
    passing = [u.parameters for u, h in pairs if h.parameters < 1]
    staging = min(setting.slots, len(passing)) * max(passing, default=0)

    host = PhaseBytes(phase="rest", unit="", tier="host", buffers=setting.chunk_buffers, **here)
    disk = PhaseBytes(phase="rest", unit="", tier="disk", **away)
    if not setting.apart:
        return {"host": replace(host, slots=slots, buffers=host.buffers + reduction), "disk": disk}
    device = PhaseBytes(phase="rest", unit="", tier="device", slots=slots, buffers=reduction)
    return {"device": device, "host": replace(host, slots=staging), "disk": disk}


def _needs_slot(home: Home, setting: Setting) -> bool:
    """A unit whose home is whole in the memory of compute is used there."""
    return setting.apart or home.parameters < 1 or (setting.stage.parameters and setting.world_size > 1)


def _are_copied(unit: UnitBytes, setting: Setting) -> bool:
    """On one rank that shards no gradients, autograd's own are kept as they are, unless they are kept in another width."""
    other_width = unit.gradients != unit.local_gradients
    return setting.world_size > 1 or setting.stage.gradients or setting.in_backward or other_width


def _share(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _refuse_wrong(numel: float, world_size: int) -> None:
    if world_size < 1:
        raise ArgumentError(f"world_size is {world_size}; there is at least one rank.")
    if not 0 <= numel < math.inf:
        raise ArgumentError(f"the number of parameters is {numel}; give a number >= 0.")
