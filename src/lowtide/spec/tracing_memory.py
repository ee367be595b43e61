"""Every piece of memory that a traced step makes, from birth to death, and what that says about each unit.

Bytes are counted by storage: a view keeps the whole of it alive. What autograd saves counts once, for the unit in whose forward
it is saved first, as the engine counts it when the model really runs.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

Where = int | None
"""A unit's number, or ``None``: outside of all units."""

_NOBODY = -1


@dataclass(slots=True, eq=False)
class _Memory:
    nbytes: int
    stays: bool = False
    """A parameter or a buffer: there before and after, never counted."""
    gradient: bool = False
    """It became the gradient of a parameter."""
    saver: Where = _NOBODY
    taken: bool = False
    """It was counted as an input of a unit."""
    reference: Any = None


class _Event(Enum):
    ENTERED = auto()
    BORN = auto()
    SAVED = auto()
    DIED = auto()


class MemoryLog:
    """See the module's docstring. ``where`` always says which unit computes now."""

    def __init__(self) -> None:
        self._alive: dict[int, _Memory] = {}
        self._events: list[tuple[_Event, Any]] = []
        self.where: Where = None
        self.saved_bytes: defaultdict[Where, int] = defaultdict(int)
        self.input_bytes: defaultdict[Where, int] = defaultdict(int)

    def enter(self, where: Where) -> None:
        """Another unit computes from now on."""
        if where != self.where:
            self.where = where
            self._events.append((_Event.ENTERED, where))

    def stays(self, tensors: Iterable[Tensor]) -> None:
        """These are in memory whatever the step does."""
        for tensor in tensors:
            self._memory(tensor.untyped_storage()).stays = True

    def given(self, tensors: Iterable[Tensor]) -> None:
        """The batch: not made by the step, but it may be saved."""
        for tensor in tensors:
            self._memory(tensor.untyped_storage())

    def born(self, results: Iterable[Tensor]) -> int:
        """An operation returned these; how many bytes of them are new."""
        fresh = 0
        for tensor in results:
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._alive and storage.nbytes():
                memory = self._memory(storage)
                self._events.append((_Event.BORN, memory))
                fresh += memory.nbytes
        return fresh

    def saved(self, tensor: Tensor) -> None:
        """Autograd keeps this until its backward."""
        memory = self._memory(tensor.untyped_storage())
        if memory.saver == _NOBODY and not memory.stays:
            memory.saver = self.where
            self.saved_bytes[self.where] += memory.nbytes
            self._events.append((_Event.SAVED, memory))

    def entered_with(self, tensors: Iterable[Tensor]) -> None:
        """These go into the unit that begins. What several units are given (a mask) is kept once: only the first counts it."""
        for tensor in tensors:
            memory = self._memory(tensor.untyped_storage())
            if not memory.taken and not memory.stays:
                memory.taken = True
                self.input_bytes[self.where] += memory.nbytes

    def became_gradient(self, tensor: Tensor | None) -> None:
        """This is a parameter's gradient now: it has a place of its own in a plan."""
        if tensor is not None and tensor.layout is torch.strided:
            self._memory(tensor.untyped_storage()).gradient = True

    def transient_bytes(self) -> dict[Where, int]:
        """For each unit the most that was alive while it computed, beside parameters, their gradients and saved tensors.

        What comes from outside counts as long as it lives: the gradient that enters a backward is there, whoever made it.
        What a unit saves does not count while that unit computes, even before it is saved.
        """
        alive = 0
        to_be_saved: defaultdict[Where, int] = defaultdict(int)
        peak: defaultdict[Where, int] = defaultdict(int)
        kept: set[_Memory] = set()
        here: Where = None
        for event, subject in self._events:
            if event is _Event.ENTERED:
                here = subject
            elif not subject.gradient:
                born = event is _Event.BORN
                if born or subject in kept:
                    change = subject.nbytes if born else -subject.nbytes
                    alive += change
                    if subject.saver != _NOBODY:
                        to_be_saved[subject.saver] += change
                    (kept.add if born else kept.remove)(subject)
            peak[here] = max(peak[here], alive - to_be_saved[here])
        return dict(peak)

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        key = id(storage)
        memory = self._alive.get(key)
        if memory is None:
            memory = self._alive[key] = _Memory(storage.nbytes())

            def died(_: Any) -> None:
                self._events.append((_Event.DIED, self._alive.pop(key)))

            memory.reference = weakref.ref(storage, died)
        return memory
