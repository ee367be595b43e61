"""Which charts of itself a run has: memory of every tier by kind, loss, speed, peaks, traffic, and the marks on them. No torch
here. What the kernel says beside it is in ``machine_view.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from lowtide.planning.picture_drawing import COLOURS, OTHER_COLOUR
from lowtide.planning.text import clean
from lowtide.reporting.charts import Chart, Level, Mark, Series, thinned
from lowtide.reporting.extras import Extras
from lowtide.reporting.format import MemoryLine, StepLine
from lowtide.reporting.postmortem import DEVICE, OURS_NOT, WORKERS, parts_of
from lowtide.reporting.summary import counted_bytes
from lowtide.reporting.timeline import Process, Run, Timeline

_MOST_POINTS = 500
_EVERY_MOMENT = 240
"""Up to so many samples all are drawn."""
_MANY_STEPS = 80
"""More samples of at least so many steps would only flicker up and down with every step; of fewer steps, each has a shape."""
_MOST_MARKS = 60
_MOST_CURVES = 8
_SAME = {"buffers in flight": "buffers", "in flight": "buffers", "staging": "buffers"}
_ORDER = ("parameters", "gradients", "optimizer", "activations", "slots", "buffers")
KIND_COLOURS = {
    **COLOURS,
    OURS_NOT: "#8a9099",
    WORKERS: "#b39c86",
    DEVICE: "#9988cc",
    "unused": "#c7b299",
    "spare": "#c9ced6",
}
CURVE_COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66bbdd", "#ccaa33", "#dd6677", "#9988cc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something that happened in a run, once, whichever rank or file told it."""

    at: float
    """Seconds since the run began."""
    step: int | None
    what: str
    text: str
    rank: int | None


def entries(run: Run, extras: Extras) -> list[Entry]:
    """Everything that happened, in the order of time. What several ranks or files tell of the same step counts once."""
    begun = run.first.processes[0].run.started
    found = [
        Entry(at=timeline.at(process, m.t), step=m.step, what=m.what, text=m.text, rank=timeline.rank)
        for timeline in run.ranks
        for process in timeline.processes
        for m in process.marks
    ]
    found += [
        Entry(at=max(0.0, (h.wall or begun) - begun), step=h.step, what=h.what, text=h.text, rank=None)
        for h in extras.happenings
    ]
    for process in run.first.processes[1:]:
        told = "another process goes on with the run"
        at = run.first.at(process, 0.0)
        if not any(e.what == "resume" and abs(e.at - at) < 30 for e in found):
            step = process.steps[0].step - 1 if process.steps else None
            found.append(Entry(at=at, step=step, what="resume", text=told, rank=None))
    seen: set[tuple[str, int | None, str]] = set()
    once: list[Entry] = []
    for entry in sorted(found, key=lambda e: (e.at, e.rank if e.rank is not None else -1)):
        told_by_step = entry.what in ("checkpoint", "skip")
        key = (entry.what, entry.step, "" if told_by_step and entry.step is not None else entry.text)
        if key not in seen:
            seen.add(key)
            once.append(entry)
    return once


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_charts(timeline: Timeline, happened: Sequence[Entry]) -> list[Chart]:
    """One per tier that holds anything: host, device, disk."""
    samples = samples_over_time(timeline)
    marks = marks_on(happened, "time")
    run = timeline.last.run
    of = f", rank {timeline.rank}" if run.world_size > 1 else ""
    charts = [
        Chart(
            key=f"memory-host-{timeline.rank}",
            title=f"Host memory{of}",
            unit="bytes",
            axis="time",
            x=[at for at, _ in samples],
            layers=_stack([_host_parts(sample) if sample is not None else {} for _, sample in samples]),
            levels=_host_levels(timeline),
            marks=marks,
        )
    ]
    for tier in ("device", "disk"):
        parts: list[dict[str, int]] = [dict(getattr(sample, tier)) if sample is not None else {} for _, sample in samples]
        if any(size for part in parts for size in part.values()):
            limit = run.disk_limit_bytes if tier == "disk" else None
            charts.append(
                Chart(
                    key=f"memory-{tier}-{timeline.rank}",
                    title=f"{tier.capitalize()}{of}",
                    unit="bytes",
                    axis="time",
                    x=[at for at, _ in samples],
                    layers=_stack(parts),
                    levels=[Level(name="limit", points=[(0.0, float(limit))], look="lt-budget")] if limit else [],
                )
            )
    return [chart for chart in charts if not chart.is_empty]


