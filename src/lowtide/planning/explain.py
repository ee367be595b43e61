"""Why a plan is as it is, in sentences, and what one more of everything would be worth.

Prices are not the shadow prices of a relaxed programme: the plan is made again with the change, so that what is said holds for
steps of whole units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.errors import DoesNotFit
from lowtide.planning.plan import Plan, Price
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec

_GIB = 1 << 30
_WORTH_SAYING = 0.001  # of a step

Question = tuple[ModelSpec, Hardware, Request]


def explain(model: ModelSpec, hardware: Hardware, request: Request, plan: Plan) -> Plan:
    """The plan with ``reasons`` and ``prices``, the most valuable first."""
    prices = tuple(sorted(_prices(model, hardware, request, plan), key=lambda p: -p.seconds))
    return replace(plan, reasons=tuple(_reasons(plan)), prices=prices)


def _reasons(plan: Plan) -> list[str]:
    said: list[str] = []
    near = plan.tiers[0]
    if plan.placement == "plain":
        said.append(
            f"All of it fits in {near.tier} memory ({_gib(near.peak_bytes)} of {_gib(near.capacity_bytes)}): nothing is moved."
        )
    else:
        for kind in ("parameters", "gradients", "optimizer"):
            counts = plan.count(kind)
            away = {tier: n for tier, n in counts.items() if tier != near.tier}
            if away:
                where = " and ".join(f"{n} of {len(plan.units)} units on {tier}" for tier, n in away.items())
                said.append(f"{kind.capitalize()} of {where}: {near.tier} memory is full.")
    policies = plan.count("activations")
    if policies.get("recompute"):
        said.append(
            f"Activations of {policies['recompute']} units are computed again in backward: that is cheaper than the "
            f"traffic which the same room saves elsewhere."
        )
    if policies.get("disk"):
        said.append(f"Activations of {policies['disk']} units wait on disk: it has time to spare in those phases.")
    for phase in plan.phases:
        others = [f"{name} {seconds:.2f} s" for name, seconds in phase.loads.items() if name != phase.limited_by]
        beside = f", beside {', '.join(others)}" if others else ""
        said.append(f"{phase.phase.capitalize()} takes {phase.seconds:.2f} s, limited by {phase.limited_by}{beside}.")
    if plan.stage and plan.world_size > 1:
        said.append(f"Stage {plan.stage} is the fastest that fits on {plan.world_size} ranks.")
    return said


def _prices(model: ModelSpec, hardware: Hardware, request: Request, plan: Plan) -> list[Price]:
    if not plan.predicted_seconds:
        return []
    out: list[Price] = []
    for change, (other_model, other_hardware, other_request) in _changes(model, hardware, request):
        try:
            seconds = plan.predicted_seconds - make_plan(other_model, other_hardware, other_request).predicted_seconds
        except DoesNotFit:
            continue
        if seconds > _WORTH_SAYING * plan.predicted_seconds:
            out.append(Price(change=change, seconds=seconds))
    return out


def _changes(model: ModelSpec, hardware: Hardware, request: Request) -> list[tuple[str, Question]]:
    """Single changes that a user can make, in words."""
    memory = request.memory_bytes if request.memory_bytes is not None else hardware.host_bytes
    found: list[tuple[str, Question]] = [
        ("1 GiB more host memory", (model, hardware, replace(request, memory_bytes=memory + _GIB))),
        ("twice the host memory", (model, hardware, replace(request, memory_bytes=2 * memory))),
    ]
    own = hardware.compute.memory_bytes
    if own is not None:
        more = (request.device_memory_bytes or own) + _GIB
        found.append(("1 GiB more device memory", (model, hardware, replace(request, device_memory_bytes=more))))
    if request.update == "step" and request.accumulate == 1:
        found.append(("update='backward' (no clipping after backward)", (model, hardware, replace(request, update="backward"))))
    found += [(what, (model, make(hardware), request)) for what, make in _FASTER.items()]
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
    "a disk twice as fast": _faster_disk,
    "compute twice as fast": _faster_compute,
    "a network twice as fast": _faster_wires,
}


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
