"""Saved-tensor hooks: a view of a parameter is kept as a recipe, not as a tensor.

[Note: autograd keeps views of parameters] ``F.linear`` saves ``weight.t()``, which shares the weight's memory, so releasing
a unit would free nothing. While a unit computes, a saved tensor that lies in the unit's block is packed as (unit, offset,
shape, stride, version), and unpacking gathers the unit on demand and checks the version. Other saved tensors go to whatever
hooks were open before (a caller's checkpointing, for instance), as if ours were not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import StaleGraph
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Unit
from lowtide.torch_internals import innermost_saved_tensor_hooks


@dataclass(frozen=True, slots=True)
class _Recipe:
    unit: Unit
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conjugate: bool


@dataclass(frozen=True, slots=True)
class _Outer:
    """A tensor packed by hooks that were open before ours."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class SavedViews:
    """Opens and closes the hooks around forward passes."""

    def __init__(self, residency: Residency, on_demand: Callable[[Unit], None]) -> None:
        self._residency = residency
        self._on_demand = on_demand
        self._pack_functions: set[Callable[..., Any]] = set()

    def open(self) -> saved_tensors_hooks | None:
        """Open the hooks, unless ours are the innermost already."""
        outer = innermost_saved_tensor_hooks()
        if outer is not None and outer[0] in self._pack_functions:
            return None

        def pack(tensor: Tensor) -> Any:
            unit = self._residency.unit_at(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
            if unit is not None and not tensor.is_neg():
                offset = int(tensor.storage_offset())
                return _Recipe(unit, unit.version, tensor.dtype, offset, tensor.shape, tensor.stride(), tensor.is_conj())
            return _Outer(outer[0](tensor), outer[1]) if outer is not None else tensor

        self._pack_functions.add(pack)
        context = saved_tensors_hooks(pack, self._unpack)
        context.__enter__()
        return context

    def close(self, context: saved_tensors_hooks | None) -> None:
        if context is not None:
            context.__exit__()
            self._pack_functions.discard(context.pack_hook)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        unit = packed.unit
        if packed.version != unit.version:
            raise StaleGraph(unit.name)
        self._on_demand(unit)
        with torch.no_grad():
            storage = self._residency.whole(unit).untyped_storage()
            view = torch.empty(0, dtype=packed.dtype, device=storage.device)
            place: Any = (storage, packed.offset, packed.shape, packed.stride)
            view.set_(*place)
            return view.conj() if packed.conjugate else view
