"""The public functions. ``shard`` is five phases, one line each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lowtide.comm.agree import agree
from lowtide.comm.group import Group
from lowtide.config import Activations, Comm, Config, Partition, Precision, UnitChoice, Update, build_config, parse_bytes
from lowtide.errors import NO_WHOLE_COMPILE, ArgumentError, DoesNotFit, Mismatch, Refused
from lowtide.planning import question
from lowtide.planning.plan import Plan
from lowtide.planning.request import Request
from lowtide.reporting.observing import optimizer_facts
from lowtide.reporting.recorder import record
from lowtide.runtime import clipping, hooks
from lowtide.runtime import gathered as _gathered
from lowtide.runtime import module as sharded_module
from lowtide.runtime import optimizer as sharded_optimizer
from lowtide.runtime.engine import Engine
from lowtide.runtime.evicted import owner_of
from lowtide.runtime.grads import refuse_unreduced
from lowtide.runtime.module import ShardedModule
from lowtide.runtime.probe import large_states, needs_closure, why_not_elementwise
from lowtide.runtime.unit import contiguous_stride, dense_stride
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec
from lowtide.spec.units import UnitSpec, find_units, is_scripted
from lowtide.spec.weights import refuse_lost_buffers
from lowtide.torch_internals import is_compiled_whole
from lowtide.version import __version__
from lowtide.wrapped import refuse_wrapped_model, refuse_wrapped_optimizer

if TYPE_CHECKING:
    from lowtide.reporting.report import Report

M = TypeVar("M", bound=nn.Module)
OptimizerOrNone = TypeVar("OptimizerOrNone", bound=Optimizer | None)


def shard(
    model: M,
    optimizer: OptimizerOrNone = None,  # pyright: ignore[reportArgumentType]
    *,
    memory: int | float | str | None = None,
    device_memory: int | float | str | None = None,
    disk: Any = None,
    stage: int | str = "auto",
    units: UnitChoice = None,
    partition: str | Partition = "element",
    weights: Any = None,
    group: ProcessGroup | DeviceMesh | None = None,
    precision: str | Precision | None = None,
    activations: str | Activations = "auto",
    update: str | Update = "step",
    comm: Comm | None = None,
    adapt: str = "placement",
    run: str | os.PathLike[str] | None = None,
) -> tuple[M, OptimizerOrNone]:
    """Shard ``model`` and ``optimizer`` in place over the ranks of ``group``; the training loop stays as it was.

    Both come back as the same objects. ``stage``: 0 nothing sharded, 1 optimizer states, 2 + gradients, 3 + parameters;
    "auto" is 3 on several ranks and 0 on one. ``units`` names modules whose parameters travel together (default: repeated
    blocks). ``group``: a process group or a DeviceMesh, also (replicate x shard); default: all ranks, or none needed.
    ``adapt="throughput"`` lets it change results for speed while it runs: gradients may cross a slow network as bf16.
    Called again with the same model and an optimizer, it makes that optimizer the model's.
    """
    if isinstance(model, ShardedModule):
        return _attach_later(model, optimizer)
    _refuse_model(model, from_file=weights is not None)
    if optimizer is not None:
        refuse_wrapped_optimizer(optimizer)
    engine: Engine | None = None
    joined = _join(group, comm or Comm())
    try:
        channels = joined.channel("gather"), joined.channel("reduce")  # first: a rank that is refused below can then be heard
        config = build_config(
            world_size=joined.shard.size,
            stage=stage,
            partition=partition,
            precision=precision,
            activations=activations,
            update=update,
            comm=comm,
            memory=memory,
            device_memory=device_memory,
            disk=disk,
            weights=weights,
            adapt=adapt,
            run=run,
        )
        specs = find_units(model, units, bucket_bytes=config.comm.bucket_bytes)
        whole = optimizer is not None and _needs_whole_parameters(optimizer, specs, config)
        engine = Engine(model, specs, config, joined, channels, whole_parameters=whole)
        agree(engine.gathers, _facts(model, optimizer, specs, config))
        if optimizer is not None:
            sharded_optimizer.refuse(optimizer, engine)
        engine.start(optimizer)
        if config.run is not None:
            engine.recorder = record(engine, config.run, **optimizer_facts(optimizer))
    except BaseException as error:
        _give_up(joined, engine, error)
        if isinstance(error, DoesNotFit) and run is not None and joined.rank == 0:
            _leave_refusal(run, error)
        raise
    hooks.install(engine)
    sharded_module.make_sharded(model, engine)
    if optimizer is not None:
        sharded_optimizer.make_sharded(optimizer, engine)
    return model, optimizer


def _give_up(joined: Group, engine: Engine | None, error: BaseException) -> None:
    """``shard`` ends with ``error`` on this rank: the others hear of it, and nothing stays open."""
    if not isinstance(error, Mismatch):  # that one is raised on every rank anyway
        joined.watch.report(error)  # other ranks must not wait for this one
    if engine is not None and engine.store is not None:
        engine.store.close()
    joined.close()


def _leave_refusal(run: str | os.PathLike[str], error: DoesNotFit) -> None:
    from lowtide.reporting.report import leave_refusal  # pages are not made in a run that goes well

    leave_refusal(Path(run), error)


def _join(group: ProcessGroup | DeviceMesh | None, comm: Comm) -> Group:
    return Group.join(
        group,
        deadline=comm.deadline,
        first_deadline=max(comm.deadline, comm.first_deadline),
        transport=comm.transport,
        codec=comm.codec,
    )


def plan(
    model: nn.Module | ModelSpec | str | float,
    optimizer: Optimizer | str | None = None,
    *,
    batch: Any = None,
    memory: int | float | str | None = None,
    device_memory: int | float | str | None = None,
    disk: Any = None,
    world_size: int = 1,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    stage: int | str = "auto",
    units: UnitChoice = None,
    precision: str | Precision | None = None,
    activations: str | Activations = "auto",
    update: str | Update = "step",
    objective: str = "time",
    accumulate: int = 1,
) -> Plan:
    """What would live where, the peak of every tier and the seconds of a step. Nothing is run and nothing changes.

    ``model``: a module, with ``batch`` as it is called (without one only bytes are planned); the name of a published
    architecture, with ``batch`` a number or (batch, sequence); a number of parameters (``7.5e9``, ``"7.5B"``); a ModelSpec.
    ``optimizer``: one, or its name; default: AdamW. ``hardware``: this machine, ``"h100-80g"``, a file. ``disk``: as in
    ``shard``, or a size. :class:`~lowtide.errors.DoesNotFit` says what is short, and what would help.
    """
    machine = question.find_machine(hardware, disk)
    own = question.dtype_of(model) if isinstance(model, nn.Module) else getattr(model, "dtype", "fp32")
    word = question.precision_word(precision, own)
    device_bytes = parse_bytes("device_memory", device_memory)
    dtype = question.compute_dtype(word, machine.hardware)
    if isinstance(model, nn.Module):
        if isinstance(model, ShardedModule):
            raise ArgumentError("this model is sharded already; make the plan before lowtide.shard.")
        on = "cpu" if machine.hardware.compute.memory_bytes is None else "cuda"
        spec = question.module_spec(model, batch, units=units, dtype=dtype, device=on)
    else:
        spec = model if isinstance(model, ModelSpec) else question.named_spec(model, batch, dtype)
    request = question.make_request(
        machine,
        Request(
            world_size=world_size,
            stage=stage,
            precision=word,
            optimizer=_optimizer_word(optimizer),
            memory_bytes=parse_bytes("memory", memory),
            device_memory_bytes=device_bytes,
            update=update.when if isinstance(update, Update) else update,
            accumulate=accumulate,
            objective=objective,
        ),
        activations,
    )
    return question.plan_or_ways_out(spec, question.with_device_memory(machine.hardware, device_bytes), request)


def report(model_or_run: nn.Module | str | os.PathLike[str]) -> Report:
    """What happened: memory of every tier over time against the plan, one step in detail, what limited the run.
    ``.save("report.html")`` makes one page of it.

    Takes a model that was sharded with ``run=``, or the folder of any run, also of one that has ended.
    """
    from lowtide.reporting.report import open_report

    if not isinstance(model_or_run, nn.Module):
        return open_report(model_or_run)
    folder = engine_of(model_or_run).config.run
    if folder is None:
        raise ArgumentError("this model keeps no record: call lowtide.shard(..., run='a/folder') and report afterwards.")
    return open_report(folder)


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; returns the norm before.

    On one rank, and for a plain model, norm and result are those of ``torch.nn.utils.clip_grad_norm_``, bit for bit. On
    several ranks they are the same bits at every stage, tier and cut; torch's own function adds in another order.
    """
    engine, params = _engine_and_params(model)
    if engine is None:
        return clipping.clip_norm_of_plain(params, max_norm, float(norm_type), error_if_nonfinite=error_if_nonfinite)
    with engine.calling("lowtide.clip_grad_norm_()"):
        _refuse_used_up(engine)
        refuse_unreduced(engine.grads.by_param.values())
        return clipping.clip_norm(engine, max_norm, float(norm_type), error_if_nonfinite=error_if_nonfinite)


