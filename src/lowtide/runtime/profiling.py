"""Ranges in a ``torch.profiler`` profile, named by phase and unit: ``lowtide forward blocks.3``.

While nobody takes a profile, a range is one question to torch and nothing more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from lowtide.torch_internals import profile_under_way

_NOTHING = nullcontext()


def profiled(phase: str, unit: str) -> AbstractContextManager[Any]:
    """A range around a block of code."""
    return record_function(_name(phase, unit)) if profile_under_way() else _NOTHING


class Ranges:
    """Ranges that begin in one call and end in another, innermost last."""

    def __init__(self) -> None:
        self._open: list[record_function | None] = []

    def enter(self, phase: str, unit: str) -> None:
        """Begin a range."""
        opened = record_function(_name(phase, unit)) if profile_under_way() else None
        if opened is not None:
            opened.__enter__()
        self._open.append(opened)

    def leave(self) -> None:
        """End the innermost one, if there is one."""
        opened = self._open.pop() if self._open else None
        if opened is not None:
            opened.__exit__(None, None, None)

    def clear(self) -> None:
        """End all: what was under way was cut short."""
        while self._open:
            self.leave()


def _name(phase: str, unit: str) -> str:
    return f"lowtide {phase} {unit}" if unit else f"lowtide {phase}"
