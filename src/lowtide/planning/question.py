"""From what people write to what the planner takes: models, machines, disks and precisions by name, number or object.

``lowtide.plan`` and ``lowtide plan`` ask through this, so that a word means the same in both.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from typing import cast as typing_cast

from lowtide.config import DiskFolder, parse_bytes, parse_disk
from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.formulas import OPTIMIZERS, PRECISIONS, KindBytes, describe_states, from_precision, states_bytes_per_rank
from lowtide.planning.request import Request
from lowtide.spec.catalogue import load
from lowtide.spec.hardware import Hardware, Wire
from lowtide.spec.model import ModelSpec, UnitFacts
from lowtide.stages import STAGES

if TYPE_CHECKING:
    from torch import nn

    from lowtide.config import Activations, Precision, UnitChoice
    from lowtide.planning.plan import Plan

NOT_MEASURED = "the speeds of this machine are assumed; `lowtide doctor` measures them in half a minute"
DISK_NOT_MEASURED = "the speed of the disk is assumed; `lowtide doctor {folder}` measures it"
ONE_HOST = "nothing is known of a network between hosts; bytes are taken to pass as fast as inside one"


# -- asking ------------------------------------------------------------------------------------------------------------


def make_request(machine: Machine, asked: Request, activations: str | Activations) -> Request:
    """``asked``, with what the machine says about disk and ranks, once its words are known to be right."""
    from lowtide.config import Activations, parse_stage

    parse_stage(asked.stage, asked.world_size)
    policy = Activations(activations) if isinstance(activations, str) else activations
    if policy.units:
        raise ArgumentError(
            "a plan chooses one policy of activations for all units, or by itself; leave Activations.units out."
        )
    if policy.needs_disk and machine.disk_bytes == 0:
        raise ArgumentError("activations='disk' needs a disk: give disk= a folder or a size.")
    on_one = asked.world_size if machine.hardware.between is None else None  # with no network there is only one host
    ranks = asked.ranks_per_host if asked.ranks_per_host is not None else on_one
    return replace(asked, disk_bytes=machine.disk_bytes, ranks_per_host=ranks, activations=policy.policy)


def plan_or_ways_out(model: ModelSpec, hardware: Hardware, request: Request) -> Plan:
    """The best plan; if nothing fits, DoesNotFit that names the changes which would help."""
    from lowtide.planning.planner import make_plan
    from lowtide.planning.ways_out import ways_out

    try:
        return make_plan(model, hardware, request)
    except DoesNotFit as error:
        changes = "; ".join(way.change for way in ways_out(model, hardware, request))
        fix = f"It would fit with: {changes}." if changes else "No single change makes it fit."
        raise DoesNotFit(error.tier, error.needed_bytes, error.budget_bytes, fix) from error


# -- machines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a plan is for."""

    hardware: Hardware
    disk_bytes: int | None
    """As in a request: ``None`` for all there is, 0 for no disk."""
    notes: tuple[str, ...] = ()
    """What the reader of a plan should know about the figures."""


def find_machine(hardware: str | os.PathLike[str] | Hardware | None, disk: Any = None) -> Machine:
    """``hardware``: this machine (``None`` or ``"this"``), a name of the catalogue, a file, or a description.

    ``disk``: ``None`` for none; a folder, or folders as ``shard`` takes them, of this machine; a size; ``"all"`` there is.
    """
    if hardware is None or hardware == "this":
        return _this_machine(disk)
    described = hardware if isinstance(hardware, Hardware) else load(os.fspath(hardware))
    if disk is None:
        return Machine(hardware=described, disk_bytes=0)
    if described.disk is None:
        raise ArgumentError(f"disk is {disk!r}, but the description of {described.name!r} has no disk.")
    if disk == "all":
        return Machine(hardware=described, disk_bytes=None)
    size = _as_size(disk)
    if size is None:
        raise ArgumentError(f"disk is {disk!r}; for another machine than this one give a size, such as '1TB', or 'all'.")
    return Machine(hardware=described, disk_bytes=size)


def with_device_memory(hardware: Hardware, nbytes: int | None) -> Hardware:
    """A machine without an accelerator gets an emulated one, as ``shard(device_memory=)`` makes it."""
    if nbytes is None or hardware.compute.memory_bytes is not None:
        return hardware
    link = Wire(bandwidth=hardware.host_bandwidth, latency=hardware.compute.op_seconds)
    emulated = replace(hardware.compute, memory_bytes=nbytes)
    return replace(hardware, name=f"{hardware.name}, emulated device", compute=emulated, link=link)


