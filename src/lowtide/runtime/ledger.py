"""Bytes live now and at the peak, by kind: what owners report as they add and let go.

Not everything is reported: bytes that somebody counts anyway (arenas, shelves, stores) are read from there when they are
asked for; runtime/holdings.py puts both together.
"""

from __future__ import annotations

import threading
from collections import Counter

KINDS = ("parameters", "slots", "gradients", "optimizer", "buffers in flight")


class Ledger:
    """What lowtide holds on this rank. Each owner of bytes reports what it adds and what it lets go, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def add(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.live[kind] += nbytes
            self.peak[kind] = max(self.peak[kind], self.live[kind])

    def remove(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.live[kind] -= nbytes

    def set(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.live[kind] = nbytes
            self.peak[kind] = max(self.peak[kind], nbytes)

    def now(self) -> dict[str, int]:
        """All kinds at one moment."""
        with self._lock:
            return dict(self.live)

    def reset_peak(self) -> None:
        with self._lock:
            self.peak = Counter(self.live)
