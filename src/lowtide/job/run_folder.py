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
import shutil
import socket
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentError
from lowtide.files import open_plain, replace_plain
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
_LEAST_ROOM = 1 << 20
"""Without so much, a run has no place for its first files."""


class RunInUse(ArgumentError):
    """Another job writes to the run folder now."""


class RunFolder:
    """A run folder that belongs to this process until it is closed."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _take_lock(path, open_plain(path / _LOCK, os.O_RDWR | os.O_CREAT, mode=0o600))
        except OSError as error:
            raise _unwritable(path, error) from error
        self.path = path
        self.events = Events(path)
        self._metrics: Any = None

    def write_config(self, options: Options, facts: dict[str, Any]) -> None:
        self._replace("config.json", json.dumps({**json.loads(options.to_json()), **facts}, indent=2) + "\n")

    def write_plan(self, text: str, plan: Plan | None) -> None:
        self._replace("plan.txt", text)
        if plan is not None:
            self._replace("plan.json", plan.to_json() + "\n")

    def begin(self, step: int) -> None:
        """Records are added from now on. Those of steps after ``step`` are of a process that died: they are made again."""
        path = self.path / _METRICS
        try:
            if os.path.lexists(path):
                replace_plain(path, "".join(_lines_until(path, step)).encode())
            self._metrics = open(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        except OSError as error:
            raise _unwritable(self.path, error) from error

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

    def _replace(self, name: str, text: str) -> None:
        try:
            replace_plain(self.path / name, text.encode("utf-8", "replace"))
        except OSError as error:
            raise _unwritable(self.path, error) from error


def refuse_unusable_run(run: str) -> None:
    """Raise if this folder cannot be written to, or a job uses it now, before anything is built. Makes nothing."""
    folder = Path(run).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ArgumentError(f"--run is {run!r}, but {str(there)!r} is not a folder; choose another name.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(f"--run is {run!r}, but you may not write to {str(there)!r}; choose another folder.")
    if shutil.disk_usage(there).free < _LEAST_ROOM:
        raise ArgumentError(f"--run is {run!r}, but the disk of {str(there)!r} is full; make room, or choose another folder.")
    with contextlib.suppress(OSError):  # no lock yet, or not ours: opening it for good says so
        os.close(_take_lock(folder, open_plain(folder / _LOCK, os.O_RDWR)))


def _unwritable(folder: Path, error: OSError) -> ArgumentError:
    where = f": {os.path.basename(error.filename)}" if isinstance(error.filename, str) and error.filename != str(folder) else ""
    return ArgumentError(f"--run is {str(folder)!r}, which cannot be written to ({error.strerror}{where}).")


def _take_lock(folder: Path, fd: int) -> int:
    """Lock the open file ``fd`` for as long as it stays open. It is closed if that fails: a lock that this process keeps by
    mistake would be another job to its next try."""
    try:
        _lock(folder, fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(folder: Path, fd: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                who = os.read(fd, 200).decode("utf-8", "replace").strip()
                raise RunInUse(
                    f"--run is {str(folder)!r}, which another job uses now ({who or 'unknown'}); "
                    f"wait for it to end, or choose another folder."
                ) from None
            time.sleep(0.1)
        except OSError:
            return  # a filesystem without locks


def _lines_until(path: Path, step: int) -> Generator[str, None, None]:
    """The records of steps up to ``step``; the last line may be torn."""
    with open(open_plain(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    yield line
