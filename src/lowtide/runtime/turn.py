"""Whose turn it is: calls that use one model, one thread at a time; and how it is found that one was broken off.

[Note: a call that did not come to its end] A signal's handler may raise between any two lines of ours, also in a ``finally``:
no scope is sure to be closed. So every call is noted before it changes anything, together with a frame that is on its thread's
stack as long as it lasts, and is only struck off when all of it is done. Whoever begins the next call looks: what is noted and
on no stack was broken off, and ``recover`` puts back what it has left, whatever that is. That may be broken off as well; then
the call after does it again.

[Note: whose turn] State belongs to the thread that is inside the outermost call. On an accelerator, autograd runs hooks on a
thread of its own while the caller of backward stands still: as long it is that thread's turn. A pass that computes no gradients
waits for its turn, and is waited for, unless other ranks would wait, too; whoever else comes in between is refused, so that the
first goes on undisturbed.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import Refused
from lowtide.runtime.ambient import GradMode
from lowtide.runtime.unit import Unit
from lowtide.torch_internals import CODE_OF_BACKWARD, CODE_OF_MODULE_CALL, backward_under_way

_SLICE = 0.002  # seconds between two looks at whether another thread is done


class Call:
    """One use of the model that is under way."""

    __slots__ = ("frame", "is_forward", "ready", "saved", "task", "thread", "trains", "units", "what", "witness")

    def __init__(self, what: str, frame: FrameType | None, *, trains: bool, witness: weakref.ref[Any] | None = None) -> None:
        self.what = what
        self.frame = frame  # on the thread's stack as long as the call is under way; None: it ends with the one around it
        self.witness = witness  # lives as long; None: there is none
        self.trains = trains
        self.thread = threading.get_ident()
        self.task = backward_under_way()
        self.is_forward = False  # a forward pass, of the model or of a part of it, has begun
        self.ready = False  # all that has to be done at its beginning is done
        self.units: Sequence[Unit] | None = None  # that are pinned for it, if it computes with some
        self.saved: saved_tensors_hooks | None = None  # that are open for it


class Turn:
    """The calls under way, outermost first. ``recover`` is given those that go on, and those that were broken off."""

    def __init__(
        self, recover: Callable[[Sequence[Call], Sequence[Call]], None], *, alone: bool, patience: Callable[[], float]
    ) -> None:
        """``alone``: no other rank waits for what this one does next. ``patience``: seconds that a thread waits for another."""
        self._recover, self._alone, self._patience = recover, alone, patience
        self._lock = threading.RLock()
        self.calls: list[Call] = []

    @property
    def depth(self) -> int:
        """How many forward passes are under way inside each other."""
        return sum(call.is_forward for call in self.calls)

    def begin(self, call: Call) -> Call:
        """``call`` begins, inside those under way or, when its turn has come, as the outermost."""
        until: float | None = None
        while (first := self._note(call)) is not None:
            until = until if until is not None else time.monotonic() + self._patience()
            if (call.trains and first.trains) or not self._alone or time.monotonic() > until:
                raise Refused(
                    f"{call.what} began while another thread was in {first.what} of the same model. One thread at a time may "
                    f"train a model; others may call it meanwhile under torch.no_grad(), on one rank."
                )
            time.sleep(_SLICE)
        return call

    def end(self, call: Call) -> None:
        """All of ``call`` is done."""
        with self._lock:
            if self.calls and self.calls[-1] is call:
                self.calls.pop()

    def innermost(self, frame: FrameType | None) -> Call | None:
        """The call under way that was noted with ``frame``; what was broken off inside it is put back first."""
        with self._lock:
            if not any(call.frame is frame for call in self.calls) or not self.is_mine():
                return None
            self.look()
            return next((call for call in reversed(self.calls) if call.frame is frame), None)

    def look(self) -> None:
        """Put back what calls have left that were broken off."""
        with self._lock:
            kept = self._running()
            if len(kept) < len(self.calls):
                self._recover(kept, self.calls[len(kept) :])
                self.calls = kept

    def is_mine(self) -> bool:
        """Whether this thread is inside the calls under way."""
        me, task = threading.get_ident(), backward_under_way()
        if any(call.thread == me or (task is not None and call.task == task) for call in self.calls):
            return True
        if task is None or not self.calls or _was_started_by_python(me):
            return False
        return any(frame.f_code is CODE_OF_BACKWARD for frame in _stack_of(self.calls[-1].thread))

    def _note(self, call: Call) -> Call | None:
        """Note ``call`` if it may begin now; else who stands in its way."""
        with self._lock:
            if self.calls and not self.is_mine() and self._running():
                return self.calls[0]
            self.look()
            self.calls.append(call)
            return None

    def _running(self) -> list[Call]:
        """The calls before the first that was broken off."""
        stacks: dict[int, set[int]] = {}  # not the frames: this one is among them, and would keep all others
        for number, call in enumerate(self.calls):
            if call.thread not in stacks:
                stacks[call.thread] = {id(frame) for frame in _stack_of(call.thread)}
            is_over = call.frame is not None and id(call.frame) not in stacks[call.thread]
            if is_over or (call.witness is not None and call.witness() is None):
                return self.calls[:number]
        return list(self.calls)


class Calling:
    """``with Calling(turn, what):`` around what is no pass. An exception leaves it noted, for the next call to look after."""

    def __init__(self, turn: Turn, what: str) -> None:
        self._turn, self._what, self._mode = turn, what, GradMode()

    def __enter__(self) -> None:
        self._mode.__enter__()
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        self._call = self._turn.begin(Call(self._what, frame, trains=True))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._mode.__exit__()
        if kind is None:
            self._turn.end(self._call)


def _was_started_by_python(thread: int) -> bool:
    """Whether it is no thread of autograd's own."""
    found = next((t for t in threading.enumerate() if t.ident == thread), None)
    return found is not None and not isinstance(found, threading._DummyThread)  # pyright: ignore


def module_call() -> FrameType | None:
    """The call of a module that runs the hook which asks."""
    return next((f for f in _stack_of(threading.get_ident()) if f.f_code is CODE_OF_MODULE_CALL), None)


def backward_call() -> FrameType | None:
    """The call that runs backward, if it is on this thread."""
    return next((f for f in _stack_of(threading.get_ident()) if f.f_code is CODE_OF_BACKWARD), None)


def forward(frame: FrameType | None) -> Call:
    """A forward pass."""
    return Call("a forward pass", frame, trains=torch.is_grad_enabled())


def _stack_of(thread: int) -> Iterator[FrameType]:
    if thread == threading.get_ident():
        frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    else:
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back
