"""The writer of one rank's timeline: whole lines, appended; never more than a fixed size; never the reason that a job fails.

[Note: a line that waits] The line of a step is held back until the next step begins, so that the caller may still say what its
loss was. Whatever ends the process in good order writes it; a kill loses that one line, and the ``now`` file has its numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from lowtide.errors import ArgumentError
from lowtide.files import NotPlain, open_plain, replace_plain
from lowtide.reporting.format import MAX_LINE_BYTES, EndLine, Line, StepLine, encode
from lowtide.reporting.timeline import FOLDER, now_path

_log = logging.getLogger("lowtide")

MOST_BYTES = 64 * 2**20
"""What one process writes at most, but for its last words: thinning stays below it in any run that was thought of."""
_PATIENCE = 5.0
"""Seconds to wait for a process of the same run that is about to end."""


class Writer:
    """One open file. Safe to use from several threads; in a forked process it does nothing."""

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / FOLDER / f"rank-{rank:05d}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.parent.is_symlink():
                raise NotPlain(self.path.parent)
            fd = open_plain(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise ArgumentError(f"run is {str(run)!r}, which cannot be written to ({error.strerror}).") from error
        self._fd: int | None = _locked(fd, run)
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a warning that is logged while a line is written becomes a line itself
        self._written = 0
        self._complained = False
        self._held: StepLine | None = None
        self.newest_step: StepLine | None = None
        """For whoever looks on: also of a step that has no line in the file."""
        self._torn = _ends_inside_a_line(fd)

    @property
    def seconds(self) -> float:
        """Since this process began to record."""
        return time.perf_counter() - self._began

    @property
    def held(self) -> StepLine | None:
        """The line that waits for the next step."""
        return self._held

    def hold(self, line: StepLine | None) -> None:
        """Let ``line`` wait; None: nothing waits any more."""
        with self._lock:
            self._held = line
            self.newest_step = line or self.newest_step

    def release(self) -> None:
        """Write the line that waits."""
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self.write(held)

    def write(self, line: Line, *, last_words: bool = False) -> None:
        """Append one line. It is in the file when this returns, unless the disk is full: that ends no job."""
        with self._lock:
            if self._fd is None or os.getpid() != self._pid:
                return
            data = encode(line)
            if len(data) > MAX_LINE_BYTES or (self._written + len(data) > MOST_BYTES and not last_words):
                return
            try:
                _write_all(self._fd, b"\n" + data if self._torn else data)
            except OSError as error:
                self._torn = True  # a part of it may be there
                self._complain(error)
                return
            self._torn = False
            self._written += len(data)

    def write_now(self, lines: Iterable[Line | None]) -> None:
        """Replace the file that says how things are now; readers see the old one or the new one."""
        with self._lock:
            if self._fd is None or os.getpid() != self._pid:
                return
            try:
                replace_plain(now_path(self.path), b"".join(encode(line) for line in lines if line is not None))
            except OSError as error:
                self._complain(error)

    def end(self, why: str, text: str = "") -> None:
        """The last line; nothing is written after it. Idempotent."""
        with self._lock:
            self.release()
            self.write(EndLine(t=round(self.seconds, 4), why=why, text=text), last_words=True)
            if self._fd is not None and os.getpid() == self._pid:
                os.close(self._fd)
            self._fd = None

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("%s is not complete: %s", self.path, error.strerror)


def _locked(fd: int, run: Path) -> int:
    """``fd``, which nobody else may write to as long as it is open."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise ArgumentError(
                    f"run is {str(run)!r}, where another model or job records this rank now; choose another folder."
                ) from None
            time.sleep(0.05)
        except OSError:
            return fd  # a file system without locks


def _ends_inside_a_line(fd: int) -> bool:
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    return False


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