def clip_grad_value_(model: nn.Module | Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every element of every gradient to [-clip_value, clip_value]."""
    engine, params = _engine_and_params(model)
    if engine is None:
        clipping.clamp(params, clip_value)
        return
    with engine.calling("lowtide.clip_grad_value_()"):
        _refuse_used_up(engine)
        clipping.clip_value(engine, clip_value)


@contextmanager
def gathered(what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False) -> Generator[None]:
    """Whole parameters of a module (or the given ones) on every rank; with ``write``, rank 0's changes are kept by all.

    Every rank must enter it. A model that is not sharded is left alone, so the same code runs with and without lowtide.
    """
    params = [what] if isinstance(what, nn.Parameter) else list(what.parameters() if isinstance(what, nn.Module) else what)
    owners = {id(e): e for p in params if (e := _engine_of(p)) is not None}
    if len(owners) > 1:
        raise ArgumentError("gathered() was given parameters of more than one sharded model; open one gathered() for each.")
    if not owners:
        yield
        return
    engine = next(iter(owners.values()))
    with _gathered.gathered(engine, [p for p in params if p in engine.unit_of], write=write):
        yield


def set_memory(model: nn.Module, memory: int | float | str) -> None:
    """From the next step on, the job may use ``memory`` bytes of each host. Call it between steps, on every rank.

    What no longer fits moves to the disk at once, and comes back when the number grows; no bit changes. If the model cannot be
    trained in so little, an error says how much it needs, and the number that was in force stays.
    """
    engine = engine_of(model)
    nbytes = parse_bytes("memory", memory)
    if nbytes is None:
        raise ArgumentError("memory is None; give a number of bytes, such as '2GiB'.")
    if engine.budget.limit is None:
        raise Refused("this model was sharded without a memory number; give memory= to lowtide.shard first.")
    with engine.calling("lowtide.set_memory()"):
        engine.announcer.refuse_alone("lowtide.set_memory()")
        engine.set_memory(nbytes)


def sharded_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of ``model``'s state, flat, by plain name: no other rank is needed, nothing whole is made."""
    return sharded_module.sharded_state_dict(engine_of(model))


def load_sharded_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load what ``sharded_state_dict`` gave, on as many ranks and with the same partition. Every rank must call it."""
    sharded_module.load_sharded_state_dict(engine_of(model), state_dict)


def engine_of(model: nn.Module) -> Engine:
    """The engine behind a sharded model, for reports and tests."""
    if not isinstance(model, ShardedModule):
        raise ArgumentError(f"this {type(model).__name__} is not sharded; call lowtide.shard first.")
    return model.lowtide_engine


# -- phases of shard --------------------------------------------------------------------------------------------------


def _attach_later(model: M, optimizer: OptimizerOrNone) -> tuple[M, OptimizerOrNone]:
    if optimizer is None or isinstance(optimizer, sharded_optimizer.ShardedOptimizer):
        raise ArgumentError("this model is sharded already; calling lowtide.shard again only makes sense with a new optimizer.")
    refuse_wrapped_optimizer(optimizer)
    engine = engine_of(model)
    sharded_optimizer.refuse(optimizer, engine)
    engine.reserve_states(optimizer)
    sharded_optimizer.make_sharded(optimizer, engine)
    return model, optimizer


_INSTEAD_OF = {
    "UninitializedParameter": "run one forward pass first",
    "DTensor": "it belongs to another parallelism (tensor parallel, FSDP2), and lowtide shards plain parameters only: leave "
    "that out, and call lowtide.shard on the plain model",
}
"""What to do about parameters of these classes."""


def _refuse_model(model: nn.Module, *, from_file: bool) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"model is a {type(model).__name__}; lowtide.shard takes a torch.nn.Module.")
    params = dict(model.named_parameters())
    if not params:
        raise ArgumentError(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    refuse_wrapped_model(model)
    odd = [n for n, p in params.items() if type(p) is not nn.Parameter]
    if odd:
        kind = type(params[odd[0]]).__name__
        way = _INSTEAD_OF.get(kind, "shard the model before other libraries convert it")
        raise Refused(f"parameter {odd[0]!r} is a {kind}, not a plain torch.nn.Parameter; {way}.")
    for name, param in params.items():
        if param.layout is not torch.strided:
            raise Refused(
                f"parameter {name!r} is laid out as {param.layout}: its elements do not lie in one piece of memory that could "
                f"be cut or moved. Make it dense (param.to_dense()) before lowtide.shard."
            )
    devices = {str(p.device) for p in params.values()}
    if from_file and devices == {"meta"}:
        refuse_lost_buffers(model)
    elif len(devices) > 1 or "meta" in devices:
        way = "build it under `with lowtide.deferred():`, or give weights=" if "meta" in devices else "move it to one device"
        raise Refused(f"the model's parameters are on {', '.join(sorted(devices))}; {way}.")
    _refuse_shared_memory(params)
    if is_scripted(model):
        raise Refused(
            "TorchScript runs this model as a whole, so that its parameters cannot come and go. "
            "Script its blocks, not the model."
        )
    if is_compiled_whole(model):
        raise Refused(NO_WHOLE_COMPILE)
    if any(isinstance(m, ShardedModule) for m in model.modules()):
        raise Refused("a part of this model is sharded already; shard the whole model once.")


def _refuse_shared_memory(params: dict[str, nn.Parameter]) -> None:
    """Two parameters in one memory would be two after sharding; one parameter under two names stays one."""
    there = {n: p for n, p in params.items() if p.numel() and not p.is_meta}
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n) for n, p in there.items())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise Refused(
                f"parameters {first!r} and {second!r} share memory but are two parameters; sharding would untie them. "
                f"Tie them by assigning the same nn.Parameter to both modules."
            )


def _needs_whole_parameters(optimizer: Optimizer, specs: list[UnitSpec], config: Config) -> bool:
    """Whether an update by chunks must not cut inside parameters, because the optimizer looks at whole matrices."""
    if not (config.disk or config.update.in_backward) or needs_closure(type(optimizer)):
        return False
    mine = [param for spec in specs for param in spec.params]
    return (
        why_not_elementwise(optimizer, lambda p: config.precision.dtypes(p.dtype).master, in_chunks=True, of=mine) is not None
    )


def _order(param: nn.Parameter) -> str:
    """How the elements lie in memory, if not row by row."""
    stride = dense_stride(param)
    return "" if stride == contiguous_stride(param.shape) else f" strides {stride}"


def _facts(model: nn.Module, optimizer: Optimizer | None, specs: list[UnitSpec], config: Config) -> list[tuple[str, str]]:
    """What must be the same on every rank, in an order in which a difference is easiest to understand."""
    facts = [
        ("lowtide version", __version__),
        ("torch version", torch.__version__),
        ("configuration", repr(replace(config, run=None))),
    ]
    facts += [("model", type(model).__name__)]
    for i, (name, p) in enumerate(model.named_parameters(remove_duplicate=False)):
        frozen = "" if p.requires_grad else " frozen"
        facts.append((f"parameter {i}", f"{name} {str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}{_order(p)}{frozen}"))
    facts += [(f"buffer {i}", f"{n} {b.dtype} {tuple(b.shape)}") for i, (n, b) in enumerate(model.named_buffers())]
    facts += [(f"unit {i}", f"{s.name}: {len(s.params)} parameters") for i, s in enumerate(specs)]
    if optimizer is not None:
        facts.append(("optimizer", type(optimizer).__name__))
        names = {p: n for s in specs for p, n in zip(s.params, s.names, strict=True)}
        for i, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in sorted(group.items()) if isinstance(v, bool | int | float | str | tuple | None)}
            facts.append((f"parameter group {i}", f"{options} for {[names.get(p, '?') for p in group['params']]}"))
    return facts


def _optimizer_word(optimizer: Optimizer | str | None) -> str:
    """How the planner calls an optimizer: by the states that it keeps, which one small step shows."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer or "adamw"
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}; lowtide.plan takes a torch.optim.Optimizer or a name.")
    params = (p for group in optimizer.param_groups for p in group["params"] if p.is_floating_point())
    return question.optimizer_word(max((len(large_states(optimizer, p, p.dtype)) for p in params), default=0))


def _refuse_used_up(engine: Engine) -> None:
    if engine.backward_update is not None:
        raise Refused(
            "update='backward' has used the gradients when backward returns: nothing is left to clip. Use update='step'."
        )


def _engine_of(param: nn.Parameter) -> Engine | None:
    owner = owner_of(param)
    return owner if isinstance(owner, Engine) else None


def _engine_and_params(model: nn.Module | Iterable[nn.Parameter]) -> tuple[Engine | None, list[nn.Parameter]]:
    if isinstance(model, nn.Module):
        if isinstance(model, ShardedModule):
            return model.lowtide_engine, list(model.lowtide_engine.unit_of)
        return None, list(model.parameters())
    params = list(model)
    owners = {id(e): e for p in params if (e := _engine_of(p)) is not None}
    if not owners:
        return None, params
    engine = next(iter(owners.values()))
    if len(owners) > 1 or set(params) != set(engine.unit_of):
        raise ArgumentError("clip takes a model, or all parameters of one sharded model.")
    return engine, params


__all__ = [
    "clip_grad_norm_",
    "clip_grad_value_",
    "engine_of",
    "gathered",
    "load_sharded_state_dict",
    "plan",
    "shard",
    "sharded_state_dict",
]
