"""What a range of memory would bring, as a picture: seconds of a step and bytes moved, over the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.planning.frontier import Point
from lowtide.planning.picture_drawing import MARGIN, WIDTH, Drawing, text_width, ticks
from lowtide.planning.text import seconds_text, shortened, size_text

_LEFT = MARGIN + 66
_RIGHT = WIDTH - MARGIN - 34
_HEIGHT = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One of the two plots."""

    title: str
    look: str
    value: Callable[[Point], float | None]
    words: Callable[[float], str]
    unit: float
    """What the axis counts in."""


_SECONDS = _Panel(title="seconds of a step", look="", value=lambda p: p.seconds, words=seconds_text, unit=1.0)
_MOVED = _Panel(
    title="GiB moved in a step",
    look="2",
    value=lambda p: None if p.plan is None else float(p.moved_bytes),
    words=size_text,
    unit=2.0**30,
)


def frontier_svg(points: Sequence[Point]) -> str:
    """Points that do not fit are crosses on the lower edge."""
    what = points[0].what.replace("-", " ") if points else "memory"
    model = next((p.plan.model for p in points if p.plan is not None), "")
    drawing = Drawing(f"What {what} would bring")
    drawing.y += 12
    drawing.text(
        MARGIN, drawing.y, shortened(f"{model}: what {what} would bring" if model else f"What {what} would bring", 80), size=19
    )
    panels = [_SECONDS, _MOVED] if any(p.seconds is not None for p in points) else [_MOVED]
    for panel in panels:
        _draw_panel(drawing, panel, points, what)
    missing = [p for p in points if p.plan is None]
    if missing:
        drawing.y += 8
        listed = ", ".join(f"{size_text(p.nbytes)} ({size_text(p.short_bytes)} of {p.short_tier} short)" for p in missing)
        drawing.wrapped(f"× does not fit: {listed}", size=12, look="lt-wrong")
    return drawing.svg()


def _draw_panel(drawing: Drawing, panel: _Panel, points: Sequence[Point], what: str) -> None:
    drawing.y += 36
    drawing.text(MARGIN, drawing.y, panel.title, size=14)
    bottom = drawing.y + 16 + _HEIGHT
    low, high = min(p.nbytes for p in points), max(p.nbytes for p in points)
    most = max((panel.value(p) or 0.0 for p in points), default=0.0)

    def x_of(nbytes: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (nbytes - low) / max(high - low, 1)

    def y_of(value: float) -> float:
        return bottom - (_HEIGHT - 12) * value / (most or 1.0)

    for tick in ticks(most / panel.unit):
        y = y_of(tick * panel.unit)
        drawing.line(_LEFT, y, _RIGHT, y)
        drawing.text(_LEFT - 8, y + 4, f"{tick:.4g}", size=11, look="lt-dim", anchor="end")
    fitting = [(p, value) for p in points if (value := panel.value(p)) is not None]
    drawing.curve([(x_of(p.nbytes), y_of(value)) for p, value in fitting], f"lt-curve{panel.look}")
    for point, value in fitting:
        tip = f"{what} {size_text(point.nbytes)}: {panel.words(value)}"
        drawing.dot(x_of(point.nbytes), y_of(value), f"lt-point{panel.look}", tip)
    free = WIDTH + 0.0  # from the right: the last size is always named
    for point in reversed(points):
        x, words = x_of(point.nbytes), size_text(point.nbytes)
        if point.plan is None:
            drawing.line(x - 5, bottom - 5, x + 5, bottom + 5, "lt-cross")
            drawing.line(x - 5, bottom + 5, x + 5, bottom - 5, "lt-cross")
        half = text_width(words, 11) / 2
        if x + half + 4 < free:
            drawing.text(x, bottom + 20, words, size=11, look="lt-dim", anchor="middle")
            free = x - half
    drawing.y = bottom + 24
