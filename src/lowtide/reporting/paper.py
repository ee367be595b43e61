"""The pictures of a report on one sheet, for papers and slides: SVG, or PNG if matplotlib is there. No torch here."""

from __future__ import annotations

import io
from typing import Any

from lowtide.errors import ArgumentError
from lowtide.planning.picture_drawing import MARGIN
from lowtide.planning.text import shortened
from lowtide.reporting.charts import Chart, draw_chart
from lowtide.reporting.findings import Findings
from lowtide.reporting.sheet import Shape, Sheet
from lowtide.reporting.step_bars import bars_legend, draw_bars
from lowtide.reporting.step_view import LANE_COLOURS, draw_step, lanes_of, typical
from lowtide.reporting.views import memory_charts, step_charts, traffic_chart

_CHART_HEIGHT = 210.0
_DOTS = 2.0
"""Pixels of a PNG per unit of the drawing."""
_INK = {
    "lt-ink": "#1b1f24",
    "lt-label": "#1b1f24",
    "lt-dim": "#59616b",
    "lt-on-colour": "#ffffff",
    "lt-track": "#eef1f4",
    "lt-line": "#d9dee4",
    "lt-mark": "#1b1f24",
    "lt-budget": "#b42318",
    "lt-plan": "#1b1f24",
    "lt-event": "#7a4fb5",
}
_DASHES: dict[str, Any] = {"lt-budget": (0, (7, 4)), "lt-plan": (0, (2, 3))}


def paper_sheet(found: Findings) -> Sheet:
    """Verdict, division of a step, memory of the fullest rank, one step, curves, traffic: one below the other."""
    sheet = Sheet(f"lowtide report: {found.name}")
    sheet.y += 12
    sheet.text(MARGIN, sheet.y, shortened(f"{found.subject} ({found.name})", 70), size=19)
    sheet.wrapped(found.verdict.sentence, size=14, look="lt-ink")
    if found.post_mortem is not None:
        sheet.wrapped(found.post_mortem.sentence, size=14, look="lt-wrong")
    if any(rank.division for rank in found.summary.ranks):
        _title(sheet, "Where the time of a step goes")
        sheet.legend(bars_legend(found.summary), left=MARGIN)
        sheet.y = draw_bars(found.summary, sheet, top=sheet.y + 8, margin=MARGIN)
    fullest = next(t for t in found.run.ranks if t.rank == found.summary.fullest.rank)
    for chart in memory_charts(fullest, found.entries):
        _add(sheet, chart)
    detail = typical(found.details)
    if detail is not None:
        _title(sheet, f"Step {detail.step}")
        draw_step(detail, sheet)
        sheet.legend([(LANE_COLOURS.get(lane, "#777777"), lane) for lane in lanes_of(detail.ranks)], left=MARGIN)
    traffic = traffic_chart(found.run)
    for chart in [*step_charts(found.run, found.extras, found.entries), *([traffic] if traffic is not None else [])]:
        _add(sheet, chart)
    return sheet


def _title(sheet: Sheet, text: str) -> None:
    sheet.y += 34
    sheet.text(MARGIN, sheet.y, text, size=14)


def _add(sheet: Sheet, chart: Chart) -> None:
    _title(sheet, chart.title)
    series = [s for s in (*chart.layers, *chart.curves) if any(s.values)]
    if len(series) > 1:
        sheet.legend([(s.colour, s.name) for s in series], left=MARGIN)
    draw_chart(chart, sheet, top=sheet.y + 4, height=_CHART_HEIGHT)
    sheet.y += _CHART_HEIGHT


def png(sheet: Sheet) -> bytes:
    """The same shapes, drawn by matplotlib; light colours, as for print."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(
            "a PNG needs matplotlib, which is not installed: pip install 'lowtide[bench]', or write an SVG."
        ) from error
    width, height = sheet.width, sheet.full_height
    figure: Any = Figure(figsize=(width / 72, height / 72), dpi=72 * _DOTS, facecolor="white")
    canvas: Any = FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for order, shape in enumerate(sheet.shapes):
        _draw(axes, shape, order)
    out = io.BytesIO()
    canvas.print_png(out)
    return out.getvalue()


def _draw(axes: Any, shape: Shape, order: int) -> None:
    """``order``: later shapes lie above earlier ones, whatever they are."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    colour = shape.colour or _INK.get(shape.look, "#1b1f24")
    xs, ys = [x for x, _ in shape.points], [y for _, y in shape.points]
    look: Any = {"zorder": order}
    match shape.kind:
        case "text":
            where = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            look |= {"weight": "bold" if shape.look == "lt-ink" and shape.size > 13 else "normal"}
            look |= {"path_effects": [withStroke(linewidth=3, foreground="white")]} if shape.look == "lt-label" else {}
            axes.text(xs[0], ys[0], _plain(shape.text), color=colour, fontsize=shape.size, ha=where, va="baseline", **look)
        case "rect":
            corner, width = (xs[0], ys[0]), max(xs[1], 0.0)
            axes.add_patch(Rectangle(corner, width, ys[1], facecolor=colour, edgecolor="none", **look))
        case "area":
            axes.fill(xs, ys, color=colour, linewidth=0, **look)
        case _:
            look |= {"linestyle": _DASHES.get(shape.look, "-"), "solid_capstyle": "butt"}
            axes.plot(xs, ys, color=colour, linewidth=0.8 if shape.look in ("lt-line", "lt-event") else 1.6, **look)


def _plain(text: str) -> str:
    """Dollars are no formulas."""
    return text.replace("$", r"\$")
