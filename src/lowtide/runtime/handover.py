"""What a rank without batches must be told beside a verb: the optimizer's options, and what was done to gradients.

[Note: what a follower cannot see] Schedulers write into ``param_groups``, and loops clip, unscale, zero or drop gradients with
PyTorch's own functions. On a rank that only follows, none of that code runs. So before anything that depends on it, the first
rank that has batches hands over its options, which gradients there are, and the values of whole ones that were changed since
they were reduced (their version counters tell). Sharded gradients have no whole value anywhere; for them each operation is
repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.runtime.announcer import Message, Verb
from lowtide.runtime.engine import Engine
from lowtide.runtime.grads import GradRecord
from lowtide.runtime.sharded_grad import OPERATIONS, ShardedGrad
from lowtide.runtime.unit import flat_view
from lowtide.runtime.used_grad import UsedGrad

_NEED_STATE = (Verb.BACKWARD, Verb.CLIP, Verb.STEP, Verb.NOTHING)
_SMALL = 64  # elements of a tensor that travels as a plain value: a learning rate, a factor


class Handover:
    """Packs on a rank that has batches, unpacks on one that has none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._versions: dict[int, int] = {}  # of whole gradients when all ranks last had the same

    # -- with a verb --------------------------------------------------------------------------------------------------

    def brings(self, verb: Verb) -> Message:
        """What goes with ``verb``."""
        if verb not in _NEED_STATE:
            return {}
        records = [r for r in self._engine.grads.by_key.values() if r.param.grad is not None and not r.unreduced]
        return {
            "options": [_options_of(optimizer) for optimizer in self._optimizers()],
            "gradients": [r.key for r in records],
            "zeroed": [r.key for r in records if r.is_zeroed],
            "changed": [r.key for r in records if self._is_changed(r)],
            "buffers_due": self._engine.buffers.due,
        }

    def take(self, message: Message) -> None:
        """Be told; values of gradients come separately."""
        for optimizer, options in zip(self._optimizers(), message["options"], strict=True):
            if optimizer is not None and options is not None:
                _set_options(optimizer, options)
        self._engine.grads.show_only(set(message["gradients"]), zeroed=set(message["zeroed"]))
        self._engine.buffers.due = message["buffers_due"]

    def exchange_values(self, channel: Channel, message: Message, root: int, *, receive: bool) -> None:
        """All ranks: hand over rank ``root``'s values of changed gradients."""
        records = [self._engine.grads.by_key[key] for key in message["changed"]]
        if not records:
            return

        def work(wire: Wire, _: list[bytes]) -> None:
            for record in records:
                values = self._values(record, is_root=wire.world.rank == root)
                wire.world.broadcast(values, root)
                if receive:
                    self._engine.grads.replace(record, values)

        channel.run(Label("hand over", -1, f"{len(records)} gradients in join()"), work)

    def same_gradients(self) -> None:
        """All ranks have the same gradients now."""
        self._versions = {
            r.key: grad._version  # pyright: ignore[reportPrivateUsage]
            for r in self._engine.grads.by_key.values()
            if (grad := r.param.grad) is not None and grad is r.shown
        }

    def _is_changed(self, record: GradRecord) -> bool:
        grad = record.param.grad
        if grad is None or isinstance(grad, ShardedGrad | UsedGrad):
            return False
        same = self._versions.get(record.key) == grad._version  # pyright: ignore[reportPrivateUsage]
        return grad is not record.shown or not same

    def _values(self, record: GradRecord, *, is_root: bool) -> Tensor:
        grad, param = record.param.grad, record.unit.layout.params[record.index]
        if is_root and grad is not None:
            return flat_view(grad, param.stride)
        return torch.empty(param.numel, dtype=record.unit.dtypes[record.index].param, device=record.param.device)

    def _optimizers(self) -> list[Optimizer | None]:
        return [reference() for reference in self._engine.optimizers]

    # -- operations on sharded gradients ------------------------------------------------------------------------------

    def operation(self, name: str, args: Any, kwargs: Any) -> Message:
        """An operation as plain values; gradients are named by their keys."""
        return {"name": name, "args": _encode(list(args)), "kwargs": {key: _encode(value) for key, value in kwargs.items()}}

    def repeat(self, message: Message) -> None:
        """The same operation on this rank's gradients."""
        args = [_decode(value, self._shown) for value in message["args"]["list"]]
        kwargs = {key: _decode(value, self._shown) for key, value in message["kwargs"].items()}
        if any(arg is _ABSENT or (isinstance(arg, list) and not arg) for arg in args):
            return
        with torch.no_grad():
            OPERATIONS[message["name"]](*args, **kwargs)

    def _shown(self, key: int) -> Any:
        shown = self._engine.grads.by_key[key].shown
        return _ABSENT if shown is None else shown


_ABSENT: Any = object()
"""What is here, or was there, something that cannot travel."""


def _encode(value: Any) -> Any:
    """Plain values as they are, the rest as a dictionary of one entry that says what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ShardedGrad):
        return {"gradient": value.key}
    if isinstance(value, Tensor) and value.numel() <= _SMALL:
        return {"tensor": value.tolist(), "dtype": _encode(value.dtype)["torch"]}
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        entries: list[Any] = [_encode(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
        return {"tuple" if isinstance(value, tuple) else "list": entries}
    return {"own": type(value).__name__}  # every rank keeps what it has


def _decode(value: Any, shown: Callable[[int], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "gradient":
        return shown(content)
    if kind == "tensor":
        return torch.tensor(content, dtype=getattr(torch, value["dtype"]))
    if kind == "torch":
        return getattr(torch, content)
    if kind in ("list", "tuple"):
        entries = [_decode(entry, shown) for entry in content]
        kept = [entry for entry in entries if entry is not _ABSENT]
        return tuple(kept) if kind == "tuple" else kept
    return _ABSENT


def _options_of(optimizer: Optimizer | None) -> list[Message] | None:
    if optimizer is None:
        return None
    return [{k: _encode(v) for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups]


def _set_options(optimizer: Optimizer, options: list[Message]) -> None:
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for name, encoded in given.items():
            value, own = _decode(encoded, lambda _: _ABSENT), group.get(name)
            if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                own.detach().copy_(value)  # a scheduler, or a compiled step, may hold this very tensor
            elif value is not _ABSENT:
                group[name] = value
