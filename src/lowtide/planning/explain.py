"""Why a plan is as it is, in sentences, and what one more of everything would be worth.

Prices are not the shadow prices of a relaxed programme: the plan is made again with the change, so that what is said holds for
steps of whole units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lowtide.errors import DoesNotFit
from lowtide.planning.plan import Plan, Price
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.planning.text import size_text
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec

_GIB = 1 << 30
_WORTH_SAYING = 0.001  # of a step
_FULL = 0.95


def explain(model: ModelSpec, hardware: Hardware, request: Request, plan: Plan) -> Plan:
    """The plan with ``reasons`` and ``prices``, the most valuable first."""
    prices = tuple(sorted(_prices(model, hardware, request, plan), key=lambda p: -p.seconds))
    return replace(plan, reasons=tuple(_reasons(request, plan)), prices=prices)


# -- reasons -----------------------------------------------------------------------------------------------------------


def _reasons(request: Request, plan: Plan) -> list[str]:
    said = [*_about_states(plan), *_about_activations(request, plan)]
    for phase in plan.phases:
        others = [f"{name} {seconds:.2f} s" for name, seconds in phase.loads.items() if name != phase.limited_by]
        beside = f", beside {', '.join(others)}" if others else ""
        said.append(f"{phase.phase.capitalize()} takes {phase.seconds:.2f} s, limited by {phase.limited_by}{beside}.")
    if plan.stage and plan.world_size > 1 and request.stage == "auto":
        said.append(f"Stage {plan.stage} is the fastest that fits on {plan.world_size} ranks.")
    return [*said, *_about_parts(request, plan), *_about_prefetching(plan)]


def _about_states(plan: Plan) -> Iterator[str]:
    near = plan.tiers[0]
    used = f"{_gib(near.peak_bytes)} of {_gib(near.capacity_bytes)}"
    if plan.placement == "plain":
        yield f"All of it fits in {near.tier} memory ({used}): nothing is moved."
        return
    full = near.peak_bytes > _FULL * near.capacity_bytes
    why = f"{near.tier} memory is full ({used})" if full else "nothing that fits is faster"
    for kind in ("parameters", "gradients", "optimizer"):
        away = {tier: n for tier, n in plan.count(kind).items() if tier != near.tier}
        if away and not (kind == "gradients" and plan.update == "backward"):
            what = "Optimizer states" if kind == "optimizer" else kind.capitalize()
            yield f"{what} of {' and '.join(f'{n} of {len(plan.units)} units on {tier}' for tier, n in away.items())}: {why}."


_ACTIVATIONS = {"recompute": "are computed again in backward", "host": "wait in host memory", "disk": "wait on disk"}


def _about_activations(request: Request, plan: Plan) -> Iterator[str]:
    best = "nothing that fits is faster" if request.objective == "time" else "that leaves most room in fast tiers"
    for policy, number in plan.count("activations").items():
        if policy in _ACTIVATIONS:
            why = best if request.activations == "auto" else "as was asked for"
            yield f"Activations of {number} of {len(plan.units)} units {_ACTIVATIONS[policy]}: {why}."


def _about_parts(request: Request, plan: Plan) -> Iterator[str]:
    if request.rank_memory_bytes:
        memories = ", ".join(map(_gib, request.rank_memory_bytes))
        if plan.shares is None:
            yield f"The ranks have {memories}, and equal parts fit on all of them."
        else:
            yield f"The ranks have {memories}. Equal parts do not fit at stage {plan.stage}; these are as equal as can be."


def _about_prefetching(plan: Plan) -> Iterator[str]:
    if plan.slots and plan.placement == "streamed":
        slot = plan.tiers[0].parts.get("slots", 0) // plan.slots
        yield (
            f"{plan.prefetch} unit is brought ahead of compute. One more would take another slot ({size_text(slot)}), and save "
            f"nothing by this model: it has every phase last as long as its busiest resource, as if all reads came in time."
        )


# -- prices ------------------------------------------------------------------------------------------------------------


def _prices(model: ModelSpec, hardware: Hardware, request: Request, plan: Plan) -> Iterator[Price]:
    """Of every limit, also if it is worth nothing, and of all else that is worth something."""
    if not plan.predicted_seconds:
        return
    limits = _more_room(hardware, request)
    others = _other_changes(hardware, request)
    for change, (other_hardware, other_request) in (limits | others).items():
        try:
            seconds = plan.predicted_seconds - make_plan(model, other_hardware, other_request).predicted_seconds
        except DoesNotFit:
            continue
        if seconds > _WORTH_SAYING * plan.predicted_seconds:
            yield Price(change=change, seconds=seconds)
        elif change in limits:
            yield Price(change=change, seconds=0.0)


Setting = tuple[Hardware, Request]


def _more_room(hardware: Hardware, request: Request) -> dict[str, Setting]:
    """1 GiB more of everything that is limited."""
    found: dict[str, Setting] = {}
    if request.rank_memory_bytes:
        more = tuple(memory + _GIB for memory in request.rank_memory_bytes)
        found["1 GiB more host memory on every rank"] = hardware, replace(request, rank_memory_bytes=more)
    else:
        memory = request.memory_bytes if request.memory_bytes is not None else hardware.host_bytes
        found["1 GiB more host memory"] = hardware, replace(request, memory_bytes=memory + _GIB)
        found["twice the host memory"] = hardware, replace(request, memory_bytes=2 * memory)
    own = hardware.compute.memory_bytes
    if own is not None:
        more_of_it = (request.device_memory_bytes or own) + _GIB
        found["1 GiB more device memory"] = hardware, replace(request, device_memory_bytes=more_of_it)
    if hardware.disk is not None and request.disk_bytes != 0:
        room = request.disk_bytes if request.disk_bytes is not None else hardware.disk.free_bytes
        found["1 GiB more disk space"] = hardware, replace(request, disk_bytes=room + _GIB)
        found["a disk twice as fast"] = _faster_disk(hardware), request
    return found


def _other_changes(hardware: Hardware, request: Request) -> dict[str, Setting]:
    found = {what: (make(hardware), request) for what, make in _FASTER.items()}
    if request.update == "step" and request.accumulate == 1:
        found["update='backward' (no clipping after backward)"] = hardware, replace(request, update="backward")
    return found


def _faster_disk(hardware: Hardware) -> Hardware:
    disk = hardware.disk
    if disk is None:
        return hardware
    return replace(hardware, disk=replace(disk, read=2 * disk.read, write=2 * disk.write, mixed=2 * disk.mixed))


def _faster_compute(hardware: Hardware) -> Hardware:
    compute = hardware.compute
    twice = {dtype: 2 * flops for dtype, flops in compute.flops.items()}
    return replace(hardware, compute=replace(compute, flops=twice, bandwidth=2 * compute.bandwidth))


def _faster_wires(hardware: Hardware) -> Hardware:
    between = hardware.between
    return replace(
        hardware,
        inside=replace(hardware.inside, bandwidth=2 * hardware.inside.bandwidth),
        between=None if between is None else replace(between, bandwidth=2 * between.bandwidth),
    )


_FASTER: dict[str, Callable[[Hardware], Hardware]] = {
    "compute twice as fast": _faster_compute,
    "a network twice as fast": _faster_wires,
}


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
