"""The chunks in which a shard is updated: what the update reads, changes and writes back at once.

[Note: one table of cuts for all kinds] A chunk is a range of a shard's bytes, cut at multiples of the disk's alignment and at
multiples of 64 elements from each parameter's start, so that an elementwise optimizer gives the same bits as on the whole
(see [Note: cuts]). Parameters lie in a chunk as they lie in the shard, because compute reads them there. Every other kind
(gradients, masters, each state of the optimizer) has its own dtype, hence its own size of the same chunk, and is packed:
the parts of the chunk's parameters one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.spec.layout import ALIGNMENT, CUT_NUMEL, UnitLayout


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``lo:hi`` of parameter ``index`` in its memory order, and where they lie in the chunk of the shard, in bytes."""

    index: int
    lo: int
    hi: int
    at: int

    @property
    def numel(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``lo:hi`` of a shard, and the parts of parameters in them."""

    lo: int
    hi: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """One kind of bytes of all chunks: chunk ``i`` lies at ``cuts[i]:cuts[i + 1]``, its parts at ``offsets[i]`` in it."""

    cuts: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]


def cut_into_chunks(layout: UnitLayout, covers: tuple[int, int], *, chunk_bytes: int, whole: bool) -> tuple[Chunk, ...]:
    """Chunks of at most ``chunk_bytes`` (but at least one granule) of the shard that holds bytes ``covers`` of the unit.

    ``whole``: never cut inside a parameter, for optimizers that look at whole matrices; a chunk may then be larger.
    """
    first, end = covers
    step = max(chunk_bytes // ALIGNMENT, 1) * ALIGNMENT
    starts = [o for o in layout.offsets if first < o < end]
    cuts = [first]
    while end - cuts[-1] > step:
        limit = cuts[-1] + step
        inside = [o for o in starts if cuts[-1] < o <= limit and (o - first) % ALIGNMENT == 0]
        if whole:
            after = [o for o in starts if o > limit and (o - first) % ALIGNMENT == 0]
            cut = inside[-1] if inside else min(after, default=end)
        else:
            cut = _aligned_cut(layout, first, limit)
        if cut >= end or cut <= cuts[-1]:
            break
        cuts.append(cut)
    cuts.append(end)
    return tuple(Chunk(a - first, b - first, _parts(layout, a, b)) for a, b in itertools.pairwise(cuts))


def pack(chunks: Sequence[Chunk], itemsizes: Sequence[int]) -> Packing:
    """Where a kind of bytes with ``itemsizes[i]`` bytes per element of parameter ``i`` lies, chunk by chunk."""
    cuts, offsets = [0], []
    for chunk in chunks:
        row, end = [], 0
        for part in chunk.parts:
            row.append(end)
            granule = CUT_NUMEL * itemsizes[part.index]
            end += -(-part.numel * itemsizes[part.index] // granule) * granule
        offsets.append(tuple(row))
        cuts.append(cuts[-1] + -(-end // ALIGNMENT) * ALIGNMENT)
    return Packing(tuple(cuts), tuple(offsets))


def _aligned_cut(layout: UnitLayout, first: int, limit: int) -> int:
    """The last place up to ``limit`` at a multiple of the alignment from the shard's start and of 64 elements."""
    index = max((i for i, o in enumerate(layout.offsets) if o <= limit), default=0)
    width = CUT_NUMEL * layout.params[index].itemsize
    cut = limit
    while cut > first and (cut - layout.offsets[index]) % width and cut < layout.offsets[index] + layout.params[index].nbytes:
        cut -= ALIGNMENT
    return cut


def _parts(layout: UnitLayout, start: int, end: int) -> tuple[Part, ...]:
    parts: list[Part] = []
    for index, (param, offset) in enumerate(zip(layout.params, layout.offsets, strict=True)):
        lo = min(max((start - offset) // param.itemsize, 0), param.numel)
        hi = min(max((end - offset) // param.itemsize, 0), param.numel)
        if lo < hi or (not param.numel and _holds(layout, start, end, offset)):
            parts.append(Part(index, lo, hi, offset + lo * param.itemsize - start))
    return tuple(parts)


def _holds(layout: UnitLayout, start: int, end: int, offset: int) -> bool:
    """Whether a parameter without elements at ``offset`` is in this chunk; at the unit's end: in the last that has bytes."""
    if offset == layout.nbytes:
        return end == offset and (start < end or not offset)
    return start <= offset < end
