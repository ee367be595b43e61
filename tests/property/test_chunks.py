"""Chunks of any shard: they tile it, are cut where bits and the disk allow it, and pack without overlap."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.config import Partition
from lowtide.spec.chunks import cut_into_chunks, pack
from lowtide.spec.layout import ALIGNMENT, CUT_NUMEL, ParamShape, UnitLayout, lay_out

shapes = st.lists(st.integers(0, 90), max_size=3).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8])


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))


param = st.builds(lambda shape, size: ParamShape(shape, contiguous(shape), size), shapes, itemsizes)
params = st.lists(param, min_size=1, max_size=6)
partitions = st.sampled_from(["element", "row", "tensor"])


@st.composite
def shards(draw: st.DrawFn) -> tuple[UnitLayout, tuple[int, int]]:
    ranks = draw(st.integers(1, 4))
    shares = draw(st.none() | st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any).map(tuple))
    layout = lay_out(draw(params), Partition(draw(partitions), shares), ranks, align=ALIGNMENT)
    rank = draw(st.integers(-1, ranks - 1))
    return layout, (0, layout.nbytes) if rank < 0 else (layout.cuts[rank], layout.cuts[rank + 1])


sizes = st.integers(ALIGNMENT, 20 * ALIGNMENT)


def rows_of_a_narrow_type_before_a_wide_one() -> tuple[UnitLayout, tuple[int, int]]:
    """A rank's part that begins inside the first, where 64 elements are not yet 64 of the second."""
    shapes = (26, 48, 89), (10, 32, 39), (29, 38, 46)
    built = [ParamShape(shape, contiguous(shape), size) for shape, size in zip(shapes, (1, 1, 2), strict=True)]
    layout = lay_out(built, Partition("row"), 4, align=ALIGNMENT)
    return layout, (layout.cuts[2], layout.cuts[3])


@settings(deadline=None)
@given(shards(), sizes, st.booleans())
@example(rows_of_a_narrow_type_before_a_wide_one(), ALIGNMENT, False)
def test_chunks_tile_the_shard(shard: tuple[UnitLayout, tuple[int, int]], chunk_bytes: int, whole: bool) -> None:
    layout, (first, end) = shard
    chunks = cut_into_chunks(layout, (first, end), chunk_bytes=chunk_bytes, whole=whole)
    assert chunks[0].lo == 0
    assert chunks[-1].hi == end - first
    assert all(a.hi == b.lo for a, b in itertools.pairwise(chunks))
    assert all(c.lo < c.hi for c in chunks) or len(chunks) == 1
    if not whole:
        assert all(c.hi - c.lo <= chunk_bytes for c in chunks)


@settings(deadline=None)
@given(shards(), sizes, st.booleans())
def test_cuts_are_where_the_disk_and_bits_allow(
    shard: tuple[UnitLayout, tuple[int, int]], chunk_bytes: int, whole: bool
) -> None:
    layout, (first, end) = shard
    for chunk in cut_into_chunks(layout, (first, end), chunk_bytes=chunk_bytes, whole=whole):
        assert chunk.lo % ALIGNMENT == 0
        for part in chunk.parts:
            param = layout.params[part.index]
            mine = [min(max((c - layout.offsets[part.index]) // param.itemsize, 0), param.numel) for c in (first, end)]
            assert part.lo % CUT_NUMEL == 0 or part.lo == mine[0]
            assert part.hi % CUT_NUMEL == 0 or part.hi in (mine[1], param.numel)
            if whole:
                assert [part.lo, part.hi] == mine


@settings(deadline=None)
@given(shards(), sizes, st.booleans())
def test_parts_tile_every_parameter(shard: tuple[UnitLayout, tuple[int, int]], chunk_bytes: int, whole: bool) -> None:
    layout, (first, end) = shard
    chunks = cut_into_chunks(layout, (first, end), chunk_bytes=chunk_bytes, whole=whole)
    parts = [(chunk, part) for chunk in chunks for part in chunk.parts]
    for index, (param, offset) in enumerate(zip(layout.params, layout.offsets, strict=True)):
        lo, hi = (min(max((c - offset) // param.itemsize, 0), param.numel) for c in (first, end))
        mine = [(part.lo, part.hi) for _, part in parts if part.index == index]
        assert [e for a, b in mine for e in range(a, b)] == list(range(lo, hi))
        if param.numel:
            assert all(a < b for a, b in mine)
        else:
            assert len(mine) <= 1
    for chunk, part in parts:
        param = layout.params[part.index]
        at_unit = layout.offsets[part.index] + part.lo * param.itemsize
        assert part.at == at_unit - first - chunk.lo
        assert 0 <= part.at <= part.at + part.numel * param.itemsize <= chunk.hi - chunk.lo


@settings(deadline=None)
@given(shards(), sizes)
def test_every_parameter_without_elements_is_in_some_rank_s_chunk(
    shard: tuple[UnitLayout, tuple[int, int]], chunk_bytes: int
) -> None:
    """Plain torch gives such a parameter a state too: one rank must update it, and only one (all, if there is nothing else)."""
    layout, _ = shard
    seen: list[int] = []
    for rank in range(layout.ranks):
        covers = layout.cuts[rank], layout.cuts[rank + 1]
        chunks = cut_into_chunks(layout, covers, chunk_bytes=chunk_bytes, whole=False)
        seen += [part.index for chunk in chunks for part in chunk.parts if not part.numel]
    empty = [i for i, param in enumerate(layout.params) if not param.numel]
    assert sorted(seen) == sorted(empty * (1 if layout.nbytes else layout.ranks))


@settings(deadline=None)
@given(shards(), sizes, st.data())
def test_packing_does_not_overlap(shard: tuple[UnitLayout, tuple[int, int]], chunk_bytes: int, data: st.DataObject) -> None:
    layout, covers = shard
    chunks = cut_into_chunks(layout, covers, chunk_bytes=chunk_bytes, whole=False)
    widths = [data.draw(itemsizes) for _ in layout.params]
    packing = pack(chunks, widths)
    assert len(packing.cuts) == len(chunks) + 1
    assert all(cut % ALIGNMENT == 0 for cut in packing.cuts)
    for number, (chunk, offsets) in enumerate(zip(chunks, packing.offsets, strict=True)):
        room = packing.cuts[number + 1] - packing.cuts[number]
        spans = [(o, o + part.numel * widths[part.index]) for part, o in zip(chunk.parts, offsets, strict=True)]
        assert all(a_end <= b for (_, a_end), (b, _) in itertools.pairwise(spans))
        assert all(0 <= a and b <= room for a, b in spans)
        # 64 elements of any width up to 8 bytes: a view of the part's dtype starts where that dtype may
        assert all(o % widths[part.index] == 0 for part, o in zip(chunk.parts, offsets, strict=True))
