"""What a caller may choose, as small frozen policies, and the only place where their words are parsed and checked.

A policy may be given as a string where one word says it all: ``partition="row"`` is ``Partition("row")``.
No torch here before a dtype is asked for: a mistyped size on the command line should not wait for it.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lowtide.errors import ArgumentError
from lowtide.stages import STAGES, Stage

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Our words, and torch's names."""
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*$", re.IGNORECASE)
_FEWEST_WITHOUT_A_UNIT = 1 << 20
"""A size without a unit that is smaller was meant to have one: nothing that is limited here works with less."""

UnitChoice: TypeAlias = (
    "str | type[torch.nn.Module] | Iterable[str | type[torch.nn.Module]] | Callable[[torch.nn.Module], bool] | None"
)
"""What ``units=`` takes: names (``*`` matches within one level), module classes, or a function that says yes to a module."""


def _one_of(what: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"{what} is {value!r}; allowed: {', '.join(repr(a) for a in allowed)}.{hint}")


@dataclass(frozen=True, slots=True)
class Partition:
    """Where a unit may be cut between ranks.

    ``element``: anywhere (at multiples of 64 elements of a parameter); ``row``: between rows of dimension 0;
    ``tensor``: never inside a parameter, which optimizers that look at whole matrices need.
    ``shares`` gives ranks unequal parts, in any unit of measure; the default is equal parts.
    """

    by: str = "element"
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _one_of("partition", self.by, ("element", "row", "tensor"))
        if self.shares is not None and (not self.shares or min(self.shares) < 0 or sum(self.shares) <= 0):
            raise ArgumentError(f"Partition.shares is {self.shares!r}; give one number >= 0 per rank, not all zero.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtype of every kind of bytes; ``None`` keeps what the model has.

    ``param``: what forward and backward compute with. ``master``: what the optimizer updates (fp32 if ``param`` is 16-bit).
    ``reduce``: what gradients are added in between ranks. ``gradient``: what gradient shards are kept in.
    ``moments``: what the optimizer's states are kept in between steps.
    ``loss_scale``: a number, or "dynamic" (the default for fp16): gradients are scaled in backward and unscaled when reduced.
    Every gradient must then enter through what the model returns; a loss made of parameters or of tensors kept aside inside
    the model is not scaled, use ``torch.amp.GradScaler`` for such losses.
    """

    param: str | None = None
    master: str | None = None
    gradient: str | None = None
    reduce: str | None = None
    moments: str | None = None
    loss_scale: float | str | None = None

    def __post_init__(self) -> None:
        for kind in ("param", "master", "gradient", "reduce", "moments"):
            value = getattr(self, kind)
            if value is not None:
                _one_of(f"Precision.{kind}", value, tuple(_DTYPES))
        scale = self.loss_scale
        if isinstance(scale, str):
            _one_of("Precision.loss_scale", scale, ("dynamic",))
        elif scale is not None and not scale > 0:
            raise ArgumentError(f"Precision.loss_scale is {scale!r}; give a number > 0 or 'dynamic'.")

    def dtypes(self, own: torch.dtype) -> KindDtypes:
        """The dtype of each kind of bytes for a parameter that was built as ``own``."""
        if not own.is_floating_point:
            return KindDtypes(own, own, own, own, own)
        param = _dtype(self.param) or own
        low = self.param is not None and param.itemsize == 2
        master = _dtype(self.master) or (_dtype("fp32") if low else None) or param
        reduce = _dtype(self.reduce) or master
        gradient = _dtype(self.gradient) or reduce
        moments = _dtype(self.moments) or master
        return KindDtypes(param, master, gradient, reduce, moments)

    @property
    def compute(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; ``None`` to leave them."""
        return _dtype(self.param)

    @property
    def scale(self) -> float | str | None:
        """The loss scale in force."""
        return self.loss_scale if self.loss_scale is not None else ("dynamic" if self.param == "fp16" else None)


def _dtype(word: str | None) -> torch.dtype | None:
    if word is None:
        return None
    import torch

    return getattr(torch, _DTYPES[word])


@dataclass(frozen=True, slots=True)
class KindDtypes:
    """One dtype per kind of bytes."""

    param: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype
    moments: torch.dtype


UPDATES = ("step", "backward")
ACTIVATION_POLICIES = ("auto", "keep", "recompute", "host", "disk")


@dataclass(frozen=True, slots=True)
class Activations:
    """What happens to tensors that autograd saves between a unit's forward and its backward.

    ``keep`` them as plain PyTorch does, ``recompute`` them from the unit's input, or move them to the ``host`` or the ``disk``.
    ``auto`` keeps what fits in ``memory``, recomputes the rest, and moves to the disk what does not fit even so. ``units``
    overrides the policy for units whose names match a pattern: ``(("blocks.0*", "keep"),)``; the first match counts.
    """

    policy: str = "auto"
    units: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _one_of("activations", self.policy, ACTIVATION_POLICIES)
        for pattern, policy in self.units:
            _one_of(f"activations of {pattern!r}", policy, ACTIVATION_POLICIES)

    def of(self, unit: str) -> str:
        """The policy for the unit of this name."""
        return next((policy for pattern, policy in self.units if fnmatch.fnmatchcase(unit, pattern)), self.policy)

    @property
    def needs_disk(self) -> bool:
        return "disk" in (self.policy, *(policy for _, policy in self.units))


@dataclass(frozen=True, slots=True)
class Update:
    """When the optimizer runs. ``step``: in ``optimizer.step()``, so that a caller may clip, scale or skip before it.
    ``backward``: for each unit as soon as its gradients are there, so that no gradient outlives its unit.

    ``chunk_bytes``: how many bytes of each kind an update from the disk handles at once.
    """

    when: str = "step"
    chunk_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        _one_of("update", self.when, UPDATES)
        if self.chunk_bytes < 4096:
            raise ArgumentError(f"Update.chunk_bytes is {self.chunk_bytes}; give at least 4096.")

    @property
    def in_backward(self) -> bool:
        return self.when == "backward"


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A folder for what does not fit in memory, and how many bytes of it may be used."""

    path: str
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """How ranks talk. ``deadline``: seconds that one exchange may take before every rank gives up with a report;
    ``first_deadline``: the same before the first step is over, and for checkpoints.
    ``prefetch``: how many units are gathered ahead of compute. ``bucket_bytes``: units below this size travel together.

    ``transport``: ``auto`` is shared memory between ranks on a host, where it can be had, and torch.distributed between hosts;
    ``shared`` is the same, and an error where it cannot be had; ``torch`` is torch.distributed everywhere. None changes a bit.
    ``codec``: how gradients cross a network; ``exact``, or ``bf16``, which halves the bytes and changes results.
    """

    deadline: float = 120.0
    first_deadline: float = 600.0
    prefetch: int = 1
    bucket_bytes: int = 1 << 20
    transport: str = "auto"
    codec: str = "exact"

    def __post_init__(self) -> None:
        _one_of("Comm.transport", self.transport, ("auto", "shared", "torch"))
        _one_of("Comm.codec", self.codec, ("exact", "bf16"))
        for name in ("deadline", "first_deadline"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"Comm.{name} is {getattr(self, name)!r}; give seconds > 0.")
        if self.prefetch < 0 or self.bucket_bytes < 0:
            raise ArgumentError("Comm.prefetch and Comm.bucket_bytes must be >= 0.")


ADAPTATIONS = ("placement", "throughput")
"""What may change by itself while a model trains. ``placement``: where bytes live, which changes no bit. ``throughput``: also
how gradients cross a network, which does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a caller chose, checked. Frozen: nothing changes it after ``shard`` has returned."""

    stage: Stage
    partition: Partition
    precision: Precision
    activations: Activations
    update: Update
    comm: Comm
    memory_bytes: int | None
    device_memory_bytes: int | None
    disk: tuple[DiskFolder, ...]
    weights: str | None
    adapt: str
    run: str | None


def parse_bytes(what: str, value: int | float | str | None) -> int | None:
    """``"4GiB"``, ``"500MB"``, ``4e9`` or ``None`` → bytes. GiB is 2**30, GB is 10**9, a bare G is 2**30.

    ``what``: the argument as its caller wrote it, ``memory`` or ``--memory``.
    """
    if value is None:
        return None
    amount = _parse_amount(what, value) if isinstance(value, str) else float(value)
    if not amount >= 1:
        raise ArgumentError(f"{what} is {value!r}; give more than 0 bytes.")
    if isinstance(value, str) and value.strip().isdecimal() and amount < _FEWEST_WITHOUT_A_UNIT:
        raise ArgumentError(f"{what} is {value!r}, which are bytes; write the unit, such as '{value.strip()}GiB'.")
    return int(amount)


def _parse_amount(what: str, text: str) -> float:
    match = _BYTES.match(text)
    if match is None:
        raise ArgumentError(f"{what} is {text!r}; write a number and a unit, such as '4GiB', '500MB' or '0.5T'.")
    number, prefix, binary, suffix = match.groups()
    base = 1000.0 if (prefix and suffix and not binary) else 1024.0
    return float(number) * base ** " kmgt".index(prefix.lower() or " ")


def parse_disk(value: Any, *, what: str = "disk") -> tuple[DiskFolder, ...]:
    """``"/a"``, ``"/a:100GiB"``, a path, a pair of a folder and a size, or a list of these → folders.

    A pair may be a list, too: YAML, and so Hydra, knows no tuples.
    """
    if value is None:
        return ()
    entries = _items(value)
    if entries is None or (len(entries) == 2 and _is_path(entries[0]) and _is_size(entries[1])):
        return (_parse_folder(what, value),)
    return tuple(_parse_folder(what, entry) for entry in entries)


def _items(value: Any) -> list[Any] | None:
    """What a list, or anything like one, holds."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return list(cast("Sequence[Any]", value)) if is_list else None


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_size(value: Any) -> bool:
    """Whether it can be the second part of a pair; a folder that has such a name is a folder."""
    if isinstance(value, str):
        return _BYTES.match(value) is not None and not os.path.isdir(value)
    return value is None or isinstance(value, int | float)


def _parse_folder(what: str, entry: Any) -> DiskFolder:
    pair = _items(entry)
    path, limit = (entry, None) if pair is None or len(pair) != 2 else pair
    if not _is_path(path):
        raise ArgumentError(f"{what} is {entry!r}; give a folder, or a list of (folder, size) pairs.")
    path = os.fspath(path)
    if limit is None and not os.path.isdir(path) and ":" in path:
        folder, _, size = path.rpartition(":")
        if _BYTES.match(size) or os.path.isdir(folder):
            path, limit = folder, size
    if not os.path.isdir(path):
        raise ArgumentError(f"{what} is {path!r}, which is not a folder; make it first, or name another.")
    return DiskFolder(path, parse_bytes(f"the size of {what}", limit))


def parse_stage(value: int | str, world_size: int) -> Stage:
    """``0``–``3`` or ``"auto"``: nothing to shard on one rank, everything on several."""
    if value == "auto":
        return STAGES[3 if world_size > 1 else 0]
    if isinstance(value, bool) or value not in STAGES:
        raise ArgumentError(
            f"stage is {value!r}; allowed: 0 (nothing sharded), 1 (optimizer), 2 (+ gradients), 3 (+ parameters) or 'auto'."
        )
    return STAGES[int(value)]


def build_config(
    *,
    world_size: int,
    stage: int | str,
    partition: str | Partition,
    precision: str | Precision | None,
    activations: str | Activations,
    update: str | Update,
    comm: Comm | None,
    memory: int | float | str | None,
    device_memory: int | float | str | None,
    disk: Any,
    weights: Any,
    adapt: str,
    run: str | os.PathLike[str] | None,
) -> Config:
    """Check every argument of ``shard`` and freeze it."""
    _one_of("adapt", adapt, ADAPTATIONS)
    built = Partition(partition) if isinstance(partition, str) else partition
    if built.shares is not None and len(built.shares) != world_size:
        raise ArgumentError(f"Partition.shares has {len(built.shares)} entries for {world_size} ranks that share the model.")
    folders = parse_disk(disk)
    chosen = Activations(activations) if isinstance(activations, str) else activations
    if chosen.needs_disk and not folders:
        raise ArgumentError("activations='disk' needs a folder: give disk='/a/folder'.")
    when = Update(update) if isinstance(update, str) else update
    parsed = parse_stage(stage, world_size)
    if world_size == 1 and (folders or when.in_backward or device_memory is not None):
        parsed = STAGES[3]  # nothing is cut on one rank; units come and go as at stage 3
    return Config(
        stage=parsed,
        partition=built,
        precision=Precision(param=precision) if isinstance(precision, str) else (precision or Precision()),
        activations=chosen,
        update=when,
        comm=comm or Comm(),
        memory_bytes=parse_bytes("memory", memory),
        device_memory_bytes=parse_bytes("device_memory", device_memory),
        disk=folders,
        weights=os.fspath(weights) if weights is not None else None,
        adapt=adapt,
        run=os.fspath(run) if run is not None else None,
    )