def _this_machine(disk: Any) -> Machine:
    limit, folders = folders_of(disk)
    from lowtide.spec.probe_assumed import assumed_machine  # imports torch: not before the words are known to be right
    from lowtide.spec.probe_cache import cached_disk, cached_machine

    folder = folders[0].path if folders else None
    measured = cached_machine(folder)
    found = measured or assumed_machine(folder)
    notes = () if measured is not None else (NOT_MEASURED,)
    if folder is None or found.disk is None:
        return Machine(hardware=found, disk_bytes=0, notes=notes)
    if measured is not None and cached_disk(folder) is None:
        notes = (DISK_NOT_MEASURED.format(folder=folder),)
    free = found.disk.free_bytes
    given = [f.limit for f in folders] if limit is None else [limit]
    room = None if given == [None] else sum(free if n is None else min(n, free) for n in given)
    return Machine(hardware=found, disk_bytes=room, notes=notes)


def folders_of(disk: Any) -> tuple[int | None, tuple[DiskFolder, ...]]:
    """What ``disk`` says of this machine: how much of it, and in which folders."""
    limit = _as_size(disk)
    return limit, parse_disk("." if disk == "all" or limit is not None else disk)


def _as_size(value: Any) -> int | None:
    """Bytes, if ``value`` is a size; a folder of that name comes first."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (isinstance(value, str) and os.path.isdir(value)):
        return None
    try:
        return parse_bytes("disk", value)
    except ArgumentError:
        return None


# -- models ------------------------------------------------------------------------------------------------------------


def module_spec(model: nn.Module, batch: Any, *, units: UnitChoice, dtype: str, device: str) -> ModelSpec:
    """The facts of a module that computes ``batch`` in ``dtype``; without a batch only its bytes."""
    from lowtide.config import Comm

    bucket_bytes = Comm().bucket_bytes
    if batch is None:
        return _bytes_only(model, units, bucket_bytes)
    from lowtide.spec.tracing import trace

    traced, converted = _in_dtype(model, batch, dtype)
    name = type(model).__name__
    return trace(traced, converted, units=units, bucket_bytes=bucket_bytes, name=name, device=device)


def named_spec(model: str | float, batch: Any, dtype: str) -> ModelSpec:
    """A published architecture (``batch``: how many, or how many × how long), or a bare count (``batch``: tokens)."""
    from lowtide.spec.architectures import ARCHITECTURES, architecture
    from lowtide.spec.counts import bare_count, parse_count

    sizes = _whole_sizes(batch)
    if isinstance(model, str) and (model in ARCHITECTURES or not model[:1].isdigit()):
        return architecture(model, batch=sizes[0] if sizes else 1, sequence=sizes[1] if len(sizes) > 1 else None, dtype=dtype)
    tokens = sizes[0] * (sizes[1] if len(sizes) > 1 else 1) if sizes else None
    count = parse_count(model if isinstance(model, str) else repr(model))
    return bare_count(count, dtype=dtype, tokens=tokens)


def _whole_sizes(batch: Any) -> tuple[int, ...]:
    if batch is None:
        return ()
    sizes = batch if isinstance(batch, tuple) else (batch,)
    if not 1 <= len(sizes) <= 2 or not all(isinstance(n, int) and n >= 1 for n in sizes):
        raise ArgumentError(f"batch is {batch!r}; for a model known by its name give a number, or (batch, sequence).")
    return sizes


def _bytes_only(model: nn.Module, units: UnitChoice, bucket_bytes: int) -> ModelSpec:
    from lowtide.spec.units import find_units

    facts = tuple(
        UnitFacts(
            name=spec.name,
            numel=sum(p.numel() for p in spec.params),
            trained_numel=sum(p.numel() for p in spec.params if p.requires_grad),
            parameter_bytes=spec.nbytes,
        )
        for spec in find_units(model, units, bucket_bytes=bucket_bytes)
    )
    return ModelSpec(name=type(model).__name__, units=facts, dtype=dtype_of(model), batch="")


def dtype_of(model: nn.Module) -> str:
    """The dtype that most of its parameters have."""
    numbers = Counter[str]()
    for param in model.parameters():
        numbers[str(param.dtype).removeprefix("torch.")] += param.numel()
    word = numbers.most_common(1)[0][0] if numbers else "float32"
    return next((short for short, long in _DTYPES.items() if long == word), word)


def _in_dtype(model: nn.Module, batch: Any, wanted: str) -> tuple[nn.Module, Any]:
    """The model and its batch in ``wanted``. Only shapes and dtypes count, so the copy has no memory."""
    import torch

    if dtype_of(model) == wanted:
        return model, batch
    dtype: torch.dtype = getattr(torch, _DTYPES[wanted])

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta", dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            return {name: cast(inner) for name, inner in typing_cast("dict[Any, Any]", value).items()}
        return type(value)(map(cast, value)) if type(value) in (tuple, list) else value

    stand_ins: dict[int, Any] = {id(b): cast(b) for b in model.buffers()}
    stand_ins |= {id(p): torch.nn.Parameter(cast(p.detach()), p.requires_grad) for p in model.parameters()}
    try:
        return copy.deepcopy(model, stand_ins), cast(batch)
    except Exception as error:  # a module may hold anything
        raise ArgumentError(
            f"the model cannot be copied to look at it in {wanted} ({type(error).__name__}: {error}); "
            f"give one that was built in {wanted}, or leave precision out."
        ) from error


# -- precisions and states ---------------------------------------------------------------------------------------------

_COMPUTE = {"mixed": "bf16", "bf16": "bf16", "fp16": "fp16", "pure-bf16": "bf16"}
"""What a precision computes in, if not in fp32."""
_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Short names, and torch's."""
_OWN = {"fp32": "fp32", "bf16": "pure-bf16", "fp16": "pure-bf16"}
"""The precision of a model that is trained as it was built."""


