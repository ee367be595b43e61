"""What the system lets a job have, as facts: memory, threads, files. What to do about them is ``probe_advice``."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from lowtide.spec.limits import memory_left

_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemLimits:
    """What the machine has, and what is left of it for this process."""

    memory_bytes: int
    """Installed."""
    available_bytes: int
    """Free, or reclaimable at once, on the whole machine."""
    left_bytes: int
    """What this process may still take: the least of what the kernel, the container and the rlimits leave."""
    swap_bytes: int
    cores: int
    """That this process may run on."""
    quota: float | None
    """Cores' worth of time that the container gets; ``None``: no limit."""
    address_space: int | None
    """``ulimit -v`` in bytes; ``None``: no limit."""
    open_files: int | None
    """``ulimit -n``; ``None``: no limit."""
    busy: float
    """The share of all processor time that somebody used while these facts were gathered."""


def system_limits() -> SystemLimits:
    """Of this machine and this process, now: a fifth of a second in which nothing else should be done here."""
    busy = psutil.cpu_percent(interval=_WATCH_SECONDS) / 100
    memory = psutil.virtual_memory()
    return SystemLimits(
        memory_bytes=memory.total,
        available_bytes=memory.available,
        left_bytes=memory_left(),
        swap_bytes=psutil.swap_memory().total,
        cores=usable_cores(),
        quota=_quota(),
        address_space=_soft(resource.RLIMIT_AS),
        open_files=_soft(resource.RLIMIT_NOFILE),
        busy=busy,
    )


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def processor() -> str:
    """The name that the processor gives itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _quota() -> float | None:
    """Version 2, then version 1; in a container its own group is the root of what it sees."""
    group = Path("/sys/fs/cgroup")
    words = _words(group / "cpu.max") or _words(group / "cpu" / "cpu.cfs_quota_us") + _words(
        group / "cpu" / "cpu.cfs_period_us"
    )
    if len(words) == 2 and all(word.isdecimal() for word in words):
        return int(words[0]) / int(words[1])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