def samples_over_time(timeline: Timeline) -> list[tuple[float, MemoryLine | None]]:
    """Samples over time, few enough to draw: of many, the fullest of every step. Nothing was there between two processes."""
    points: list[tuple[float, MemoryLine | None]] = []
    most = max(10, _MOST_POINTS // len(timeline.processes))
    count = sum(len(process.memory) for process in timeline.processes)
    steps = sum(len({sample.step for sample in process.memory}) for process in timeline.processes)
    for process in timeline.processes:
        taken = [(timeline.at(process, sample.t), sample) for sample in process.memory]
        if count > _EVERY_MOMENT and steps >= _MANY_STEPS:
            taken = [_fullest(list(group)) for _, group in groupby(taken, key=lambda pair: pair[1].step)]
        if taken and points:
            points += [(points[-1][0], None), (taken[0][0], None)]
        points += [_fullest(taken[begin:end]) for begin, end in thinned(len(taken), most)]
    return points


def _fullest(group: Sequence[tuple[float, MemoryLine]]) -> tuple[float, MemoryLine]:
    """Of samples that share a point, the one that used most: a peak must not be lost."""
    return max(group, key=lambda taken: counted_bytes(taken[1]))


def _host_parts(sample: MemoryLine) -> dict[str, int]:
    """What counts against the budget, and nothing else: the top of the stack is held against that line."""
    named: dict[str, int] = {}
    for kind, size in parts_of(sample).items():
        name = _SAME.get(kind, kind)
        named[name] = named.get(name, 0) + size
    return named


def _stack(parts: Sequence[dict[str, int]]) -> list[Series]:
    kinds = sorted({kind for part in parts for kind in part}, key=_place)
    return [
        Series(name=clean(kind), values=[part.get(kind, 0) for part in parts], colour=KIND_COLOURS.get(kind, OTHER_COLOUR))
        for kind in kinds
    ]


def _place(kind: str) -> tuple[int, str]:
    last = ("unused", "spare", DEVICE, OURS_NOT, WORKERS)
    if kind in last:
        return len(_ORDER) + 1 + last.index(kind), kind
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER)), kind


def _host_levels(timeline: Timeline) -> list[Level]:
    def changes(values: Iterable[tuple[Process, float, int | None]]) -> list[tuple[float, float]]:
        return [(timeline.at(process, t), float(value)) for process, t, value in values if value]

    budget = changes((p, 0.0, p.run.budget_bytes) for p in timeline.processes)
    plan = changes((p, plan.t, plan.predicted_peak_bytes) for p in timeline.processes for plan in p.plans)
    levels = [
        Level(name="budget", points=budget, look="lt-budget"),
        Level(name="planned peak", points=plan, look="lt-plan"),
    ]
    return [level for level in levels if level.points]


# -- over steps --------------------------------------------------------------------------------------------------------


def step_charts(run: Run, extras: Extras, happened: Sequence[Entry]) -> list[Chart]:
    """Loss, seconds, peaks and traffic, step by step."""
    by_rank = {timeline.rank: {step.step: step for _, step in timeline.steps()} for timeline in run.ranks}
    steps = sorted({step for lines in by_rank.values() for step in lines})
    groups = [steps[begin:end] for begin, end in thinned(len(steps), _MOST_POINTS)]
    x = [float(group[-1]) for group in groups]
    marks = marks_on(happened, "step")
    drawn = dict(list(by_rank.items())[:_MOST_CURVES])
    charts = [
        _loss_chart(groups, x, by_rank[run.first.rank], extras, marks),
        Chart(
            key="seconds",
            title="Seconds per step, from the beginning of its forward pass to the end of its update",
            unit="seconds",
            axis="step",
            x=x,
            curves=_per_rank(groups, drawn, "seconds", use_most=False),
            levels=_predicted(run),
            marks=marks,
        ),
        Chart(
            key="peaks",
            title="Peak of host memory per step, as it counts against the budget",
            unit="bytes",
            axis="step",
            x=x,
            curves=_per_rank(groups, drawn, "peak_bytes", use_most=True),
            levels=_budgets(run),
            marks=marks,
        ),
    ]
    return [chart for chart in charts if not chart.is_empty]


