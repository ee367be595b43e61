"""The page of a report: one HTML file with everything in it, which reads nothing from anywhere else. No torch here.

The first sentence says what limited the run. Charts are SVG, drawn wide and narrow by the same code; the step's timeline is a
canvas that a small script draws. Style and scripts are files in ``assets/``, put into the page as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lowtide.planning.picture_drawing import safe
from lowtide.planning.text import seconds_text, size_text
from lowtide.reporting.charts import Chart, chart_data, chart_sheet
from lowtide.reporting.findings import Findings
from lowtide.reporting.machine_view import free_text, machine_charts
from lowtide.reporting.page_postmortem import postmortem_html
from lowtide.reporting.postmortem import PostMortem
from lowtide.reporting.step_bars import bars_legend, bars_sheet
from lowtide.reporting.step_view import details_data, typical
from lowtide.reporting.tables import Table, arena_table, entry_table, lane_table, prediction_table, table_html, unit_table
from lowtide.reporting.timeline import Timeline
from lowtide.reporting.views import memory_charts, step_charts, traffic_chart
from lowtide.reporting.wear import wear_text

_WIDE, _NARROW = (1040.0, 250.0), (400.0, 230.0)
_SCRIPTS = ("theme.js", "charts.js", "steps.js", "tables.js")
_MOST_RANKS = 8
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def report_page(found: Findings) -> str:
    """HTML, complete in itself."""
    charts: list[Chart] = []
    sections = [
        _head(found),
        postmortem_html(found.post_mortem) if found.post_mortem is not None else "",
        _verdict(found),
        _memory(found, charts),
        _step(found),
        _curves(found, charts),
        _disk(found, charts),
        _machine(found, charts),
        _optional("Predictions", "predictions-section", prediction_table(found.predictions)),
        _optional("What happened", "happened-section", entry_table(found.entries)),
        _optional("Units", "units-section", unit_table(found.run)),
        _arenas(found),
        _foot(found),
    ]
    data = {"charts": {chart.key: chart_data(chart) for chart in charts}, "steps": details_data(found.details)}
    return _document(f"lowtide report: {found.subject} ({found.name})", [section for section in sections if section], data)


def refusal_page(name: str, post: PostMortem) -> str:
    """Of a run that ended before anything was recorded."""
    toggle = '<button type="button" id="theme" aria-label="Colours: as the system">colours: auto</button>'
    head = f"<header><div><p class='product'>lowtide report</p><h1>{safe(name)}</h1></div>{toggle}</header><main id='main'>"
    return _document(f"lowtide report: {name}", [head, postmortem_html(post)], {"charts": {}, "steps": []})


def _document(title: str, sections: Sequence[str], data: dict[str, Any]) -> str:
    folder = files("lowtide.reporting") / "assets"
    style = (folder / "report.css").read_text(encoding="utf-8")
    scripts = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    head = [
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<title>{safe(title)}</title><link rel="icon" href="data:,"><style>{style}</style>',
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head>{"".join(head)}</head><body>',
            '<a class="skip" href="#main">Skip to the report</a>',
            *sections,
            "</main>",
            f'<script type="application/json" id="lowtide-data">{embedded(data)}</script>',
            f"<script>{scripts}</script>",
            "</body></html>",
            "",
        ]
    )


def embedded(data: Any) -> str:
    """JSON that cannot end the script around it, whatever names it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# -- sections ----------------------------------------------------------------------------------------------------------


def _head(found: Findings) -> str:
    run = found.run.first.last.run
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.summary.started))
    hosts = {rank.run.host for rank in found.summary.ranks}
    ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    facts = [f"started {started}", ranks, f"stage {run.stage}", f"update in {run.update}", found.ending.words]
    why = f'<p class="cause">{safe(found.ending.text)}</p>' if found.ending.text and found.post_mortem is None else ""
    toggle = '<button type="button" id="theme" aria-label="Colours: as the system">colours: auto</button>'
    title = f"<div><p class='product'>lowtide report · {safe(found.name)}</p><h1>{safe(found.subject)}</h1></div>"
    return f'<header>{title}{toggle}<p class="dim">{safe(" · ".join(facts))}</p>{why}</header><main id="main">'


def _verdict(found: Findings) -> str:
    division = "".join(
        f'<div class="{look}">{bars_sheet(found.summary, width=width).inline()}</div>'
        for look, width in (("wide-only", _WIDE[0]), ("narrow-only", _NARROW[0]))
        if any(rank.division for rank in found.summary.ranks)
    )
    tiles = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in found.facts())
    legend = _legend(bars_legend(found.summary)) if division else ""
    title = "Where the time of a step goes: the average, from the end of one update to the end of the next"
    figure = f"<figure><figcaption>{title}</figcaption>{legend}{division}</figure>" if division else ""
    sentence = f'<p class="verdict" id="verdict">{safe(found.verdict.sentence)}</p>'
    return f'<section>{sentence}<dl class="tiles">{tiles}</dl>{figure}</section>'


def _memory(found: Findings, charts: list[Chart]) -> str:
    ordered = by_fullness(found)
    parts: list[str] = []
    for i, timeline in enumerate(ordered[:_MOST_RANKS]):
        drawn = memory_charts(timeline, found.entries)
        if not drawn:
            continue
        charts += drawn
        inside = "".join(_figure(chart) for chart in drawn)
        parts.append(inside if i == 0 else f"<details><summary>Rank {timeline.rank}</summary>{inside}</details>")
    if not parts:
        return ""
    left = len(ordered) - _MOST_RANKS
    more = f'<p class="dim">{left} more ranks are not drawn; the one shown first is the fullest.</p>' if left > 0 else ""
    note = (
        "Host memory is what counts against the budget: every kind is what lowtide holds of it, and what is there beyond is "
        "Python and torch. Pages of files, which the kernel can drop, and memory that other ranks count are left out here; "
        "all that the kernel sees is drawn below, under Machine."
    )
    return f'<section id="memory"><h2>Memory of every tier</h2><p class="dim">{note}</p>{"".join(parts)}{more}</section>'


