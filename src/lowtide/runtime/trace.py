"""The order of events: what the engine did, for tests, the timeline and bug reports."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``what`` is a verb of the engine, ``unit`` the unit it happened to."""

    seconds: float
    what: str
    unit: str


class Trace:
    """A bounded record; off until somebody turns it on, because a record of nothing must cost nothing."""

    def __init__(self) -> None:
        self.on = False
        self.events: deque[Event] = deque(maxlen=100_000)

    def __call__(self, what: str, unit: str) -> None:
        if self.on:
            self.events.append(Event(time.perf_counter(), what, unit))
