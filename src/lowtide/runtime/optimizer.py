"""What ``optimizer`` gains: a step on shards, whole state_dicts, and the check of new parameters.

The optimizer stays the same object, so that schedulers made before or after keep working; its class becomes a subclass of
its own.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import ArgumentError, Refused
from lowtide.runtime.ambient import undisturbed
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine
from lowtide.runtime.module import refuse_in_parts
from lowtide.runtime.optimizer_copy import plain_class
from lowtide.runtime.probe import needs_closure, why_not_apart, why_not_elementwise
from lowtide.runtime.unit import flat_view
from lowtide.torch_internals import asked_by_checkpoint_api

_classes: dict[type[Optimizer], type[Optimizer]] = {}


class ShardedOptimizer(Optimizer):
    """Methods that take precedence over the optimizer's own."""

    lowtide_engine: Engine
    plain_class: type[Optimizer]
    step_was_skipped: bool = False
    """Whether the last step changed nothing because a gradient was not finite. A scheduler should not advance then."""

    _hooks_have_run: bool = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._hooks_have_run = False
        try:
            return self._step_between_hooks(closure)
        except BaseException as error:
            if not self._hooks_have_run:
                self.lowtide_engine.refused_by_a_hook(error)
            raise

    @Optimizer.profile_hook_step  # runs step hooks, once, around the whole update
    def _step_between_hooks(self, closure: Callable[[], Any] | None = None) -> Any:
        self._hooks_have_run = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self.lowtide_engine
        with engine.calling("optimizer.step()"), engine.announcer.doing(Verb.STEP, _number(self)):
            self.step_was_skipped = not engine.step(self)
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """As in PyTorch, with whole tensors. Where states are sharded: on rank 0 only; every rank must call it."""
        engine = self.lowtide_engine
        if engine.config.stage.optimizer and asked_by_checkpoint_api() is not None:
            refuse_in_parts(engine, whole_on_rank_0=False)
        with engine.calling("optimizer.state_dict()"):
            engine.announcer.refuse_alone("optimizer.state_dict()")
            engine.settle()
            return self._whole_state_dict()

    def _whole_state_dict(self) -> dict[str, Any]:
        engine = self.lowtide_engine
        with undisturbed():
            local = super().state_dict()
            _add_streamed(self, local)
            if not engine.config.stage.optimizer or engine.group.shard.size == 1:
                return local
            return _whole_state_dict(self, local)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch; every rank gives the whole state_dict and keeps its shard."""
        if not state_dict:
            raise ArgumentError(
                "load_state_dict was given an empty state_dict: optimizer.state_dict() is whole on rank 0 and empty elsewhere. "
                "Save it on rank 0 and load that on every rank."
            )
        engine = self.lowtide_engine
        with engine.calling("optimizer.load_state_dict()"):
            engine.announcer.refuse_alone("optimizer.load_state_dict()")
            engine.before_load()
            with undisturbed():
                with engine.update.on_pieces(self):
                    super().load_state_dict(state_dict)
                engine.update.forget_states(self)
                engine.update.cut_state(self)
                engine.update.options = []  # a step that update="backward" has done was done from other states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        _refuse_strangers([params] if isinstance(params, Tensor) else list(params), self.lowtide_engine)
        super().add_param_group(param_group)
        self.lowtide_engine.reserve_states(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused("the optimizer of a sharded model cannot be deep-copied; copy it before lowtide.shard.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("the optimizer of a sharded model cannot be pickled; save optimizer.state_dict(), or use lowtide.save.")


def refuse(optimizer: Optimizer, engine: Engine) -> None:
    """Raise if this optimizer cannot update this model's shards. Changes nothing."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    _refuse_strangers(params, engine)
    earlier = engine.backward_update.optimizer if engine.backward_update is not None else None
    if earlier is not None and not {p for group in earlier.param_groups for p in group["params"]} <= set(params):
        raise Refused(
            "update='backward' runs one optimizer for a model, and this one leaves out parameters of the one that is there. "
            "Give all of them to one optimizer (in groups), or use update='step'."
        )
    _refuse_unfit(optimizer, engine)


def make_sharded(optimizer: Optimizer, engine: Engine) -> None:
    """Give ``optimizer`` the methods above."""
    cls = type(optimizer)
    if cls not in _classes:
        names = {"plain_class": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (ShardedOptimizer, cls), names)
    optimizer.__class__ = _classes[cls]
    optimizer.lowtide_engine = engine  # pyright: ignore[reportAttributeAccessIssue]
    engine.optimizers.append(weakref.ref(optimizer))
    if engine.backward_update is not None:
        engine.backward_update.optimizer = optimizer
    if "step" in optimizer.__dict__:
        _rewrap_for_scheduler(optimizer)
    engine.update.cut_state(optimizer)


def _number(optimizer: ShardedOptimizer) -> int:
    """Which of its model's optimizers this is, on every rank."""
    known = [reference() for reference in optimizer.lowtide_engine.optimizers]
    return next(number for number, one in enumerate(known) if one is optimizer)


