"""What the machine gives now, against what the placement was made for: the speed of the disk, and memory.

Noise must change nothing: a speed counts as changed when it has been off by half for three steps in a row, or by far for two,
and memory when what the machine leaves is below what the job may use.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowtide.config import DiskFolder
from lowtide.planning.estimate import disk_rates
from lowtide.planning.options import Rates
from lowtide.spec.limits import memory_left
from lowtide.spec.probe_assumed import assumed_disk
from lowtide.spec.probe_cache import cached_disk
from lowtide.tiers.store import Store, Traffic

_OFF_BY = 1.5
_IN_A_ROW = 3
_FAR_OFF_BY, _FAR_IN_A_ROW = 3.0, 2
_LEAST_BYTES = 64 << 20
"""Less traffic than this in a step says nothing about a disk."""
_LEAST_SHARE = 0.5
"""Nor does a disk that worked for less than this part of a step: it waited for requests, not they for it."""


class DiskSpeed:
    """The rates that placements are made with. One writer: the placer, after every step."""

    def __init__(self, folders: tuple[DiskFolder, ...], store: Store | None, *, ranks: int) -> None:
        self._store = store
        self._before = Traffic()
        self._off: list[float] = []  # measured over planned speed of the last steps, as long as they were off
        disks = [cached_disk(f.path) or assumed_disk(f.path) for f in folders]
        self.rates = disk_rates(disks, ranks) if disks and store is not None else Rates()

    def look(self, seconds: float | None) -> str | None:
        """After a step of so many seconds: what has changed, in words, or None."""
        if self._store is None:
            return None
        now = replace(self._store.traffic)
        before, self._before = self._before, now
        read, written = now.read_bytes - before.read_bytes, now.written_bytes - before.written_bytes
        busy = now.busy_seconds - before.busy_seconds
        if read + written < _LEAST_BYTES or not seconds or busy <= 0:
            return None
        planned = read * self.rates.disk_read + written * self.rates.disk_write
        speed = planned / busy
        # A disk that idles between requests looks slower than it is; it is slow only if it had no time to idle.
        slower = speed < 1 / _OFF_BY and busy > _LEAST_SHARE * seconds
        faster = speed > _OFF_BY
        if not (slower or faster) or (self._off and (self._off[-1] < 1) != (speed < 1)):
            self._off = []
        if slower or faster:
            self._off.append(speed)
        far = sum(s < 1 / _FAR_OFF_BY or s > _FAR_OFF_BY for s in self._off[-_FAR_IN_A_ROW:])
        if len(self._off) < _IN_A_ROW and far < _FAR_IN_A_ROW:
            return None
        factor = sorted(self._off, key=lambda s: abs(math.log(s)))[(len(self._off) - 1) // 2]
        self._off = []
        old = (read + written) / planned
        self.rates = replace(self.rates, disk_read=self.rates.disk_read / factor, disk_write=self.rates.disk_write / factor)
        return f"the disk gives {old * factor / 1e9:.2f} GB/s instead of {old / 1e9:.2f}"


def memory_allowed(limit: int, used: int, *, ranks: int) -> int:
    """What a rank may use: its limit, or less if the machine, its control group or another process leaves less."""
    return min(limit, used + memory_left() // ranks)
