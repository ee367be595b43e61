"""A parameter whose values are elsewhere: it keeps its identity and metadata, and cannot be used by mistake.

Two things see to that. The class of an evicted parameter is swapped for one whose ``__torch_function__`` answers metadata
and asks the owner for all else. And what is in its place has no values that torch would read: some ways into torch ask no
``__torch_function__`` (``torch.tensor(p)``, scripted functions, ``torch.vmap(f)(p)``, an autograd graph that saved the
parameter itself), and end at :func:`_refuse_read` ([Note: a trap for reads]).

[Note: a trap for reads] Memory cannot say no: NaN is a number, integers read 0, and no address is a segmentation fault. A
negated view can: whatever reads one, torch makes it plain first, by one of three operators that we stand in front of.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.errors import Evicted, Refused
from lowtide.torch_internals import refuse_reads, storage_of, unreadable, without_torch_function

_T = Tensor
_METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(_T, name).__get__
            for name in (
                "shape dtype device requires_grad grad is_leaf ndim layout is_sparse is_cuda is_meta grad_fn is_quantized "
                "is_mkldnn is_nested is_cpu itemsize nbytes _backward_hooks _post_accumulate_grad_hooks _version names "
                "retains_grad output_nr is_xpu is_mps is_xla is_ipu is_maia is_mtia is_vulkan is_sparse_csr _base is_inference "
                "grad_dtype"
            ).split()
            if hasattr(getattr(_T, name, None), "__get__")
        ),
        *(_T.grad.__set__, _T.requires_grad.__set__, _T.grad_dtype.__set__),  # type: ignore[attr-defined]
        *(_T.numel, _T.nelement, _T.size, _T.dim, _T.ndimension, _T.element_size, _T.get_device, _T.__len__),
        *(_T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.is_shared),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad),
        # to autograd a parameter is a name for a node of the graph: gradients with respect to it need no values of its own
        *(torch.autograd.backward, _T.backward),
    }
)
_OF_A_STAND_IN: frozenset[Any] = frozenset(
    {
        *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(_T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor, _T.new_empty_strided),
        *(_T.stride, _T.is_contiguous, _T.storage_offset, _T.is_neg, _T.is_conj, torch.is_neg, torch.is_conj),
    }
)
"""What needs strides as well, or makes a tensor like the parameter: asked of a tensor without memory that lies as it would."""
_MAKES: frozenset[Any] = frozenset(f for f in _OF_A_STAND_IN if "like" in f.__name__ or "new_" in f.__name__)


_WAYS_TO_THE_GRAPH: frozenset[Any] = frozenset({_T.view_as, _T.expand_as})
"""``p.view_as(p).grad_fn`` is how torch itself comes to the node that accumulates a parameter's gradient."""


class Owner(Protocol):
    """Who knows where an evicted parameter's values are."""

    def touch(self, param: nn.Parameter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def stride_of(self, param: nn.Parameter) -> tuple[int, ...]: ...

    def describe(self, param: nn.Parameter) -> str: ...

    def names_of(self, param: nn.Parameter) -> tuple[str, str]: ...


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
        if func in _METADATA or _asks_for_its_node(func, args):
            with without_torch_function():
                return func(*args, **kwargs)
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        param = _first_evicted((args, tuple(kwargs.values())))
        owner = owner_of(param) if param is not None else None
        if param is None or owner is None:
            raise Refused(f"{getattr(func, '__name__', func)}: an evicted parameter whose sharded model is gone.")
        if func in _OF_A_STAND_IN:
            return _ask_a_stand_in(func, param, owner.stride_of(param), args, kwargs)
        if func is _T.type and len(args) + len(kwargs) == 1:  # with a dtype it is a conversion
            with without_torch_function():
                return func(*args)
        if func is _T.__repr__:
            return f"EvictedParameter({owner.describe(param)}, shape={tuple(param.shape)}, dtype={param.dtype})"
        try:
            return owner.touch(param, func, args, kwargs)
        except Evicted:
            if func not in _WAYS_TO_THE_GRAPH or any(arg is not param for arg in args):
                raise
            with without_torch_function():  # a view for the sake of its grad_fn: nothing can read it
                return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Torch asks no ``__torch_function__`` about this one."""
        return EvictedParameter.__torch_function__(_T.set_, (EvictedParameter,), (self, *args), kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise Refused("an evicted parameter cannot be copied; copy the model before lowtide.shard, or use state_dict().")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("a sharded model cannot be pickled; save model.state_dict() instead.")


def _asks_for_its_node(func: Any, args: Any) -> bool:
    """Whether this is how torch.autograd.graph finds the node that accumulates a gradient; to read the view still raises."""
    return func is _T.view_as and len(args) == 2 and args[0] is args[1]


def _first_evicted(args: Any) -> nn.Parameter | None:
    for arg in args:
        if isinstance(arg, EvictedParameter):
            return arg
        if isinstance(arg, list | tuple):
            inner = _first_evicted(arg)
            if inner is not None:
                return inner
    return None


def _gradients(outputs: Any, inputs: Any, *, materialize_grads: bool, **options: Any) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, which needs no values, and zeros for what it did not reach: made here, because in there nobody
    asks us."""
    with without_torch_function():
        found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, inputs, **options)
    if not materialize_grads:
        return found
    zeros = functools.partial(torch.zeros_like, requires_grad=options["create_graph"])
    return tuple(zeros(value) if grad is None else grad for value, grad in zip(inputs, found, strict=True))


def _ask_a_stand_in(func: Any, param: nn.Parameter, stride: tuple[int, ...], args: Any, kwargs: Any) -> Any:
    stand_in = torch.empty_strided(param.shape, stride, dtype=param.dtype, device="meta")
    if func in _MAKES:
        kwargs = {"device": param.device, **kwargs}
    return func(*(stand_in if arg is param else arg for arg in args), **kwargs)


_readers: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Tensor]]] = {}
"""Whose placeholder a storage is, and the placeholder: while that lives, the number of its storage is nobody else's."""


@functools.cache
def _set_the_trap() -> None:
    refuse_reads(_refuse_read)


def _refuse_read(storage: int) -> None:
    reader, holder = _readers.get(storage, (None, None))
    param = reader() if reader is not None else None
    if param is None or (not isinstance(param, EvictedParameter) and (holder is None or holder() is None)):
        return  # another negated view, that only has the number of a placeholder that is gone
    owner = owner_of(param)
    if owner is None:
        raise Refused("an evicted parameter whose sharded model is gone was read.")
    raise Evicted(*owner.names_of(param), "an operation that does not ask for them")


def placeholder(param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """What ``param`` holds while its values are elsewhere: one element of memory that nothing reads."""
    _set_the_trap()
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    value = torch.full((), fill, dtype=dtype, device=param.device)
    storage = storage_of(value)

    def forget(reader: weakref.ref[nn.Parameter]) -> None:
        if _readers.get(storage, (None,))[0] is reader:  # the number may be another one's by now
            del _readers[storage]

    nothing = unreadable(value, param.shape)
    _readers[storage] = weakref.ref(param, forget), weakref.ref(nothing)
    return nothing
