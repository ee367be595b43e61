"""What ``model`` gains: no_sync, join, state_dict, load_state_dict, and refusals of what sharding makes impossible.

The model stays the same object; its class becomes a subclass of its own class, with the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, DiskError, DoesNotFit, Error, Evicted, Refused
from lowtide.runtime.engine import Engine
from lowtide.runtime.join import joined
from lowtide.runtime.unit import Unit, flat_view
from lowtide.torch_internals import asked_by_checkpoint_api

_classes: dict[type[nn.Module], type[nn.Module]] = {}


class ShardedModule(nn.Module):
    """Methods that take precedence over the model's own."""

    lowtide_engine: Engine

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Backward passes inside keep whole local gradients; the next one outside reduces their sum, as in DDP."""
        grads = self.lowtide_engine.grads
        # on one rank there is nothing to put off
        before, grads.sync = grads.sync, self.lowtide_engine.group.size == 1
        try:
            yield
        finally:
            grads.sync = before

    @contextmanager
    def join(self, *, divide_by: str = "all", after_step: Callable[[], Any] | None = None) -> Generator[None]:
        """Ranks may run different numbers of batches inside: one that has none left follows the others until all are done.

        ``divide_by``: gradients are divided by the number of all ranks, as in DDP ("all"), or of those that still have a batch
        ("active"). ``after_step`` is called on a rank that follows, after every step: ``scheduler.step``, if the loop has one.
        """
        with joined(self.lowtide_engine, divide_by=divide_by, after_step=after_step):
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Plain names and tensors. Where parameters are sharded, all on rank 0 and none on others: every rank must call it."""
        engine = self.lowtide_engine
        if engine.config.stage.parameters and (asked := asked_by_checkpoint_api()) is not None:
            refuse_in_parts(engine, whole_on_rank_0=asked.full_state_dict and asked.cpu_offload)
        with engine.calling("model.state_dict()"):
            engine.announcer.refuse_alone("model.state_dict()")
            engine.settle()
            if not engine.config.stage.parameters:
                return super().state_dict(*args, **kwargs)
            _refuse_above_budget(engine)
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
        with engine.calling("model.load_state_dict()"):
            engine.announcer.refuse_alone("model.load_state_dict()")
            usable = engine.is_usable
            engine.before_load()
            named = self.named_parameters(remove_duplicate=False)
            given = {param: state_dict[name] for name, param in named if _fits(param, state_dict.get(name))}
            try:
                with _loading(engine, given):
                    result = super().load_state_dict(state_dict, strict=strict)
            except Error:
                raise
            except RuntimeError:  # a name or a size: all that fitted has been loaded, as in plain PyTorch
                if usable:
                    _loaded(engine, given)
                raise
            _loaded(engine, given)
            return result

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        probes = [
            torch.empty(0, dtype=d, device=self.lowtide_engine.arena.device) for d in {p.dtype for p in self.parameters()}
        ]
        if all((moved := fn(p)).dtype is p.dtype and moved.device == p.device for p in probes):
            return self  # .to(where it is already), .float() of an fp32 model: nothing to do
        raise Refused(
            ".to(), .half(), .bfloat16() and the like cannot move a sharded model. Convert it before lowtide.shard, "
            "or choose the dtype with shard(..., precision=lowtide.Precision(param='bf16'))."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused("a sharded model cannot be deep-copied: it has shards on every rank. Copy it before lowtide.shard.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("a sharded model cannot be pickled; save model.state_dict() instead.")


def _fits(param: nn.Parameter, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and not value.is_meta


def _loaded(engine: Engine, given: Mapping[nn.Parameter, Tensor]) -> None:
    for unit in engine.units:
        engine.update.write_masters(unit, given)
    engine.after_load()


def refuse_in_parts(engine: Engine, *, whole_on_rank_0: bool) -> None:
    """Raise on every rank what torch's checkpoints would trip over on all but rank 0, which has it whole."""
    if engine.group.shard.size > 1 and not whole_on_rank_0:
        raise Refused(
            "torch.distributed.checkpoint cannot read a model or optimizer whose states are sharded by lowtide. Save with "
            "lowtide.save(folder, model, optimizer), which any number of ranks can load; model.state_dict() and "
            "optimizer.state_dict() are whole on rank 0."
        )


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
    copies: dict[nn.Parameter, Tensor] = {}  # tied names share one tensor, as in a plain state_dict

    def touch(param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        unit = engine.unit_of[param]
        if function is not Tensor.detach:
            raise Evicted(engine.name_of[param], unit.name, getattr(function, "__name__", str(function)))
        if param not in copies:
            if current != [unit]:
                engine.residency.forget(current)
                current[:] = [unit]
            view = unit.views(engine.residency.whole(unit))[unit.index_of[param]]
            copies[param] = view.detach().clone() if engine.group.rank == 0 else view.new_empty(())
        return copies[param]

    engine.answer_touches(touch)
    try:
        yield
    finally:
        engine.answer_touches(None)
        engine.residency.forget(current)


@contextmanager
def _loading(engine: Engine, given: Mapping[nn.Parameter, Tensor]) -> Generator[None]:
    """``param.copy_(value)`` writes this rank's piece. A unit on disk stays in memory as long as its parameters come."""
    current: list[tuple[Unit, Tensor]] = []
    failures: list[DiskError] = []  # torch would only quote them
    with ExitStack() as opened:

        def open_shard(unit: Unit) -> Tensor:
            try:
                return opened.enter_context(engine.residency.shard(unit, write=True))
            except DiskError as error:
                if not all(p in given for p in unit.params):
                    failures.append(error)
                    raise
            # What the disk has lost is replaced by what is given.
            return opened.enter_context(engine.residency.shard(unit, write=True, read=False))

        def touch(param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            unit = engine.unit_of[param]
            if function is not Tensor.copy_:
                raise Evicted(engine.name_of[param], unit.name, getattr(function, "__name__", str(function)))
            if not current or current[0][0] is not unit:
                current.clear()
                opened.close()
                current.append((unit, open_shard(unit)))
            _write_piece(engine, param, args[1], current[0][1])
            return param

        engine.answer_touches(touch)
        try:
            yield
        except RuntimeError:
            if failures:
                raise failures[0] from None
            current.clear()
            opened.close()  # nothing is wrong with what came before
            raise
        finally:
            engine.answer_touches(None)
            current.clear()


def _write_piece(engine: Engine, param: nn.Parameter, value: Tensor, shard: Tensor) -> None:
    """Keep this rank's part of ``value`` as the parameter's."""
    unit = engine.unit_of[param]
    index = unit.index_of[param]
    lo, hi = unit.layout.piece(index, engine.group.shard.rank)
    flat = flat_view(value, unit.layout.params[index].stride)[lo:hi]
    engine.residency.piece(unit, index, lo, hi, shard).copy_(flat)


def _refuse_above_budget(engine: Engine) -> None:
    budget, needed = engine.config.memory_bytes, sum(u.layout.nbytes for u in engine.units)
    if budget is not None and needed > budget:
        raise DoesNotFit("host", needed, budget, "A whole state_dict is above memory=; use lowtide.sharded_state_dict(model).")


def sharded_state_dict(engine: Engine) -> dict[str, Tensor]:
    """This rank's part of every parameter, flat in memory order, by plain name; and the buffers. No rank waits for another."""
    out: dict[str, Tensor] = {}
    with engine.calling("lowtide.sharded_state_dict()"):
        engine.settle()
        for unit in engine.units:
            with engine.residency.shard(unit, write=False) as shard:
                for index, name in enumerate(unit.names):
                    lo, hi = unit.layout.piece(index, engine.group.shard.rank)
                    out[name] = engine.residency.piece(unit, index, lo, hi, shard).clone()
    return {**out, **{name: buffer.detach().clone() for name, buffer in engine.model.named_buffers()}}


def load_sharded_state_dict(engine: Engine, state: Mapping[str, Tensor]) -> None:
    """The inverse, on the same number of ranks and with the same units and partition."""
    rank = engine.group.shard.rank
    mine = {name: tuple(buffer.shape) for name, buffer in engine.model.named_buffers()}
    for unit in engine.units:
        pieces = [unit.layout.piece(index, rank) for index in range(len(unit.names))]
        mine |= {name: (hi - lo,) for name, (lo, hi) in zip(unit.names, pieces, strict=True)}
    wrong = [n for n in mine if n not in state or tuple(state[n].shape) != mine[n]] + [n for n in state if n not in mine]
    if wrong:
        raise ArgumentError(
            f"sharded state_dict: {wrong[0]!r} is missing or of another size; it was made for another partition."
        )
    with engine.calling("lowtide.load_sharded_state_dict()"):
        engine.announcer.refuse_alone("lowtide.load_sharded_state_dict()")
        engine.before_load()
        for unit in engine.units:
            with engine.residency.shard(unit, write=True, read=False) as shard:
                for index, name in enumerate(unit.names):
                    lo, hi = unit.layout.piece(index, rank)
                    engine.residency.piece(unit, index, lo, hi, shard).copy_(state[name])
        for name, buffer in engine.model.named_buffers():
            buffer.detach().copy_(state[name])
        engine.after_load()
