"""The files of one run, written by rank 0 alone, and the lock that keeps a second job out. No torch here.

``config.json`` says what was asked for, ``plan.txt`` and ``plan.json`` what was planned, ``metrics.jsonl`` has a line per step,
``events.jsonl`` one for everything else that happened, ``checkpoints/`` what a run goes on from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentError
from lowtide.job.events import Events
from lowtide.job.options import Options
from lowtide.job.records import StepRecord, ValidationRecord
from lowtide.planning.plan import Plan

_log = logging.getLogger("lowtide")

CHECKPOINTS = "checkpoints"
_METRICS = "metrics.jsonl"
_LOCK = "lock"
_PATIENCE = 3.0
"""How long a new job waits for the lock: the ranks of one that has just failed may take that long to end."""


class RunInUse(ArgumentError):
    """Another job writes to the run folder now."""


class RunFolder:
    """A run folder that belongs to this process until it is closed."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _take_lock(path, os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ArgumentError(f"--run is {str(path)!r}, which cannot be written to ({error.strerror}).") from error
        self.path = path
        self.events = Events(path)
        self._metrics: Any = None

    def write_config(self, options: Options, facts: dict[str, Any]) -> None:
        _replace(self.path / "config.json", json.dumps({**json.loads(options.to_json()), **facts}, indent=2) + "\n")

    def write_plan(self, text: str, plan: Plan | None) -> None:
        _replace(self.path / "plan.txt", text)
        if plan is not None:
            _replace(self.path / "plan.json", plan.to_json() + "\n")

    def begin(self, step: int) -> None:
        """Records are added from now on. Those of steps after ``step`` are of a process that died: they are made again."""
        path = self.path / _METRICS
        if path.exists():
            _replace(path, "".join(_lines_until(path, step)))
        self._metrics = open(path, "ab", buffering=0)

    def add(self, record: StepRecord | ValidationRecord) -> None:
        """Append one line; it is in the file when this returns, so a run that dies keeps its metrics.

        A full disk loses lines and ends no job.
        """
        try:
            self._metrics.write(f"{json.dumps(asdict(record))}\n".encode())
        except OSError as error:
            _log.warning("step %d is not in %s: %s", record.step, self.path / _METRICS, error.strerror)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def refuse_run_in_use(run: str) -> None:
    """Raise if a job uses this folder now, before anything is built. Makes nothing."""
    with contextlib.suppress(OSError):  # not there, or not ours: opening it for good says so
        os.close(_take_lock(Path(run), os.open(Path(run, _LOCK), os.O_RDWR | os.O_CLOEXEC)))


def _take_lock(folder: Path, fd: int) -> int:
    """Lock the open file ``fd`` for as long as it stays open."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                who = os.read(fd, 200).decode("utf-8", "replace").strip()
                os.close(fd)
                raise RunInUse(
                    f"--run is {str(folder)!r}, which another job uses now ({who or 'unknown'}); "
                    f"wait for it to end, or choose another folder."
                ) from None
            time.sleep(0.1)
        except OSError:
            break  # a filesystem without locks
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd


def _lines_until(path: Path, step: int) -> Generator[str, None, None]:
    """The records of steps up to ``step``; the last line may be torn."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    yield line


def _replace(path: Path, text: str) -> None:
    """A reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text)
    temporary.rename(path)
