"""What a sharded model needs on this rank, for the placement: bytes from its layout, seconds from the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from lowtide.config import Config, KindDtypes
from lowtide.errors import Refused
from lowtide.planning.options import Kind, Phase, Rates, UnitNeeds, Way
from lowtide.planning.placement import Needs
from lowtide.runtime.probe import large_states
from lowtide.runtime.unit import Unit
from lowtide.spec.limits import Mappings

_BACKWARD_OVER_FORWARD = 2.0
"""Seconds of a backward over those of its forward, before one was measured."""
_UPDATE_BANDWIDTH = 10e9
"""Bytes per second that an elementwise optimizer reads and writes; a guess on the slow side."""


def needs_at_start(
    units: Sequence[Unit],
    config: Config,
    optimizer: Optimizer | None,
    *,
    budget: int,
    ranks: int,
    hosts: int = 1,
    slot_sharers: int = 1,
) -> Needs:
    """Before the first step: bytes only. ``hosts``: how many have a copy of what is sharded, see runtime/common_homes.py.
    ``slot_sharers``: how many ranks have slots together, see runtime/shared_slots.py."""
    states = state_bytes(units, optimizer)
    rows: list[UnitNeeds] = []
    for unit, optimizer_bytes in zip(units, states, strict=True):
        shard = unit.updates[1] - unit.updates[0]
        trained = any(p.requires_grad for p in unit.params)
        width = max((d.gradient.itemsize / d.param.itemsize for d in unit.dtypes), default=1.0)
        gradients = int((shard if config.stage.gradients else unit.layout.nbytes) * width) if trained else 0
        home = shard * hosts if config.stage.parameters else unit.layout.nbytes
        moved = 2 * shard + gradients + 2 * optimizer_bytes if trained else 0
        rows.append(
            UnitNeeds(
                name=unit.name,
                whole=unit.layout.nbytes if config.stage.parameters else 0,
                parameters=home,
                gradients=gradients,
                optimizer=optimizer_bytes,
                update_seconds=moved / _UPDATE_BANDWIDTH,
            )
        )
    kinds = 2 + max((s / max(u.parameters, 1) for s, u in zip(states, rows, strict=True)), default=0)
    return Needs(
        units=tuple(rows),
        budget=budget,
        chunk_bytes=int(min(config.update.chunk_bytes, max((u.parameters for u in rows), default=0)) * kinds),
        in_flight_units=1 if ranks == 1 else 3,
        has_disk=bool(config.disk),
        in_backward=config.update.in_backward,
        slot_sharers=slot_sharers,
        movable=_movable(config),
        way=_way(config, ranks),
    )


def with_gradients_that_stay(needs: Needs, *, stay: bool) -> Needs:
    """After a step: whether its forward passes began with gradients of the step before."""
    return needs if needs.has_disk else replace(needs, way=replace(needs.way, gradients_stay=stay))


def with_measurements(
    needs: Needs, units: Sequence[Unit], activations: Sequence[int], forward: Mapping[Unit, float], backward: float
) -> Needs:
    """After a step: what autograd saved for each unit, its forward's seconds, and those of the whole backward pass."""
    total = sum(forward.values())
    ratio = backward / total if total and backward else _BACKWARD_OVER_FORWARD
    rows: list[UnitNeeds] = []
    for unit, row, saved in zip(units, needs.units, activations, strict=True):
        seconds = forward.get(unit, row.forward_seconds)
        rows.append(replace(row, activations=saved, forward_seconds=seconds, backward_seconds=ratio * seconds))
    return replace(needs, units=tuple(rows))


def backward_alone(needs: Needs, policies: Sequence[str], forward: Sequence[float], backward: float) -> float:
    """The seconds of a measured backward pass without what the programme adds to it by itself: activations that were computed
    again, and updates. ``policies`` and ``forward``: of every unit, in the step that was measured."""
    again = sum(seconds for policy, seconds in zip(policies, forward, strict=True) if policy == "recompute")
    updates = sum(unit.update_seconds for unit in needs.units) if needs.in_backward else 0.0
    return max(backward - again - updates, min(backward, sum(forward)))


def with_rates(needs: Needs, rates: Rates) -> Needs:
    return replace(needs, rates=rates)


def _movable(config: Config) -> frozenset[Kind]:
    if not config.disk:
        return frozenset()
    stage = config.stage
    kinds = {
        Kind.OPTIMIZER: True,
        Kind.PARAMETERS: stage.parameters,
        Kind.GRADIENTS: stage.gradients and not config.update.in_backward,
    }
    return frozenset(kind for kind, can_move in kinds.items() if can_move)


def _way(config: Config, ranks: int) -> Way:
    """When units are updated, see runtime/due.py and runtime/backward_update.py."""
    alone, disk = ranks == 1, bool(config.disk)  # gradients stay until forward passes have shown that they do not
    way = Way(slots_in_update=alone, chunk_bytes=config.update.chunk_bytes, gradients_stay=True)
    if config.update.in_backward:
        return replace(way, update_in=Phase.BACKWARD)
    put_off = alone and disk and config.device_memory_bytes is None
    return replace(way, update_in=Phase.FORWARD if put_off else Phase.UPDATE, slots_in_update=put_off)


def bytes_of_their_own(units: Sequence[Unit]) -> int:
    """What the parameters still take, as they were built; nothing if they were deferred to files, or are on no device."""
    mappings = Mappings()
    params = [p for unit in units for p in unit.params if not p.is_meta]
    return sum(p.nbytes for p in params if not mappings.is_file(p.data_ptr()))


def _state_width(optimizer: Optimizer, param: nn.Parameter, dtypes: KindDtypes) -> int:
    """Bytes of the optimizer's states per element of a parameter."""
    try:
        states = large_states(optimizer, param, dtypes.master)
    except Refused:  # where states are moved it is refused; where they stay in memory this is no more than an estimate
        return 2 * dtypes.moments.itemsize
    return sum(dtypes.moments.itemsize if s.dtype is dtypes.master else s.dtype.itemsize for s in states)


def state_bytes(units: Sequence[Unit], optimizer: Optimizer | None) -> list[int]:
    """Masters and optimizer states of every unit on this rank, in bytes."""
    if optimizer is None:
        return [0] * len(units)
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    out: list[int] = []
    for unit in units:
        total = 0
        for chunk in unit.chunks:
            for part in chunk.parts:
                param, dtypes = unit.params[part.index], unit.dtypes[part.index]
                if param not in owned or not (param.is_floating_point() or param.is_complex()):
                    continue
                master = dtypes.master.itemsize if dtypes.master is not dtypes.param else 0
                total += part.numel * (_state_width(optimizer, param, dtypes) + master)
        out.append(total)
    return out
