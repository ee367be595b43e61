"""What the kernel counts about memory that ran out: kills, limits and peaks of control groups, version 1 and 2. No torch here.

A process that the kernel kills for memory leaves no word. But the kernel counts such kills, for every control group and for the
whole machine. Counters from before and from after a death tell an OOM kill from a ``kill -9`` that somebody sent.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lowtide.planning.text import size_text

_ROOT = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_VMSTAT = Path("/proc/vmstat")
_NO_LIMIT = 1 << 60
_NEAR = 0.97
"""A peak of this share of a limit means that the limit was reached: the kernel charges in batches."""
_FACT = "oom_"
"""What the names of counters begin with where they stand among other facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the kernel has counted so far. ``None`` where it does not say."""

    group: str = ""
    """The control group of the process; counters of another group, or of another boot, cannot be compared."""
    boot: str = ""
    group_kills: int | None = None
    machine_kills: int | None = None
    limit_bytes: int | None = None
    """The least limit of the group and those around it."""
    peak_bytes: int | None = None
    """Of the group that has this limit, pages of files included."""

    def facts(self) -> dict[str, str | int | None]:
        """The same, flat, to stand among the facts of a run."""
        return {f"{_FACT}{name}": value for name, value in asdict(self).items()}


def counters_from(facts: Mapping[str, object]) -> Counters | None:
    """The counters among the facts of a run; ``None`` if there are none."""
    if not any(name.startswith(_FACT) for name in facts):
        return None
    known = {f.name: facts.get(_FACT + f.name) for f in fields(Counters)}
    texts = {name: known[name] for name in ("group", "boot") if isinstance(known[name], str)}
    numbers = {name: value for name, value in known.items() if isinstance(value, int) and not isinstance(value, bool)}
    return Counters(**{**texts, **numbers})  # pyright: ignore[reportArgumentType] - sorted by type just above


def read_counters(*, process: Path = Path("/proc/self"), root: Path = _ROOT) -> Counters:
    """What the kernel says now about the control group of a process; an empty answer where it says nothing."""
    found = Counters(boot=_text(_BOOT), machine_kills=_field(_VMSTAT, "oom_kill"))
    lines = [line.split(":", 2) for line in _text(process / "cgroup").splitlines() if line.count(":") >= 2]
    for wanted, names in (("memory", _VERSION_1), ("", _VERSION_2)):
        for _, controllers, path in lines:
            if wanted not in controllers.split(","):
                continue
            top = root / "memory" if wanted else root
            folder = top / path.lstrip("/")
            if not folder.is_dir():  # in a container the path may be the host's, and the group is the root of what is seen
                folder = top
            limit, peak = _limit_and_peak(folder, top, names)
            kills = _field(folder / names.kills, "oom_kill")
            if kills is not None or limit is not None:
                return Counters(
                    group=f"{wanted}:{path}",
                    boot=found.boot,
                    machine_kills=found.machine_kills,
                    group_kills=kills,
                    limit_bytes=limit,
                    peak_bytes=peak,
                )
    return found


def read_again(before: Counters, *, root: Path = _ROOT) -> Counters:
    """The same counters now, by whoever asks: the group may be gone by then, and its own counters with it."""
    version, _, path = before.group.partition(":")
    top, names = (root / "memory", _VERSION_1) if version else (root, _VERSION_2)
    folder = top / path.lstrip("/")
    limit, peak = _limit_and_peak(folder, top, names) if before.group and folder.is_dir() else (None, None)
    return Counters(
        group=before.group,
        boot=_text(_BOOT),
        machine_kills=_field(_VMSTAT, "oom_kill"),
        group_kills=_field(folder / names.kills, "oom_kill") if before.group else None,
        limit_bytes=limit,
        peak_bytes=peak,
    )


def oom_killed(before: Counters | None, after: Counters | None) -> bool | None:
    """Whether the kernel killed anybody for memory between the two readings; ``None`` if they do not tell."""
    if before is None or after is None or not before.boot or before.boot != after.boot:
        return None
    if before.group == after.group and before.group_kills is not None and after.group_kills is not None:
        return after.group_kills > before.group_kills
    if before.machine_kills is not None and after.machine_kills is not None:
        # that of the whole machine: it may have been another program, so only "none" is an answer
        return False if after.machine_kills == before.machine_kills else None
    return None


def how_it_died(code: int, before: Counters | None, after: Counters | None) -> str:
    """Why a process ended, in words: ``code`` is its return code as ``subprocess`` has it, the counters are from before it
    started and from after its end. To be read after "rank 3 "."""
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else 0
    if not number:
        return f"ended with exit code {code} and left no report"
    name = _signal_name(number)
    if number != signal.SIGKILL:
        return f"was ended by {name}{_SIGNALS.get(number, '')}"
    killed = oom_killed(before, after)
    if killed:
        return f"was ended by the kernel because memory ran out ({_where(after)})"
    if killed is None:
        return f"was ended by {name}; the kernel does this when memory runs out, and here it does not tell{_hint(after)}"
    who = "a person, a script or a batch system did it"
    return f"was ended by {name}, and not by the kernel for memory: it counted no such kill; {who}"


_SIGNALS: dict[int, str] = {
    signal.SIGBUS: ": a mapped file was cut short, or its disk or /dev/shm is full",
    signal.SIGSEGV: ": a crash in native code",
    signal.SIGABRT: ": native code gave up; its last words are above",
    signal.SIGILL: ": the processor lacks an instruction that was used",
    signal.SIGXCPU: ": its limit of processor time is used up",
}


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of a control group."""

    kills: str
    limit: str
    peak: str


_VERSION_1 = _Names("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
_VERSION_2 = _Names("memory.events", "memory.max", "memory.peak")


def _limit_and_peak(folder: Path, top: Path, names: _Names) -> tuple[int | None, int | None]:
    """Of the tightest group from this one up to the root; the peak of this one if none has a limit."""
    tightest: tuple[int, Path] | None = None
    for at in (folder, *folder.parents):
        limit = _number(at / names.limit)
        if limit is not None and limit < _NO_LIMIT and (tightest is None or limit < tightest[0]):
            tightest = limit, at
        if at == top:
            break
    limit, where = tightest if tightest is not None else (None, folder)
    return limit, _number(where / names.peak)


def _where(after: Counters | None) -> str:
    if after is None or after.limit_bytes is None:
        return "the machine had no more"
    peak = f", which it reached: peak {size_text(after.peak_bytes)}" if _at_limit(after) and after.peak_bytes else ""
    return f"its control group may use {size_text(after.limit_bytes)}{peak}"


def _hint(after: Counters | None) -> str:
    return f", but {_where(after)}" if after is not None and _at_limit(after) else ""


def _at_limit(counters: Counters) -> bool:
    limit, peak = counters.limit_bytes, counters.peak_bytes
    return limit is not None and peak is not None and peak >= _NEAR * limit


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
