"""The lines of a timeline: what a recorder writes and what every reader believes. No torch here.

``RUN/timeline/rank-00000.jsonl`` has one JSON object per line, each with its ``kind`` and ``t``, the seconds since the process
that wrote it began. A process that goes on with a run appends, beginning with another ``run`` line. Beside it
``rank-00000.now.json`` has the newest step and memory lines and is replaced every second or so, for whoever looks on.

Nothing in a file is believed unchecked: numbers must be finite and of a sane size, texts are cut, lists and lines have a
largest length, and a line that does not hold is counted and left out. Keys and kinds that are not known are passed over, so
that an older reader can read what a newer writer wrote.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

FORMAT = 1
MAX_LINE_BYTES = 2 * 2**20
MAX_ITEMS = 20_000
"""In a list or a table of one line."""
MAX_TEXT = 2_000
"""Characters."""
LANES = ("compute", "disk read", "disk write", "gather", "reduce", "update", "wait")
VERBS = (
    "forward",
    "backward",
    "recompute",
    "fetch",
    "evict",
    "gather",
    "release",
    "reduce",
    "clip",
    "update",
    "publish",
    "spill",
    "wait for disk",
    "wait for ranks",
    "wait",  # in older files, which do not say for what
)
MARKS = ("checkpoint", "skip", "replan", "warning", "leak", "over budget", "straggler")
_LARGEST = 2**62

Scalar: TypeAlias = "str | int | float | bool | None"
Bytes: TypeAlias = "dict[str, int]"
"""Bytes by kind: ``parameters``, ``gradients``, ``optimizer``, ``slots``, ``activations``, ``staging``, ..."""


class BadLine(ValueError):
    """A line that does not hold."""


# -- what values may be -----------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:  # NaN is not, either
        raise BadLine
    return float(value)


def _count(value: Any) -> int:
    """A whole number; files may say 3.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
        raise BadLine
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadLine
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadLine
    value = value[:MAX_TEXT]
    if value.isprintable():
        return value
    # Escape sequences would reach a terminal, half characters cannot be written anywhere.
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    return _text(value) if isinstance(value, str) else _count(value) if isinstance(value, int) else _number(value)


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _table(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def table(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MAX_ITEMS:
            raise BadLine
        return {_text(key): read(item) for key, item in value.items()}

    return table


def _list(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def sequence(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise BadLine
        return tuple(read(item) for item in value)

    return sequence


def _as(read: Callable[[Any], Any], **default: Any) -> Any:
    """A field of a line, and what its value may be."""
    return field(metadata=_reads(read), **default)


def _reads(read: Callable[[Any], Any]) -> dict[str, Any]:
    return {"read": read}


def _record(cls: type) -> Callable[[Any], Any]:
    return lambda value: _filled(cls, value)


def _filled(cls: type, value: Any) -> Any:
    """``cls`` from the keys of ``value`` that it has."""
    if not isinstance(value, dict):
        raise BadLine
    known: list[Any] = list(dataclasses.fields(cls))
    try:
        return cls(**{f.name: f.metadata["read"](value[f.name]) for f in known if f.name in value})
    except TypeError as error:  # a field without a default is missing
        raise BadLine from error


# -- the lines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """A unit, as it is from the start."""

    name: str = _as(_text)
    numel: int = _as(_count)
    bytes: int = _as(_count)
    """Whole, as compute reads it."""
    shard_bytes: int = _as(_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A process begins."""

    KIND: ClassVar[str] = "run"
    t: float = _as(_number, default=0.0)
    format: int = _as(_count, default=FORMAT)
    started: float = _as(_number)
    """Seconds since 1970."""
    rank: int = _as(_count)
    world_size: int = _as(_count)
    local_ranks: int = _as(_count)
    host: str = _as(_text)
    pid: int = _as(_count)
    stage: int = _as(_count)
    update: str = _as(_text)
    budget_bytes: int | None = _as(_or_none(_count), default=None)
    """Of this rank."""
    disk_limit_bytes: int | None = _as(_or_none(_count), default=None)
    folders: tuple[str, ...] = _as(_list(_text), default=())
    units: tuple[UnitFacts, ...] = _as(_list(_record(UnitFacts)), default=())
    facts: dict[str, Scalar] = field(metadata=_reads(_table(_scalar)), default_factory=dict[str, Scalar])
    """Versions, number of processors, whatever else is worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """What lives where from now on."""

    KIND: ClassVar[str] = "plan"
    t: float = _as(_number)
    step: int = _as(_count, default=0)
    predicted_seconds: float | None = _as(_or_none(_number), default=None)
    predicted_peak_bytes: int | None = _as(_or_none(_count), default=None)
    tiers: dict[str, Bytes] = field(metadata=_reads(_table(_table(_count))), default_factory=dict[str, Bytes])
    """``host``, ``device``, ``disk``: bytes by kind."""
    why: str = _as(_text, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A step, all values its own; what ``total_`` begins with is of the whole process so far, so that nothing is lost where
    steps between two lines were left out (``covers`` says how many steps there were since the line before)."""

    KIND: ClassVar[str] = "step"
    t: float = _as(_number)
    step: int = _as(_count)
    seconds: float = _as(_number)
    compute_seconds: float = _as(_number, default=0.0)
    disk_wait_seconds: float = _as(_number, default=0.0)
    comm_wait_seconds: float = _as(_number, default=0.0)
    update_seconds: float = _as(_number, default=0.0)
    loss: float | None = _as(_or_none(_number), default=None)
    disk_busy_seconds: float = _as(_number, default=0.0)
    """In which at least one request to the disk was being carried out."""
    disk_read_bytes: int = _as(_count, default=0)
    disk_written_bytes: int = _as(_count, default=0)
    wire_bytes: int = _as(_count, default=0)
    peak_bytes: int = _as(_count, default=0)
    """Of the process in this step, as it counts against the budget."""
    skipped: bool = _as(_truth, default=False)
    covers: int = _as(_count, default=1)
    total_disk_read_bytes: int = _as(_count, default=0)
    total_disk_written_bytes: int = _as(_count, default=0)
    total_wire_bytes: int = _as(_count, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaFacts:
    """An arena's memory."""

    reserved: int = _as(_count)
    taken: int = _as(_count)
    free_blocks: int = _as(_count, default=0)
    limbo: int = _as(_count, default=0)
    """Bytes given back that somebody still has a view of."""
    takes: int = _as(_count, default=0)
    """How often a block was taken, over the whole process."""
    fresh: int = _as(_count, default=0)
    """How often that needed new memory; ``takes / fresh`` is the reuse factor."""
    largest_free: int = _as(_count, default=0)
    """Bytes of the largest free block; the rest of what is free is in smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What the kernel says this process has in memory. ``total`` is their sum."""

    anonymous: int = _as(_count)
    shared: int = _as(_count)
    file: int = _as(_count)
    total: int = _as(_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """A moment: the ledger beside the process's real figures."""

    KIND: ClassVar[str] = "memory"
    t: float = _as(_number)
    step: int = _as(_count)
    """The step under way."""
    moment: str = _as(_text, default="")
    """``begin``, ``forward``, ``backward``, ``clip``, ``update`` or ``step`` (after it)."""
    host: Bytes = field(metadata=_reads(_table(_count)))
    device: Bytes = field(metadata=_reads(_table(_count)), default_factory=dict[str, int])
    disk: Bytes = field(metadata=_reads(_table(_count)), default_factory=dict[str, int])
    arenas: dict[str, ArenaFacts] = field(metadata=_reads(_table(_record(ArenaFacts))), default_factory=dict[str, ArenaFacts])
    process: ProcessMemory = field(metadata=_reads(_record(ProcessMemory)))
    not_ours: int = _as(_count, default=0)
    """``process.total`` less the sum of ``host``: Python, torch, and what the caller holds."""
    cgroup_bytes: int | None = _as(_or_none(_count), default=None)
    cgroup_limit_bytes: int | None = _as(_or_none(_count), default=None)
    cpu_percent: float | None = _as(_or_none(_number), default=None)
    """Since the sample before; 100 is one core."""
    cpu_given_percent: float | None = _as(_or_none(_number), default=None)
    """Of the processor time that the step's thread asked for since then, how much it got."""
    disk_busy_percent: float | None = _as(_or_none(_number), default=None)
    """Of the time since then in which the busiest disk of the spool folders had something to do, whoever asked for it."""
    device_percent: float | None = _as(_or_none(_number), default=None)
    """How busy the accelerator is, as its driver says."""
    disk_free_bytes: int | None = _as(_or_none(_count), default=None)
    fds: int | None = _as(_or_none(_count), default=None)
    threads: int | None = _as(_or_none(_count), default=None)
    spool_bytes: int = _as(_count, default=0)
    shared_saved_bytes: int = _as(_count, default=0)
    children_bytes: int = _as(_count, default=0)
    """Of loader workers: memory that only they have."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while. A row of a line; times are seconds since the step began."""

    begin: float
    end: float
    lane: str
    verb: str
    unit: int
    """In ``SpansLine.names``."""
    bytes: int


def _span(value: Any) -> Span:
    if not isinstance(value, list) or len(value) < 6:
        raise BadLine
    begin, end = _number(value[0]), _number(value[1])
    return Span(begin, max(begin, end), _text(value[2])[:20], _text(value[3])[:20], _count(value[4]), _count(value[5]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansLine:
    """One step in detail."""

    KIND: ClassVar[str] = "spans"
    t: float = _as(_number)
    step: int = _as(_count)
    why: str = _as(_text, default="")
    """``regular`` or ``slowest``."""
    names: tuple[str, ...] = _as(_list(_text))
    rows: tuple[Span, ...] = _as(_list(_span))
    dropped: int = _as(_count, default=0)
    """Short spans that were left out, because there were too many."""

    def __post_init__(self) -> None:
        if any(not 0 <= row.unit < len(self.names) for row in self.rows):
            raise BadLine


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """A unit's work and traffic, over the whole process so far."""

    name: str = _as(_text)
    forward_seconds: float = _as(_number, default=0.0)
    fetch_bytes: int = _as(_count, default=0)
    fetches: int = _as(_count, default=0)
    gather_bytes: int = _as(_count, default=0)
    wait_seconds: float = _as(_number, default=0.0)
    tier: dict[str, str] = field(metadata=_reads(_table(_text)), default_factory=dict[str, str])
    """By kind: ``{"parameters": "host", "gradients": "disk", "optimizer": "disk"}``."""
    activations: str = _as(_text, default="keep")
    activation_bytes: int = _as(_count, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsLine:
    """All units."""

    KIND: ClassVar[str] = "units"
    t: float = _as(_number)
    step: int = _as(_count)
    rows: tuple[UnitRow, ...] = _as(_list(_record(UnitRow)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkLine:
    """Something worth a mark on the time axis; ``what`` is one of ``MARKS``."""

    KIND: ClassVar[str] = "mark"
    t: float = _as(_number)
    step: int = _as(_count)
    what: str = _as(_text)
    text: str = _as(_text, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLine:
    """The process ended in good order, or raised. One that was killed leaves none."""

    KIND: ClassVar[str] = "end"
    t: float = _as(_number)
    why: str = _as(_text, default="done")
    text: str = _as(_text, default="")


Line: TypeAlias = RunLine | PlanLine | StepLine | MemoryLine | SpansLine | UnitsLine | MarkLine | EndLine
_KINDS: dict[str, Any] = {c.KIND: c for c in (RunLine, PlanLine, StepLine, MemoryLine, SpansLine, UnitsLine, MarkLine, EndLine)}


# -- to and from bytes ------------------------------------------------------------------------------------------------


def encode(line: Line) -> bytes:
    """One line of a file. Numbers that JSON has no word for become ``null``."""
    return encode_table({"kind": line.KIND, **as_table(line)})


def encode_table(table: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(table, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(table), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def as_table(line: Any) -> dict[str, Any]:
    """A line's fields; not ``dataclasses.asdict``, which copies everything and takes ten times as long."""
    table = {f.name: getattr(line, f.name) for f in dataclasses.fields(line)}
    for key, value in table.items():
        if key == "arenas":
            table[key] = {name: as_table(arena) for name, arena in value.items()}
        elif isinstance(value, tuple) and value and not isinstance(value[0], str):
            table[key] = [_row(item) for item in value]
        elif isinstance(value, ProcessMemory):
            table[key] = as_table(value)
    return table


def _row(item: Any) -> Any:
    if isinstance(item, Span):
        return [round(item.begin, 6), round(item.end, 6), item.lane, item.verb, item.unit, item.bytes]
    return as_table(item)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items: Iterable[Any] = value
        return [_finite(item) for item in items]
    return value


def decode(data: bytes) -> Line | None:
    """The line that ``data`` is, or None if it is of a kind that is not known here. Raises ``BadLine``."""
    if len(data) > MAX_LINE_BYTES:
        raise BadLine
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadLine from error
    if not isinstance(table, dict) or not isinstance(kind := table.get("kind"), str):
        raise BadLine
    cls = _KINDS.get(kind)
    return None if cls is None else _filled(cls, table)
