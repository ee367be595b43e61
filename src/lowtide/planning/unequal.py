"""A plan for ranks whose memory differs: equal parts if those fit everywhere, else parts that fit each rank.

It is for jobs without a disk and without a memory number. Where there is a number all ranks hold that of the smallest
(``runtime/placer.py``), because they use one placement; then the largest part would be the one that does not fit. So nothing
moves here, and activations stay as the caller wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.options import Tier
from lowtide.planning.plan import Plan
from lowtide.planning.planner import candidates, make_plan
from lowtide.planning.programme import solve
from lowtide.planning.request import Request
from lowtide.planning.shares import best_shares
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec
from lowtide.stages import STAGES

_NO_END = 1 << 56
_DIGITS = 4
"""Of the parts: a user copies them. What that changes is far below the slack."""


def plan_unequal(model: ModelSpec, hardware: Hardware, request: Request) -> Plan:
    """The fastest stage that fits all ranks of ``request.rank_memory_bytes``; the plan is that of the slowest rank. Its
    ``shares`` are None if the parts are equal."""
    _refuse(hardware, request)
    found: list[Plan] = []
    short: list[DoesNotFit] = []
    sharding = [number for number, stage in STAGES.items() if stage.optimizer]
    for number in sharding if request.stage == "auto" else [request.stage]:
        try:
            found.append(_at_stage(model, hardware, replace(request, stage=number)))
        except DoesNotFit as error:
            short.append(error)
    if not found:
        raise min(short, key=lambda error: error.needed_bytes - error.budget_bytes)
    return min(found, key=lambda plan: (round(plan.predicted_seconds, 6), plan.shares is not None, plan.stage))


def _refuse(hardware: Hardware, request: Request) -> None:
    if request.stage != "auto" and not STAGES[int(request.stage)].optimizer:
        raise ArgumentError(f"ranks with unequal memory share nothing at stage {request.stage}; use stage 1, 2, 3 or 'auto'.")
    if hardware.compute.memory_bytes is not None:
        raise ArgumentError("ranks with unequal memory are planned on hosts that compute themselves, without an accelerator.")
    if request.disk_bytes != 0:
        raise ArgumentError(
            "ranks with unequal memory are planned without a disk: beside one all ranks hold the memory number of the smallest."
        )


def _at_stage(model: ModelSpec, hardware: Hardware, request: Request) -> Plan:
    ranks = request.world_size
    try:
        return _slowest(model, hardware, request, [1 / ranks] * ranks)
    except DoesNotFit:
        parts = [round(part, _DIGITS) for part in _best_parts(model, hardware, request)]
    return replace(_slowest(model, hardware, request, parts), shares=tuple(parts))


def _slowest(model: ModelSpec, hardware: Hardware, request: Request, parts: Sequence[float]) -> Plan:
    """The plan of the rank that takes longest, of equals the fullest; raises if any does not fit."""
    kinds = dict.fromkeys(zip(request.rank_memory_bytes, parts, strict=True))
    plans = [make_plan(model, hardware, _one_rank(request, memory, part)) for memory, part in kinds]
    return max(plans, key=lambda plan: (plan.predicted_seconds, plan.tiers[0].peak_bytes / plan.tiers[0].capacity_bytes))


def _one_rank(request: Request, memory: int, part: float) -> Request:
    policy = "keep" if request.activations == "auto" else request.activations  # as shard does without a number
    return replace(
        request, memory_bytes=memory, rank_memory_bytes=(), ranks_per_host=1, disk_bytes=0, part=part, activations=policy
    )


def _best_parts(model: ModelSpec, hardware: Hardware, request: Request) -> tuple[float, ...]:
    """A peak is convex in the part, so that it is never above the straight line between no part and all of it."""
    nothing, everything = (_needed(model, hardware, _one_rank(request, _NO_END, part)) for part in (0.0, 1.0))
    rooms = [_room(model, hardware, _one_rank(request, memory, 0.0)) - nothing for memory in request.rank_memory_bytes]
    if min(rooms) < 0:
        smallest = min(request.rank_memory_bytes)
        raise DoesNotFit("host", smallest - min(rooms), smallest, "A rank needs so much without any part of the states")
    return best_shares(everything - nothing, rooms, [float("inf")] * len(rooms))


def _needed(model: ModelSpec, hardware: Hardware, request: Request) -> int:
    return solve(next(candidates(model, hardware, request)).problem).peaks[Tier.HOST]


def _room(model: ModelSpec, hardware: Hardware, request: Request) -> int:
    return next(candidates(model, hardware, request)).problem.room[Tier.HOST]
