"""How long one rank waits for another: long until the first step is over, short from then on.

Before that, ranks read weights, compile and make their arenas, each at its own pace. Later a step is like the one before, and a
rank that is not there after two minutes does not come. What is known to take long (a checkpoint) asks for patience itself.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

FIRST = 5.0
"""How many times longer a wait may be before the first step is over, if nothing else is said."""


class Deadlines:
    """Shared by everything that waits in one group. Any thread may read and change it."""

    def __init__(self, seconds: float, *, first: float | None = None) -> None:
        self._seconds = seconds
        self._first = max(seconds, seconds * FIRST if first is None else first)
        self._patient = 1  # reasons to wait long; the first step is one
        self._settled = False
        self._lock = threading.Lock()

    @classmethod
    def fixed(cls, seconds: float) -> Deadlines:
        """The same from the start."""
        return cls(seconds, first=seconds)

    @property
    def seconds(self) -> float:
        """How long a wait may take now."""
        return self._first if self._patient else self._seconds

    @property
    def longest(self) -> float:
        """How long it may ever take."""
        return self._first

    def settled(self) -> None:
        """The first step is over. Idempotent."""
        with self._lock:
            if not self._settled:
                self._settled = True
                self._patient -= 1

    @contextmanager
    def relaxed(self) -> Generator[None, None, None]:
        """Waits inside may be as long as in the first step: ranks read or write at the pace of their own disks."""
        with self._lock:
            self._patient += 1
        try:
            yield
        finally:
            with self._lock:
                self._patient -= 1
