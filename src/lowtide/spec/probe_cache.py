"""What the probe found, kept per machine and per disk in the user's cache folder, so that planning never waits for it.

The processor and the disks are kept apart: another folder needs only its own disk measured. Limits (memory, free disk) are
never taken from a file: they are read again each time.

A file says which machine it is for. One that cannot be read, or that is for another machine (a home folder shared between
hosts, a new torch), is as good as none, and is said to be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from lowtide.spec.catalogue import impossible_numbers
from lowtide.spec.hardware import Disk, Hardware
from lowtide.spec.limits import default_budget
from lowtide.spec.probe_assumed import assumed_disk
from lowtide.spec.probe_disk import device_of, free_bytes
from lowtide.spec.probe_limits import processor, usable_cores

_FORMAT = 2
"""Goes up when the file changes, or the way of measuring."""
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKey:
    """Which machine, and which software, numbers are for."""

    processor: str
    cores: int
    memory_bytes: int
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptMachine:
    """The file of one machine."""

    format_version: int
    key: MachineKey
    hardware: Hardware
    """Without a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptDisk:
    """The file of one disk of one machine."""

    format_version: int
    key: MachineKey
    device: str
    disk: Disk


_Kept = TypeVar("_Kept", _KeptMachine, _KeptDisk)


def _say_nothing(_: str) -> None: ...


def user_cache_folder() -> Path:
    """Where lowtide keeps what it can make again, by the XDG rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"), "lowtide")


def cached_machine(folder: str | None, *, tell: Callable[[str], None] = _say_nothing) -> Hardware | None:
    """This machine as it was measured, with today's limits; never measures. ``None``: it was not measured yet.

    A disk that was not measured gets assumed speeds, and ``source`` says so.
    """
    path = _machine_file(key := machine_key())
    kept = _load(path, _KeptMachine, tell)
    if kept is None:
        return None
    if kept.key != key:
        return _foreign(path, tell)
    hardware = dataclasses.replace(kept.hardware, host_bytes=default_budget(), disk=None)
    if folder is None:
        return hardware
    disk = cached_disk(folder, tell=tell)
    if disk is None:
        return dataclasses.replace(hardware, disk=assumed_disk(folder), source=f"{hardware.source}; disk assumed")
    return dataclasses.replace(hardware, disk=disk)


def cached_disk(folder: str, *, tell: Callable[[str], None] = _say_nothing) -> Disk | None:
    """The disk of ``folder`` as it was measured, with what is free now."""
    device = _device(folder)
    path = _disk_file(key := machine_key(), device)
    kept = _load(path, _KeptDisk, tell)
    if kept is None:
        return None
    if kept.key != key or kept.device != device:
        return _foreign(path, tell)
    return dataclasses.replace(kept.disk, free_bytes=free_bytes(folder))


def cache_machine(hardware: Hardware, folder: str | None) -> None:
    """Keep what was measured. An OSError if the cache folder cannot be written."""
    key = machine_key()
    kept = _KeptMachine(format_version=_FORMAT, key=key, hardware=dataclasses.replace(hardware, disk=None))
    _store(_machine_file(key), kept)
    if folder is not None and hardware.disk is not None:
        cache_disk(hardware.disk, folder)


def cache_disk(disk: Disk, folder: str) -> None:
    """Keep what was measured of the disk of ``folder``."""
    key, device = machine_key(), _device(folder)
    _store(_disk_file(key, device), _KeptDisk(format_version=_FORMAT, key=key, device=device, disk=disk))


def machine_key() -> MachineKey:
    """Of this machine."""
    return MachineKey(
        processor=processor(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        torch=metadata.version("torch"),
    )


def _machine_file(key: MachineKey) -> Path:
    return user_cache_folder() / "hardware" / f"machine-{_digest(key)}.json"


def _disk_file(key: MachineKey, device: str) -> Path:
    return user_cache_folder() / "hardware" / f"disk-{_digest(key, device)}.json"


def _digest(key: MachineKey, *more: str) -> str:
    text = json.dumps([dataclasses.asdict(key), *more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _device(folder: str) -> str:
    return " ".join(device_of(folder))


def _load(path: Path, kind: type[_Kept], tell: Callable[[str], None]) -> _Kept | None:
    try:
        text = _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        tell(f"{path} is not used: {error}")
        return None
    from pydantic import TypeAdapter, ValidationError  # only who reads a file pays for the import

    try:
        kept = TypeAdapter(kind).validate_json(text)
    except ValidationError:
        tell(f"{path} is damaged and not used: it does not hold what a probe writes")
        return None
    found: Hardware | Disk = kept.hardware if isinstance(kept, _KeptMachine) else kept.disk
    if kept.format_version != _FORMAT or impossible_numbers(found):
        tell(f"{path} is not used: it was written by another version, or its numbers are impossible")
        return None
    return kept


def _read(path: Path) -> str:
    """The text of a file that this user wrote, and nobody put in its place."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ValueError("it is not a file of this user")
        if facts.st_size > _MOST_BYTES:
            raise ValueError("it is far larger than what a probe writes")
        return file.read().decode()


def _store(path: Path, kept: _KeptMachine | _KeptDisk) -> None:
    """All of it or nothing: whoever reads meanwhile finds the old file or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(kept), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _foreign(path: Path, tell: Callable[[str], None]) -> None:
    tell(f"{path} is not used: it is for another machine, disk or torch")
