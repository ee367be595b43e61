"""What this process may use of the machine: cgroup limits, free memory, rlimits."""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60
_MARGIN = 0.9
"""How much of what is free a job takes if nobody said a number."""


def memory_left() -> int:
    """Bytes that this process may still take before something stops it: the least of what the kernel and the limits leave."""
    left = [_meminfo("MemAvailable")]
    left += [limit - used for limit, used in _cgroup_limits()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        left.append(soft)
    return max(0, min(left))


class Mappings:
    """Which of this process's memory is a mapping of a file: such pages do not count, the kernel can drop them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._files: list[tuple[int, bool]] = []
        for line in _read(Path("/proc/self/maps")).splitlines():
            span, _, _, _, inode, *_ = line.split()
            start, end = (int(x, 16) for x in span.split("-"))
            self._starts.append(start)
            self._files.append((end, inode != "0"))

    def is_file(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._files[at][0] and self._files[at][1]


def default_budget() -> int:
    """The number to hold if the caller gave none: most of what is left, and what this process has already."""
    return int((memory_left() + psutil.Process().memory_info().rss) * _MARGIN)


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) of every group that this process is in, version 1 or 2, from its own up to the root. Pages of files are not
    counted as used: the kernel drops them before it stops anybody.

    ``memory.high`` is a limit like ``memory.max``: nobody is killed there, but a group above it is slowed down until a step
    does not end any more."""
    found: list[tuple[int, int]] = []
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP if not controllers else _CGROUP / "memory"
            names = ("memory.max", "memory.high") if not controllers else ("memory.limit_in_bytes",)
            folder = root / path.lstrip("/")
            for at in (folder, *folder.parents):
                limits = [n for name in names if (n := _number(at / name)) is not None and n < _NO_LIMIT]
                used = _number(at / ("memory.current" if not controllers else "memory.usage_in_bytes"))
                if limits and used is not None:
                    found.append((min(limits), max(0, used - _reclaimable(at / "memory.stat"))))
                if at == root:
                    break
    return found


def _reclaimable(stat: Path) -> int:
    lines = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    names = ("total_inactive_file", "total_active_file") if "total_inactive_file" in lines else ("inactive_file", "active_file")
    return sum(int(lines.get(name, 0)) for name in names)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _meminfo(name: str) -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