def _rewrap_for_scheduler(optimizer: Optimizer) -> None:
    """A scheduler made before us has put a wrapper of the old step on the object; put the same kind around the new one."""
    del optimizer.__dict__["step"]
    new_step = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return new_step(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def _refuse_strangers(params: Iterable[Any], engine: Engine) -> None:
    # a group may also list (name, parameter) pairs
    strangers = sum((p[1] if isinstance(p, tuple) else p) not in engine.unit_of for p in params)
    if strangers:
        raise ArgumentError(
            f"the optimizer has {strangers} parameters that are not in the model. "
            f"Give lowtide.shard a module that contains all of them, or make one optimizer per model."
        )


def _refuse_unfit(optimizer: Optimizer, engine: Engine) -> None:
    name = plain_class(optimizer).__name__
    if needs_closure(type(optimizer)):
        raise Refused(
            f"{name} evaluates the model inside its step; sharded models need an optimizer whose step takes no closure."
        )
    in_chunks = engine.updates_by_chunks
    if not in_chunks and not (engine.config.stage.optimizer and engine.group.shard.size > 1):
        return  # it runs as it is, on everything

    def seen_as(param: nn.Parameter) -> torch.dtype:
        unit = engine.unit_of[param]
        return unit.dtypes[unit.index_of[param]].master

    if (reason := why_not_apart(optimizer, seen_as, in_chunks=in_chunks)) is not None:
        if in_chunks:
            raise Refused(
                f"{name} cannot update a model in parts, as disk= and update='backward' do: {reason}. "
                f"Leave both out, or use an optimizer that treats every tensor by itself."
            )
        raise Refused(
            f"{name} cannot be run by every rank on its part of the model: {reason}. "
            f"Use shard(..., stage=0), where every rank updates all of it, or another optimizer."
        )
    reason = why_not_elementwise(optimizer, seen_as, in_chunks=in_chunks, of=engine.cut_parameters)
    if reason is not None:
        raise Refused(
            f"{name} cannot update parameters that are cut between ranks: {reason}. "
            f"Use shard(..., partition='tensor'), which keeps every parameter whole on one rank, or an elementwise optimizer."
        )


def _whole_state_dict(optimizer: ShardedOptimizer, local: dict[str, Any]) -> dict[str, Any]:
    engine = optimizer.lowtide_engine
    params: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    own = {index: state for index, state in local["state"].items() if _is_index(index)}
    mine = {index: {k: _describe(v, params[index], engine) for k, v in s.items()} for index, s in own.items()}
    everybody = engine.exchange.texts("optimizer states", json.dumps(mine))
    known: dict[str, dict[str, Any]] = {}
    for text in everybody:
        for index, entry in json.loads(text).items():
            known.setdefault(index, entry)
    state: dict[Any, Any] = {key: value for key, value in local["state"].items() if key not in own}
    for index in sorted(known, key=int):
        param = params[int(index)]
        piece = engine.update.pieces[param]
        spec = piece.record.unit.layout.params[piece.record.index]
        row = state[int(index)] = {}
        for key, (kind, dtype, value) in known[index].items():
            if kind == "piece":
                here = local["state"].get(int(index), {}).get(key)
                here = torch.empty(0, dtype=getattr(torch, dtype)) if here is None else _flat(here, spec.stride)
                what = f"{key} of {engine.name_of[param]}"
                flat = engine.exchange.whole(what, piece.record.unit.layout, piece.record.index, here)
                row[key] = flat.as_strided(spec.shape, spec.stride)
            else:
                row[key] = torch.tensor(value, dtype=getattr(torch, dtype)) if kind == "scalar" else value
    return {**local, "state": state} if engine.group.rank == 0 else {}


def _add_streamed(optimizer: ShardedOptimizer, local: dict[str, Any]) -> None:
    """Put the large states of units that are updated by chunks beside their small ones: this rank's part of each."""
    engine = optimizer.lowtide_engine
    params: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    for index, small in local["state"].items():
        if not _is_index(index):
            continue
        param = params[index]
        piece = engine.update.pieces[param]
        stream = engine.update.streams.get(piece.record.unit)
        if stream is None:
            continue
        spec = piece.record.unit.layout.params[piece.record.index]
        row = dict(small)
        for name in stream.large_names(param):
            flat = stream.read_state(param, name, piece.lo, piece.hi)
            row[name] = flat.as_strided(spec.shape, spec.stride) if piece.is_whole else flat
        local["state"][index] = row


def _is_index(key: Any) -> bool:
    """Whether a key of a state_dict stands for a parameter; an optimizer may keep more under keys of its own."""
    return isinstance(key, int)


def _flat(state: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A state of a whole parameter is shaped like it, one of a cut parameter is flat already."""
    return flat_view(state, stride if state.dim() == len(stride) else (1,))


def _describe(value: Any, param: nn.Parameter, engine: Engine) -> tuple[str, str, Any]:
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        piece = engine.update.pieces[param]
        if value.dim() and (value.shape == param.shape if piece.is_whole else value.shape == (piece.hi - piece.lo,)):
            return "piece", name, None
        return "scalar", name, value.tolist()
    return "plain", "", value
