"""What ``lowtide plan`` is asked, put together from its flags: a model, a machine, and what is wanted of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide.config import Activations, parse_bytes, parse_stage
from lowtide.errors import ArgumentError, Error
from lowtide.job.interrupt import import_torch
from lowtide.job.options import Options
from lowtide.planning.request import VARIABLE

if TYPE_CHECKING:
    from lowtide.planning.question import Machine, ModelFor
    from lowtide.planning.request import Request
    from lowtide.spec.hardware import Hardware
    from lowtide.spec.model import ModelSpec

DEFAULT_BATCH = 2
_RANGE = re.compile(r"^([a-z-]+)=(.+?)\.\.(.+)$")
_ONE_SIZE = re.compile(r"^([a-z-]+)=([^.=]+(?:\.\d+)?[^.=]*)$")
_LETTERS = re.compile(r"[a-zA-Z]+$")
_CLUSTER_KEYS = ("nodes", "gpus", "hardware", "network")
_NETWORK_LATENCY = 50e-6
_SUBJECTS = ("--preset", "--model", "--arch", "--params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What to plan, as it was typed."""

    preset: str | None
    model: str | None
    arch: str | None
    params: str | None
    batch: str | None
    sequence: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to plan it, as it was typed."""

    hardware: str | None
    world_size: int | None
    cluster: str | None
    memory: str | None
    rank_memory: str | None
    device_memory: str | None
    disk: str | None

    @property
    def is_given(self) -> bool:
        """Whether a machine or a limit was named: only then is it wrong that something does not fit."""
        return any((self.hardware, self.cluster, self.memory, self.rank_memory, self.device_memory, self.disk))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a planner needs."""

    name: str
    model_for: ModelFor
    batch: int | None
    """``None``: the best is to be found."""
    hardware: Hardware
    request: Request
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    nodes: int
    ranks_per_node: int | None
    hardware: str | None
    network: int | None


def ask(what: Subject, where: Place, how: Request) -> Question:
    """The question that flags ask; every mistake in them is an ArgumentError. ``how``: what of a request has no place."""
    _one_subject(what)
    batch = _batch_size(what)
    cluster = None if where.cluster is None else parse_cluster(where.cluster)
    _refuse_wrong_words(what, where, how, cluster)
    import_torch()
    from lowtide.planning.question import compute_dtype, make_request, with_device_memory

    machine = _machine(where, cluster)
    hardware = machine.hardware
    dtype = compute_dtype(how.precision, hardware)
    request = make_request(machine, _request(where, how, cluster, hardware), how.activations)
    name, model_for = _subject(what, dtype, "cpu" if hardware.compute.memory_bytes is None else "cuda")
    return Question(
        name=name,
        model_for=model_for,
        batch=batch,
        hardware=with_device_memory(hardware, request.device_memory_bytes),
        request=request,
        notes=machine.notes,
    )


def _refuse_wrong_words(what: Subject, where: Place, how: Request, cluster: _Cluster | None) -> None:
    """What can be known to be wrong without torch, which takes seconds to import: all that is only looked up."""
    from lowtide.planning.formulas import from_precision
    from lowtide.planning.question import folders_of
    from lowtide.spec.architectures import architecture
    from lowtide.spec.catalogue import load
    from lowtide.spec.counts import parse_count

    for flag, size in (("--memory", where.memory), ("--device-memory", where.device_memory)):
        parse_bytes(flag, size)
    _rank_memories(where)
    parse_stage(_stage(how), 1)
    from_precision(how.precision, how.optimizer)
    Activations(how.activations)
    if where.world_size is not None and where.world_size < 1:
        raise ArgumentError(f"--world-size is {where.world_size}; give a whole number >= 1.")
    if what.params is not None:
        with _about("--params"):
            parse_count(what.params)
    if what.arch is not None:
        with _about("--arch"):
            architecture(what.arch, batch=1, sequence=what.sequence)
    Options(preset=what.preset, model=what.model)
    named = where.hardware if cluster is None or cluster.hardware is None else cluster.hardware
    if named in (None, "this"):
        folders_of(where.disk)
    else:
        with _about("--hardware"):
            load(named)


