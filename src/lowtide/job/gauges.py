"""How full host memory and disk are, for a person: two short bars on a terminal, the same numbers in a log. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from lowtide.job.records import StepRecord

_BAR_WIDTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What rank 0 may use; ``None`` for what nobody limited and the job does not watch."""

    host_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Gauge:
    """How much of something is used."""

    name: str
    used_bytes: int
    limit_bytes: int

    @property
    def text(self) -> str:
        """Short, so that two bars with their numbers fit in 80 columns."""
        if self.limit_bytes < 2**30:
            return f"{self.used_bytes / 2**20:.0f} of {self.limit_bytes / 2**20:.0f} MiB"
        return f"{self.used_bytes / 2**30:.2f} of {self.limit_bytes / 2**30:.2f} GiB"


def gauges(record: StepRecord, limits: Limits) -> list[Gauge]:
    """One gauge for everything that has a limit."""
    pairs = (("host", record.host_bytes, limits.host_bytes), ("disk", record.disk_bytes, limits.disk_bytes))
    return [Gauge(name, used, limit) for name, used, limit in pairs if limit is not None]


def gauge_row(readings: Sequence[Gauge]) -> RenderableType:
    """All gauges beside each other. A bar that is over its limit is full and red."""
    row = Table.grid(padding=(0, 1))
    cells: list[RenderableType] = []
    for gauge in readings:
        over = gauge.used_bytes > gauge.limit_bytes
        style = "bold red" if over else "green"
        bar = ProgressBar(
            total=gauge.limit_bytes,
            completed=min(gauge.used_bytes, gauge.limit_bytes),
            width=_BAR_WIDTH,
            complete_style=style,
            finished_style=style,
        )
        cells += [gauge.name, bar, gauge.text]
    for _ in cells:
        row.add_column()
    row.add_row(*cells)
    return row