def compute_dtype(precision: str, hardware: Hardware) -> str:
    """What kernels run in. ``mixed`` takes the 16-bit dtype that the machine is faster in."""
    from_precision(precision)  # refuses what it does not know
    if precision != "mixed":
        return _COMPUTE.get(precision, "fp32")
    return max(("bf16", "fp16"), key=lambda dtype: hardware.compute.flops.get(dtype, 0.0))


def precision_word(precision: str | Precision | None, own: str) -> str:
    """One of the planner's words for what ``shard`` takes; ``own`` is the dtype that the model was built in."""
    if isinstance(precision, str):
        from_precision(precision)
        return precision
    if precision is None:
        if own not in _OWN:
            raise ArgumentError(
                f"the model is in {own}, which cannot be planned; give precision= one of {', '.join(PRECISIONS)}."
            )
        return _OWN[own]
    import torch

    dtypes = precision.dtypes(getattr(torch, _DTYPES.get(own, own)))
    masters = 0 if dtypes.master is dtypes.param else dtypes.master.itemsize
    wanted = KindBytes(
        parameters=dtypes.param.itemsize,
        gradients=dtypes.gradient.itemsize,
        masters=masters,
        moment=dtypes.moments.itemsize,
        reduction=dtypes.reduce.itemsize,
    )
    for word, kinds in PRECISIONS.items():
        if kinds == wanted and _COMPUTE.get(word, "fp32") in (str(precision.param), own):
            return word
    raise ArgumentError(f"{precision} cannot be planned; the nearest of {', '.join(PRECISIONS)} can.")


def optimizer_word(states_per_element: int) -> str:
    """The planner's word for an optimizer that keeps so many numbers per element."""
    for word, number in OPTIMIZERS.items():
        if number == states_per_element:
            return word
    known = ", ".join(f"{n} ({word})" for word, n in OPTIMIZERS.items())
    raise ArgumentError(f"the optimizer keeps {states_per_element} states per element; planned can be {known}.")


def states_facts(model: ModelSpec, request: Request, stage: int | None = None) -> dict[str, int | str]:
    """The states as the ZeRO paper counts them, whole bytes. ``stage``: what a plan has chosen, if there is one."""
    asked = request.stage if stage is None else stage
    number = (3 if request.world_size > 1 else 0) if asked == "auto" else int(asked)
    facts = describe_states(model.numel, request.world_size, number, request.precision, request.optimizer)
    if model.trained_numel == model.numel:
        return facts
    kinds = from_precision(request.precision, request.optimizer)
    trained = model.trained_numel

    def rounded(ranks: int) -> dict[str, int]:
        kept = states_bytes_per_rank(model.numel, STAGES[number], ranks, kinds, trained_numel=trained)
        return {name: -int(-getattr(kept, name) // 1) for name in ("parameters", "gradients", "optimizer")}

    parts = {f"{name}_bytes_per_rank": size for name, size in rounded(request.world_size).items()}
    return facts | parts | {"states_bytes_per_rank": sum(parts.values()), "states_bytes": sum(rounded(1).values())}


ModelFor = Callable[[int], ModelSpec]
"""The model for a batch of so many samples."""
