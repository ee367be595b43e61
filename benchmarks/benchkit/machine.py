"""Facts about the machine that a reader needs to judge a number, and how busy others keep it."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

MOMENT_SECONDS = 2.0


def _first(path: str, key: str, separator: str) -> str | None:
    try:
        with open(path) as file:
            return next((line.split(separator, 1)[1].strip() for line in file if line.startswith(key)), None)
    except OSError:
        return None


def available_bytes() -> int:
    """What the kernel says can be allocated without swapping."""
    text = _first("/proc/meminfo", "MemAvailable", ":")
    return int(text.split()[0]) * 1024 if text else 0


def facts() -> dict[str, Any]:
    total = _first("/proc/meminfo", "MemTotal", ":")
    flags = (_first("/proc/cpuinfo", "flags", ":") or "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _first("/proc/cpuinfo", "model name", ":") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "vector_extensions": [flag for flag in wanted if flag in flags],
        "memory_bytes": int(total.split()[0]) * 1024 if total else None,
        "load_average_at_start": os.getloadavg()[0],
    }


class Foreign:
    """The share of all cores that processes other than ours used since this object was made."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._busy = self._busy_seconds()

    @staticmethod
    def _busy_seconds() -> float:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, file.readline().split()[1:9])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")

    def share(self, own_cpu_seconds: float) -> float:
        wall = time.monotonic() - self._wall
        others = self._busy_seconds() - self._busy - own_cpu_seconds
        return max(0.0, others / (wall * (os.cpu_count() or 1)))


def wait_for_quiet(*, share: float, at_most_seconds: float) -> None:
    """Return when all processes together have used at most ``share`` of the cores for a moment, or when time is up.

    Only for moments in which our own processes are idle."""
    end = time.monotonic() + at_most_seconds
    while time.monotonic() < end:
        foreign = Foreign()
        time.sleep(min(MOMENT_SECONDS, at_most_seconds))
        if foreign.share(0.0) <= share:
            return
