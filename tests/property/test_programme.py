"""The programme against brute force, and what must hold for every plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planning.options import Kind, Phase, Rates, Tier, UnitNeeds, Way
from lowtide.planning.programme import Infeasible, Problem, Solution, evaluate, options_for, peak_of, solve, step_seconds

MIB = 1 << 20
sizes = st.integers(1, 40).map(lambda n: n * MIB)
seconds = st.integers(0, 20).map(lambda n: n / 10)
speeds = st.sampled_from([1 / (50 * MIB), 1 / (20 * MIB), 1 / (200 * MIB)])


@st.composite
def units(draw: st.DrawFn, most: int) -> tuple[UnitNeeds, ...]:
    out = []
    for i in range(draw(st.integers(1, most))):
        parameters, activations = draw(sizes), draw(sizes)
        out.append(
            UnitNeeds(
                name=f"unit {i}",
                whole=parameters,
                parameters=parameters,
                gradients=parameters,
                optimizer=2 * parameters,
                activations=activations,
                inputs=draw(st.integers(0, activations)),
                forward_seconds=draw(seconds),
                backward_seconds=draw(seconds),
                update_seconds=draw(seconds) / 10,
            )
        )
    return tuple(out)


@st.composite
def problems(draw: st.DrawFn, most: int = 2, policies: tuple[str, ...] = ("keep", "recompute", "disk")) -> Problem:
    found = draw(units(most))
    total = sum(u.parameters * 4 + u.activations for u in found)
    room = {Tier.HOST: draw(st.integers(0, total)), Tier.DISK: draw(st.sampled_from([total // 2, 2 * total]))}
    link = None
    if draw(st.booleans()):
        room = {Tier.DEVICE: draw(st.integers(0, total)), **room}
        link = draw(speeds) / 4
    rates = Rates(disk_read=draw(speeds), disk_write=draw(speeds), disk_busy=draw(st.sampled_from([0.0, 0.2])), link=link)
    way = Way(
        update_in=draw(st.sampled_from(list(Phase))),
        slots_in_update=draw(st.booleans()),
        slots=draw(st.sampled_from([2, 3])),
        gradients_stay=draw(st.booleans()),
    )
    return Problem(units=found, rates=rates, way=way, room=room, policies=(policies,) * len(found))


def every_choice(problem: Problem) -> itertools.product:  # type: ignore[type-arg]
    per_unit = [list(itertools.product(*kinds)) for kinds in options_for(problem)]
    return itertools.product(*per_unit)


def best_by_hand(problem: Problem) -> float | None:
    """The seconds of the best of all choices that fit; no use of the programme."""
    best: float | None = None
    for chosen in every_choice(problem):
        if all(peak_of(tier, chosen) <= room for tier, room in problem.room.items()):
            found = evaluate(problem, chosen).seconds
            best = found if best is None else min(best, found)
    return best


def solved(problem: Problem) -> Solution | None:
    try:
        return solve(problem)
    except Infeasible as infeasible:
        if not infeasible.short:
            raise  # what does not fit is named with the bytes that are missing
        return None


@settings(max_examples=60, deadline=None)
@given(problems(most=2))
def test_nothing_that_fits_is_faster(problem: Problem) -> None:
    by_hand = best_by_hand(problem)
    solution = solved(problem)
    assert (solution is None) == (by_hand is None)
    if solution is not None and by_hand is not None:
        # Traffic breaks ties with a weight of a thousandth, and the search stops within a thousandth of the best.
        assert solution.seconds <= by_hand * 1.004 + 1e-6


@settings(max_examples=60, deadline=None)
@given(problems(most=6))
def test_a_solution_fits_in_every_tier_and_chooses_once(problem: Problem) -> None:
    solution = solved(problem)
    if solution is None:
        return
    for tier, room in problem.room.items():
        assert solution.peaks[tier] <= room + 1, tier
    for unit, row in zip(problem.units, solution.chosen, strict=True):
        kinds = [option.kind for option in row]
        assert len(set(kinds)) == len(kinds), unit
        assert {Kind.PARAMETERS, Kind.OPTIMIZER, Kind.ACTIVATIONS} <= set(kinds), unit
    assert solution.seconds == step_seconds(solution.loads)


@settings(max_examples=40, deadline=None)
@given(problems(most=5), st.integers(1, 200))
def test_more_memory_is_never_slower(problem: Problem, more: int) -> None:
    less = solved(problem)
    room = dict(problem.room)
    room[Tier.HOST] += more * MIB
    roomier = solved(Problem(**{**{f: getattr(problem, f) for f in Problem.__slots__}, "room": room}))
    if less is not None:
        assert roomier is not None
        assert roomier.seconds <= less.seconds * 1.004 + 1e-6


@settings(max_examples=40, deadline=None)
@given(problems(most=3))
def test_equal_units_in_a_row_are_as_good_as_one_by_one(problem: Problem) -> None:
    """Units that are alike are counted together; that must not make the answer worse than it is without."""
    alike = tuple(problem.units[0] for _ in range(3))
    fields = {f: getattr(problem, f) for f in Problem.__slots__}
    policies = (problem.policies[0],) * 3
    together = solved(Problem(**{**fields, "units": alike, "policies": policies}))
    # The same units, told apart by a byte of inputs that nobody needs.
    apart = tuple(
        UnitNeeds(**{**{f: getattr(u, f) for f in UnitNeeds.__slots__}, "whole": u.whole + i}) for i, u in enumerate(alike)
    )
    separate = solved(Problem(**{**fields, "units": apart, "policies": policies}))
    if together is not None:
        assert separate is not None
        assert separate.seconds <= together.seconds * 1.004 + 1e-6


def test_capacity_fills_the_fast_tier_first() -> None:
    unit = UnitNeeds(name="u", whole=MIB, parameters=MIB, gradients=MIB, optimizer=2 * MIB, activations=MIB, forward_seconds=9)
    problem = Problem(
        units=(unit,) * 4,
        rates=Rates(disk_read=1e-9, disk_write=1e-9),
        way=Way(),
        room={Tier.HOST: 14 * MIB, Tier.DISK: 1 << 40},
        policies=(("keep", "disk"),) * 4,
        objective="capacity",
    )
    solution = solve(problem)
    assert solution.peaks[Tier.HOST] > 13 * MIB
    away = sum(o.nbytes for row in solution.chosen for o in row if o.tier is Tier.DISK)
    assert away == 20 * MIB - 14 * MIB


def test_what_does_not_fit_is_named_with_its_bytes() -> None:
    unit = UnitNeeds(name="u", parameters=10 * MIB, gradients=10 * MIB, optimizer=20 * MIB)
    problem = Problem(units=(unit,), rates=Rates(), way=Way(), room={Tier.HOST: 5 * MIB}, policies=(("keep",),))
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert caught.value.short == {Tier.HOST: 35 * MIB}
