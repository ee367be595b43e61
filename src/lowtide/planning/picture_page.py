"""A page around a picture: the same numbers as tables, light and dark, complete in itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.planning.frontier import Point
from lowtide.planning.picture_drawing import safe
from lowtide.planning.plan import Plan
from lowtide.planning.text import in_order, outcome_rows, percent_text, saving_text, seconds_text, size_text, unit_rows

_STYLE = """
body{margin:0 auto;max-width:880px;padding:16px;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;
background:#ffffff;color:#1b1f24}
svg{max-width:100%;height:auto}h2{font-size:17px;margin:28px 0 8px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid #d9dee4;text-align:left;vertical-align:top}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.part td:first-child{padding-left:20px}.dim{color:#59616b;font-size:13px}
@media (prefers-color-scheme:dark){body{background:#15181c;color:#e8eaed}th,td{border-color:#3a4149}.dim{color:#a3abb5}}
""".strip()

Row = Sequence[str]


def plan_page(plan: Plan, picture: str) -> str:
    """``picture`` is SVG of the same plan."""
    parts = [picture, _tier_table(plan), _unit_table(plan)]
    if plan.batch:
        parts.append(_phase_table(plan))
    parts.append(_table("Predicted", ("what", "how much"), outcome_rows(plan), numbers=0))
    if plan.reasons:
        parts += ["<h2>Why</h2>", "<ul>", *(f"<li>{safe(reason)}</li>" for reason in plan.reasons), "</ul>"]
    if plan.prices:
        rows = [(price.change, saving_text(price.seconds)) for price in plan.prices]
        parts.append(_table("What a change would save of a step", ("change", "saves"), rows, numbers=1))
    parts.append(f'<p class="dim">Figures of the machine: {safe(plan.hardware)}; {safe(plan.hardware_source)}.</p>')
    return page(f"Plan for {plan.model}", parts)


def frontier_page(points: Sequence[Point], picture: str) -> str:
    """``picture`` is SVG of the same points."""
    rows: list[Row] = []
    for point in points:
        if point.plan is None:
            rows.append(
                (size_text(point.nbytes), "does not fit", f"{size_text(point.short_bytes)} of {point.short_tier} short", "")
            )
        else:
            seconds = "not known" if point.seconds is None else seconds_text(point.seconds)
            peak = size_text(point.plan.predicted_peak_bytes)
            rows.append((size_text(point.nbytes), seconds, size_text(point.moved_bytes), peak))
    what = points[0].what.replace("-", " ") if points else "memory"
    table = _table("The same as numbers", (what, "a step", "moved in a step", "peak of host memory"), rows, numbers=3)
    return page(f"What {what} would bring", [picture, table])


def page(title: str, parts: Iterable[str]) -> str:
    """HTML around ``parts``, which are HTML."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    scheme = '<meta name="color-scheme" content="light dark">'
    lines = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head>{head}{scheme}<title>{safe(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
    ]
    return "\n".join([*lines, *parts, "</body></html>", ""])


def _tier_table(plan: Plan) -> str:
    head = ("tier and kind", "peak", "capacity", "share")
    lines = [_cells("th", head, numbers=3)]
    for tier in plan.tiers:
        share = percent_text(tier.peak_bytes, tier.capacity_bytes)
        row = (tier.tier, size_text(tier.peak_bytes), size_text(tier.capacity_bytes), share)
        lines.append(_cells("td", row, numbers=3))
        for name, size in in_order(tier.parts).items():
            inner = _cells("td", (name, size_text(size), "", percent_text(size, tier.capacity_bytes)), numbers=3)
            lines.append(inner.replace("<tr>", '<tr class="part">', 1))
    title = "Memory of one rank" if plan.world_size > 1 else "Memory"
    return f'<h2>{title}</h2><div class="wide"><table>{"".join(lines)}</table></div>'


def _unit_table(plan: Plan) -> str:
    head = ("units", "parameters", "gradients", "optimizer", "activations")
    rows = [(name, unit.parameters, unit.gradients, unit.optimizer, unit.activations) for name, unit in unit_rows(plan)]
    return _table(f"Where {len(plan.units)} units live", head, rows, numbers=0)


def _phase_table(plan: Plan) -> str:
    names = list(in_order({name: seconds for phase in plan.phases for name, seconds in phase.loads.items()}))
    rows = [
        (p.phase, seconds_text(p.seconds), *(seconds_text(p.loads[n]) if n in p.loads else "" for n in names), p.limited_by)
        for p in plan.phases
    ]
    head = ("phase", "takes", *names, "waits for")
    return _table("One step", head, rows, numbers=len(head) - 1)


def _table(title: str, head: Row, rows: Iterable[Row], *, numbers: int) -> str:
    """``numbers``: how many columns at the right are numbers."""
    lines = [_cells("th", head, numbers=numbers), *(_cells("td", row, numbers=numbers) for row in rows)]
    return f'<h2>{safe(title)}</h2><div class="wide"><table>{"".join(lines)}</table></div>'


def _cells(tag: str, row: Row, *, numbers: int) -> str:
    first = len(row) - numbers
    cells = (
        f'<{tag} class="number">{safe(text)}</{tag}>' if i >= first else f"<{tag}>{safe(text)}</{tag}>"
        for i, text in enumerate(row)
    )
    return f"<tr>{''.join(cells)}</tr>"