@contextmanager
def _about(flag: str) -> Generator[None, None, None]:
    """Say which flag it was that an error is about, unless the error says so itself."""
    try:
        yield
    except ArgumentError as error:
        if "--" in str(error):
            raise
        raise ArgumentError(f"{flag}: {error}") from error


def _stage(how: Request) -> int | str:
    stage = str(how.stage)
    return int(stage) if stage.isdecimal() else stage


def parse_range(text: str) -> tuple[str, int, int]:
    """``memory=2..16GiB`` → what varies, and from where to where. A size without a unit has that of the other."""
    match = _RANGE.match(text.strip())
    if match is None or match[1] not in VARIABLE:
        one = _ONE_SIZE.match(text.strip())
        why = f"{one[2]!r} is one size, not a range; " if one is not None and one[1] in VARIABLE else ""
        raise ArgumentError(f"--what-if is {text!r}; {why}write {', '.join(VARIABLE)} and a range, such as memory=2..16GiB.")
    what, low, high = match[1], match[2].strip(), match[3].strip()
    unit = _LETTERS.search(high)
    if unit is not None and not _LETTERS.search(low):
        low += unit[0]
    try:
        smallest, largest = parse_bytes("the size", low), parse_bytes("the size", high)
    except ArgumentError as error:
        raise ArgumentError(f"--what-if is {text!r}: {error}") from error
    if smallest is None or largest is None or smallest >= largest:
        raise ArgumentError(f"--what-if is {text!r}; the first size must be below the second.")
    return what, smallest, largest


def parse_cluster(text: str) -> _Cluster:
    """``nodes=16,gpus=8,hardware=h100-80g``."""
    given: dict[str, str] = {}
    for entry in text.split(","):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if key not in _CLUSTER_KEYS or not equals or not value or key in given:
            raise ArgumentError(
                f"--cluster is {text!r}: {entry.strip()!r} is not understood; write nodes=16,gpus=8 and, if you like, "
                f"hardware=h100-80g and network=25GB (bytes per second between nodes)."
            )
        given[key] = value
    if "nodes" not in given:
        raise ArgumentError(f"--cluster is {text!r}; say how many nodes: nodes=16,gpus=8.")
    return _Cluster(
        nodes=_whole(text, "nodes", given["nodes"]),
        ranks_per_node=_whole(text, "gpus", given["gpus"]) if "gpus" in given else None,
        hardware=given.get("hardware"),
        network=parse_bytes("--cluster network", given.get("network")),
    )


# -- where -------------------------------------------------------------------------------------------------------------


def _machine(where: Place, cluster: _Cluster | None) -> Machine:
    from lowtide.planning.question import ONE_HOST, find_machine
    from lowtide.spec.hardware import Wire

    if cluster is not None and cluster.hardware is not None and where.hardware is not None:
        raise ArgumentError("hardware is given twice, in --cluster and as --hardware; choose one.")
    word = where.hardware if cluster is None or cluster.hardware is None else cluster.hardware
    machine = find_machine(word, where.disk)
    if cluster is None:
        apart = where.rank_memory is not None and machine.hardware.between is None
        return replace(machine, notes=(*machine.notes, ONE_HOST)) if apart else machine
    hardware, notes = machine.hardware, machine.notes
    if cluster.network is not None:
        hardware = replace(hardware, between=Wire(bandwidth=float(cluster.network), latency=_NETWORK_LATENCY))
    if cluster.nodes > 1 and hardware.between is None:
        notes += (f"{ONE_HOST} (--cluster ...,network=1.25GB says how fast)",)
    return replace(machine, hardware=hardware, notes=notes)


def _request(where: Place, how: Request, cluster: _Cluster | None, hardware: Hardware) -> Request:
    memories = _rank_memories(where)
    world_size, ranks = len(memories) or 1 if where.world_size is None else where.world_size, 1 if memories else None
    if cluster is not None:
        ranks = cluster.ranks_per_node or hardware.ranks_per_host
        world_size = cluster.nodes * ranks
        if where.world_size not in (None, world_size):
            raise ArgumentError(f"--world-size is {where.world_size}, but --cluster has {world_size} ranks; leave one out.")
    return replace(
        how,
        stage=_stage(how),
        world_size=world_size,
        ranks_per_host=ranks,
        memory_bytes=parse_bytes("--memory", where.memory),
        rank_memory_bytes=memories,
        device_memory_bytes=parse_bytes("--device-memory", where.device_memory),
    )


