"""The numbers a model starts from: those it was built with, or those of a file, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowtide.runtime.unit import Unit, flat_view
from lowtide.spec.weights import Weights, give_buffers_memory, leave_meta, load_buffers, match, open_weights


class InitialValues:
    """Gives every unit its first values. Only rank 0 reads files: its values become everybody's."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], path: str | None, rank: int, device: torch.device) -> None:
        self._weights: Weights | None = None
        self._weight_of: dict[str, str] = {}
        self._from_file, self._device = path is not None, device
        if path is None:
            return
        if rank == 0:
            self._weights = open_weights(path)
            self._weight_of = match(self._weights, model)
        give_buffers_memory(model, device)
        if self._weights is not None:
            load_buffers(self._weights, model, self._weight_of)
        leave_meta([p for unit in units for p in unit.params], device)

    def of(self, unit: Unit) -> list[Tensor]:
        """The parameters of ``unit``, flat in memory order. Valid on rank 0."""
        shapes = unit.layout.params
        if not self._from_file:
            return [flat_view(p, spec.stride) for p, spec in zip(unit.params, shapes, strict=True)]
        values = [torch.empty(s.numel, dtype=p.dtype, device=self._device) for p, s in zip(unit.params, shapes, strict=True)]
        if self._weights is not None:
            for name, value, shape in zip(unit.names, values, shapes, strict=True):
                self._weights.read_into(self._weight_of[name], value.as_strided(shape.shape, shape.stride))
        return values
