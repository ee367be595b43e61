"""What the engine did: events in their order, for tests and bug reports, and how long things took, for the timeline.

Both are off until somebody turns them on, because a record of nothing must cost nothing. Whoever does the work notes it, on
whatever thread; whoever records collects it between steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lowtide.tiers.store import Extent


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``what`` is a verb of the engine, ``unit`` the unit it happened to."""

    seconds: float
    what: str
    unit: str


class Trace:
    """A bounded record of events. ``listener`` hears of each as it happens, in the thread that caused it."""

    def __init__(self) -> None:
        self.on = False
        self.events: deque[Event] = deque(maxlen=100_000)
        self.listener: Callable[[str, str], None] | None = None

    def __call__(self, what: str, unit: str) -> None:
        if self.on:
            self.events.append(Event(time.perf_counter(), what, unit))
        if self.listener is not None:
            self.listener(what, unit)


class SpanRow(NamedTuple):
    """Something that took a while; seconds are those of ``time.perf_counter``, which on Linux is ``time.monotonic`` too."""

    begin: float
    end: float
    lane: str
    verb: str
    unit: str
    nbytes: int
    thread: int


class Spans:
    """What took how long since it was last taken, by any thread. Holds no object of the engine: threads of stores and channels
    refer to it, and must not keep a model alive."""

    def __init__(self, most: int = 50_000) -> None:
        self._rows: list[SpanRow] = []
        self._most = most

    def add(self, lane: str, verb: str, unit: str, begin: float, end: float, nbytes: int = 0) -> None:
        """Note something that is over. What is more than ``most`` is left out."""
        rows = self._rows  # one append, which the interpreter does as one; another thread may take the list meanwhile
        if len(rows) < self._most:
            rows.append(SpanRow(begin, end, lane, verb, unit, nbytes, threading.get_ident()))

    @contextmanager
    def during(self, lane: str, verb: str, unit: str = "") -> Generator[None]:
        """Note what is done inside, also if it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, verb, unit, begin, time.perf_counter())

    def take(self) -> list[SpanRow]:
        """Everything so far; begins anew."""
        rows, self._rows = self._rows, []
        return rows

    def note_request(self, what: str, label: str, key: Hashable, begin: float) -> None:
        """A request to a store was carried out (``work``), or somebody waited for it (``wait``): see ``Traffic.observer``."""
        end = time.perf_counter()
        unit, nbytes, spilled = "", 0, False
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], Extent) and isinstance(key[1], int):
            extent, block = key[0], key[1]
            spilled = extent.key.unit == _SPILLED
            unit, nbytes = "" if spilled else extent.key.unit, extent.block_bytes(block)
        if what == "wait":
            self.add("wait", "disk", unit, begin, end)
        elif label.startswith("write"):
            self.add("disk write", "spill" if spilled else "evict", unit, begin, end, nbytes)
        else:
            self.add("disk read", "fetch", unit, begin, end, nbytes)

    def note_exchange(self, what: str, kind: str, unit: str, begin: float) -> None:
        """An exchange with other ranks was carried out (``work``), or somebody has waited for it (``wait``)."""
        end = time.perf_counter()
        if what == "wait":
            self.add("wait", "ranks", unit, begin, end)
        elif kind in _LANE_OF:
            self.add(_LANE_OF[kind], kind, unit, begin, end)


_SPILLED = "activations"  # the unit of extents that hold saved tensors
_LANE_OF = {"gather": "gather", "publish": "gather", "reduce": "reduce"}


class Recording(Protocol):
    """What others may tell whoever records a run."""

    def note(self, *, loss: float) -> None:
        """What the step that has just ended came to."""
        ...

    def mark(self, what: str, text: str) -> None:
        """Something happened that is worth a mark on the time axis."""
        ...

    def end(self, why: str, text: str = "") -> None:
        """The run ends here: ``done`` or ``error``."""
        ...
