"""The numbers of a run that a report starts from: how a step's time divides, what was moved, what was held. Pure, no torch.

Everything is of steps in the steady state: the first step of a process builds, measures and places, and says little about the
others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lowtide.reporting.format import MemoryLine, PlanLine, RunLine, SpansLine, StepLine
from lowtide.reporting.timeline import Run, Timeline

SHARED = "shared with ranks"
"""A kind of bytes in host memory that this process has and other ranks count."""
FEW = 3
"""With no more steps than this, none is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Where the seconds of an average step go, from the end of one to the end of the next. They add up to ``seconds``."""

    seconds: float
    compute: float
    update: float
    disk: float
    """Waiting for the disk."""
    comm: float
    """Waiting for other ranks."""
    rest: float
    """Inside the step, and none of these: the caller's own code between forward pass and update."""
    between: float = 0.0
    """After an update, before the next forward pass: loading data, as a rule."""

    def parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "update": self.update,
            "waiting for the disk": self.disk,
            "waiting for other ranks": self.comm,
            "other code inside the step": self.rest,
            "between steps": self.between,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank, over all processes that worked on the run."""

    rank: int
    run: RunLine
    """The newest process."""
    steps: int
    """The number of the last step."""
    division: Division | None
    """``None`` before the first step is over."""
    median_seconds: float | None
    read_bytes: int
    """Of an average step, from the disk."""
    written_bytes: int
    wire_bytes: int
    total_read_bytes: int
    total_written_bytes: int
    peak_bytes: int
    """As it counts against the budget."""
    parked: dict[str, int]
    """What lives on disk now, by kind."""
    disk_speed: float | None
    """Bytes per second while the disk worked, from steps recorded in detail."""
    plan: PlanLine | None
    """The newest."""
    clip_share: float
    """Of the seconds of its update, how many were spent on clipping, from steps recorded in detail."""
    processor_share: float | None
    """Of the processor time that the step's thread asked for, how much it got; ``None`` if nobody counts that here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run."""

    ranks: tuple[RankSummary, ...]
    started: float
    seconds: float
    """From the first line to the last, by the clock on the wall."""
    steps: int
    bad_lines: int
    processes: int
    """How often rank 0 was started."""

    @property
    def slowest(self) -> RankSummary | None:
        """The rank that stands still least for the others: the one they wait for."""
        timed = [rank for rank in self.ranks if rank.division is not None]
        return min(timed, key=lambda r: r.division.comm if r.division else 0.0, default=None)

    @property
    def fullest(self) -> RankSummary:
        """The rank whose peak is closest to its budget, or the highest."""
        return max(self.ranks, key=lambda r: (r.peak_bytes / r.run.budget_bytes if r.run.budget_bytes else 0.0, r.peak_bytes))

    @property
    def total_written_bytes(self) -> int:
        return sum(rank.total_written_bytes for rank in self.ranks)

    @property
    def total_read_bytes(self) -> int:
        return sum(rank.total_read_bytes for rank in self.ranks)


def summarise(run: Run) -> Summary:
    """All ranks of a run."""
    ranks = tuple(_rank(timeline) for timeline in run.ranks)
    started = min(timeline.processes[0].run.started for timeline in run.ranks)
    ends = [process.run.started + process.last_seconds for timeline in run.ranks for process in timeline.processes]
    return Summary(
        ranks=ranks,
        started=started,
        seconds=max(0.0, max(ends) - started),
        steps=max(rank.steps for rank in ranks),
        bad_lines=sum(len(timeline.bad_lines) for timeline in run.ranks),
        processes=len(run.first.processes),
    )


def steady_steps(timeline: Timeline) -> list[StepLine]:
    """Steps without the first of each process, unless that leaves too few."""
    steps = [step for _, step in timeline.steps()]
    first = {id(process.steps[0]) for process in timeline.processes if process.steps}
    steady = [step for step in steps if id(step) not in first]
    return steady if len(steady) >= FEW else steps


def usual_gap(timeline: Timeline) -> float:
    """Seconds between two steps: loading data, as a rule. The median, so that checkpoints do not count."""
    gaps: list[float] = []
    for process in timeline.processes:
        for before, step in pairwise(process.steps):
            gaps.append((step.t - before.t) / max(step.covers, 1) - step.seconds)
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