def traffic_chart(run: Run) -> Chart | None:
    """Bytes of all ranks from and to the disk, per step; ``None`` if nothing was ever moved."""
    totals: dict[int, list[int]] = {}
    for timeline in run.ranks:
        for _, step in timeline.steps():
            moved = totals.setdefault(step.step, [0, 0, 0])
            moved[0] += step.disk_read_bytes
            moved[1] += step.disk_written_bytes
            moved[2] += step.wire_bytes
    steps = sorted(totals)
    groups = [steps[begin:end] for begin, end in thinned(len(steps), _MOST_POINTS)]
    curves = [
        Series(
            name=name,
            values=[sum(totals[step][column] for step in group) / len(group) for group in groups],
            colour=colour,
        )
        for column, (name, colour) in enumerate(
            (("read from disk", "#228833"), ("written to disk", "#ee7733"), ("between ranks", "#9988cc"))
        )
        if any(moved[column] for moved in totals.values())
    ]
    if not curves:
        return None
    x = [float(group[-1]) for group in groups]
    return Chart(key="traffic", title="Bytes moved per step, all ranks", unit="bytes", axis="step", x=x, curves=curves)


def _loss_chart(
    groups: Sequence[Sequence[int]], x: Sequence[float], steps: dict[int, StepLine], extras: Extras, marks: Sequence[Mark]
) -> Chart:
    losses = {number: step.loss for number, step in steps.items() if step.loss is not None}
    losses = {**losses, **{number: loss for number, loss in extras.losses.items() if number in steps}}
    curves = [Series(name="loss", values=[_mean(losses, group) for group in groups], colour=CURVE_COLOURS[0])]
    if extras.validation:
        held = [_mean(extras.validation, group) for group in groups]
        known = [(i, value) for i, value in enumerate(held) if value is not None]
        joined: list[float | None] = [None] * len(held)
        for (i, first), (j, second) in pairwise(known):
            for k in range(i, j + 1):
                joined[k] = first + (second - first) * (k - i) / (j - i)
        if known:
            joined[known[-1][0]] = known[-1][1]
            curves.append(Series(name="held-out loss", values=joined, colour=CURVE_COLOURS[1]))
    return Chart(key="loss", title="Loss", unit="number", axis="step", x=x, curves=curves, marks=marks, from_zero=False)


def _per_rank(
    groups: Sequence[Sequence[int]], ranks: dict[int, dict[int, StepLine]], name: str, *, use_most: bool
) -> list[Series]:
    def value(lines: dict[int, StepLine], group: Sequence[int]) -> float | None:
        found = [float(getattr(lines[step], name)) for step in group if step in lines]
        if not found:
            return None
        return max(found) if use_most else sum(found) / len(found)

    return [
        Series(
            name=f"rank {rank}" if len(ranks) > 1 else "measured",
            values=[value(lines, group) for group in groups],
            colour=CURVE_COLOURS[i % len(CURVE_COLOURS)],
        )
        for i, (rank, lines) in enumerate(ranks.items())
    ]


def _predicted(run: Run) -> list[Level]:
    """Seconds by the plans of the first rank, each from its step on."""
    plans = [plan for process in run.first.processes for plan in process.plans if plan.predicted_seconds]
    points = [(float(plan.step), float(plan.predicted_seconds or 0.0)) for plan in plans]
    ordered = [point for i, point in enumerate(points) if i == 0 or point[0] >= points[i - 1][0]]
    return [Level(name="predicted", points=ordered, look="lt-plan")] if ordered else []


def _budgets(run: Run) -> list[Level]:
    budget = run.first.last.run.budget_bytes
    return [Level(name="budget", points=[(0.0, float(budget))], look="lt-budget")] if budget else []


def _mean(values: dict[int, float], group: Sequence[int]) -> float | None:
    found = [values[step] for step in group if step in values]
    return sum(found) / len(found) if found else None


def marks_on(happened: Sequence[Entry], axis: str) -> list[Mark]:
    """At most a readable number; what is rarer than a checkpoint goes first."""
    placed = [(e.at if axis == "time" else float(e.step or 0), e) for e in happened if axis == "time" or e.step is not None]
    rare = [pair for pair in placed if pair[1].what != "checkpoint"]
    often = [pair for pair in placed if pair[1].what == "checkpoint"]
    kept = [*rare[-_MOST_MARKS:], *often[: max(0, _MOST_MARKS - len(rare))]]
    return [Mark(x=x, what=clean(e.what), text=clean(f"{e.what}: {e.text}" if e.text else e.what)) for x, e in kept]
