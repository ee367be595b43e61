"""Tensors inside whatever a module takes or returns: tuples, dicts, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor in it replaced by ``function(tensor)``; what is no container is left alone."""
    if isinstance(value, Tensor):
        return function(value)
    if pytree.tree_is_leaf(value):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: map_tensors(getattr(value, f.name), function) for f in dataclasses.fields(value) if f.init}
            return dataclasses.replace(value, **fields)
        if isinstance(value, Mapping):
            return type(value)({k: map_tensors(v, function) for k, v in value.items()})  # pyright: ignore[reportCallIssue]
        return value
    return pytree.tree_map(lambda leaf: map_tensors(leaf, function), value)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, each once."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found[id(tensor)] = tensor
        return tensor

    map_tensors(value, note)
    return list(found.values())


class ScaleGradient(torch.autograd.Function):
    """The identity forward, a multiplication backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Callable[[], float]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.factor(), None
