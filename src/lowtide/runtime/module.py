"""What ``model`` gains: no_sync, join, state_dict, load_state_dict, and refusals of what sharding makes impossible.

The model stays the same object; its class becomes a subclass of its own class, with the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import Evicted, Refused
from lowtide.runtime.engine import Engine
from lowtide.runtime.unit import Unit, flat_view

_classes: dict[type[nn.Module], type[nn.Module]] = {}


class ShardedModule(nn.Module):
    """Methods that take precedence over the model's own."""

    lowtide_engine: Engine

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside keep whole local gradients; the next one outside reduces their sum, as in DDP."""
        grads = self.lowtide_engine.grads
        before, grads.sync = grads.sync, False
        try:
            yield
        finally:
            grads.sync = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Plain names and tensors. Where parameters are sharded, all on rank 0 and none on others: every rank must call it."""
        engine = self.lowtide_engine
        engine.check()
        if not engine.config.stage.parameters:
            return super().state_dict(*args, **kwargs)
        with _saving(engine):
            out = super().state_dict(*args, **kwargs)
        if engine.group.rank:
            out.clear()
        return out

    def load_state_dict(  # torch's own signature
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """As in PyTorch; every rank gives the whole state_dict and keeps its shard."""
        engine = self.lowtide_engine
        if assign:
            raise Refused("load_state_dict(assign=True) would replace sharded parameters; leave assign out to copy the values.")
        with _loading(engine):
            result = super().load_state_dict(state_dict, strict=strict)
        engine.residency.forget()
        engine.parameters_written(engine.units)
        engine.heal()
        return result

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        device = self.lowtide_engine.arena.device
        probe = torch.empty(0, device=device)
        moved = fn(probe)
        if moved.dtype is probe.dtype and moved.device == probe.device:
            return self  # .to(where it is already), .float() of an fp32 model: nothing to do
        raise Refused(
            ".to(), .half(), .bfloat16() and the like cannot move a sharded model. Convert it before lowtide.shard, "
            "or choose the dtype with shard(..., precision=lowtide.Precision(param='bf16'))."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused("a sharded model cannot be deep-copied: it has shards on every rank. Copy it before lowtide.shard.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("a sharded model cannot be pickled; save model.state_dict() instead.")


def make_sharded(model: nn.Module, engine: Engine) -> None:
    """Give ``model`` the methods above."""
    cls = type(model)
    if cls not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _classes[cls] = type(cls.__name__, (ShardedModule, cls), names)
    model.__class__ = _classes[cls]
    object.__setattr__(model, "lowtide_engine", engine)


@contextmanager
def _saving(engine: Engine) -> Generator[None]:
    """``param.detach()`` gathers the unit and answers with a copy on rank 0; the rest of state_dict is torch's own."""
    current: list[Unit] = []

    def touch(param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        unit = engine.unit_of[param]
        if function is not Tensor.detach:
            raise Evicted(engine.name_of[param], unit.name, getattr(function, "__name__", str(function)))
        if current != [unit]:
            engine.residency.forget(current)
            current[:] = [unit]
        view = unit.views(engine.residency.whole(unit))[unit.index_of[param]]
        return view.detach().clone() if engine.group.rank == 0 else view.new_empty(())

    engine.answer_touches(touch)
    try:
        yield
    finally:
        engine.answer_touches(None)
        engine.residency.forget(current)


@contextmanager
def _loading(engine: Engine) -> Generator[None]:
    """``param.copy_(value)`` writes this rank's piece of the value."""

    def touch(param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        unit = engine.unit_of[param]
        if function is not Tensor.copy_:
            raise Evicted(engine.name_of[param], unit.name, getattr(function, "__name__", str(function)))
        index = unit.index_of[param]
        spec, dtype = unit.layout.params[index], unit.dtypes[index].param
        lo, hi = unit.layout.piece(index, engine.group.shard.rank)
        home, base = engine.residency.home(unit)
        start = unit.layout.offsets[index] + lo * spec.itemsize - base
        if hi > lo:
            value = flat_view(args[1].to(dtype), spec.stride)[lo:hi]
            home[start : start + (hi - lo) * spec.itemsize].view(dtype).copy_(value)
        return param

    engine.answer_touches(touch)
    try:
        yield
    finally:
        engine.answer_touches(None)
