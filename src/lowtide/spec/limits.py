"""What this process may use of the machine: cgroup limits, free memory, rlimits."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
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


def default_budget(already_used: int) -> int:
    """The number to hold if the caller gave none."""
    return int((memory_left() + already_used) * _MARGIN)


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) of every group that this process is in, version 1 or 2, from its own up to the root."""
    found: list[tuple[int, int]] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP if not controllers else _CGROUP / "memory"
            names = ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            folder = root / path.lstrip("/")
            for at in (folder, *folder.parents):
                limit, used = (_number(at / name) for name in names)
                if limit is not None and used is not None and limit < _NO_LIMIT:
                    found.append((limit, used))
                if at == root:
                    break
    return found


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
