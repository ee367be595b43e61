"""The best placement, as an integer linear programme: which option for every kind of bytes of every unit.

Units that are alike and follow each other are one *run*; a variable says how many units of a run take an option. For each
phase a variable is at least the load of every resource in it, and their sum, the seconds of a step, is minimised. What lives
in a tier stays within it at every moment of the step at which it could be fullest.

[Note: moments] While backward passes a run, memory falls and then rises (see ``_spread``), so the ends of runs are the only
moments at which a tier can be fullest.

Of two placements that take the same time the one that moves fewer bytes is better: it wears the disk less, and leaves more room
for what was not foreseen. So a little of the load of everything but compute is added to what is minimised.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.planning.options import (
    Kind,
    Lasting,
    Load,
    Option,
    Phase,
    Rates,
    Resource,
    Tier,
    UnitNeeds,
    Way,
    fixed_loads,
    options_of,
)

_TRAFFIC_WEIGHT = 1e-3
_MIP_GAP = 1e-3
_SCALE = 2.0**-20  # numbers around one are solved best
_NO_END = 1 << 56
_NODES = (200, 20_000)
"""The search is stopped after so many nodes, and what it has found by then is used; if that is nothing, it may look at more.
Not by the clock: on a busy machine the same question would have another answer. Nearly all programmes need one node."""
_LAST_RESORT_SECONDS = 45.0
"""But for this: while training, other ranks wait for the answer, and not for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be placed, and where."""

    units: tuple[UnitNeeds, ...]
    rates: Rates
    way: Way
    room: dict[Tier, int]
    """Bytes that may be used in every tier there is, after all that is not placed by this programme. A tier that is missing
    here is not used."""
    policies: tuple[tuple[str, ...], ...] = ()
    """For each unit, what may become of its activations."""
    fixed: frozenset[Kind] = frozenset()
    """Kinds that must stay in the fastest tier."""
    objective: str = "time"
    """``time``, or ``capacity``: as few bytes as possible in slow tiers, whatever that costs."""
    outside: tuple[Load, ...] = field(default=())
    """What a step costs outside of units."""

    def tiers_for(self, kind: Kind) -> tuple[Tier, ...]:
        tiers = tuple(t for t in Tier if t in self.room)
        return tiers[:1] if kind in self.fixed else tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One option for every kind of every unit, in the order of the units."""

    chosen: tuple[tuple[Option, ...], ...]
    loads: dict[tuple[Phase, Resource], float]
    peaks: dict[Tier, int]

    @property
    def seconds(self) -> float:
        return step_seconds(self.loads)


