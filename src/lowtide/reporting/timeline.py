"""The timelines of a run, read: all ranks, all processes that went on with it. No torch here.

Also for files that are still being written: a ``Follower`` gives what is new since the last look.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.errors import ArgumentError
from lowtide.files import NotPlain, open_plain
from lowtide.reporting.format import (
    MAX_LINE_BYTES,
    BadLine,
    EndLine,
    Line,
    MarkLine,
    MemoryLine,
    PlanLine,
    RunLine,
    SpansLine,
    StepLine,
    UnitsLine,
    decode,
)

FOLDER = "timeline"
MAX_FILE_BYTES = 2**30
"""More of a file is not read: what writes such files stays far below it."""
MAX_RANKS = 65_536
_PART = 2**20
_NAME = re.compile(r"rank-(\d{5,8})\.jsonl")


class NoTimeline(ArgumentError):
    """There is no timeline where one was looked for."""


@dataclass(frozen=True, slots=True)
class Process:
    """What one process wrote, from its ``run`` line on. All lists are in the order of the file, but for ``memory``, which is in
    the order of time: the sample of a step's fullest moment is written when the step is over."""

    run: RunLine
    plans: list[PlanLine] = field(default_factory=list[PlanLine])
    steps: list[StepLine] = field(default_factory=list[StepLine])
    memory: list[MemoryLine] = field(default_factory=list[MemoryLine])
    spans: list[SpansLine] = field(default_factory=list[SpansLine])
    units: list[UnitsLine] = field(default_factory=list[UnitsLine])
    marks: list[MarkLine] = field(default_factory=list[MarkLine])
    ends: list[EndLine] = field(default_factory=list[EndLine])

    @property
    def end(self) -> EndLine | None:
        """How it ended; None if it runs still, or was killed."""
        return self.ends[-1] if self.ends else None

    @property
    def last_seconds(self) -> float:
        """``t`` of the last line."""
        lists: Iterable[list[Line]] = (self.plans, self.steps, self.memory, self.spans, self.units, self.marks, self.ends)  # type: ignore[assignment]
        return max((lines[-1].t for lines in lists if lines), default=0.0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One rank's file."""

    rank: int
    path: Path
    processes: list[Process] = field(default_factory=list[Process])
    bad_lines: list[int] = field(default_factory=list[int])
    """Numbers of lines that could not be believed; the last one may be under way still."""

    @property
    def last(self) -> Process:
        """The newest process."""
        return self.processes[-1]

    def at(self, process: Process, t: float) -> float:
        """Seconds since the run's first process began, by the clock on the wall, of ``t`` in ``process``."""
        return process.run.started - self.processes[0].run.started + t

    def steps(self) -> list[tuple[Process, StepLine]]:
        """The steps of the whole run in order; of one that was made again, because a process had died, the last time."""
        taken: list[tuple[Process, StepLine]] = []
        for process in self.processes:
            if process.steps:
                first = process.steps[0].step
                taken = [(p, s) for p, s in taken if s.step < first]
            taken += [(process, step) for step in process.steps]
        return taken


@dataclass(frozen=True, slots=True)
class Run:
    """All ranks that have written."""

    path: Path
    ranks: tuple[Timeline, ...]

    @property
    def first(self) -> Timeline:
        """Rank 0, or the lowest there is."""
        return self.ranks[0]


class Follower:
    """One rank's file, as it grows."""

    def __init__(self, path: Path, rank: int) -> None:
        self.timeline = Timeline(rank, path)
        self._offset = 0
        self._lines = 0
        self._rest = b""
        self._too_long = False  # inside a line that is not read

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        seen = self._lines
        for data in _parts(self.timeline.path, self._offset):
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                self._lines += 1
                if self._too_long or not self._take(line):
                    self.timeline.bad_lines.append(self._lines)
                self._too_long = False
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest, self._too_long = b"", True
        return self._lines > seen

    def _take(self, data: bytes) -> bool:
        """Sort one line in; False if it does not hold."""
        if not data.strip():
            return True
        try:
            line = decode(data)
        except BadLine:
            return False
        if isinstance(line, RunLine):
            self.timeline.processes.append(Process(line))
            return True
        if line is None:
            return True
        if not self.timeline.processes:
            return False
        process = self.timeline.processes[-1]
        match line:
            case PlanLine():
                process.plans.append(line)
            case StepLine():
                process.steps.append(line)
            case MemoryLine():
                _add_in_order(process.memory, line)
            case SpansLine():
                process.spans.append(line)
            case UnitsLine():
                process.units.append(line)
            case MarkLine():
                process.marks.append(line)
            case EndLine():
                process.ends.append(line)
        return True


def _add_in_order(samples: list[MemoryLine], line: MemoryLine) -> None:
    """By time; what was written twice counts once."""
    at = bisect.bisect_right(samples, line.t, key=lambda sample: sample.t)
    if not at or samples[at - 1] != line:
        samples.insert(at, line)


def _parts(path: Path, offset: int) -> Iterator[bytes]:
    """The file from ``offset`` on, in parts."""
    try:
        fd = open_plain(path)
    except NotPlain:
        return
    try:
        while offset < MAX_FILE_BYTES and (data := os.pread(fd, min(_PART, MAX_FILE_BYTES - offset), offset)):
            offset += len(data)
            yield data
    finally:
        os.close(fd)


def timeline_files(run: Path) -> list[tuple[int, Path]]:
    """Rank and path of every timeline in a run's folder, in the order of ranks."""
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return []
    found = [(int(match[1]), run / FOLDER / name) for name in names if (match := _NAME.fullmatch(name))]
    return sorted(found)[:MAX_RANKS]


def follow(path: str | os.PathLike[str]) -> list[Follower]:
    """A follower for every rank of a run; nothing is read yet. Raises ``NoTimeline``."""
    run = Path(path)
    files = timeline_files(run)
    if not files:
        raise NoTimeline(
            f"{str(run)!r} has no timeline ({FOLDER}/rank-*.jsonl); "
            f"`lowtide.shard(..., run={str(run)!r})` and `lowtide train --run {run}` write one."
        )
    return [Follower(file, rank) for rank, file in files]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Everything that a run has written so far. Raises ``NoTimeline`` if that is nothing."""
    followers = follow(path)
    for follower in followers:
        follower.look()
    ranks = tuple(f.timeline for f in followers if f.timeline.processes)
    if not ranks:
        raise NoTimeline(f"the timelines in {str(Path(path))!r} are empty or damaged: no line says which run they are of.")
    return Run(Path(path), ranks)


def read_now(timeline: Timeline) -> list[Line]:
    """The newest step and memory lines of a rank, as of a second ago or so; nothing if there are none."""
    try:
        data = b"".join(_parts(now_path(timeline.path), 0))
    except OSError:
        return []
    lines: list[Line] = []
    for text in data.split(b"\n"):
        try:
            line = decode(text) if text else None
        except BadLine:
            continue
        if line is not None:
            lines.append(line)
    return lines


def now_path(timeline: Path) -> Path:
    """The file beside a timeline that says how things are now."""
    return timeline.with_suffix(".now.json")
