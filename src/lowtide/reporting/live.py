"""A running job, seen from another terminal: what its files say now. Reads only; nothing is asked of the job. No torch here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowtide.reporting.ending import Ending, ending_of
from lowtide.reporting.extras import planned_steps
from lowtide.reporting.format import MemoryLine, StepLine
from lowtide.reporting.summary import counted_bytes, divide
from lowtide.reporting.timeline import Follower, NoTimeline, Timeline, follow, read_now, timeline_files

_RECENT = 20
"""Steps that a speed is an average of."""
_MARKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNow:
    """What a rank uses of one tier. ``limit_bytes``: ``None`` if there is none."""

    tier: str
    used_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """One rank."""

    rank: int
    host: str
    pid: int
    ending: Ending
    step: int
    loss: float | None
    seconds: float | None
    """Of a step, lately."""
    disk_share: float
    """Of a step that waits for the disk."""
    comm_share: float
    read_speed: float
    """Bytes per second, lately."""
    write_speed: float
    cpu_percent: float | None
    tiers: tuple[TierNow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkNow:
    """Something that happened lately."""

    rank: int
    step: int
    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All ranks, now. Steps and seconds that are not known are ``None``."""

    name: str
    ranks: tuple[RankNow, ...]
    missing: int
    """Ranks that have written nothing."""
    steps: int | None
    seconds_left: float | None
    marks: tuple[MarkNow, ...]

    @property
    def is_over(self) -> bool:
        return all(rank.ending.state in ("done", "error", "killed") for rank in self.ranks)

    @property
    def words(self) -> str:
        """What state the run is in; the worst of its ranks speaks for it."""
        order = ("killed", "error", "silent", "running", "done")
        worst = min(self.ranks, key=lambda r: (order.index(r.ending.state), -r.ending.silent_seconds))
        where = f"rank {worst.rank}: " if len(self.ranks) > 1 and worst.ending.state in ("killed", "error", "silent") else ""
        return where + worst.ending.words


class Live:
    """Looks at a run again and again; only what is new is read."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._followers: dict[Path, Follower] = {follower.timeline.path: follower for follower in follow(run)}
        self._steps = planned_steps(run)

    def look(self) -> Snapshot:
        """How things are now. Raises ``NoTimeline`` as long as no rank has written its first line."""
        for rank, path in timeline_files(self._run):
            self._followers.setdefault(path, Follower(path, rank))
        for follower in self._followers.values():
            follower.look()
        timelines = [
            f.timeline for f in sorted(self._followers.values(), key=lambda f: f.timeline.rank) if f.timeline.processes
        ]
        if not timelines:
            raise NoTimeline(f"{str(self._run)!r} has timelines, but no rank has begun to write yet; try again in a moment.")
        now = time.time()
        ranks = tuple(rank_now(timeline, now=now) for timeline in timelines)
        return Snapshot(
            name=self._run.resolve().name,
            ranks=ranks,
            missing=max(0, timelines[0].last.run.world_size - len(timelines)),
            steps=self._steps,
            seconds_left=_seconds_left(timelines[0], ranks[0], self._steps),
            marks=_last_marks(timelines),
        )


def rank_now(timeline: Timeline, *, now: float) -> RankNow:
    """One rank, by its file and by what it said last beside it."""
    process = timeline.last
    newest = read_now(timeline)
    steps = _newest_steps(process.steps, newest)
    samples = [line for line in newest if isinstance(line, MemoryLine)] or process.memory[-1:]
    recent = steps[-_RECENT:] if len(steps) < 3 else steps[1:][-_RECENT:]
    division = divide(recent)
    spent = sum(step.seconds for step in recent)
    return RankNow(
        rank=timeline.rank,
        host=process.run.host,
        pid=process.run.pid,
        ending=ending_of(timeline, now=now),
        step=steps[-1].step if steps else 0,
        loss=next((step.loss for step in reversed(steps) if step.loss is not None), None),
        seconds=division.seconds if division is not None else None,
        disk_share=division.disk / division.seconds if division is not None and division.seconds else 0.0,
        comm_share=division.comm / division.seconds if division is not None and division.seconds else 0.0,
        read_speed=sum(step.disk_read_bytes for step in recent) / spent if spent else 0.0,
        write_speed=sum(step.disk_written_bytes for step in recent) / spent if spent else 0.0,
        cpu_percent=samples[-1].cpu_percent if samples else None,
        tiers=_tiers(timeline, samples[-1]) if samples else (),
    )


def _newest_steps(written: Sequence[StepLine], newest: Sequence[object]) -> list[StepLine]:
    """Those in the file, and the one that is newer than the file."""
    last = written[-1].step if written else -1
    return [*written, *(line for line in newest if isinstance(line, StepLine) and line.step > last)]


def _tiers(timeline: Timeline, sample: MemoryLine) -> tuple[TierNow, ...]:
    run = timeline.last.run
    tiers = [TierNow(tier="host", used_bytes=counted_bytes(sample), limit_bytes=run.budget_bytes)]
    if any(sample.device.values()):
        tiers.append(TierNow(tier="device", used_bytes=sum(sample.device.values()), limit_bytes=None))
    used = max(sample.spool_bytes, sum(sample.disk.values()))
    if used or run.folders:
        limit = run.disk_limit_bytes
        if limit is None and sample.disk_free_bytes is not None:
            limit = used + sample.disk_free_bytes
        tiers.append(TierNow(tier="disk", used_bytes=used, limit_bytes=limit))
    return tuple(tiers)


def _seconds_left(timeline: Timeline, rank: RankNow, steps: int | None) -> float | None:
    """By the clock on the wall over the last steps: checkpoints and the like count too."""
    if steps is None or rank.ending.state != "running":
        return None
    lines = timeline.last.steps[-_RECENT:]
    per_step = rank.seconds
    if len(lines) > 1 and lines[-1].step > lines[0].step:
        per_step = (lines[-1].t - lines[0].t) / (lines[-1].step - lines[0].step)
    return None if per_step is None else max(0, steps - rank.step) * per_step


def _last_marks(timelines: Sequence[Timeline]) -> tuple[MarkNow, ...]:
    """The newest of all ranks; what several of them tell of the same step stands once."""
    begun = [(t, p) for t in timelines for p in t.processes]
    told = sorted(((t.at(p, m.t), t.rank, m) for t, p in begun for m in p.marks), key=lambda entry: entry[:2])
    seen: set[tuple[str, int]] = set()
    kept: deque[MarkNow] = deque(maxlen=_MARKS)
    for _, rank, mark in told:
        if (mark.what, mark.step) not in seen:
            seen.add((mark.what, mark.step))
            kept.append(MarkNow(rank=rank, step=mark.step, what=mark.what, text=mark.text))
    return tuple(kept)
