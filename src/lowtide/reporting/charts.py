"""Charts over time or steps: stacked areas, curves, levels and marks, drawn by one function. No torch here.

A chart is data; the page draws it wide and narrow, a paper as one file, and the page's script reads its values from the same
data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.planning.picture_drawing import text_width
from lowtide.planning.text import seconds_text, size_text
from lowtide.reporting.sheet import Point, Sheet

LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 18.0, 26.0
_FAR = 4.0
"""A level this many times above everything else would flatten the rest; it is named, not drawn."""
_HEADROOM, _HEADROOM_FOR_WORDS = 0.06, 0.14
"""Above what is drawn, as a part of it; more if the name of a level must go there."""
_DOT = 5.0
_LETTERS = 13.0
"""Height of a line of text."""
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_LEAST = {"GiB": 0.0995}
"""An axis is in the unit in which ``size_text`` writes its highest value, so that the words beside it match."""
_TIMES = ((3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
"""No minutes: numbers in the text below an hour are in seconds, too."""
_LONG_AXES = ((3 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "h"), (3600.0, 60.0, "min"))
"""From so many seconds on, a time axis counts in this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One value per point of the chart's axis; ``None`` where there is none."""

    name: str
    values: Sequence[float | None]
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A line that others are held against: values over the axis, which hold until the next; one value holds throughout."""

    name: str
    points: Sequence[Point]
    look: str

    @property
    def most(self) -> float:
        return max((y for _, y in self.points), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at ``x``."""

    x: float
    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """``unit`` is bytes, seconds, percent or number; ``axis`` is time (``x`` in seconds) or step."""

    key: str
    title: str
    unit: str
    axis: str
    x: Sequence[float]
    layers: Sequence[Series] = ()
    """Stacked, the first at the bottom."""
    curves: Sequence[Series] = ()
    levels: Sequence[Level] = ()
    marks: Sequence[Mark] = ()
    from_zero: bool = True

    @property
    def is_empty(self) -> bool:
        return not self.x or not any(v is not None for s in (*self.layers, *self.curves) for v in s.values)

    def levels_too_high(self) -> list[str]:
        """What is said of levels that would flatten everything else."""
        most = _most(self)
        return [
            f"{level.name}: {value_text(level.most, self.unit)}, far above what is drawn"
            for level in self.levels
            if level.points and not _is_near(level, most)
        ]

    def marks_in_words(self) -> str:
        """What the flags on the chart stand for: ``checkpoint (3), replan (1)``."""
        counted = Counter(mark.what for mark in self.marks)
        return ", ".join(f"{what} ({count})" for what, count in sorted(counted.items()))


def chart_data(chart: Chart) -> dict[str, Any]:
    """What the page's script needs to say the values below the pointer."""
    low, high = _x_range(chart)
    return {
        "title": chart.title,
        "unit": chart.unit,
        "axis": chart.axis,
        "from": low,
        "to": high,
        "x": [_short(x) for x in chart.x],
        "stacked": bool(chart.layers),
        "series": [
            {"name": s.name, "colour": s.colour, "values": [None if v is None else _short(v) for v in s.values]}
            for s in (*chart.layers, *chart.curves)
        ],
    }


def chart_sheet(chart: Chart, *, width: float, height: float) -> Sheet:
    """A chart alone."""
    sheet = Sheet(chart.title, width=width, height=height)
    draw_chart(chart, sheet, top=0.0, height=height)
    return sheet


