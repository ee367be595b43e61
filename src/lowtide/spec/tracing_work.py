"""What one operation of a trace costs: products by the formulas of torch's own counter, all else by the bytes it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lowtide.spec.model import Work

_aten = torch.ops.aten

_ALLOCATIONS = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}

# Arguments that a kernel does not read, or of which it reads a few rows: they count as nothing, what is read as the result.
_HARDLY_READ: dict[Any, int] = {
    _aten.embedding: 0,
    _aten.index: 0,
    _aten.index_select: 0,
    _aten.gather: 0,
    _aten.nll_loss_forward: 0,
    _aten.nll_loss_backward: 1,
    _aten.copy_: 0,
    _aten.fill_: 0,
    _aten.zero_: 0,
}


def _attention(*args: Any) -> float:
    return sdpa_flop_count(*(t.shape for t in args[:3]))


def _attention_backward(*args: Any) -> float:
    return sdpa_backward_flop_count(*(t.shape for t in args[:4]))


def _lstm(*args: Any) -> float:
    """Input and hidden state times the four gates' weights, at every step of the sequence."""
    sequence, weights = args[0], args[1:3]
    return 2.0 * sequence.shape[0] * sequence.shape[1] * sum(w.numel() for w in weights)


_OWN_FORMULAS: dict[Any, Callable[..., float]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mkldnn_rnn_layer: _lstm,
    _aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _lstm(*args),
}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, fresh_bytes: int) -> Work | None:
    """The cost of an operation, of whose result ``fresh_bytes`` are new memory; ``None``: it is a view or a question."""
    if func.namespace == "prim":
        return None
    packet = func.overloadpacket
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        return Work(flops=float(flops), fresh_bytes=fresh_bytes, operations=1)
    if packet in _OWN_FORMULAS:
        return Work(flops=float(_OWN_FORMULAS[packet](*args)), fresh_bytes=fresh_bytes, operations=1)
    if packet in _ALLOCATIONS:
        return Work(fresh_bytes=fresh_bytes)
    if not fresh_bytes and not func._schema.is_mutable:  # a view, or a question
        return None
    unread = _HARDLY_READ.get(packet)
    read = [a for i, a in enumerate(args) if i != unread]
    moved = sum(map(_touched, tensors_of([*read, *kwargs.values(), result])))
    if unread is not None and not func._schema.is_mutable and packet is not _aten.nll_loss_backward:
        moved += sum(map(_touched, tensors_of(result)))
    return Work(moved_bytes=moved, fresh_bytes=fresh_bytes, operations=1)


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor's own elements: an expanded one has more of them than memory."""
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
