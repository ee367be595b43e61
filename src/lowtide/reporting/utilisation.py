"""How busy processor and disks were since the last look, as the kernel counts it. No torch here.

What a machine cannot say is ``None``: a file system without a disk of its own (overlay, network), a kernel without the counter.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

_BLOCK = Path("/sys/dev/block")
_IO_TICKS = 9
"""The column of a disk's ``stat`` that counts milliseconds in which at least one request was under way."""


class ProcessorShare:
    """Of the processor time that the thread which asks wanted, how much it got: the kernel counts how long a thread ran, and
    how long it stood ready and somebody else ran."""

    def __init__(self, path: Path = Path("/proc/thread-self/schedstat")) -> None:
        self._path = path
        self._before: tuple[int, int] | None = None

    def percent(self) -> float | None:
        """Since the last look. Always the same thread must ask."""
        now = self._read()
        before, self._before = self._before, now
        if before is None or now is None:
            return None
        ran, stood = now[0] - before[0], now[1] - before[1]
        return round(100 * ran / (ran + stood), 1) if ran >= 0 and stood >= 0 and ran + stood > 0 else None

    def _read(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError, ValueError), open(self._path, "rb", buffering=0) as file:
            ran, stood, *_ = file.read(128).split()
            return int(ran), int(stood)
        return None


class DisksBusy:
    """The disks below some folders: the busiest of them counts, whoever keeps it busy."""

    def __init__(self, folders: Sequence[str], *, root: Path = _BLOCK) -> None:
        self._files: list[Path] = []
        for folder in folders:
            with contextlib.suppress(OSError):
                device = os.stat(folder).st_dev
                path = root / f"{os.major(device)}:{os.minor(device)}" / "stat"
                if path not in self._files and _io_ticks(path) is not None:
                    self._files.append(path)
        self._before: tuple[float, list[int | None]] | None = None

    def percent(self) -> float | None:
        """Since the last look."""
        if not self._files:
            return None
        now = time.perf_counter(), [_io_ticks(path) for path in self._files]
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        ticks = [b - a for a, b in zip(before[1], now[1], strict=True) if a is not None and b is not None and b >= a]
        return round(min(100.0, max(ticks) / (now[0] - before[0]) / 10), 1) if ticks else None


def _io_ticks(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb", buffering=0) as file:
        return int(file.read(512).split()[_IO_TICKS])
    return None
