"""One step in detail: what every rank did when, in lanes. As data for the page's script, and as a drawing. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.planning.picture_drawing import MARGIN, OTHER_COLOUR
from lowtide.planning.text import seconds_text, shortened, size_text
from lowtide.reporting.charts import round_numbers
from lowtide.reporting.format import LANES, Span, SpansLine
from lowtide.reporting.sheet import Sheet
from lowtide.reporting.timeline import Run

LANE_COLOURS = {
    "compute": "#4477aa",
    "disk read": "#228833",
    "disk write": "#88aa22",
    "gather": "#c2500f",
    "reduce": "#aa3377",
    "update": "#85751c",
    "wait": "#cc4433",
}
_MOST_ROWS = 40_000
"""Of all steps and ranks in a page."""
_MOST_STEPS = 8
_MOST_RANKS = 16
_LANE_HEIGHT = 18.0
_LABELS = 96.0
_GAP = 0.7
"""Spans of the same kind that are closer than this on paper become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetail:
    """What one rank did in a step."""

    rank: int
    spans: SpansLine

    @property
    def seconds(self) -> float:
        return max((row.end for row in self.spans.rows), default=0.0)

    def busy(self) -> dict[str, float]:
        """Seconds in which each lane did something; overlaps count once."""
        found: dict[str, float] = {}
        for lane in lanes_of([self]):
            reached = float("-inf")
            for begin, end in sorted((r.begin, r.end) for r in self.spans.rows if r.lane == lane):
                found[lane] = found.get(lane, 0.0) + max(0.0, end - max(begin, reached))
                reached = max(reached, end)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDetail:
    """One step of all ranks that recorded it."""

    step: int
    why: str
    ranks: tuple[RankDetail, ...]

    @property
    def rows(self) -> int:
        return sum(len(rank.spans.rows) for rank in self.ranks)

    @property
    def seconds(self) -> float:
        return max((rank.seconds for rank in self.ranks), default=0.0)


def step_details(run: Run) -> list[StepDetail]:
    """The steps that a page shows, in order: the newest first choice, then the slowest, then the others as room allows."""
    by_step: dict[int, dict[int, SpansLine]] = {}
    for timeline in run.ranks[:_MOST_RANKS]:
        for process in timeline.processes:
            for line in process.spans:
                if line.rows:
                    by_step.setdefault(line.step, {})[timeline.rank] = line
    found = [
        StepDetail(
            step=step,
            why="slowest" if any(line.why == "slowest" for line in lines.values()) else "",
            ranks=tuple(RankDetail(rank=rank, spans=line) for rank, line in sorted(lines.items())),
        )
        for step, lines in by_step.items()
    ]
    full = max((len(detail.ranks) for detail in found), default=0)
    chosen: list[StepDetail] = []
    for detail in sorted(found, key=lambda d: (len(d.ranks) < full, d.step == 0, d.why == "slowest", -d.step)):
        if len(chosen) < _MOST_STEPS and (not chosen or sum(c.rows for c in chosen) + detail.rows <= _MOST_ROWS):
            chosen.append(detail)
    slowest = [d for d in found if d.why == "slowest" and d not in chosen]
    if slowest and len(chosen) > 1:
        chosen[-1] = max(slowest, key=lambda d: d.step)
    return sorted(chosen, key=lambda d: d.step)


def typical(details: Sequence[StepDetail]) -> StepDetail | None:
    """The one that is shown first: the newest ordinary one."""
    ordinary = [detail for detail in details if detail.why != "slowest"] or list(details)
    return ordinary[-1] if ordinary else None


def lanes_of(ranks: Sequence[RankDetail]) -> list[str]:
    """In the usual order; lanes that are not known come last."""
    there = {row.lane for rank in ranks for row in rank.spans.rows}
    return [lane for lane in LANES if lane in there] + sorted(there - set(LANES))


def details_data(details: Sequence[StepDetail]) -> list[dict[str, Any]]:
    """For the page's script: times in whole microseconds, lanes and verbs by number."""
    out: list[dict[str, Any]] = []
    for detail in details:
        lanes = lanes_of(detail.ranks)
        verbs = sorted({row.verb for rank in detail.ranks for row in rank.spans.rows})
        number = {word: i for i, word in enumerate(verbs)}
        out.append(
            {
                "step": detail.step,
                "why": detail.why,
                "seconds": detail.seconds,
                "lanes": [{"name": lane, "colour": LANE_COLOURS.get(lane, OTHER_COLOUR)} for lane in lanes],
                "verbs": verbs,
                "ranks": [
                    {
                        "rank": rank.rank,
                        "names": list(rank.spans.names),
                        "dropped": rank.spans.dropped,
                        "rows": [
                            [
                                round(row.begin * 1e6),
                                round((row.end - row.begin) * 1e6),
                                lanes.index(row.lane),
                                number[row.verb],
                                row.unit,
                                row.bytes,
                            ]
                            for row in sorted(rank.spans.rows, key=lambda r: r.begin)
                        ],
                    }
                    for rank in detail.ranks
                ],
            }
        )
    return out


def draw_step(detail: StepDetail, sheet: Sheet, *, most_ranks: int = 4) -> None:
    """Below what is on the sheet already."""
    shown = detail.ranks[:most_ranks]
    lanes = lanes_of(shown)
    left, right = MARGIN + _LABELS, sheet.width - MARGIN
    scale = (right - left) / max(detail.seconds, 1e-9)
    for rank in shown:
        if len(detail.ranks) > 1:
            sheet.y += 16
            sheet.text(MARGIN, sheet.y, f"rank {rank.rank}", size=12)
        for lane in lanes:
            top = sheet.y + 3
            sheet.text(MARGIN, top + 12, lane, size=11, look="lt-dim")
            sheet.rect(left, top, right - left, _LANE_HEIGHT - 4, look="lt-track")
            for span in _merged([row for row in rank.spans.rows if row.lane == lane], _GAP / scale):
                width = max((span.end - span.begin) * scale, 0.5)
                tip = span_text(span, rank.spans.names)
                colour = LANE_COLOURS.get(lane, OTHER_COLOUR)
                sheet.rect(left + span.begin * scale, top, width, _LANE_HEIGHT - 4, colour=colour, tip=tip)
            sheet.y += _LANE_HEIGHT
    unit, word = (1.0, "s") if detail.seconds >= 1 else (1e-3, "ms")
    for tick in round_numbers(0.0, detail.seconds / unit, 8):
        sheet.text(left + tick * unit * scale, sheet.y + 15, f"{tick:.4g}", size=11, look="lt-dim", anchor="middle")
    sheet.text(MARGIN, sheet.y + 15, word, size=11, look="lt-dim")
    sheet.y += 18


def span_text(span: Span, names: Sequence[str]) -> str:
    """``fetch blocks.3, 12.0 MiB, 4.1 ms``."""
    unit = shortened(names[span.unit], 60)
    parts = [f"{span.verb} {unit}".strip(), seconds_text(span.end - span.begin)]
    return ", ".join([*parts, size_text(span.bytes)] if span.bytes else parts)


def _merged(rows: Sequence[Span], gap: float) -> list[Span]:
    """Neighbours that nobody could tell apart at this scale, as one."""
    out: list[Span] = []
    for row in sorted(rows, key=lambda r: r.begin):
        last = out[-1] if out else None
        if last is not None and row.begin - last.end < gap and (row.end - row.begin < gap or last.end - last.begin < gap):
            out[-1] = Span(last.begin, max(last.end, row.end), last.lane, last.verb, last.unit, last.bytes + row.bytes)
        else:
            out.append(row)
    return out
