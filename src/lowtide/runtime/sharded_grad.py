"""A gradient that is stored as shards: what ``param.grad`` shows at the stages that shard gradients.

It has the parameter's shape and dtype and forwards what training loops do with gradients (norm, scaling, unscaling,
clamping, zeroing) to the piece on this rank, with the global result, so that ``torch.nn.utils.clip_grad_norm_`` and
``torch.amp.GradScaler`` are right. Everything else raises: a whole gradient does not exist anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.errors import GradientElsewhere
from lowtide.runtime.grad_store import Change
from lowtide.runtime.grad_summary import is_power_of_two
from lowtide.torch_internals import IGNORE_TORCH_FUNCTION, wrapper_tensor

aten: Any = torch.ops.aten


class GradOwner(Protocol):
    """Who can combine pieces of gradients over ranks."""

    def norm_of(self, grad: ShardedGrad, order: float) -> float: ...

    def any_rank(self, flag: bool) -> bool: ...  # noqa: FBT001

    def whole_of(self, grad: ShardedGrad) -> Tensor: ...

    def grads_changed(self) -> None: ...

    def change(self, grad: ShardedGrad, change: Change) -> None: ...

    def was_changed(self, grad: ShardedGrad, change: Change) -> None: ...

    def is_finite(self, grad: ShardedGrad) -> bool: ...

    def about_to(self, operation: str, args: Any, kwargs: Any) -> None: ...


class ShardedGrad(torch.Tensor):
    """See the module's docstring. ``piece`` is the part on this rank, 1-D in the parameter's memory order; ``None`` if that is
    on a shelf, where the owner knows it."""

    piece: Tensor | None
    key: int
    parameter: str
    owner_reference: weakref.ref[GradOwner]  # weak: Python cannot see a cycle that goes through ``param.grad``

    @property
    def owner(self) -> GradOwner:
        """Who combines this gradient with other ranks'."""
        owner = self.owner_reference()
        if owner is None:
            raise GradientElsewhere(self.parameter, "anything, now that its sharded model is gone,")
        return owner

    @classmethod
    def make(
        cls, like: Tensor, *, stride: Sequence[int], piece: Tensor | None, key: int, name: str, owner: GradOwner
    ) -> ShardedGrad:
        """A gradient shaped like ``like``, of which ``piece`` is here."""
        self: ShardedGrad = wrapper_tensor(cls, like, tuple(stride))
        self.piece, self.key, self.parameter, self.owner_reference = piece, key, name, weakref.ref(owner)
        return self

    def full_tensor(self) -> Tensor:
        """The whole gradient as a plain tensor; every rank must call it."""
        self.owner.about_to("full_tensor", (self,), {})
        return self.owner.whole_of(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        here = "elsewhere" if self.piece is None else f"{self.piece.numel()} of {self.numel()} elements here"
        return f"ShardedGrad({self.parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype}, {here})"

    __torch_function__ = IGNORE_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        first = next((a for a in _flatten(args) if isinstance(a, ShardedGrad)), None)
        if handler is None:
            raise GradientElsewhere(first.parameter if first is not None else "?", str(func))
        if handler is not _same and first is not None:
            first.owner.about_to(str(func), args, kwargs or {})
        return handler(func, args, kwargs or {})


def _flatten(args: Any) -> list[Any]:
    return [x for a in args for x in (_flatten(a) if isinstance(a, list | tuple) else [a])]


def _same(func: Any, args: Any, kwargs: Any) -> ShardedGrad:
    return args[0]


def _frozen(operands: Any) -> Any:
    """Operands as they are now: a noted change must not see what the caller makes of them later."""
    return tuple(
        o.detach().clone() if isinstance(o, Tensor) else type(o)(_frozen(o)) if isinstance(o, list | tuple) else o
        for o in operands
    )


def _factor(func: Any, operands: Sequence[Any]) -> float | None:
    """What the operation multiplies by, if it does only that."""
    packet = func.overloadpacket
    if packet not in (aten.mul_, aten._foreach_mul_, aten.div_, aten._foreach_div_) or len(operands) != 1:
        return None
    operand = operands[0]
    if not isinstance(operand, Tensor | float | int) or (isinstance(operand, Tensor) and operand.is_complex()):
        return None
    value = float(operand)
    if packet in (aten.mul_, aten._foreach_mul_):
        return value
    return 1.0 / value if is_power_of_two(value) else None


def _change(func: Any, operands: Sequence[Any], apply: Callable[[Tensor], Any]) -> Change | None:
    """The operation as it is made of one gradient; None if it leaves every number as it is."""
    factor = _factor(func, operands)
    if factor == 1.0:  # gradients below the limit of a clip: the usual case
        return None
    keeps = func.overloadpacket in (aten.zero_, aten._foreach_zero_, aten.clamp_, aten.clamp_min_, aten.clamp_max_)
    return Change(apply, keeps_finite=keeps or (factor is not None and abs(factor) <= 1.0), factor=factor)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """An elementwise in-place operation with scalars or one-element tensors, on one gradient."""
    grad: ShardedGrad = args[0]
    _refuse_operands(grad, func, args[1:])
    operands = _frozen(args[1:])
    change = _change(func, operands, lambda piece: func(piece, *operands, **kwargs))
    if change is not None:
        grad.owner.change(grad, change)
    return grad


def _in_place_each(func: Any, args: Any, kwargs: Any) -> None:
    """The same on a list of gradients."""
    for grad in args[0]:
        if isinstance(grad, ShardedGrad):
            _refuse_operands(grad, func, args[1:])
    operands = _frozen(args[1:])
    change = _change(func, operands, lambda piece: func([piece], *operands, **kwargs))
    for grad in args[0]:
        if not isinstance(grad, ShardedGrad):
            func([grad], *operands, **kwargs)
        elif change is not None:
            grad.owner.change(grad, change)


def _refuse_operands(grad: ShardedGrad, func: Any, operands: Sequence[Any]) -> None:
    if any(isinstance(o, Tensor) and o.numel() != 1 for o in _flatten(operands)):
        raise GradientElsewhere(grad.parameter, f"{func} with a tensor that is not a scalar")


def _vector_norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    grad: ShardedGrad = args[0]
    order = args[1] if len(args) > 1 else 2
    value = grad.owner.norm_of(grad, float(2 if order is None else order))
    return torch.tensor(value, dtype=kwargs.get("dtype") or grad.dtype.to_real(), device=grad.device)


def _norm_each(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    def one(grad: Tensor) -> Tensor:
        return (
            _vector_norm(func, (grad, *args[1:]), kwargs)
            if isinstance(grad, ShardedGrad)
            else func([grad], *args[1:], **kwargs)[0]
        )

    return [one(g) for g in args[0]]


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """GradScaler's check and unscale: what one rank finds, all ranks must know."""
    grads, found_inf, inverse_scale = args
    owner = next(g.owner for g in grads if isinstance(g, ShardedGrad))
    here = [g.piece if isinstance(g, ShardedGrad) else g for g in grads]
    func([g for g in here if g is not None], found_inf, inverse_scale, **kwargs)
    factor, ignored = inverse_scale.detach().clone(), torch.zeros_like(found_inf)
    value = float(factor)
    change = Change(lambda piece: func([piece], ignored, factor), keeps_finite=value <= 1.0, factor=value)
    for grad in grads:
        if not isinstance(grad, ShardedGrad):
            continue
        if grad.piece is not None:
            owner.was_changed(grad, change)
            continue
        if not owner.is_finite(grad):
            found_inf.fill_(1.0)
        owner.change(grad, change)
    if owner.any_rank(bool(found_inf.item())):
        found_inf.fill_(1.0)


_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.zero_.default: _in_place,
    aten.mul_.Scalar: _in_place,
    aten.mul_.Tensor: _in_place,
    aten.div_.Scalar: _in_place,
    aten.div_.Tensor: _in_place,
    aten.clamp_.default: _in_place,
    aten.clamp_min_.default: _in_place,
    aten.clamp_max_.default: _in_place,
    aten.nan_to_num_.default: _in_place,
    aten._foreach_zero_.default: _in_place_each,
    aten._foreach_mul_.Scalar: _in_place_each,
    aten._foreach_mul_.Tensor: _in_place_each,
    aten._foreach_div_.Scalar: _in_place_each,
    aten._foreach_div_.Tensor: _in_place_each,
    aten._foreach_clamp_min_.Scalar: _in_place_each,
    aten._foreach_clamp_max_.Scalar: _in_place_each,
    aten._foreach_norm.Scalar: _norm_each,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _vector_norm,
    aten.norm.ScalarOpt_dtype: _vector_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
OPERATIONS: dict[str, Callable[..., Any]] = {str(func): func for func in _HANDLERS} | {"full_tensor": ShardedGrad.full_tensor}
"""What can be done with a sharded gradient, by name: ranks that follow others repeat it."""