class Infeasible(Exception):
    """No choice fits. ``short``: bytes that are missing in every tier if the smallest option is taken everywhere."""

    def __init__(self, short: dict[Tier, int]) -> None:
        super().__init__(f"short of {short}")
        self.short = short


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal units that follow each other."""

    first: int
    count: int
    kinds: tuple[tuple[Option, ...], ...]
    fixed: tuple[Load, ...]


def solve(problem: Problem) -> Solution:
    """The best choice, or :class:`Infeasible`."""
    runs = list(_runs(problem))
    model = _Model(problem, runs)
    counts = model.solve()
    if counts is None:
        raise Infeasible(_short_of(problem, runs) or _short_in_all(problem))
    chosen: list[tuple[Option, ...]] = []
    for run, by_kind in zip(runs, counts, strict=True):
        columns = [_spread(options, numbers) for options, numbers in zip(run.kinds, by_kind, strict=True)]
        chosen += zip(*columns, strict=True) if columns else [()] * run.count
    return evaluate(problem, tuple(chosen))


def evaluate(problem: Problem, chosen: tuple[tuple[Option, ...], ...]) -> Solution:
    """Loads and peaks of a choice, by adding up."""
    loads: dict[tuple[Phase, Resource], float] = defaultdict(float)
    fixed = (load for unit in problem.units for load in fixed_loads(unit, problem.rates, problem.way))
    for load in itertools.chain(problem.outside, fixed, (x for row in chosen for option in row for x in option.loads)):
        loads[load.phase, load.resource] += load.seconds
    return Solution(chosen=chosen, loads=dict(loads), peaks={tier: peak_of(tier, chosen) for tier in problem.room})


def step_seconds(loads: dict[tuple[Phase, Resource], float]) -> float:
    """Every phase takes as long as its busiest resource."""
    return sum(max((s for (p, _), s in loads.items() if p is phase), default=0.0) for phase in Phase)


def peak_of(tier: Tier, chosen: Sequence[Sequence[Option]]) -> int:
    """The most bytes that are in ``tier`` at any moment: backward reaches unit i, and activations of later ones are gone."""
    rows = [[o for o in row if o.tier is tier] for row in chosen]
    near = Tier.DEVICE if any(o.tier is Tier.DEVICE for row in chosen for o in row) else Tier.HOST
    always = sum(o.nbytes for row in rows for o in row if o.lasting is Lasting.ALWAYS)
    saved = [sum(o.nbytes for o in row if o.lasting is Lasting.FROM_FORWARD) for row in rows]
    gradients = [sum(o.nbytes for o in row if o.lasting is Lasting.FROM_BACKWARD) for row in rows]
    again = [max((o.again for o in row), default=0) for row in chosen] if tier is near else [0] * len(rows)
    live, most = sum(saved), sum(saved)
    for i in reversed(range(len(rows))):  # before and after the backward of unit i
        most = max(most, live + again[i])
        live += gradients[i] - saved[i]
        most = max(most, live)
    return always + most


def options_for(problem: Problem) -> list[list[tuple[Option, ...]]]:
    """For every unit and every kind of its bytes, what may be chosen: the nearest tier first."""
    policies = problem.policies or ((),) * len(problem.units)
    return [_options(problem, unit, allowed) for unit, allowed in zip(problem.units, policies, strict=True)]


def _options(problem: Problem, unit: UnitNeeds, policies: tuple[str, ...]) -> list[tuple[Option, ...]]:
    found = options_of(unit, problem.rates, problem.way, problem.tiers_for(Kind.ACTIVATIONS), policies)
    return [tuple(o for o in options if o.tier in problem.tiers_for(o.kind)) for options in found]


def _runs(problem: Problem) -> Iterable[_Run]:
    policies = problem.policies or ((),) * len(problem.units)
    start = 0
    for i in range(1, len(problem.units) + 1):
        same = i < len(problem.units) and problem.units[i].same_as(problem.units[start]) and policies[i] == policies[start]
        if not same:
            unit = problem.units[start]
            fixed = fixed_loads(unit, problem.rates, problem.way)
            yield _Run(start, i - start, tuple(_options(problem, unit, policies[start])), fixed)
            start = i


def _spread(options: Sequence[Option], counts: Sequence[int]) -> list[Option]:
    """``counts[i]`` units take ``options[i]``, in an order in which memory falls before it rises while backward passes the run:
    activations that are kept belong to its last units, gradients that are near to its first ones."""
    sign = 1 if options[0].lasting is Lasting.FROM_BACKWARD else -1
    ordered = sorted(zip(options, counts, strict=True), key=lambda pair: sign * _distance(pair[0]))
    return [option for option, count in ordered for _ in range(count)]


def _distance(option: Option) -> int:
    return list(Tier).index(option.tier) * 2 + bool(option.again)


def _short_of(problem: Problem, runs: Sequence[_Run]) -> dict[Tier, int]:
    """How many bytes are missing if every kind takes its smallest option in each tier."""
    short: dict[Tier, int] = {}
    for tier, room in problem.room.items():
        least = []
        for run in runs:
            row = tuple(min(options, key=lambda o: o.nbytes if o.tier is tier else 0) for options in run.kinds)
            least += [row] * run.count
        needed = peak_of(tier, least)
        if needed > room:
            short[tier] = needed - room
    return short


def _short_in_all(problem: Problem) -> dict[Tier, int]:
    """Every tier could hold its least, but not all of them at once: what the slowest would have to have more."""
    slowest = max(problem.room, key=list(Tier).index)
    if problem.room[slowest] == _NO_END:  # even that would not do: then the nearest is too small, by an amount not known
        return {min(problem.room, key=list(Tier).index): 1}
    roomier = replace(problem, room={**problem.room, slowest: _NO_END}, objective="capacity")
    try:
        return {slowest: solve(roomier).peaks[slowest] - problem.room[slowest]}
    except Infeasible as infeasible:
        return infeasible.short


class _Model:
    """The programme's columns and rows, as HiGHS takes them."""

    def __init__(self, problem: Problem, runs: Sequence[_Run]) -> None:
        import highspy  # pyright: ignore[reportMissingTypeStubs]

        self._problem, self._runs = problem, runs
        self._infinity = highspy.kHighsInf
        self._integer = highspy.HighsVarType.kInteger
        self._highs: Any = highspy.Highs()
        self._infeasible = highspy.HighsModelStatus.kInfeasible
        for name, value in (
            ("output_flag", False),
            ("mip_rel_gap", _MIP_GAP),
            ("threads", 1),
            ("time_limit", _LAST_RESORT_SECONDS),
        ):
            self._highs.setOptionValue(name, value)
        self._columns = 0
        self._numbers: list[list[list[int]]] = [
            [[self._column(0, run.count, self._weight(o), integer=True) for o in options] for options in run.kinds]
            for run in runs
        ]
        self._phases = {phase: self._column(0, self._infinity, 1.0 if problem.objective == "time" else 1e-6) for phase in Phase}
        self._add_rows()

    def solve(self) -> list[list[list[int]]] | None:
        """How many units of each run take each option; None if nothing fits."""
        for nodes in _NODES:
            self._highs.setOptionValue("mip_max_nodes", nodes)
            self._highs.run()
            if self._highs.getInfo().primal_solution_status == 2:  # kSolutionStatusFeasible
                values = self._highs.getSolution().col_value
                return [[[round(values[c]) for c in columns] for columns in kinds] for kinds in self._numbers]
            if self._highs.getModelStatus() == self._infeasible:
                return None
        return None

    def _weight(self, option: Option) -> float:
        """What an option adds to the objective by itself."""
        if self._problem.objective == "capacity":
            return float(list(Tier).index(option.tier) * option.nbytes) / 2**30
        return _TRAFFIC_WEIGHT * sum(x.seconds for x in option.loads if x.resource is not Resource.COMPUTE)

    def _column(self, low: float, high: float, cost: float, *, integer: bool = False) -> int:
        self._highs.addCol(cost, low, high, 0, [], [])
        if integer:
            self._highs.changeColIntegrality(self._columns, self._integer)
        self._columns += 1
        return self._columns - 1

    def _row(self, low: float, terms: dict[int, float], high: float) -> None:
        self._highs.addRow(low, high, len(terms), list(terms), list(terms.values()))

    def _add_rows(self) -> None:
        for run, kinds in zip(self._runs, self._numbers, strict=True):
            for columns in kinds:
                self._row(run.count, dict.fromkeys(columns, 1.0), run.count)
        for phase in Phase:
            for resource in Resource:
                self._add_load(phase, resource)
        for tier, room in self._problem.room.items():
            self._add_room(tier, room)

    def _add_load(self, phase: Phase, resource: Resource) -> None:
        """The phase lasts at least as long as this resource works in it."""
        fixed = sum(x.seconds * r.count for r in self._runs for x in r.fixed if (x.phase, x.resource) == (phase, resource))
        fixed += sum(x.seconds for x in self._problem.outside if (x.phase, x.resource) == (phase, resource))
        terms: dict[int, float] = {}
        for option, column in self._options():
            seconds = sum(x.seconds for x in option.loads if (x.phase, x.resource) == (phase, resource))
            if seconds:
                terms[column] = -seconds
        if terms or fixed:
            self._row(fixed, {self._phases[phase]: 1.0, **terms}, self._infinity)

    def _options(self) -> Iterable[tuple[Option, int]]:
        for run, kinds in zip(self._runs, self._numbers, strict=True):
            for options, columns in zip(run.kinds, kinds, strict=True):
                yield from zip(options, columns, strict=True)

    def _add_room(self, tier: Tier, room: int) -> None:
        """What is in the tier fits at every moment, see [Note: moments]. Each moment's bytes are those of the one before, less
        the activations and plus the gradients of the run between them: a few terms each, where a sum would have all."""
        near = min(self._problem.room, key=list(Tier).index)
        live = self._column(0, room * _SCALE, 0.0)
        before = {c: o.nbytes for o, c in self._options() if o.tier is tier and o.lasting is not Lasting.FROM_BACKWARD}
        self._row(0, {live: -1.0, **{c: n * _SCALE for c, n in before.items()}}, 0)
        for run, kinds in zip(reversed(self._runs), reversed(self._numbers), strict=True):
            again = self._again(run, kinds) if tier is near else None
            after = self._column(0, room * _SCALE, 0.0)
            terms = {live: 1.0, after: -1.0}
            for options, columns in zip(run.kinds, kinds, strict=True):
                for option, column in zip(options, columns, strict=True):
                    if option.tier is tier and option.lasting is not Lasting.ALWAYS:
                        sign = 1 if option.lasting is Lasting.FROM_BACKWARD else -1
                        terms[column] = sign * option.nbytes * _SCALE
            self._row(0, terms, 0)
            if again is not None:
                self._row(-self._infinity, {live: 1.0, again: 1.0}, room * _SCALE)
                if run.count > 1:  # its last unit computes again when most of the run is done
                    self._row(-self._infinity, {after: 1.0, again: 1.0}, room * _SCALE)
            live = after

    def _again(self, run: _Run, kinds: list[list[int]]) -> int | None:
        """A variable that is the size of one unit's activations if any unit of the run computes them again."""
        for options, columns in zip(run.kinds, kinds, strict=True):
            for option, column in zip(options, columns, strict=True):
                if option.again:
                    any_ = self._column(0, 1, 0.0, integer=True)
                    size = self._column(0, self._infinity, 0.0)
                    nbytes = option.again + (option.nbytes if run.count > 1 else 0)
                    self._row(-self._infinity, {column: 1.0, any_: -float(run.count)}, 0)
                    self._row(0, {size: 1.0, any_: -nbytes * _SCALE}, self._infinity)
                    return size
        return None
