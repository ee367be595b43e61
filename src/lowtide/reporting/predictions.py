"""How far off the plans of a run were: each against the steps it was in force for, and against their peak. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.reporting.extras import Extras
from lowtide.reporting.format import PlanLine, StepLine
from lowtide.reporting.summary import Summary, steady_steps
from lowtide.reporting.timeline import Run, Timeline

_BEFORE = "plan from before the first step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was said and what came. ``None`` where one of the two is missing."""

    what: str
    """Which plan: why it was made."""
    steps: str
    """Those it is held against."""
    predicted: float | None
    measured: float | None
    unit: str
    """seconds or bytes"""

    @property
    def of(self) -> str:
        """What was predicted."""
        return "seconds per step" if self.unit == "seconds" else "peak of host memory"

    @property
    def error(self) -> float | None:
        """Of what was measured: 0.1 is a tenth too high."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def error_text(error: float) -> str:
    """``+12 %``."""
    return f"{100 * error:+.0f} %".replace("-", "−")


def off_text(error: float) -> str:
    """``12 % too high``."""
    percent = f"{100 * abs(error):.0f} %"
    return f"{percent} too {'high' if error > 0 else 'low'}" if round(100 * error) else "right to 1 %"


def predictions(run: Run, summary: Summary, extras: Extras) -> list[Prediction]:
    """The plan from before the first step, if there was one, and every placement of the first rank."""
    found: list[Prediction] = []
    steps = steady_steps(run.first)
    if extras.plan is not None and steps:
        seconds = extras.plan.predicted_seconds or None
        peak = sum(rank.peak_bytes for rank in summary.ranks if rank.run.host == summary.ranks[0].run.host)
        found.append(_seconds(_BEFORE, "all", seconds, steps))
        predicted = float(extras.plan.predicted_peak_bytes)
        found.append(Prediction(what=_BEFORE, steps="all", predicted=predicted, measured=float(peak), unit="bytes"))
    for plan, lines in _in_force(run.first):
        if lines:
            first, last = lines[0].step, lines[-1].step
            numbers = f"{first} to {last}" if last > first else str(first)
            why = plan.why or "placement"
            found.append(_seconds(why, numbers, plan.predicted_seconds, lines))
            peak = max(step.peak_bytes for step in lines)
            if plan.predicted_peak_bytes is not None and peak:
                predicted = float(plan.predicted_peak_bytes)
                found.append(Prediction(what=why, steps=numbers, predicted=predicted, measured=float(peak), unit="bytes"))
    return [p for p in found if p.predicted is not None]


def _seconds(what: str, numbers: str, predicted: float | None, steps: Sequence[StepLine]) -> Prediction:
    measured = sum(step.seconds for step in steps) / len(steps)
    return Prediction(what=what, steps=numbers, predicted=predicted, measured=measured, unit="seconds")


def _in_force(timeline: Timeline) -> list[tuple[PlanLine, list[StepLine]]]:
    """Every plan with the steps that ended under it; the first step of a process says little and is left out."""
    out: list[tuple[PlanLine, list[StepLine]]] = []
    for process in timeline.processes:
        for i, plan in enumerate(process.plans):
            until = process.plans[i + 1].t if i + 1 < len(process.plans) else float("inf")
            out.append((plan, [step for step in process.steps[1:] if plan.t <= step.t - step.seconds and step.t <= until]))
    return out
