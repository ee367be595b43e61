"""Where the time of a step goes, rank by rank: bars. No torch here."""

from __future__ import annotations

from lowtide.planning.picture_drawing import text_width
from lowtide.planning.text import percent_text, seconds_text
from lowtide.reporting.sheet import Sheet
from lowtide.reporting.summary import Summary

COLOURS = {
    "compute": "#4477aa",
    "update": "#85751c",
    "waiting for the disk": "#228833",
    "waiting for other ranks": "#c2500f",
    "other code inside the step": "#8a9099",
    "between steps": "#b0a08a",
}
_MOST_RANKS = 16
_ROW = 26.0
_NAMES = 58.0
_END = 72.0
"""Room for the seconds at the end of the longest bar."""


def bars_legend(summary: Summary) -> list[tuple[str, str]]:
    """Colours and names of what there is."""
    there = {name for rank in summary.ranks if rank.division is not None for name, s in rank.division.parts().items() if s > 0}
    return [(colour, name) for name, colour in COLOURS.items() if name in there]


def bars_sheet(summary: Summary, *, width: float) -> Sheet:
    """One bar per rank, as long as its step; the longest fills the width."""
    rows = min(sum(rank.division is not None for rank in summary.ranks), _MOST_RANKS)
    sheet = Sheet("Where the time of a step goes", width=width, height=_ROW * max(rows, 1) + 6)
    draw_bars(summary, sheet, top=2.0)
    return sheet


def draw_bars(summary: Summary, sheet: Sheet, *, top: float, margin: float = 0.0) -> float:
    """Between the margins of a sheet; returns where they end."""
    shown = [(rank.rank, rank.division) for rank in summary.ranks if rank.division is not None][:_MOST_RANKS]
    most = max((division.seconds for _, division in shown), default=0.0) or 1.0
    left = margin + (_NAMES if len(shown) > 1 else 0.0)
    scale = (sheet.width - margin - _END - left) / most
    for rank, division in shown:
        if len(shown) > 1:
            sheet.text(margin, top + 15, f"rank {rank}", size=12, look="lt-dim")
        x = left
        for name, seconds in division.parts().items():
            width, share = seconds * scale, percent_text(seconds, division.seconds)
            if width > 0.2:
                sheet.rect(x, top, width, _ROW - 6, colour=COLOURS[name], tip=f"{name}: {share}, {seconds_text(seconds)}")
            if text_width(share, 11) + 8 < width:
                sheet.text(x + 5, top + 14, share, size=11, look="lt-on-colour")
            x += width
        sheet.text(x + 6, top + 15, seconds_text(division.seconds), size=12)
        top += _ROW
    return top
