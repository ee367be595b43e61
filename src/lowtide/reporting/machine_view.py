"""What the kernel says about a rank and its machine, as charts: memory as it counts it, and how busy everything was. No torch
here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.planning.text import size_text
from lowtide.reporting.charts import Chart, Level, Series
from lowtide.reporting.format import MemoryLine
from lowtide.reporting.timeline import Run, Timeline
from lowtide.reporting.views import Entry, marks_on, samples_over_time

_Read = Callable[[MemoryLine], float | None]
_MEMORY: tuple[tuple[str, str, _Read], ...] = (
    ("anonymous", "#4477aa", lambda sample: sample.process.anonymous),
    ("shared", "#ee7733", lambda sample: sample.process.shared),
    ("pages of files", "#8a9099", lambda sample: sample.process.file),
    ("control group, all that is in it", "#aa3377", lambda sample: sample.cgroup_bytes),
)
_BUSY: tuple[tuple[str, str, _Read], ...] = (
    ("processor (100 % is one core)", "#4477aa", lambda sample: sample.cpu_percent),
    ("processor time got, of what was asked for", "#66bbdd", lambda sample: sample.cpu_given_percent),
    ("disk, whoever uses it", "#228833", lambda sample: sample.disk_busy_percent),
    ("accelerator", "#aa3377", lambda sample: sample.device_percent),
)


def machine_charts(timeline: Timeline, happened: Sequence[Entry]) -> list[Chart]:
    """Of one rank; what nobody counted is left out."""
    samples = samples_over_time(timeline)
    of = f", rank {timeline.rank}" if timeline.last.run.world_size > 1 else ""
    limit = next((s.cgroup_limit_bytes for p in reversed(timeline.processes) for s in reversed(p.memory)), None)
    charts = [
        Chart(
            key=f"kernel-{timeline.rank}",
            title=f"Memory of the process, as the kernel counts it{of}",
            unit="bytes",
            axis="time",
            x=[at for at, _ in samples],
            curves=_curves(samples, _MEMORY, least=0.01),
            levels=[Level(name="limit of the control group", points=[(0.0, float(limit))], look="lt-budget")] if limit else [],
            marks=marks_on(happened, "time"),
        ),
        Chart(
            key=f"busy-{timeline.rank}",
            title=f"How busy the machine was since the sample before{of}",
            unit="percent",
            axis="time",
            x=[at for at, _ in samples],
            curves=_curves(samples, _BUSY),
        ),
    ]
    return [chart for chart in charts if not chart.is_empty]


def free_text(run: Run) -> str:
    """How close the disk came to being full; empty if nothing was ever on it."""
    samples = [sample for timeline in run.ranks for process in timeline.processes for sample in process.memory]
    free = [sample.disk_free_bytes for sample in samples if sample.disk_free_bytes is not None]
    if not free or not any(sample.spool_bytes for sample in samples):
        return ""
    return f"At least {size_text(min(free))} stayed free on the disk."


def _curves(
    samples: Sequence[tuple[float, MemoryLine | None]], kinds: Sequence[tuple[str, str, _Read]], *, least: float = 0.0
) -> list[Series]:
    """Those that somewhere reach ``least`` of the highest: a line along the axis says nothing."""
    found = [
        Series(name=name, values=[read(sample) if sample is not None else None for _, sample in samples], colour=colour)
        for name, colour, read in kinds
    ]
    most = [max((value for value in series.values if value is not None), default=-1.0) for series in found]
    return [series for series, own in zip(found, most, strict=True) if own >= max(0.0, least * max(most))]