def divide(steps: Sequence[StepLine], *, gap: float = 0.0) -> Division | None:
    """The average of steps, with ``gap`` between two of them. What is measured in two ways counts once, waits first."""
    if not steps:
        return None
    count = len(steps)
    seconds = sum(step.seconds for step in steps) / count
    left = seconds
    found: dict[str, float] = {}
    for name in ("disk_wait", "comm_wait", "update", "compute"):
        mean = sum(getattr(step, f"{name}_seconds") for step in steps) / count
        found[name] = min(max(mean, 0.0), left)
        left -= found[name]
    return Division(
        seconds=seconds + gap,
        compute=found["compute"],
        update=found["update"],
        disk=found["disk_wait"],
        comm=found["comm_wait"],
        rest=max(left, 0.0),
        between=gap,
    )


def disk_speed(spans: Iterable[SpansLine]) -> float | None:
    """Bytes per second of disk work, where it is long enough to tell: overlapping requests count their time once."""
    moved, busy = 0, 0.0
    for line in spans:
        rows = sorted((row.begin, row.end) for row in line.rows if row.lane.startswith("disk") and row.bytes)
        moved += sum(row.bytes for row in line.rows if row.lane.startswith("disk"))
        reached = float("-inf")
        for begin, end in rows:
            busy += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
    return moved / busy if busy > 1e-3 else None


def counted_bytes(sample: MemoryLine) -> int:
    """What of a sample counts against the memory number of its rank: all but pages of files, which the kernel can drop, and
    shared memory that other ranks count."""
    shared = max(0, sample.process.shared - sample.host.get(SHARED, 0))
    return sample.process.anonymous + shared + sample.children_bytes


def _rank(timeline: Timeline) -> RankSummary:
    steps = steady_steps(timeline)
    last = timeline.last
    memory = [sample for process in timeline.processes for sample in process.memory]
    count = max(len(steps), 1)
    peaks = [step.peak_bytes for process in timeline.processes for step in process.steps]
    return RankSummary(
        rank=timeline.rank,
        run=last.run,
        steps=max((step.step for process in timeline.processes for step in process.steps), default=0),
        division=divide(steps, gap=usual_gap(timeline)),
        median_seconds=statistics.median(step.seconds for step in steps) if steps else None,
        read_bytes=sum(step.disk_read_bytes for step in steps) // count,
        written_bytes=sum(step.disk_written_bytes for step in steps) // count,
        wire_bytes=sum(step.wire_bytes for step in steps) // count,
        total_read_bytes=_total(timeline, "disk_read_bytes"),
        total_written_bytes=_total(timeline, "disk_written_bytes"),
        peak_bytes=max([*peaks, *(counted_bytes(sample) for sample in memory)], default=0),
        parked={kind: size for kind, size in memory[-1].disk.items() if size > 0 and kind != "spare"} if memory else {},
        disk_speed=disk_speed(line for process in timeline.processes for line in process.spans),
        plan=next((process.plans[-1] for process in reversed(timeline.processes) if process.plans), None),
        clip_share=_clip_share(line for process in timeline.processes for line in process.spans),
        processor_share=_processor_share(memory),
    )


def _clip_share(spans: Iterable[SpansLine]) -> float:
    """Chunks lie inside the span of the whole update, which has no unit; an update inside backward has no such span."""
    found = {"clip": 0.0, "update": 0.0}
    for line in spans:
        for row in line.rows:
            if row.lane == "update" and not line.names[row.unit]:
                found[row.verb] = found.get(row.verb, 0.0) + row.end - row.begin
    return found["clip"] / sum(found.values()) if found["clip"] else 0.0


def _processor_share(samples: Sequence[MemoryLine]) -> float | None:
    given = [sample.cpu_given_percent for sample in samples if sample.cpu_given_percent is not None]
    return statistics.fmean(given) / 100 if given else None


def _total(timeline: Timeline, name: str) -> int:
    """Over all processes: the running total of each one's last step, or the sum where it has none."""
    return sum(
        max(getattr(process.steps[-1], f"total_{name}"), sum(getattr(step, name) for step in process.steps))
        for process in timeline.processes
        if process.steps
    )
