"""Bytes live now and at the peak, by kind."""

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
        self.add(kind, nbytes - self.live[kind])

    def reset_peak(self) -> None:
        self.peak = Counter(self.live)
