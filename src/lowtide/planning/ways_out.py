"""When nothing fits: the changes that would make it fit, the cheapest first.

A change of a flag is cheaper than a slower step, that is cheaper than more ranks, and those are cheaper than more memory. Of
each kind of change only the mildest that fits is named, so that there is something to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lowtide.errors import DoesNotFit
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.hardware import Disk, Hardware
from lowtide.spec.model import ModelSpec, UnitFacts

_MORE_RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_SMALLER_BATCHES = (2, 4, 8)
_MIB = 1 << 20
_USUAL_DISK = Disk(read=2e9, write=1e9, mixed=1.5e9, free_bytes=1 << 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """One change, and the plan that it makes possible."""

    change: str
    plan: Plan


def ways_out(model: ModelSpec, hardware: Hardware, request: Request, *, most: int = 3) -> list[WayOut]:
    """At most ``most`` changes after which the model fits."""
    found: list[WayOut] = []
    for change, question in _changes(model, hardware, request):
        try:
            found.append(WayOut(change=change, plan=make_plan(*question)))
        except DoesNotFit:
            continue
        if len(found) == most:
            break
    return found


Question = tuple[ModelSpec, Hardware, Request]


def _changes(model: ModelSpec, hardware: Hardware, request: Request) -> Iterator[tuple[str, Question]]:
    if request.activations != "auto":
        yield "activations='auto'", (model, hardware, replace(request, activations="auto"))
    if request.rank_memory_bytes:  # there is no number to hold, so a plan does not choose this by itself
        yield "activations='recompute'", (model, hardware, replace(request, activations="recompute"))
    if request.disk_bytes == 0 and not request.rank_memory_bytes:
        with_disk = hardware if hardware.disk is not None else replace(hardware, disk=_USUAL_DISK)
        needed = _least_disk(model, with_disk, request)
        if needed is not None:
            enough = None if with_disk.disk is not None and with_disk.disk.free_bytes >= needed else 2 * needed
            what = f"a disk with {_size(needed)} free (disk='/a/folder')"
            yield what, (model, with_disk, replace(request, disk_bytes=enough))
    if request.update == "step" and request.accumulate == 1:
        yield "update='backward', which keeps no gradients", (model, hardware, replace(request, update="backward"))
    if model.batch:
        batches = ((part, _smaller_batch(model, part)) for part in _SMALLER_BATCHES)
        fitting = next((found for found in batches if _fits(found[1], hardware, request)), None)
        if fitting is not None:
            yield f"a batch {fitting[0]} times smaller", (fitting[1], hardware, request)
    # Further ranks, and more memory, are those of hosts that are all alike.
    request = replace(request, rank_memory_bytes=(), memory_bytes=min(request.rank_memory_bytes, default=request.memory_bytes))
    for ranks in _MORE_RANKS:
        if ranks > request.world_size and hardware.ranks_per_host >= 1:
            more = replace(request, world_size=ranks, stage="auto" if request.stage == "auto" else 3)
            if _fits(model, hardware, more):
                yield (
                    _ranks_text(ranks, hardware, request),
                    (model, hardware, replace(more, stage=3)),
                )
                break
    least = least_memory(model, hardware, request)
    if least is not None:
        yield f"memory={_size(least)!r} on each host", (model, hardware, replace(request, memory_bytes=least))


def least_memory(model: ModelSpec, hardware: Hardware, request: Request) -> int | None:
    """The smallest number of host bytes with which the request fits, to the MiB; None if host memory does not help."""
    return _least(lambda n: _fits(model, hardware, replace(request, memory_bytes=n)))


def _least_disk(model: ModelSpec, hardware: Hardware, request: Request) -> int | None:
    return _least(lambda n: _fits(model, hardware, replace(request, disk_bytes=n)))


def _least(fits: Callable[[int], bool]) -> int | None:
    low, high = 0, 64 * _MIB
    while not fits(high):
        low, high = high, high * 4
        if high > 1 << 56:
            return None
    while high - low > max(_MIB, high // 256):
        middle = (low + high) // 2 // _MIB * _MIB
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _fits(model: ModelSpec, hardware: Hardware, request: Request) -> bool:
    try:
        make_plan(model, hardware, request)
    except DoesNotFit:
        return False
    return True


def _smaller_batch(model: ModelSpec, part: int) -> ModelSpec:
    def smaller(unit: UnitFacts) -> UnitFacts:
        return replace(
            unit,
            activation_bytes=unit.activation_bytes // part,
            input_bytes=unit.input_bytes // part,
            transient_bytes=unit.transient_bytes // part,
            forward=unit.forward.scaled(1 / part),
            backward=unit.backward.scaled(1 / part),
        )

    units = tuple(smaller(u) for u in model.units)
    return replace(
        model,
        units=units,
        outside_bytes=model.outside_bytes // part,
        outside_transient_bytes=model.outside_transient_bytes // part,
        outside_forward=model.outside_forward.scaled(1 / part),
        outside_backward=model.outside_backward.scaled(1 / part),
        batch=f"1/{part} of {model.batch}",
    )


def _ranks_text(ranks: int, hardware: Hardware, request: Request) -> str:
    hosts = -(-ranks // (request.ranks_per_host or hardware.ranks_per_host))
    return f"{ranks} ranks on {hosts} hosts at stage 3" if hosts > 1 else f"{ranks} ranks at stage 3"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}GiB" if nbytes >= 1 << 30 else f"{-(-nbytes // _MIB)}MiB"
