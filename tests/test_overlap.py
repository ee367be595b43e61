"""Exchanges run next to compute: shown by the order of events on each of two ranks, not by times."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import lowtide
from lowtide.api import engine_of
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack

COUNT = 5
UNITS = [*(f"blocks.{k}" for k in range(COUNT)), "head"]
Events = list[tuple[str, str]]


def traced(rank: int, world: int, stage: int, comm: lowtide.Comm) -> tuple[Events, Events, Events]:
    """The events of forward, backward and step, in the third round: the order of units is known by then."""
    torch.manual_seed(0)
    model = Stack([Block() for _ in range(COUNT)])
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage, comm=comm)
    trace = engine_of(model).trace
    phases: list[Events] = []

    def cut() -> None:
        phases.append([(e.what, e.unit) for e in trace.events])
        trace.events.clear()

    for number in range(3):
        if number == 2:
            trace.on = True
        loss = model(torch.full((2, 24), 0.1 * (rank + number + 1))).square().mean()
        cut()
        loss.backward()
        cut()
        optimizer.step()
        optimizer.zero_grad()
        cut()
    forward, backward, step = phases[-3:]
    return forward, backward, step


def unit_of(parameter: str) -> str:
    return next(unit for unit in UNITS if parameter.startswith(unit + "."))


def place(events: Events, what: str, unit: str) -> int:
    found = [i for i, event in enumerate(events) if event == (what, unit)]
    assert found, f"{what} of {unit} did not happen in {events}"
    return found[0]


def gradients(events: Events, unit: str) -> list[int]:
    return [i for i, (what, name) in enumerate(events) if what == "gradient" and unit_of(name) == unit]


def test_forward_gathers_the_next_unit_while_one_computes() -> None:
    for forward, _, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0)):
        for here, following in pairwise(UNITS):
            assert place(forward, "attach", here) < place(forward, "prefetch", following) < place(forward, "release", here)
        # one ahead, not more: whoever is gathered two ahead takes memory for nothing
        for here, later in zip(UNITS, UNITS[2:], strict=False):
            assert place(forward, "release", here) < place(forward, "prefetch", later)
        assert sum(what == "prefetch" for what, _ in forward) == len(UNITS), "each unit is gathered once"
        assert all(what != "demand" for what, _ in forward)


def test_backward_gathers_the_next_unit_and_reduces_the_last_one_while_one_computes() -> None:
    for _, backward, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0)):
        order = UNITS[::-1]
        for here, following in pairwise(order):
            mine, next_ones = gradients(backward, here), gradients(backward, following)
            assert len(mine) == (2 if here == "head" else 6)
            assert place(backward, "prefetch", following) < mine[-1], f"{following} is gathered after {here} is done"
            assert mine[-1] < place(backward, "reduce", here) < next_ones[0], f"{here} is reduced after {following} has begun"
        ends = [i for i, (what, _) in enumerate(backward) if what == "reduced"]
        assert min(ends) > place(backward, "reduce", UNITS[0]), "nobody waits for a reduction while there is work left"
        assert [unit for what, unit in backward if what == "reduce"] == order


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reductions_overlap_backward_at_every_stage(stage: int) -> None:
    for forward, backward, _ in run_ranks(2, traced, stage, lowtide.Comm(transport="torch", bucket_bytes=0)):
        assert forward == [], "resident parameters are not moved"
        order = UNITS[::-1]
        for here, following in pairwise(order):
            assert gradients(backward, here)[-1] < place(backward, "reduce", here) < gradients(backward, following)[0]


def test_units_are_dropped_as_soon_as_backward_is_done_with_them() -> None:
    for _, backward, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0)):
        for here, later in zip(UNITS[::-1], UNITS[::-1][2:], strict=False):
            assert place(backward, "drop", here) < gradients(backward, later)[0]


def test_prefetch_can_be_deeper_or_off() -> None:
    for forward, _, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0, prefetch=2)):
        assert place(forward, "prefetch", UNITS[2]) < place(forward, "release", UNITS[0])
    for forward, _, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0, prefetch=0)):
        for here, following in pairwise(UNITS):
            assert place(forward, "release", here) < place(forward, "prefetch", following)


def test_small_units_travel_together() -> None:
    """All of this model fits into one bucket: one gather forward, one backward, one reduction."""
    for forward, backward, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=1 << 20)):
        name = "blocks.0 … head"
        assert [e for e in forward if e[0] == "prefetch"] == [("prefetch", name)]
        assert [e for e in backward if e[0] == "reduce"] == [("reduce", name)]
    size = sum(p.nbytes for p in Block().parameters())
    for _, backward, _ in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=2 * size)):
        units = [unit for what, unit in backward if what == "reduce"]
        assert units == ["blocks.4 … head", "blocks.2 … blocks.3", "blocks.0 … blocks.1"]


def test_a_step_at_stage_3_gathers_nothing() -> None:
    for _, _, step in run_ranks(2, traced, 3, lowtide.Comm(transport="torch", bucket_bytes=0)):
        assert step == [("step", ""), ("update", "")]
