"""What stands in a run's folder beside its timelines, if `lowtide train` made it: losses, events, what was asked, the plan.

All of it is optional, and none of it is believed unchecked: a file that cannot be read is as good as none, and so is what
is no plain file.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lowtide.errors import Error
from lowtide.files import allowed_bytes, json_bytes, open_plain, read_plain
from lowtide.planning.plan import Plan

EVENTS = "events.jsonl"
"""What happened beside the steps, in the words of `lowtide train`."""
_MAX_BYTES = 256 * 2**20
_MAX_LINES = 2_000_000
_MAX_TEXT = 2_000
_AS_MARK = {
    "save": "checkpoint",
    "save_failed": "warning",
    "resume": "resume",
    "passed_over": "warning",
    "skip": "skip",
    "signal": "signal",
    "straggler": "straggler",
    "restart": "restart",
    "failure": "failure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A line of the run's events that is worth a mark. ``wall``: seconds since 1970, if it could be read."""

    wall: float | None
    step: int | None
    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """See the module's docstring."""

    losses: dict[int, float] = field(default_factory=dict[int, float])
    validation: dict[int, float] = field(default_factory=dict[int, float])
    tokens_per_second: dict[int, float] = field(default_factory=dict[int, float])
    happenings: tuple[Happening, ...] = ()
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    plan: Plan | None = None


def read_extras(folder: Path) -> Extras:
    """Whatever there is."""
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    speed: dict[int, float] = {}
    for entry in _lines(folder / "metrics.jsonl"):
        step = entry.get("step")
        if isinstance(step, int):
            for name, found in (("loss", losses), ("validation_loss", validation), ("tokens_per_second", speed)):
                if (value := _finite(entry.get(name))) is not None:
                    found[step] = value
    happenings = tuple(
        Happening(
            wall=_wall(entry.get("time")),
            step=entry["step"] if isinstance(entry.get("step"), int) else None,
            what=_AS_MARK[str(entry["event"])],
            text=str(entry.get("cause", ""))[:_MAX_TEXT],
        )
        for entry in _lines(folder / EVENTS)
        if str(entry.get("event")) in _AS_MARK
    )
    return Extras(
        losses=losses,
        validation=validation,
        tokens_per_second=speed,
        happenings=happenings,
        config=_json_table(folder / "config.json"),
        plan=_plan(folder / "plan.json"),
    )


def stopped_by(folder: Path, started: float) -> str:
    """The signal that asked the processes which began at ``started`` to end; empty if none did, or nobody wrote it down."""
    found = ""
    for entry in _lines(folder / EVENTS):
        if entry.get("event") == "signal" and (_wall(entry.get("time")) or 0.0) >= started - 1:  # events have whole seconds
            found = str(entry.get("cause", ""))[:_MAX_TEXT]
    return found


def planned_steps(folder: Path) -> int | None:
    """How many steps the job was asked for, if that was written down."""
    steps = _json_table(folder / "config.json").get("steps")
    return steps if isinstance(steps, int) and steps > 0 else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), open(open_plain(path), "rb") as file:
        read = 0
        for _ in range(_MAX_LINES):
            line = file.readline(_MAX_BYTES)
            read += len(line)
            if not line or read > _MAX_BYTES:
                return
            with contextlib.suppress(ValueError, RecursionError):
                if json_bytes(line) > allowed_bytes(len(line)):
                    continue
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield cast("dict[str, Any]", entry)


def _json_table(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = read_plain(path, _MAX_BYTES)
        found = json.loads(text) if json_bytes(text) <= allowed_bytes(len(text)) else None
        if isinstance(found, dict):
            return cast("dict[str, Any]", found)
    return {}


def _plan(path: Path) -> Plan | None:
    with contextlib.suppress(OSError, Error, UnicodeDecodeError):
        text = read_plain(path, _MAX_BYTES)
        return Plan.from_json(text.decode()) if json_bytes(text) <= allowed_bytes(len(text)) else None
    return None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _wall(value: object) -> float | None:
    """``2026-11-16T10:37:08+0000`` as seconds since 1970."""
    if not isinstance(value, str):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        parsed = time.strptime(value, "%Y-%m-%dT%H:%M:%S%z")
        return float(calendar.timegm(parsed) - (parsed.tm_gmtoff or 0))
    return None
