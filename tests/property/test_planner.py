"""More of anything never makes a plan slower, through the whole planner: ways of running a step, programme and all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.errors import DoesNotFit
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.catalogue import load
from lowtide.spec.hardware import Disk, Hardware
from lowtide.spec.model import ModelSpec, UnitFacts, Work

MIB = 1 << 20
NEARLY = 1.005
"""Traffic breaks ties with a weight of a thousandth, and the search stops within a thousandth of the best."""


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    unit_sizes = st.integers(1, 12).map(lambda n: n * 1_000_000)
    units: list[UnitFacts] = []
    for i in range(draw(st.integers(1, 3))):
        numel, saved = draw(unit_sizes), draw(st.integers(0, 60)) * MIB
        work = Work(flops=draw(st.integers(1, 50)) * 1e8, moved_bytes=1e7, operations=20)
        unit = UnitFacts(
            name=f"unit {i}",
            numel=numel,
            trained_numel=numel,
            parameter_bytes=4 * numel,
            forward=work,
            backward=work + work,
            activation_bytes=saved,
            input_bytes=saved // 8,
        )
        units += [unit] * draw(st.integers(1, 3))
    return ModelSpec(name="drawn", units=tuple(units), dtype="fp32", batch="a batch")


@st.composite
def requests(draw: st.DrawFn) -> Request:
    ranks = draw(st.sampled_from([1, 1, 2]))
    return Request(
        memory_bytes=draw(st.integers(400, 2500)) * MIB * ranks,
        disk_bytes=draw(st.sampled_from([0, None])),
        world_size=ranks,
        ranks_per_host=ranks,
        update=draw(st.sampled_from(["step", "backward"])),
    )


def machine(disk_speed: float) -> Hardware:
    return replace(load("cpu-2"), disk=Disk(read=disk_speed, write=disk_speed / 2, mixed=disk_speed, free_bytes=1 << 40))


def planned(model: ModelSpec, hardware: Hardware, request: Request) -> Plan | None:
    try:
        return make_plan(model, hardware, request)
    except DoesNotFit:
        return None


@settings(max_examples=25, deadline=None)
@given(models(), requests(), st.sampled_from([2e8, 2e9]), st.integers(1, 1500))
def test_more_memory_never_gives_a_slower_plan(model: ModelSpec, request: Request, speed: float, more: int) -> None:
    less = planned(model, machine(speed), request)
    assume(less is not None)
    roomier = planned(model, machine(speed), replace(request, memory_bytes=(request.memory_bytes or 0) + more * MIB))
    assert less is not None
    assert roomier is not None, "what fits in less fits in more"
    assert roomier.predicted_seconds <= less.predicted_seconds * NEARLY + 1e-6


@settings(max_examples=10, deadline=None)
@given(models(), requests())
def test_a_faster_disk_never_gives_a_slower_plan(model: ModelSpec, request: Request) -> None:
    slow, fast = planned(model, machine(3e8), request), planned(model, machine(3e9), request)
    assert (slow is None) == (fast is None)
    if slow is not None and fast is not None:
        assert fast.predicted_seconds <= slow.predicted_seconds * NEARLY + 1e-6
