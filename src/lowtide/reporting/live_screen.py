"""How a running job looks in a terminal: bars of every tier against its limit, speed, waits, time left. No torch here."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lowtide.planning.text import clean, percent_text, seconds_text, shortened, size_text
from lowtide.reporting.live import MarkNow, RankNow, Snapshot, TierNow

_BAR = 24
_MOST_RANKS = 16
_NEARLY_FULL = 0.95
_STATE_STYLES = {"running": "green", "done": "cyan", "error": "bold red", "killed": "bold red", "silent": "yellow"}


def screen(snapshot: Snapshot) -> RenderableType:
    """All of it, from top to bottom: the run, its ranks, what happened lately."""
    parts: list[RenderableType] = [_head(snapshot), _progress(snapshot), Text("")]
    parts += [_rank(rank, alone=len(snapshot.ranks) == 1) for rank in snapshot.ranks[:_MOST_RANKS]]
    hidden = len(snapshot.ranks) - _MOST_RANKS
    if hidden > 0:
        parts.append(Text(f"{hidden} more ranks are not shown", style="dim"))
    if snapshot.missing:
        parts.append(Text(f"{snapshot.missing} ranks have written nothing here", style="yellow"))
    if snapshot.marks:
        parts += [Text(""), *(_mark(mark) for mark in snapshot.marks)]
    return Group(*parts)


def _head(snapshot: Snapshot) -> Text:
    worst = "done"
    for state in ("killed", "error", "silent", "running"):
        if any(rank.ending.state == state for rank in snapshot.ranks):
            worst = state
            break
    head = Text(clean(snapshot.name), style="bold")
    head.append("  ")
    head.append(snapshot.words, style=_STATE_STYLES[worst])
    texts = [rank.ending.text for rank in snapshot.ranks if rank.ending.text]
    if texts:
        head.append(f"  {shortened(texts[0], 200)}", style="red")
    return head


def _progress(snapshot: Snapshot) -> Text:
    first = snapshot.ranks[0]
    parts = [f"step {first.step}" + (f" of {snapshot.steps}" if snapshot.steps else "")]
    if first.loss is not None:
        parts.append(f"loss {first.loss:.4f}")
    if first.seconds:
        parts.append(f"{seconds_text(first.seconds)} a step")
    if snapshot.seconds_left is not None:
        parts.append(f"{seconds_text(snapshot.seconds_left)} left")
    return Text("   ".join(parts))


def _rank(rank: RankNow, *, alone: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    if not alone:
        grid.add_row(Text(f"rank {rank.rank}", style="bold"), Text(clean(rank.host), style="dim"), Text(""), Text(""))
    for tier in rank.tiers:
        grid.add_row(Text(f"  {tier.tier:<6}"), _bar(tier), Text(_sizes(tier)), Text(_share(tier), style="dim"))
    waits = f"waits: disk {percent_text(rank.disk_share, 1)}, ranks {percent_text(rank.comm_share, 1)}"
    moved = f"read {size_text(rank.read_speed)}/s, write {size_text(rank.write_speed)}/s"
    cpu = f"   cpu {rank.cpu_percent:.0f} %" if rank.cpu_percent is not None else ""
    silent = ""
    if rank.ending.state in ("running", "silent") and rank.ending.silent_seconds > 10:
        silent = f"   silent since {rank.ending.silent_seconds:.0f} s"
    return Group(grid, Text.assemble(f"  {waits}   {moved}{cpu}", (silent, "yellow")))


def _bar(tier: TierNow) -> RenderableType:
    if not tier.limit_bytes:
        return Text("no limit".ljust(_BAR), style="dim")
    share = tier.used_bytes / tier.limit_bytes
    style = "bold red" if share > 1 else "yellow" if share > _NEARLY_FULL else "green"
    used = min(tier.used_bytes, tier.limit_bytes)
    return ProgressBar(total=tier.limit_bytes, completed=used, width=_BAR, complete_style=style, finished_style=style)


def _sizes(tier: TierNow) -> str:
    return size_text(tier.used_bytes) + (f" of {size_text(tier.limit_bytes)}" if tier.limit_bytes else "")


def _share(tier: TierNow) -> str:
    return percent_text(tier.used_bytes, tier.limit_bytes) if tier.limit_bytes else ""


def _mark(mark: MarkNow) -> Text:
    style = "dim" if mark.what in ("checkpoint", "replan") else "yellow"
    return Text(f"step {mark.step:>6}  {mark.what}: {shortened(mark.text, 120)}".rstrip(": "), style=style)
