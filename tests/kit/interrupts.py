"""Exceptions by real signals, at a chosen line of a package: what Ctrl-C, a time limit or a scheduler's warning do, but when we
say so.

A signal's Python handler does not run where the signal comes, but where the interpreter looks next: at the entry of a
function, after a call, at the end of a loop's body. An exception raised by a trace function would come at places where no
handler can run. So nothing is raised by a trace function here: when the line is about to run, a C function without a frame
of its own, called by the interpreter between two instructions, raises the signal; the handler runs when and where the
interpreter looks.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

SIGNAL = signal.SIGUSR2

_raise = ctypes.PyDLL(None)["raise"]
_raise.argtypes = [ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.py_object]  # C passes over what it does not expect
_raise.restype = None
_send: Any = functools.partial(_raise, SIGNAL)
"""A trace function that consists of C only."""


@dataclass(frozen=True, order=True)
class Spot:
    """The ``nth`` time (from 1) that a line is about to run."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/lowtide/', 1)[-1]}:{self.line} ({self.nth})"


def _tracing(folder: str, at_line: Callable[[FrameType], Any]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that calls ``at_line`` before every line of a file in ``folder``; its result traces the frame on."""

    def local(frame: FrameType, event: str, _: Any) -> Any:
        return (at_line(frame) or local) if event == "line" else local

    def begins(frame: FrameType, _: str, __: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(folder) else None

    return begins


def executed(folder: str, run: Callable[[], None]) -> Counter[tuple[str, int]]:
    """How often ``run`` executes each line of the files in ``folder``, on this thread."""
    counted: Counter[tuple[str, int]] = Counter()

    def at_line(frame: FrameType) -> None:
        counted[frame.f_code.co_filename, frame.f_lineno] += 1

    sys.settrace(_tracing(folder, at_line))
    try:
        run()
    finally:
        sys.settrace(None)
    return counted


@dataclass
class Shot:
    """What came of a signal."""

    sent: bool = False
    where: str = ""
    """The function in which the handler ran."""
    swallowed: bool = False
    """Whether it ran where Python cannot pass an exception on (a finalizer)."""
    _raised: list[BaseException] = field(default_factory=list[BaseException])


@contextmanager
def interrupted(folder: str, spot: Spot, error: Callable[[], BaseException]) -> Iterator[Shot]:
    """When the code inside is about to run ``spot``, a signal comes whose handler raises ``error()``."""
    shot, seen = Shot(), Counter[tuple[str, int]]()

    def handle(_: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        shot.sent = True
        if frame is not None:
            shot.where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
        raise error()

    def at_line(frame: FrameType) -> Any:
        if (frame.f_code.co_filename, frame.f_lineno) != (spot.file, spot.line):
            return None
        seen[spot.file, spot.line] += 1
        if seen[spot.file, spot.line] != spot.nth:
            return None
        frame.f_trace_opcodes = True  # the next event comes before the line's first instruction
        return _send

    def unraisable(_: Any) -> None:
        shot.swallowed = True

    before, hook = signal.signal(SIGNAL, handle), sys.unraisablehook
    sys.unraisablehook = unraisable
    sys.settrace(_tracing(folder, at_line))
    try:
        yield shot
    finally:
        sys.settrace(None)
        sys.unraisablehook = hook
        signal.signal(SIGNAL, before)
