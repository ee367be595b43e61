"""Schedules of plans: every one holds, every way of breaking one is found, and what it moves is what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide.errors import InternalError
from lowtide.planning.options import Kind
from lowtide.planning.plan import Plan
from lowtide.planning.planner import candidates, make_plan
from lowtide.planning.request import Request
from lowtide.planning.schedule import Event, Verb, schedule
from lowtide.planning.verify import same_collectives, verify
from lowtide.spec.catalogue import load
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec, UnitFacts, Work
from lowtide.tiers.null import NullStore
from lowtide.tiers.store import Key, Priority

GIB = 1 << 30
HARDWARE: Hardware = load("cpu-2")


def model(layers: int = 8) -> ModelSpec:
    work = Work(flops=1e10, moved_bytes=1e8, fresh_bytes=1e7, operations=40)
    unit = UnitFacts(
        name="block",
        numel=30_000_000,
        trained_numel=30_000_000,
        parameter_bytes=120_000_000,
        forward=work,
        backward=work + work,
        activation_bytes=60_000_000,
        input_bytes=3_000_000,
        transient_bytes=10_000_000,
    )
    units = tuple(replace(unit, name=f"blocks.{i}") for i in range(layers))
    return ModelSpec(name="blocks", units=units, dtype="fp32", batch="2×256 tokens")


REQUESTS = {
    "plain": Request(memory_bytes=16 * GIB),
    "put off": Request(memory_bytes=2 * GIB),
    "backward": Request(memory_bytes=2 * GIB, update="backward"),
    "tight": Request(memory_bytes=int(1.3 * GIB), update="backward"),
    "spilled": Request(memory_bytes=int(1.6 * GIB), activations="disk"),
    "recomputed": Request(memory_bytes=int(1.6 * GIB), activations="recompute"),
    **{f"4 ranks, stage {s}": Request(memory_bytes=64 * GIB, world_size=4, ranks_per_host=4, stage=s) for s in range(4)},
    "4 ranks from disk": Request(memory_bytes=8 * GIB, world_size=4, ranks_per_host=4, stage=3),
}


def planned(name: str) -> tuple[Plan, list[Event], tuple[object, ...]]:
    request = REQUESTS[name]
    plan = make_plan(model(), HARDWARE, request)
    chosen = next(c for c in candidates(model(), HARDWARE, request) if c.stage.number == plan.stage)
    return plan, list(schedule(plan)), chosen.problem.units


@pytest.mark.parametrize("name", REQUESTS)
def test_every_schedule_holds_and_moves_what_the_plan_says(name: str) -> None:
    plan, events, sizes = planned(name)
    moved = verify(plan, sizes, events)  # type: ignore[arg-type]
    assert (plan.placement == "streamed") == bool(moved)


def test_an_update_apart_reads_by_chunks_and_takes_no_slot() -> None:
    """With a device of its own all units are updated after backward, on the host: more of them than there are slots."""
    hardware = load("h100-80g")
    request = Request(memory_bytes=int(1.4 * GIB), device_memory_bytes=int(1.4 * GIB))
    plan = make_plan(model(), hardware, request)
    assert plan.update_in == "update"
    assert sum(unit.parameters == "disk" for unit in plan.units) > plan.slots
    chosen = next(c for c in candidates(model(), hardware, request) if c.stage.number == plan.stage)
    assert verify(plan, chosen.problem.units, schedule(plan))


def test_the_null_store_counts_the_same_bytes() -> None:
    plan, events, sizes = planned("backward")
    store, buffer = NullStore(), torch.empty(1 << 29, dtype=torch.uint8)
    extents = {
        (i, kind): store.reserve(Key(f"{i}", kind.value), (0, getattr(unit, kind.value)))
        for i, unit in enumerate(sizes)
        for kind in Kind
    }

    def move(unit: int, kind: Kind, nbytes: int, verb: Verb) -> None:
        act = store.read if verb is Verb.READ else store.write
        act(extents[unit, kind], 0, buffer[:nbytes], Priority.NOW).wait()

    for (unit, kind), extent in extents.items():
        store.write(extent, 0, buffer[: getattr(sizes[unit], kind.value)], Priority.NOW).wait()
    before = store.traffic.written_bytes
    moved = verify(plan, sizes, events, move)  # type: ignore[arg-type]
    assert store.traffic.read_bytes == moved["disk read"]
    assert store.traffic.written_bytes - before == moved["disk written"]


BREAKS = {
    "no read before compute": (lambda e: e.verb is Verb.READ and e.kind is Kind.PARAMETERS, "not whole"),
    "no read before update": (lambda e: e.verb is Verb.READ and e.kind is Kind.OPTIMIZER, "updated before"),
    "no write after update": (lambda e: e.verb is Verb.WRITE and e.kind is Kind.OPTIMIZER, "not written"),
    "never released": (lambda e: e.verb is Verb.RELEASE, "slots"),
    "never updated": (lambda e: e.verb is Verb.UPDATE, "not updated"),
    "never computed": (lambda e: e.verb is Verb.COMPUTE, "compute once"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_schedule_is_found(name: str) -> None:
    left_out, message = BREAKS[name]
    plan, events, sizes = planned("tight")
    assert plan.count("parameters").get("disk", 0) > 3
    with pytest.raises(InternalError, match=message):
        verify(plan, sizes, [e for e in events if not left_out(e)])  # type: ignore[arg-type]


def test_ranks_that_would_meet_in_other_collectives_are_found() -> None:
    _, events, _ = planned("4 ranks from disk")
    same_collectives([events, events])
    swapped = [e for e in events if not (e.verb is Verb.GATHER and e.unit == 3)]
    with pytest.raises(InternalError, match="rank 1"):
        same_collectives([events, swapped])
