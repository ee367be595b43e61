"""Whether a run goes on, has ended, or has fallen silent. No torch here."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from lowtide.files import open_plain
from lowtide.reporting.extras import stopped_by
from lowtide.reporting.format import MAX_LINE_BYTES, BadLine, EndLine, decode
from lowtide.reporting.timeline import Process, Timeline, now_path

_SLACK = 2.0
"""Seconds between the start of a process and its first line are never negative by more than clocks are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """``state``: running, done, error, killed (its process is gone without a word), or silent (it is on another host, and
    nothing says whether it lives)."""

    state: str
    silent_seconds: float
    """Since it last wrote anything."""
    text: str = ""
    stopped_by: str = ""
    """The signal that asked it to end early, if `lowtide train` wrote that down."""

    @property
    def words(self) -> str:
        if self.state == "running" and self.silent_seconds > 60:
            return f"running, but silent for {self.silent_seconds:.0f} s"
        if self.stopped_by:
            return f"stopped by {self.stopped_by}"
        if self.state == "silent":
            return f"silent for {self.silent_seconds:.0f} s; it runs on another host"
        return {
            "running": "running",
            "done": "ended",
            "error": "ended with an error",
            "killed": "its process is gone without a word: killed, or crashed",
        }[self.state]


def ending_of(timeline: Timeline, *, now: float | None = None) -> Ending:
    """Of the newest process of a rank."""
    now = time.time() if now is None else now
    silent = max(0.0, now - _last_write(timeline))
    process = timeline.last
    if process.end is not None:
        state = "error" if process.end.why == "error" else "done"
        signal = stopped_by(timeline.path.parent.parent, process.run.started) if state == "done" else ""
        return Ending(state=state, silent_seconds=silent, text=process.end.text, stopped_by=signal)
    if process.run.host != socket.gethostname():
        return Ending(state="silent" if silent > 60 else "running", silent_seconds=silent)
    return Ending(state="running" if is_alive(process) else "killed", silent_seconds=silent)


def is_alive(process: Process) -> bool:
    """Whether a process of this host lives still; another one with the same number, started later, is not it."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        found = psutil.Process(process.run.pid)
        return found.create_time() <= process.run.started + _SLACK and found.status() != psutil.STATUS_ZOMBIE
    return False


def fell_silent(timeline: Path) -> bool:
    """Whether the last process that wrote this file left no last word. Only the end of the file is read."""
    with contextlib.suppress(OSError), open(open_plain(timeline), "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE_BYTES))
        lines = [line for line in file.read().split(b"\n") if line.strip()]
        with contextlib.suppress(BadLine):
            return bool(lines) and not isinstance(decode(lines[-1]), EndLine)
        return True  # killed inside a line
    return False


def _last_write(timeline: Timeline) -> float:
    """When the files of a rank were written last, by the clock on the wall."""
    times = [timeline.last.run.started + timeline.last.last_seconds]
    for path in (timeline.path, now_path(timeline.path)):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
