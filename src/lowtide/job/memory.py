"""How much memory a job used on this host, as the kernel counts it.

Each rank resets the kernel's high-water mark of its resident set when training starts (with a memory number, it counts from
the start of the process) and reads it at the end: exact, and free of cost. The peak of the job is the sum of the ranks'
peaks minus what that sum counts more than once:

* pages of files that are mapped privately (torch's libraries, the token file): the largest rank's share is counted, once;
* shared memory: each rank has its proportional part of it (the kernel's Pss), which add up to all that any of them touches.

Ranks compute in step, so their peaks fall together; where they do not, the sum overstates the job's peak and never
understates it. The sharing is read at the end of training, from ``/proc/self/smaps``. Where there is no ``/proc``, the
peak is the process' whole life's (``getrusage``) and nothing is known to be shared.
"""

from __future__ import annotations

import re
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<rights>\S{4}) [0-9a-f]+ (?P<device>\S+) (?P<inode>\d+)")
_STATUS = Path("/proc/self/status")
_SMAPS = Path("/proc/self/smaps")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Resident pages of one file (or piece of shared memory) in one rank, in bytes."""

    file: str
    resident: int
    proportional: int
    """The same, each page divided by the number of processes that have it."""
    shared_memory: bool


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank used: its peak, and the part of it that other ranks may have as well."""

    host: str
    peak_bytes: int
    shareable: tuple[SharedPages, ...]


def reset_peak() -> None:
    """Start a new high-water mark at what is resident now. Where the kernel does not allow it, the old one stays."""
    with suppress(FileNotFoundError, PermissionError):
        _CLEAR.write_text("5")


def peak_bytes() -> int:
    """The high-water mark of this process' resident set."""
    status = _status()
    if "VmHWM" in status:
        return status["VmHWM"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure_rank() -> RankMemory:
    """This rank's peak since :func:`reset_peak`, and what it may share with others now."""
    shareable = shareable_pages(_SMAPS.read_text().splitlines()) if _SMAPS.exists() else ()
    return RankMemory(socket.gethostname(), peak_bytes(), shareable)


def rank_memory_from_json(entry: dict[str, Any]) -> RankMemory:
    """What ``dataclasses.asdict`` made of a :class:`RankMemory`, after a journey between ranks."""
    shareable = tuple(SharedPages(**pages) for pages in entry["shareable"])
    return RankMemory(entry["host"], entry["peak_bytes"], shareable)


def job_peak(ranks: Sequence[RankMemory]) -> int:
    """The peak of all ranks on the host of the first, pages that they share counted once."""
    local = [rank for rank in ranks if rank.host == ranks[0].host]
    by_file: defaultdict[str, list[SharedPages]] = defaultdict(list)
    for rank in local:
        for pages in rank.shareable:
            by_file[pages.file].append(pages)
    counted_twice = sum(sum(part.resident for part in parts) - _once(parts) for parts in by_file.values())
    return sum(rank.peak_bytes for rank in local) - counted_twice


def counted_peak(ranks: Sequence[RankMemory]) -> int:
    """What :func:`job_peak` says, without pages of files: the kernel can drop those, so no memory number counts them."""
    local = [rank for rank in ranks if rank.host == ranks[0].host]
    files: defaultdict[str, int] = defaultdict(int)
    for pages in (pages for rank in local for pages in rank.shareable if not pages.shared_memory):
        files[pages.file] = max(files[pages.file], pages.resident)
    return job_peak(ranks) - sum(files.values())


def shareable_pages(smaps: Iterable[str]) -> tuple[SharedPages, ...]:
    """The file-backed and shared mappings in the text of ``/proc/<pid>/smaps``, one entry per file."""
    resident: defaultdict[tuple[str, bool], int] = defaultdict(int)
    proportional: defaultdict[tuple[str, bool], int] = defaultdict(int)
    key: tuple[str, bool] | None = None
    for line in smaps:
        mapping = _MAPPING.match(line)
        if mapping is not None:
            named = mapping["inode"] != "0"
            key = (f"{mapping['device']}:{mapping['inode']}", mapping["rights"][3] == "s") if named else None
        elif key is not None:
            name, _, rest = line.partition(":")
            if name == "Pss":
                proportional[key] += _kilobytes(rest)
            elif name == "Rss":
                resident[key] += _kilobytes(rest)
            elif name == "Anonymous" and not key[1]:
                resident[key] -= _kilobytes(rest)  # pages that were written to are this rank's own
    return tuple(SharedPages(file, resident[file, shared], proportional[file, shared], shared) for file, shared in resident)


def _once(parts: Sequence[SharedPages]) -> int:
    if any(part.shared_memory for part in parts):
        return max(sum(part.proportional for part in parts), max(part.resident for part in parts))
    return max(part.resident for part in parts)


def _status() -> dict[str, int]:
    """The entries of ``/proc/self/status`` that are counted in kB, in bytes."""
    if not _STATUS.exists():
        return {}
    pairs = (line.partition(":")[::2] for line in _STATUS.read_text().splitlines())
    return {name: _kilobytes(value) for name, value in pairs if value.endswith(" kB")}


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024
