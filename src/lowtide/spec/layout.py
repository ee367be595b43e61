"""Where every parameter lies in its unit, and where the unit is cut between ranks. The only division by the number of ranks.

[Note: cuts] Vector kernels treat the body and the tail of a tensor differently, and the two round differently. A cut at a
multiple of 64 elements from a parameter's own start keeps every element in the role it has in the uncut tensor, so that an
elementwise optimizer gives the same bits on pieces. Parameters therefore start at multiples of 64 of the unit's widest
element, and every cut is such a multiple (or a parameter's end).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.config import Partition

CUT_NUMEL = 64

ALIGNMENT = 4096
"""Bytes at multiples of this, in memory and in a file, go to the disk without a copy."""


@dataclass(frozen=True)
class ParamShape:
    """What the layout must know of one parameter. ``stride`` is dense: it orders the elements in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class UnitLayout:
    """One unit in memory: byte offset of every parameter, and ``cuts[r]:cuts[r+1]``, the bytes of rank r."""

    params: tuple[ParamShape, ...]
    offsets: tuple[int, ...]
    nbytes: int
    cuts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    @property
    def cut_between_ranks(self) -> set[int]:
        """The parameters that lie on more than one rank."""
        pieces = ((i, *self.piece(i, rank), p.numel) for i, p in enumerate(self.params) for rank in range(self.ranks))
        return {i for i, lo, hi, numel in pieces if lo < hi and hi - lo < numel}

    def shard_bytes(self, rank: int) -> int:
        return self.cuts[rank + 1] - self.cuts[rank]

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """Elements ``lo:hi`` of parameter ``index``, in its memory order, that lie in rank ``rank``'s shard."""
        param, offset = self.params[index], self.offsets[index]
        lo, hi = ((self.cuts[r] - offset) // param.itemsize for r in (rank, rank + 1))
        return min(max(lo, 0), param.numel), min(max(hi, 0), param.numel)


def lay_out(params: Sequence[ParamShape], partition: Partition, ranks: int, *, align: int = 1) -> UnitLayout:
    """Place ``params`` one after another and cut the result between ``ranks``; both at multiples of ``align`` bytes."""
    width = CUT_NUMEL * max((p.itemsize for p in params), default=1)
    granule = math.lcm(width, align)
    offsets: list[int] = []
    end = 0
    for param in params:
        offsets.append(end)
        end += -(-param.nbytes // granule) * granule
    shares = partition.shares or (1.0,) * ranks
    if partition.by == "element" and partition.shares is None:
        part = -(-end // (granule * ranks)) * granule
        return UnitLayout(tuple(params), tuple(offsets), part * ranks, tuple(part * r for r in range(ranks + 1)))
    cuts = [0]
    for rank in range(1, ranks):
        target = end * sum(shares[:rank]) / sum(shares)
        cuts.append(max(cuts[-1], _nearest_cut(target, params, offsets, end, partition.by, granule, width)))
    return UnitLayout(tuple(params), tuple(offsets), end, (*cuts, end))


def _nearest_cut(
    target: float, params: Sequence[ParamShape], offsets: Sequence[int], end: int, by: str, granule: int, width: int
) -> int:
    """The allowed cut nearest to ``target`` bytes."""
    candidates = {0, end}
    for param, offset, following in zip(params, offsets, [*offsets[1:], end], strict=True):
        if not offset <= target <= following:
            continue
        candidates |= {offset, following}
        if by == "tensor" or not param.shape:
            continue
        step = granule
        if by == "row":
            row = param.nbytes // max(param.shape[0], 1)
            # Rows are cut together until their elements are a multiple of 64, see [Note: cuts]; of the widest type, because
            # chunks are counted from here and must be able to end in any parameter that follows.
            step = math.lcm(row, width) if row else granule
        below = offset + int((target - offset) // step) * step
        candidates |= {c for c in (below, below + step) if c < offset + param.nbytes}
    return min(candidates, key=lambda cut: (abs(cut - target), cut))
