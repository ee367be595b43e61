"""An event that a signal's handler cannot break.

``threading.Event`` is written in Python around a lock: an exception of a signal's handler in the middle of ``wait`` can
leave the lock taken, and then ``set`` stops the thread that calls it, for good. A latch does each in one call of C.
"""

from __future__ import annotations

import threading


class Latch:
    """Something that happens once, and can be waited for by any thread."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()  # free once it has happened
        self._lock.acquire()

    def set(self) -> None:
        """It has happened. To be called once."""
        self.is_set = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Sleep until it has happened, or so long; whether it has."""
        # An interrupt between the two calls leaves the lock taken: then ``is_set`` says all that there is to know.
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.is_set