def _rank_memories(where: Place) -> tuple[int, ...]:
    if where.rank_memory is None:
        return ()
    if where.memory is not None or where.cluster is not None or where.disk is not None:
        raise ArgumentError(
            "--rank-memory is for ranks on hosts of their own, without a disk; leave out --memory, --cluster and --disk."
        )
    sizes = [parse_bytes("--rank-memory", text.strip()) for text in where.rank_memory.split(",")]
    return tuple(size for size in sizes if size is not None)


def _whole(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentError(f"--cluster is {text!r}; {key} is {value!r}, give a whole number >= 1.")
    return int(value)


# -- what --------------------------------------------------------------------------------------------------------------


def _one_subject(what: Subject) -> None:
    given = [name for name in _SUBJECTS if getattr(what, name.removeprefix("--")) is not None]
    if not given:
        raise ArgumentError(
            "what is to be planned? Give one of --preset gpt-98m, --model package.module:function, --arch llama-2-7b, "
            "--params 7.5e9."
        )
    if len(given) > 1:
        raise ArgumentError(f"{' and '.join(given)} are given; a plan is for one model, choose one.")


def _batch_size(what: Subject) -> int | None:
    """``None`` for ``auto``; 0 where nothing is known of a batch."""
    known_sequence = what.params is None or what.sequence is not None
    if what.sequence is not None and what.sequence < 1:
        raise ArgumentError(f"--sequence is {what.sequence}; give a whole number >= 1.")
    if what.batch is None:
        return (DEFAULT_BATCH if what.params is None else 1) if known_sequence else 0
    if not known_sequence:
        raise ArgumentError("--batch is given, but of --params only a number is known; give --sequence too, or use --arch.")
    if what.batch == "auto":
        if what.params is not None:
            raise ArgumentError("--batch auto needs to know what activations take; of --params only a number is known.")
        return None
    if not what.batch.isdecimal() or int(what.batch) < 1:
        raise ArgumentError(f"--batch is {what.batch!r}; give a whole number >= 1, or auto.")
    return int(what.batch)


def _subject(what: Subject, dtype: str, device: str) -> tuple[str, ModelFor]:
    if what.params is not None:
        from lowtide.spec.counts import bare_count, parse_count

        count, sequence = parse_count(what.params), what.sequence
        return f"{count:,} parameters", lambda batch: bare_count(
            count, dtype=dtype, tokens=batch * sequence if batch and sequence else None
        )
    if what.arch is not None:
        from lowtide.spec.architectures import architecture

        name = what.arch
        return name, lambda batch: architecture(name, batch=batch, sequence=what.sequence, dtype=dtype)
    return what.model or what.preset or "", _traced(what, dtype, device)


def _traced(what: Subject, dtype: str, device: str) -> Callable[[int], ModelSpec]:
    """A model that is built without memory, and looked at for every batch anew."""
    import torch

    from lowtide.job.models import build_model
    from lowtide.job.planned import spec_of

    options = Options(preset=what.preset, model=what.model)
    try:
        with torch.device("meta"):
            built = build_model(options)
    except Error:
        raise
    except Exception as error:  # a caller's function may raise anything
        raise ArgumentError(
            f"--model is {options.model!r}: it cannot be built without memory ({type(error).__name__}: {error}); "
            f"let it make the model from its sizes, without values (no weights, no .item()), or use --params."
        ) from error
    if what.sequence is not None and what.sequence > built.context:
        raise ArgumentError(f"--sequence is {what.sequence}; {options.model_name} looks at {built.context} tokens.")
    length = what.sequence or built.context
    built.model.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))

    def for_batch(batch: int) -> ModelSpec:
        spec = spec_of(built, options.model_name, batch, length=length, device=device)
        return replace(spec, batch=f"{batch}×{length} tokens")

    return for_batch
