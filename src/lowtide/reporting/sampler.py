"""The process's real figures, as the kernel counts them: memory by sort, control group, processor, disk space, handles.

A sample is a few small reads, about a tenth of a millisecond; loader workers are looked for rarely, because that means asking
about every process of the machine. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lowtide.reporting.format import ProcessMemory
from lowtide.reporting.utilisation import DisksBusy, ProcessorShare

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_LIMITS_EVERY = 64
"""Samples between two looks at limits, which hardly ever change."""
_CHILDREN_EVERY = 30.0
"""Seconds between two looks at child processes, at least; it may be dear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One sample. ``None`` where the system does not say."""

    memory: ProcessMemory
    cgroup_bytes: int | None
    cgroup_limit_bytes: int | None
    cpu_percent: float | None
    """Since the sample before; 100 is one core."""
    cpu_given_percent: float | None
    """Of the processor time that the thread which samples asked for since then."""
    disk_busy_percent: float | None
    device_percent: float | None
    disk_free_bytes: int | None
    fds: int | None
    threads: int | None
    children_bytes: int


class Sampler:
    """``folders``: whose disks are of interest. ``device``: says how busy an accelerator is, in percent, if there is one."""

    def __init__(
        self,
        folders: Sequence[str],
        *,
        device: Callable[[], float | None] = lambda: None,
        root: Path = _CGROUP,
        process: Path = Path("/proc/self"),
    ) -> None:
        self._process, self._device = process, device
        self._given, self._disks = ProcessorShare(), DisksBusy(folders)
        self._folders = _one_per_file_system(folders)
        self._usage, self._limits = _group_files(root, process)
        self._limit: int | None = None
        self._samples = 0
        self._cpu: tuple[float, float] | None = None
        self._children_bytes, self._children_due = 0, time.monotonic() + _CHILDREN_EVERY

    def sample(self) -> Figures:
        """Now."""
        status = _status(self._process / "status")
        anonymous, shared, file = (status.get(name, 0) * 1024 for name in ("RssAnon", "RssShmem", "RssFile"))
        if self._samples % _LIMITS_EVERY == 0:
            limits = [limit for limit in map(_number, self._limits) if limit is not None and limit < _NO_LIMIT]
            self._limit = min(limits, default=None)
        self._samples += 1
        return Figures(
            memory=ProcessMemory(anonymous=anonymous, shared=shared, file=file, total=anonymous + shared + file),
            cgroup_bytes=_number(self._usage) if self._usage is not None else None,
            cgroup_limit_bytes=self._limit,
            cpu_percent=self._cpu_percent(),
            cpu_given_percent=self._given.percent(),
            disk_busy_percent=self._disks.percent(),
            device_percent=self._device(),
            disk_free_bytes=self._disk_free(),
            fds=_count_fds(self._process / "fd"),
            threads=status.get("Threads"),
            children_bytes=self._children(),
        )

    def _cpu_percent(self) -> float | None:
        now = (time.perf_counter(), time.process_time())
        before, self._cpu = self._cpu, now
        if before is None or now[0] <= before[0]:
            return None
        return round(100 * (now[1] - before[1]) / (now[0] - before[0]), 1)

    def _disk_free(self) -> int | None:
        total: int | None = None
        for folder in self._folders:
            with contextlib.suppress(OSError):
                space = os.statvfs(folder)
                total = (total or 0) + space.f_bavail * space.f_frsize
        return total

    def _children(self) -> int:
        """What only loader workers have in memory."""
        start = time.monotonic()
        if start < self._children_due:
            return self._children_bytes
        total = 0
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended, or is not ours to look into
                total += child.memory_full_info().uss
        end = time.monotonic()
        self._children_bytes, self._children_due = total, end + max(_CHILDREN_EVERY, 1000 * (end - start))
        return total


def _status(path: Path) -> dict[str, int]:
    """The lines of ``status`` that are one number."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name in (b"RssAnon", b"RssShmem", b"RssFile", b"Threads"):
                found[name.decode()] = int(rest.split()[0])
    return found


def _count_fds(folder: Path) -> int | None:
    try:
        return len(os.listdir(folder)) - 1  # the one that lists
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _one_per_file_system(folders: Sequence[str]) -> list[str]:
    found: dict[int, str] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            found.setdefault(os.stat(folder).st_dev, folder)
    return list(found.values())


def _group_files(root: Path, process: Path) -> tuple[Path | None, list[Path]]:
    """The file that says what this process's group uses, and those that say what it and the groups around it may use."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return None, []
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers != "" and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        usage, limit = ("memory.usage_in_bytes", "memory.limit_in_bytes") if controllers else ("memory.current", "memory.max")
        folder = top / path.lstrip("/")
        groups = [at for at in (folder, *folder.parents) if at == top or top in at.parents]
        here = next((at for at in groups if (at / usage).exists()), None)  # a container may not show its own path
        if here is not None:
            return here / usage, [at / limit for at in groups if (at / limit).exists()]
    return None, []