def _step(found: Findings) -> str:
    shown = typical(found.details)
    if shown is None:
        return ""
    options = "".join(
        f'<option value="{i}"{" selected" if detail is shown else ""}>{detail.step}{" (slowest)" if detail.why else ""}: '
        f"{safe(seconds_text(detail.seconds))}</option>"
        for i, detail in enumerate(found.details)
    )
    help_text = "Wheel or + and − zoom, drag or arrow keys move, 0 shows all."
    controls = (
        f'<label>step <select id="step-choice">{options}</select></label>'
        '<label>rank <select id="rank-choice"></select></label>'
        '<button type="button" id="zoom-in" aria-label="zoom in">+</button>'
        '<button type="button" id="zoom-out" aria-label="zoom out">−</button>'
        '<button type="button" id="zoom-all" aria-label="show the whole step">all</button>'
    )
    canvas = f'<canvas id="timeline" tabindex="0" role="img" aria-label="Timeline of one step. {safe(help_text)}"></canvas>'
    reading = f'<p class="reading" id="timeline-reading" aria-live="polite">{safe(help_text)}</p>'
    table = f"<details><summary>The same as numbers</summary>{table_html(lane_table(shown))}</details>"
    return f'<section id="step"><h2>One step</h2><div class="controls">{controls}</div>{canvas}{reading}{table}</section>'


def _curves(found: Findings, charts: list[Chart]) -> str:
    drawn = step_charts(found.run, found.extras, found.entries)
    charts += drawn
    inside = "".join(_figure(chart) for chart in drawn)
    return f'<section id="curves"><h2>Step by step</h2>{inside}</section>' if drawn else ""


def _disk(found: Findings, charts: list[Chart]) -> str:
    chart = traffic_chart(found.run)
    if chart is None:
        return ""
    charts.append(chart)
    wear = wear_text(found.summary)
    text = f"<p>{safe(wear)}</p>" if wear else ""
    return f'<section id="disk"><h2>Traffic</h2>{_figure(chart)}{text}</section>'


def _machine(found: Findings, charts: list[Chart]) -> str:
    ordered = by_fullness(found)
    parts: list[str] = []
    for i, timeline in enumerate(ordered[:_MOST_RANKS]):
        if drawn := machine_charts(timeline, found.entries):
            charts += drawn
            inside = "".join(_figure(chart) for chart in drawn)
            parts.append(inside if i == 0 else f"<details><summary>Rank {timeline.rank}</summary>{inside}</details>")
    free = free_text(found.run)
    said = f"<p>{safe(free)}</p>" if free else ""
    return f'<section id="machine"><h2>Machine</h2>{"".join(parts)}{said}</section>' if parts else ""


def _arenas(found: Findings) -> str:
    table = arena_table(found.run)
    saved = sum(timeline.last.memory[-1].shared_saved_bytes for timeline in found.run.ranks if timeline.last.memory)
    shared = f"<p>{size_text(saved)} are saved by storing what ranks of one host share only once.</p>" if saved else ""
    return f'<section id="arenas-section"><h2>Reuse of memory</h2>{table_html(table)}{shared}</section>' if table else shared


def _optional(title: str, key: str, table: Table | None) -> str:
    return f'<section id="{key}"><h2>{safe(title)}</h2>{table_html(table)}</section>' if table is not None else ""


def _foot(found: Findings) -> str:
    run = found.run.first.last.run
    facts = ", ".join(
        f"{name} {value}" for name, value in run.facts.items() if value is not None and not name.startswith("oom_")
    )
    bad = f" {found.summary.bad_lines} lines of the timelines could not be read." if found.summary.bad_lines else ""
    return f'<footer class="dim"><p>{safe(facts)}</p><p>Run folder {safe(str(found.run.path))}.{bad}</p></footer>'


def by_fullness(found: Findings) -> list[Timeline]:
    """The rank that is closest to its budget first, the others by number."""
    fullest = found.summary.fullest.rank
    return sorted(found.run.ranks, key=lambda t: (t.rank != fullest, t.rank))


# -- pieces ------------------------------------------------------------------------------------------------------------


def _figure(chart: Chart) -> str:
    pictures = "".join(
        f'<div class="{look}">{chart_sheet(chart, width=width, height=height).inline(data_chart=chart.key)}</div>'
        for look, (width, height) in (("wide-only", _WIDE), ("narrow-only", _NARROW))
    )
    legend = _legend([(series.colour, series.name) for series in (*chart.layers, *chart.curves) if any(series.values)])
    many = legend if len(chart.layers) + len(chart.curves) > 1 else ""
    if flags := chart.marks_in_words():
        many += f'<p class="flags dim"><i></i>{safe(flags)}: see What happened</p>'
    far = "".join(f'<p class="dim">{safe(words)}</p>' for words in chart.levels_too_high())
    reading = '<p class="reading" aria-live="polite"></p>'
    return (
        f'<figure class="chart" tabindex="0" data-key="{safe(chart.key)}"><figcaption>{safe(chart.title)}</figcaption>'
        f"{many}{pictures}{far}{reading}</figure>"
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i style="background:{colour}"></i>{safe(words)}</li>' for colour, words in entries)
    return f'<ul class="legend">{items}</ul>'
