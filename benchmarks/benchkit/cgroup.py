"""A control group with a memory limit, version 1 or 2: what a container or a batch system gives a job.

It is made inside the group that this process is in, so that a limit from outside still holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

EMPTYING_SECONDS = 10.0
_MOUNT = Path("/sys/fs/cgroup")


class NoCgroup(Exception):
    """A group cannot be made here; the message is the reason."""


class Cgroup:
    """One group. Numbers of a killed process stay readable until the group is removed."""

    def __init__(self, path: Path, *, version: int) -> None:
        self.path, self.version = path, version

    @property
    def limit_file(self) -> Path:
        """What its limit is written to."""
        return self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")

    def kills(self) -> int:
        """How many processes the kernel has killed for memory in it."""
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)

    def peak_bytes(self) -> int | None:
        """The most that was ever charged to it, reclaimable file pages included."""
        with contextlib.suppress(OSError):
            return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())
        return None


def _parent(controller: str = "memory") -> tuple[Path, int]:
    """The folder of the group that this process is in, and the version."""
    version, root = (1, _MOUNT / controller) if (_MOUNT / controller).is_dir() else (2, _MOUNT)
    wanted = controller if version == 1 else ""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == wanted:
            own = root / path.lstrip("/")
            # In a container the path may be the host's; then the root of what is mounted is this process' group.
            return (own if own.is_dir() else root), version
    return root, version


@contextmanager
def memory_cgroup(name: str, limit_bytes: int) -> Generator[Cgroup]:
    """A group of exactly this size; needs root, and in version 2 a parent that hands the memory controller down."""
    parent, version = _parent()
    path = parent / f"{name}-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        raise NoCgroup(f"{parent}: {error.strerror}") from error
    try:
        group = Cgroup(path, version=version)
        limit = group.limit_file
        try:
            if not limit.exists():
                raise NoCgroup(f"{parent} does not hand the memory controller down")
            limit.write_text(str(limit_bytes))
        except OSError as error:
            raise NoCgroup(f"{limit}: {error.strerror}") from error
        yield group
    finally:
        _remove(path)


class SlowDisk:
    """A group whose reads and writes of one disk can be slowed down at any time."""

    def __init__(self, path: Path, device: str, *, version: int) -> None:
        self.path, self._device, self._version = path, device, version

    @property
    def files(self) -> list[str]:
        """What ``rule`` is written to."""
        names = ["blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"] if self._version == 1 else ["io.max"]
        return [str(self.path / name) for name in names]

    def rule(self, bytes_per_second: int) -> str:
        """At most so many in each direction; 0: as fast as it can."""
        if self._version == 1:
            return f"{self._device} {bytes_per_second}"
        limit = bytes_per_second or "max"
        return f"{self._device} rbps={limit} wbps={limit}"


@contextmanager
def slow_disk(name: str, folder: Path) -> Generator[SlowDisk]:
    """A group that can slow down the disk that ``folder`` is on; needs root. Version 1: direct requests only."""
    parent, version = _parent("blkio")
    number = folder.stat().st_dev
    path = parent / f"{name}-io-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        raise NoCgroup(f"{parent}: {error.strerror}") from error
    try:
        yield SlowDisk(path, f"{os.major(number)}:{os.minor(number)}", version=version)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """End what is left in the group, compilers that a killed process had started for one, and take the group away."""
    give_up = time.monotonic() + EMPTYING_SECONDS
    while time.monotonic() < give_up:
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            (path / "memory.force_empty").write_text("0")
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.05)