def draw_chart(chart: Chart, sheet: Sheet, *, top: float, height: float) -> None:
    """Over the whole width of ``sheet``."""
    frame = _Frame.around(chart, left=LEFT, right=sheet.width - RIGHT, top=top + TOP, bottom=top + height - BOTTOM)
    _draw_axes(chart, sheet, frame)
    below = [0.0] * len(chart.x)
    for layer in chart.layers:
        above = [b + (v or 0.0) for b, v in zip(below, layer.values, strict=True)]
        if any(v for v in layer.values):
            edge = [frame.at(x, y) for x, y in zip(chart.x, above, strict=True)]
            floor = [frame.at(x, y) for x, y in zip(chart.x, below, strict=True)]
            sheet.area([*edge, *reversed(floor)], layer.colour, layer.name)
        below = above
    for curve in chart.curves:
        for run in _unbroken(chart.x, curve.values):
            if len(run) == 1:  # a line of one point is nothing
                x, y = frame.at(*run[0])
                sheet.rect(x - _DOT / 2, y - _DOT / 2, _DOT, _DOT, colour=curve.colour)
            else:
                sheet.coloured_curve([frame.at(x, y) for x, y in run], curve.colour)
    for mark in chart.marks:
        if frame.low <= mark.x <= frame.high:
            sheet.mark(frame.at(mark.x, 0.0)[0], frame.top, frame.bottom, mark.text)
    _draw_levels(chart, sheet, frame)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """From values to places."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    least: float
    most: float
    near: tuple[Level, ...] = field(default=())
    """Levels that are drawn."""

    @classmethod
    def around(cls, chart: Chart, *, left: float, right: float, top: float, bottom: float) -> _Frame:
        values = [v for s in chart.curves for v in s.values if v is not None]
        most = _most(chart)
        near = tuple(level for level in chart.levels if level.points and _is_near(level, most))
        most = max([most, *(level.most for level in near)])
        least = 0.0 if chart.from_zero else min(values, default=0.0)
        tops = any(level.most > 0.9 * most for level in near)
        room = (most - least) * (_HEADROOM_FOR_WORDS if tops else _HEADROOM) or abs(most) * 0.1 or 1.0
        low, high = _x_range(chart)
        return cls(
            left=left,
            right=right,
            top=top,
            bottom=bottom,
            low=low,
            high=high,
            least=least if chart.from_zero else least - room,
            most=most + room,
            near=near,
        )

    def at(self, x: float, y: float) -> Point:
        across = (x - self.low) / ((self.high - self.low) or 1.0)
        up = (y - self.least) / ((self.most - self.least) or 1.0)
        return (
            self.left + min(max(across, 0.0), 1.0) * (self.right - self.left),
            self.bottom - min(max(up, 0.0), 1.0) * (self.bottom - self.top),
        )


def _most(chart: Chart) -> float:
    stacked = [sum(v or 0.0 for v in column) for column in zip(*(s.values for s in chart.layers), strict=True)]
    return max([*stacked, *(v for s in chart.curves for v in s.values if v is not None)], default=0.0)


def _is_near(level: Level, most: float) -> bool:
    return most <= 0 or level.most <= _FAR * most


def _draw_axes(chart: Chart, sheet: Sheet, frame: _Frame) -> None:
    scale, word = _scale(chart.unit, frame.most)
    for tick in round_numbers(frame.least / scale, frame.most / scale, 5):
        _, y = frame.at(0.0, tick * scale)
        sheet.line(frame.left, y, frame.right, y)
        sheet.text(frame.left - 6, y + 4, f"{tick:.6g}", size=11, look="lt-dim", anchor="end")
    if word:
        sheet.text(frame.left - 6, frame.top - 8, word, size=10, look="lt-dim", anchor="end")
    span, unit = _time_axis(frame.high) if chart.axis == "time" else (1.0, "step")
    wanted = max(2, min(10, int((frame.right - frame.left) / 90)))
    end = f"{frame.high / span:.6g}"
    for tick in round_numbers(frame.low / span, frame.high / span, wanted):
        if chart.axis == "step" and tick != int(tick):
            continue
        x, _ = frame.at(tick * span, 0.0)
        if x + text_width(end, 11) / 2 < frame.right - text_width(unit, 11) - 6:
            sheet.text(x, frame.bottom + 16, f"{tick:.6g}", size=11, look="lt-dim", anchor="middle")
    sheet.line(frame.left, frame.bottom, frame.right, frame.bottom)
    sheet.text(frame.right, frame.bottom + 16, unit, size=11, look="lt-dim", anchor="end")


def _draw_levels(chart: Chart, sheet: Sheet, frame: _Frame) -> None:
    drawn: list[tuple[float, str]] = []
    for level in frame.near:
        corners: list[Point] = []
        for x, y in level.points:
            if corners:
                corners.append((frame.at(x, 0.0)[0], corners[-1][1]))
            corners.append(frame.at(max(x, frame.low), y))
        corners.append((frame.right, corners[-1][1]))
        sheet.curve(corners, level.look)
        drawn.append((corners[-1][1], f"{level.name} {value_text(level.points[-1][1], chart.unit)}"))
    taken: list[float] = []
    lines = [y for y, _ in drawn]
    for line, words in sorted(drawn):
        taken.append(_beside(line, frame, lines, taken))
        sheet.text(frame.right - 4, taken[-1], words, size=11, look="lt-label", anchor="end")


def _beside(line: float, frame: _Frame, lines: Sequence[float], taken: Sequence[float]) -> float:
    """Where the words for a level go: above its line, or below, where no other words are and no other line goes through."""
    for y in (line - 5, line + _LETTERS):
        crossed = any(y - _LETTERS < other < y + 3 for other in lines if other != line)
        if y > frame.top + 6 and not crossed and all(abs(y - other) >= _LETTERS for other in taken):
            return y
    y = line + _LETTERS
    while any(abs(y - other) < _LETTERS for other in taken):
        y += _LETTERS
    return y


def _unbroken(x: Sequence[float], values: Sequence[float | None]) -> list[list[Point]]:
    """Runs of points without a gap."""
    runs: list[list[Point]] = [[]]
    for at, value in zip(x, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


# -- numbers -----------------------------------------------------------------------------------------------------------


def value_text(value: float, unit: str) -> str:
    """As a person reads it."""
    if unit == "bytes":
        return size_text(value)
    if unit == "seconds":
        return seconds_text(value)
    return f"{value:.0f} %" if unit == "percent" else f"{value:.5g}"


def round_numbers(low: float, high: float, wanted: int) -> list[float]:
    """About ``wanted`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(count: int, most: int) -> list[tuple[int, int]]:
    """``count`` things in at most ``most`` neighbouring groups, as (begin, end)."""
    groups = min(count, most)
    return [(count * g // groups, count * (g + 1) // groups) for g in range(groups)] if groups else []


def _scale(unit: str, most: float) -> tuple[float, str]:
    if unit in ("number", "percent"):
        return 1.0, "%" if unit == "percent" else ""
    table = _SIZES if unit == "bytes" else _TIMES
    fitting = ((float(size), word) for size, word in table if most >= size * _LEAST.get(word, 1.0))
    return next(fitting, (float(table[-1][0]), table[-1][1]))


def _time_axis(seconds: float) -> tuple[float, str]:
    """What a time axis of this length counts in."""
    return next(((size, word) for least, size, word in _LONG_AXES if seconds >= least), _scale("seconds", seconds / 3))


def _x_range(chart: Chart) -> tuple[float, float]:
    if not chart.x:
        return 0.0, 1.0
    low = 0.0 if chart.axis == "time" else float(chart.x[0])
    high = float(chart.x[-1])
    return low, high if high > low else low + 1.0


def _short(value: float) -> float:
    """Seven digits: enough for anybody who points at it, and half the bytes."""
    return int(value) if float(value).is_integer() else float(f"{value:.7g}")
