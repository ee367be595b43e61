"""Tables of a report as HTML: sortable where there is something to sort. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.planning.picture_drawing import safe
from lowtide.planning.text import percent_text, seconds_text, shortened, size_text
from lowtide.reporting.charts import value_text
from lowtide.reporting.predictions import Prediction, error_text
from lowtide.reporting.step_view import StepDetail, lanes_of
from lowtide.reporting.timeline import Run
from lowtide.reporting.views import Entry

_MOST_ENTRIES = 300


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what it is sorted by: a number, or its own text."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """``numbers``: how many columns at the right are numbers."""

    key: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: int = 0
    sortable: bool = False


def table_html(table: Table) -> str:
    """Complete, in a box that scrolls if the screen is narrow."""
    first = len(table.head) - table.numbers
    heads = "".join(_head(name, is_number=i >= first, sortable=table.sortable) for i, name in enumerate(table.head))
    rows = "".join(
        f"<tr>{''.join(_cell(cell, is_number=i >= first, is_name=i == 0) for i, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    look = ' class="sortable"' if table.sortable else ""
    caption = f"<caption><span>{safe(table.caption)}</span></caption>" if table.caption else ""
    inside = f"{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    label = safe(table.caption or table.key)
    box = f'<div class="scrolls" tabindex="0" role="region" aria-label="{label}">'
    return f'{box}<table id="{safe(table.key)}"{look}>{inside}</table></div>'


def _head(name: str, *, is_number: bool, sortable: bool) -> str:
    look = ' class="number"' if is_number else ""
    if not sortable:
        return f'<th scope="col"{look}>{safe(name)}</th>'
    return f'<th scope="col"{look} aria-sort="none"><button type="button">{safe(name)}<i aria-hidden="true"></i></button></th>'


def _cell(cell: Cell, *, is_number: bool, is_name: bool) -> str:
    look = ' class="number"' if is_number else ""
    value = f' data-value="{cell.value:.10g}"' if cell.value is not None else ""
    return f'<th scope="row">{safe(cell.text)}</th>' if is_name else f"<td{look}{value}>{safe(cell.text)}</td>"


# -- the tables of a report ----------------------------------------------------------------------------------------------


def unit_table(run: Run) -> Table | None:
    """The units of the first rank that told of them: size, home, traffic and waits."""
    timeline = next((t for t in run.ranks if t.last.units), None)
    if timeline is None:
        return None
    line = timeline.last.units[-1]
    sizes = {unit.name: unit for unit in timeline.last.run.units}
    rows: list[list[Cell]] = []
    for row in line.rows:
        facts = sizes.get(row.name)
        rows.append(
            [
                Cell(shortened(row.name, 60)),
                *(Cell(row.tier.get(kind, "–")) for kind in ("parameters", "gradients", "optimizer")),
                Cell(row.activations),
                _size(facts.bytes if facts else 0),
                _size(row.activation_bytes),
                _seconds(row.forward_seconds),
                _seconds(row.wait_seconds),
                _size(row.fetch_bytes),
                _size(row.gather_bytes),
            ]
        )
    of = f" of rank {timeline.rank}" if timeline.last.run.world_size > 1 else ""
    words = ("unit", "parameters", "gradients", "optimizer", "activations")
    numbers = ("size", "saved", "forward", "waits", "fetched", "gathered")
    shown = [i for i in range(len(words) + len(numbers)) if i < len(words) or any(row[i].value for row in rows)]
    return Table(
        key="units",
        caption=f"{len(rows)} units{of}; times and traffic since the process began, up to step {line.step}",
        head=[(*words, *numbers)[i] for i in shown],
        rows=[[row[i] for i in shown] for row in rows],
        numbers=len(shown) - len(words),
        sortable=True,
    )


def arena_table(run: Run) -> Table | None:
    """Memory that is taken once and reused, as of the last sample of every rank."""
    rows: list[list[Cell]] = []
    for timeline in run.ranks:
        if not timeline.last.memory:
            continue
        for name, arena in timeline.last.memory[-1].arenas.items():
            if not arena.reserved and not arena.takes:
                continue  # a kind of bytes that this run has none of
            free = max(0, arena.reserved - arena.taken - arena.limbo)
            largest = min(arena.largest_free, free)
            split = 1 - largest / free if largest else None
            rows.append(
                [
                    Cell(shortened(name, 40)),
                    _count(timeline.rank),
                    _size(arena.reserved),
                    _size(arena.taken),
                    _size(free),
                    _count(arena.free_blocks),
                    Cell("–" if split is None else percent_text(split, 1.0), split),
                    _size(arena.limbo),
                    _count(arena.takes),
                    _times(arena.takes, arena.fresh),
                ]
            )
    if not rows:
        return None
    head = ("arena", "rank", "reserved", "in use", "free", "free blocks", "fragmented", "held by others")
    return Table(
        key="arenas",
        caption="Arenas: reuse says how often memory served, for every time it was taken from the system",
        head=(*head, "taken", "reuse"),
        rows=rows,
        numbers=9,
        sortable=True,
    )


def entry_table(entries: Sequence[Entry]) -> Table | None:
    """What happened beside the steps, the newest first."""
    rows = [
        [
            Cell(entry.what),
            Cell("" if entry.step is None else str(entry.step), float(entry.step or 0)),
            Cell(seconds_text(entry.at) if entry.at > 0 else "0 s", entry.at),
            Cell("" if entry.rank is None else str(entry.rank), float(entry.rank or 0)),
            Cell(entry.text),
        ]
        for entry in list(reversed(entries))[:_MOST_ENTRIES]
    ]
    left_out = len(entries) - len(rows)
    caption = f"the newest {len(rows)}; {left_out} older ones are not shown" if left_out else ""
    head = ("what", "step", "after", "rank", "text")
    return Table(key="happened", caption=caption, head=head, rows=rows, sortable=True) if rows else None


def prediction_table(found: Sequence[Prediction]) -> Table | None:
    """Plans against what came."""
    rows = [
        [
            Cell(shortened(p.what, 80)),
            Cell(p.of),
            Cell(p.steps),
            Cell(value_text(p.predicted or 0.0, p.unit), p.predicted),
            Cell("–" if p.measured is None else value_text(p.measured, p.unit), p.measured),
            Cell("–" if p.error is None else error_text(p.error), p.error),
        ]
        for p in found
    ]
    head = ("plan, by what made it", "predicts", "for steps", "predicted", "measured", "error")
    caption = (
        "Every plan against the steps it was in force for, without the first step of a process. "
        "Error: how much too high (+) or too low (−) the prediction was"
    )
    return Table(key="predictions", caption=caption, head=head, rows=rows, numbers=3) if rows else None


def lane_table(detail: StepDetail) -> Table:
    """How long every lane worked in a step: the timeline for those who cannot see it."""
    lanes = lanes_of(detail.ranks)
    rows = [
        [Cell(f"rank {rank.rank}"), *(_seconds(busy.get(lane, 0.0)) for lane in lanes)]
        for rank, busy in ((rank, rank.busy()) for rank in detail.ranks)
    ]
    caption = f"Seconds in which each lane worked in step {detail.step}, which took {seconds_text(detail.seconds)}"
    return Table(key="lanes", caption=caption, head=("rank", *lanes), rows=rows, numbers=len(lanes))


def _size(nbytes: int) -> Cell:
    return Cell(size_text(nbytes) if nbytes else "–", float(nbytes))


def _count(number: int) -> Cell:
    return Cell(f"{number:,}", float(number))


def _seconds(seconds: float) -> Cell:
    return Cell(seconds_text(seconds) if seconds > 0 else "–", seconds)


def _times(takes: int, fresh: int) -> Cell:
    return Cell(f"{takes / fresh:.1f} ×", takes / fresh) if fresh else Cell("–", 0.0)
