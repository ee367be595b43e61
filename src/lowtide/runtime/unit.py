"""One unit at run time: its parameters, how they lie in memory, and how old their values are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from lowtide.config import Config, KindDtypes
from lowtide.errors import Refused
from lowtide.spec.chunks import Chunk, cut_into_chunks
from lowtide.spec.layout import ALIGNMENT, ParamShape, UnitLayout, lay_out
from lowtide.spec.units import UnitSpec


class Unit:
    """Identity and layout. Where its bytes are is known to Residency, its gradients to Grads, its states to Update."""

    def __init__(self, index: int, spec: UnitSpec, config: Config, shard: tuple[int, int], *, whole_parameters: bool) -> None:
        rank, ranks = shard
        self.index = index
        self.name = spec.name
        self.modules = spec.modules
        self.params = spec.params
        self.names = spec.names
        self.dtypes: tuple[KindDtypes, ...] = tuple(config.precision.dtypes(p.dtype) for p in spec.params)
        shapes = [
            ParamShape(tuple(p.shape), dense_stride(p), d.param.itemsize) for p, d in zip(spec.params, self.dtypes, strict=True)
        ]
        self.layout: UnitLayout = lay_out(shapes, config.partition, ranks, align=ALIGNMENT if config.disk else 1)
        cuts = self.layout.cuts
        self.updates = (cuts[rank], cuts[rank + 1]) if config.stage.optimizer else (0, self.layout.nbytes)
        """The bytes of the unit that this rank updates."""
        self._chunk_bytes, self._whole_parameters = config.update.chunk_bytes, whole_parameters
        self._sharded = config.stage.optimizer
        self.chunks = self._chunks(self.updates)
        self.chunk_cuts = (0, *(c.hi for c in self.chunks))
        self.index_of = {p: i for i, p in enumerate(spec.params)}
        self.version = 0
        """Raised by every update; a graph built on an older version must not be walked backward."""

    @functools.cached_property
    def chunks_by_rank(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of every rank's shard."""
        return tuple(map(self._chunks, itertools.pairwise(self.layout.cuts)))

    @property
    def cut_by_chunks(self) -> set[int]:
        """The parameters of which some rank updates a part at a time."""
        numels = [p.numel for p in self.layout.params]
        every = self.chunks_by_rank if self._sharded else (self.chunks,)
        return {p.index for chunks in every for c in chunks for p in c.parts if p.numel < numels[p.index]}

    def _chunks(self, covers: tuple[int, int]) -> tuple[Chunk, ...]:
        return cut_into_chunks(self.layout, covers, chunk_bytes=self._chunk_bytes, whole=self._whole_parameters)

    def replaced(self, address: int, but: Container[int] = ()) -> dict[int, Tensor]:
        """The attached parameters, by index, that are not views of the memory at ``address`` any more, and what they hold."""
        found: dict[int, Tensor] = {}
        for index, (param, shape, offset) in enumerate(zip(self.params, self.layout.params, self.layout.offsets, strict=True)):
            if shape.numel and index not in but and param.data_ptr() != address + offset:
                found[index] = param.data
        return found

    def refuse_converted(self, replaced: Mapping[int, Tensor], device: torch.device) -> None:
        """Raise unless what parameters were given instead of their memory are values that they could have had."""
        for index, value in replaced.items():
            param = self.layout.params[index]
            wanted = (param.shape, self.dtypes[index].param, torch.strided, device)
            if (tuple(value.shape), value.dtype, value.layout, value.device) != wanted:
                raise Refused(
                    f"the memory of parameter {self.names[index]!r} was replaced after lowtide.shard by a tensor of another "
                    f"kind (.to(), .half(), `param.data = ...`): {tuple(value.shape)} {value.dtype} on {value.device}. "
                    f"Convert the model before sharding it; change values with `with lowtide.gathered(module, write=True):`."
                )

    def views(self, whole: Tensor) -> list[Tensor]:
        """The parameters of this unit as views of ``whole``, the unit's bytes."""
        out: list[Tensor] = []
        for param, offset, dtype in zip(self.layout.params, self.layout.offsets, self.dtypes, strict=True):
            flat = whole[offset : offset + param.nbytes].view(dtype.param)
            out.append(flat.as_strided(param.shape, param.stride))
        return out


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides a parameter keeps: its own if they are dense (channels_last is), else those of a contiguous tensor."""
    order = sorted((d for d in range(tensor.dim()) if tensor.shape[d] != 1), key=tensor.stride)
    expected = 1
    for dim in order:
        if tensor.stride(dim) != expected:
            return contiguous_stride(tensor.shape)
        expected *= tensor.shape[dim]
    return tuple(tensor.stride()) if tensor.numel() else contiguous_stride(tensor.shape)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def flat_view(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """``tensor``'s elements in the order of ``stride``, as 1-D; a view where the memory allows it, else a copy."""
    if tuple(tensor.stride()) != tuple(stride) and tensor.numel() > 1:
        reordered = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device)
        tensor = reordered.copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_whole(piece: tuple[int, int], param: ParamShape) -> bool:
    return piece == (0, param.numel)


def named(units: Sequence[Unit]) -> dict[nn.Parameter, str]:
    """The first name of every parameter."""
    return {p: n for unit in units for p, n in zip(unit.params, unit.names, strict=True)}
