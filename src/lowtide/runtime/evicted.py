"""A parameter whose values are elsewhere: it keeps its identity and metadata, and cannot be used by mistake.

An ordinary placeholder is not enough: fused optimizers ignore stride 0, ``zero_`` and ``fill_`` succeed, integers read 0.
So the class of an evicted parameter is swapped for one whose ``__torch_function__`` answers metadata and asks the owner for
all else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.errors import Refused
from lowtide.torch_internals import without_torch_function

_T = Tensor
_METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(_T, name).__get__
            for name in (
                "shape dtype device requires_grad grad is_leaf ndim layout is_sparse is_cuda is_meta grad_fn is_quantized "
                "is_mkldnn is_nested is_cpu itemsize nbytes _backward_hooks _post_accumulate_grad_hooks _version names "
                "retains_grad output_nr is_xpu is_mps is_xla is_ipu is_maia is_mtia is_vulkan is_sparse_csr _base is_inference"
            ).split()
            if hasattr(getattr(_T, name, None), "__get__")
        ),
        *(_T.grad.__set__, _T.requires_grad.__set__),  # type: ignore[attr-defined]
        *(_T.numel, _T.nelement, _T.size, _T.dim, _T.ndimension, _T.element_size, _T.get_device, _T.__len__),
        *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.is_shared),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad),
    }
)


class Owner(Protocol):
    """Who knows where an evicted parameter's values are."""

    def touch(self, param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def stride_of(self, param: nn.Parameter) -> tuple[int, ...]: ...

    def describe(self, param: nn.Parameter) -> str: ...


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register(params: Iterable[nn.Parameter], owner: Owner) -> None:
    """Make ``owner`` answerable for ``params``."""
    reference = weakref.ref(owner)
    for param in params:
        _owners[param] = reference


def owner_of(param: Tensor) -> Owner | None:
    reference = _owners.get(param)
    return reference() if reference is not None else None


class EvictedParameter(nn.Parameter):
    """See the module's docstring. Never constructed: ``param.__class__`` is set by residency."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        param = _first_evicted((args, tuple(kwargs.values())))
        owner = owner_of(param) if param is not None else None
        if param is None or owner is None:
            raise Refused(f"{getattr(func, '__name__', func)}: an evicted parameter whose sharded model is gone.")
        if func is _T.stride:
            stride = owner.stride_of(param)
            return stride[args[1]] if len(args) > 1 else stride
        if func is _T.__repr__:
            return f"EvictedParameter({owner.describe(param)}, shape={tuple(param.shape)}, dtype={param.dtype})"
        return owner.touch(param, func, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused("an evicted parameter cannot be copied; copy the model before lowtide.shard, or use state_dict().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("a sharded model cannot be pickled; save model.state_dict() instead.")


def _first_evicted(args: Any) -> nn.Parameter | None:
    for arg in args:
        if isinstance(arg, EvictedParameter):
            return arg
        if isinstance(arg, list | tuple):
            inner = _first_evicted(arg)
            if inner is not None:
                return inner
    return None


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the given shape that occupies one element."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)
