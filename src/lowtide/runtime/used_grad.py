"""A gradient that an update in backward has used: what ``param.grad`` shows until ``zero_grad()``.

Its numbers are gone. With ``None`` in its place, torch's own clipping would find no gradient, return a norm of 0 and clip
nothing, without a word. So it is there, has the parameter's shape and dtype and no memory, and refuses to be used.

[Note: zeroed, not gone] ``zero_grad(set_to_none=False)`` leaves a gradient of zeros, with which an optimizer moves a parameter
that the next backward does not reach (Adam by its momentum). Zeroing one of these notes that, and the next update acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import Refused
from lowtide.torch_internals import IGNORE_TORCH_FUNCTION, wrapper_tensor

aten: Any = torch.ops.aten


class UsedGrad(torch.Tensor):
    """See the module's docstring."""

    parameter: str
    zeroed: bool
    """Whether it stands for zeros now."""

    @classmethod
    def make(cls, like: Tensor, *, stride: tuple[int, ...], name: str) -> UsedGrad:
        """The gradient of parameter ``name``, which is shaped like ``like``, after its use."""
        self: UsedGrad = wrapper_tensor(cls, like, stride)
        self.parameter, self.zeroed = name, False
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"UsedGrad({self.parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype}, zeroed={self.zeroed})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise refusal(self.parameter, "copying it")

    __torch_function__ = IGNORE_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0]
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            grads = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            for grad in grads:
                if isinstance(grad, UsedGrad):
                    grad.zeroed = True
                else:
                    grad.zero_()
            return args[0] if func is aten.zero_.default else None
        raise refusal(next(_used((args, tuple((kwargs or {}).values())))).parameter, str(func))


def _used(args: Iterable[Any]) -> Iterator[UsedGrad]:
    for arg in args:
        if isinstance(arg, UsedGrad):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _used(arg)


def refusal(parameter: str, what: str) -> Refused:
    """What a use of such a gradient raises."""
    return Refused(
        f"the gradient of {parameter!r}: update='backward' has used it in loss.backward(), and it is gone, so {what} is not "
        f"possible. Clip, scale or look at gradients with update='step'; to go on, call optimizer.step() and zero_grad()."
    )
