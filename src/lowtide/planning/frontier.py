"""What a range of memory would bring: the same question asked at several sizes. Pure, like the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.request import VARIABLE, Request
from lowtide.planning.text import bar, seconds_text, size_text
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec

_FEWEST, _MOST = 7, 11
"""Steps between the two ends. More than half as many again, so that some step always lies between."""
_NARROWEST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size, and the best plan with it; or how much is missing, and where."""

    what: str
    nbytes: int
    plan: Plan | None
    short_tier: str = ""
    short_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return 0 if self.plan is None else sum(self.plan.traffic_bytes.values())

    @property
    def seconds(self) -> float | None:
        """Of a step; ``None`` if it does not fit or its work is not known."""
        return self.plan.predicted_seconds if self.plan is not None and self.plan.batch else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the plan itself."""
        fields = {name: value for name, value in asdict(replace(self, plan=None)).items() if name != "plan"}
        fitting = {"fits": self.plan is not None, "predicted_seconds": self.seconds, "moved_bytes": self.moved_bytes}
        peak = None if self.plan is None else self.plan.predicted_peak_bytes
        return {**fields, **fitting, "predicted_peak_bytes": peak}


def sizes_between(low: int, high: int) -> list[int]:
    """8 to 12 sizes from ``low`` to ``high``, at steps of a power of two if that is possible, else of three times one."""
    width = high - low
    if low <= 0 or width < _NARROWEST:
        raise ArgumentError(f"a range from {low} to {high} bytes is empty or too narrow; give a smaller and a larger size.")
    steps = [factor << shift for factor in (3, 1) for shift in range(width.bit_length())]
    step = next(s for s in reversed(steps) if _FEWEST * s <= width <= _MOST * s)
    return [*range(low, high - step // 2, step), high]


def frontier(model: ModelSpec, hardware: Hardware, request: Request, what: str, sizes: Sequence[int]) -> list[Point]:
    """The best plan at every size of ``what`` (one of ``VARIABLE``)."""
    points: list[Point] = []
    for nbytes in sizes:
        try:
            plan = make_plan(model, hardware, replace(request, **{VARIABLE[what]: nbytes}))
            points.append(Point(what=what, nbytes=nbytes, plan=plan))
        except DoesNotFit as error:
            short = error.needed_bytes - error.budget_bytes
            points.append(Point(what=what, nbytes=nbytes, plan=None, short_tier=error.tier, short_bytes=short))
    return points


def frontier_text(points: Sequence[Point]) -> str:
    """A row per size, with bars."""
    slowest = max((p.seconds or 0.0 for p in points), default=0.0)
    most = max((p.moved_bytes for p in points), default=0)
    head = points[0].what.replace("-", " ") if points else ""
    lines = [f"{head:>13}   {'a step':>10}   {'':<24}   {'moved':>11}   {'':<18}   placement"]
    for point in points:
        if point.plan is None:
            lines.append(
                f"{size_text(point.nbytes):>13}   does not fit: {size_text(point.short_bytes)} of {point.short_tier} short"
            )
            continue
        seconds = "not known" if point.seconds is None else seconds_text(point.seconds)
        bars = f"{bar(point.seconds or 0.0, slowest, 24):<24}   {size_text(point.moved_bytes):>11}   "
        bars += f"{bar(point.moved_bytes, most, 18):<18}"
        lines.append(f"{size_text(point.nbytes):>13}   {seconds:>10}   {bars}   {point.plan.placement}")
    return "\n".join(lines)
