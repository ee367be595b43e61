"""Where a rank stands, and the one report that is made of it when somebody has waited too long.

Every rank that can still run Python answers with a :class:`Status`; a rank that cannot is named. Pure but for looking at this
process' own threads. Between ranks all of it is JSON with a limit on its size.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from types import FrameType
from typing import Any

OUR_THREADS = "lowtide-"
"""What the names of our own threads begin with."""
_FRAMES = 24  # of a thread, the innermost
_STACKS_CHARS = 6_000  # of one rank
_REPORT_CHARS = 40_000
_LABEL_CHARS = 200

COMES = "waits for the others to come"
MOVES = "exchanges bytes"
DONE = "done"


@dataclass(frozen=True, slots=True)
class Hang:
    """Who waited, for what, on which channel and for how long, and found it too long."""

    rank: int
    what: str
    where: str
    seconds: float
    awaited: int = -1
    """The rank that it waited for, if it knows."""

    def to_bytes(self) -> bytes:
        facts = [self.rank, self.what[:_LABEL_CHARS], self.where[:_LABEL_CHARS], self.seconds, self.awaited]
        return json.dumps(facts).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> Hang:
        rank, what, where, seconds, awaited = json.loads(packed)
        return cls(int(rank), str(what), str(where), float(seconds), int(awaited))


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is at, or was at last, at one of the things on which it can wait."""

    where: str
    """Such as ``channel 'gather'``."""
    label: str
    state: str
    """``COMES``, ``MOVES`` or ``DONE``."""
    seconds: float
    """Since when."""
    exchange: int = -1
    """Its number, where exchanges are counted: a rank with a smaller one is behind."""

    def __str__(self) -> str:
        number = f" (exchange {self.exchange})" if self.exchange >= 0 else ""
        if self.state == DONE:
            return f"{self.where}: last did {self.label}{number}, {self.seconds:.1f} s ago"
        return f"{self.where}: at {self.label}{number} for {self.seconds:.1f} s, {self.state}"


@dataclass(frozen=True, slots=True)
class Status:
    """Where one rank stands."""

    rank: int
    phase: str
    """What its engine last said that it does."""
    places: tuple[Place, ...]
    stacks: str
    process: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> Status:
        raw: dict[str, Any] = json.loads(packed)
        places = tuple(
            Place(str(p["where"]), str(p["label"]), str(p["state"]), float(p["seconds"]), int(p["exchange"]))
            for p in raw["places"]
        )
        return cls(int(raw["rank"]), str(raw["phase"]), places, str(raw["stacks"]), str(raw["process"]))


@dataclass(frozen=True, slots=True)
class Finding:
    """What came out: one sentence for an error, the whole report for people, and the ranks that did not answer."""

    because: str
    report: str
    silent: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return json.dumps([self.because, self.report, self.silent]).encode()

    @classmethod
    def from_bytes(cls, packed: bytes) -> Finding:
        because, report, silent = json.loads(packed)
        return cls(str(because), str(report), tuple(int(rank) for rank in silent))


def find(hang: Hang, statuses: Mapping[int, Status], *, asked: Sequence[int], left: Sequence[int], size: int) -> Finding:
    """Make the report from the answers. ``asked`` are the ranks that could have answered, ``left`` those that had gone."""
    silent = tuple(rank for rank in asked if rank not in statuses and rank not in left)
    because = _because(hang, statuses, silent, left)
    lines = [
        f"lowtide: rank {hang.rank} has waited {hang.seconds:.1f} s for {hang.what} ({hang.where}): {because}.",
        _who_waits(hang, statuses, silent),
    ]
    for rank in range(size):
        if rank in statuses:
            lines += _lines_of(statuses[rank])
        elif rank in left:
            lines.append(f"  rank {rank}: left in good order before")
        elif rank in silent:
            lines.append(f"  rank {rank}: does not answer (stopped, or stuck in native code that holds Python's lock)")
        else:
            lines.append(f"  rank {rank}: could not be asked")
    lines += _all_stacks(statuses)
    return Finding(because, "\n".join(line for line in lines if line)[:_REPORT_CHARS], silent)


def _because(hang: Hang, statuses: Mapping[int, Status], silent: Sequence[int], left: Sequence[int]) -> str:
    if silent:
        return f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    if left:
        return f"{_ranks(left)} left in good order before"
    behind = _behind(hang, statuses)
    if not behind:
        return "all ranks take part, but what one of them waits for does not come: a slow disk, a slow or broken connection"
    rank, last = next(iter(behind.items()))
    where = "has not done its part"
    if hang.awaited < 0:
        where = f"last did {last.label} there, {last.seconds:.1f} s ago" if last is not None else "has not been there yet"
    return f"{_ranks(list(behind))} {'is' if len(behind) == 1 else 'are'} not there (rank {rank} {where})"


def _behind(hang: Hang, statuses: Mapping[int, Status]) -> dict[int, Place | None]:
    """The ranks that answer and are not at what ``hang`` waits for, and where they were last."""
    if hang.awaited in statuses:
        return {hang.awaited: _at(statuses[hang.awaited], hang.where)}
    mine = statuses.get(hang.rank)
    there = _at(mine, hang.where) if mine is not None else None
    behind: dict[int, Place | None] = {}
    for rank, status in sorted(statuses.items()):
        place = _at(status, hang.where)
        if rank != hang.rank and (place is None or (there is not None and place.exchange < there.exchange)):
            behind[rank] = place
    return behind


def _at(status: Status, where: str) -> Place | None:
    return next((place for place in status.places if place.where == where), None)


def _who_waits(hang: Hang, statuses: Mapping[int, Status], silent: Sequence[int]) -> str:
    """``ranks 0, 2 wait for rank 1``."""
    awaited = list(silent) or list(_behind(hang, statuses))
    waiting = [
        rank for rank, s in sorted(statuses.items()) if rank not in awaited and any(place.state != DONE for place in s.places)
    ]
    if not awaited or not waiting:
        return ""
    return f"  {_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {_ranks(awaited)}"


def _lines_of(status: Status) -> list[str]:
    phase = f", {status.phase}" if status.phase else ""
    lines = [f"  rank {status.rank}: {status.process}{phase}"]
    return lines + [f"    {place}" for place in status.places]


def _all_stacks(statuses: Mapping[int, Status]) -> list[str]:
    """The stacks of all ranks, those that are alike once."""
    alike: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        alike.setdefault(status.stacks, []).append(rank)
    return [f"  stacks of {_ranks(ranks)}:\n{stacks}" for stacks, ranks in alike.items() if stacks]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def stacks_here() -> str:
    """Where the threads of this process stand; our own that only serve others in one line each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    asking = threading.get_ident()
    theirs: list[str] = []
    ours: list[str] = []
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - documented for this
        name = names.get(ident, f"thread {ident}")
        if ident == asking:
            continue
        if name.startswith(OUR_THREADS):
            ours.append(f"    {name}: {_innermost(frame)}")
        elif ident == threading.main_thread().ident:
            theirs[:0] = [f"    {name}", *_frames(frame)]
        else:
            theirs += [f"    {name}", *_frames(frame)]
    return "\n".join([*theirs, *sorted(ours)])[:_STACKS_CHARS]


def _innermost(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _frames(frame: FrameType) -> list[str]:
    stack = traceback.extract_stack(frame, limit=_FRAMES)
    return [f"      {_short(entry.filename)}:{entry.lineno} in {entry.name}: {entry.line or ''}" for entry in stack]


def _short(filename: str) -> str:
    """The end of a path: enough to find the file, without the machine's folders."""
    return "/".join(PurePath(filename).parts[-3:])
