"""Any shapes, dtypes, ranks, partition and shares: the pieces of all ranks make up every parameter exactly once."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.config import Partition
from lowtide.runtime.unit import contiguous_stride
from lowtide.spec.layout import ParamShape, UnitLayout, lay_out

dims = st.one_of(st.integers(0, 9), st.sampled_from([30, 63, 64, 65, 128, 200]))
shapes = st.lists(dims, max_size=3).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8])
params = st.lists(
    st.builds(lambda shape, itemsize: ParamShape(shape, contiguous_stride(shape), itemsize), shapes, itemsizes),
    min_size=1,
    max_size=7,
)


@st.composite
def layouts(draw: st.DrawFn, by: str) -> tuple[UnitLayout, Partition, int]:
    ranks = draw(st.integers(1, 6))
    number = st.one_of(st.just(0.0), st.floats(0.01, 10))
    shares = draw(st.none() | st.lists(number, min_size=ranks, max_size=ranks).filter(any).map(tuple))
    partition = Partition(by, shares)
    return lay_out(draw(params), partition, ranks), partition, ranks


def granule(layout: UnitLayout) -> int:
    return 64 * max(p.itemsize for p in layout.params)


def check(layout: UnitLayout, ranks: int) -> None:
    assert len(layout.cuts) == ranks + 1
    assert (layout.cuts[0], layout.cuts[-1]) == (0, layout.nbytes)
    assert all(a <= b for a, b in pairwise(layout.cuts))
    assert sum(layout.shard_bytes(r) for r in range(ranks)) == layout.nbytes
    ends = [offset + p.nbytes for offset, p in zip(layout.offsets, layout.params, strict=True)]
    assert all(offset % granule(layout) == 0 for offset in layout.offsets)
    assert all(end <= following for end, following in zip(ends, [*layout.offsets[1:], layout.nbytes], strict=True))
    for index, param in enumerate(layout.params):
        covered = 0
        for rank in range(ranks):
            lo, hi = layout.piece(index, rank)
            assert 0 <= lo <= hi <= param.numel
            if lo == hi:
                continue
            assert lo == covered, "the pieces leave a gap or overlap"
            covered = hi
            start = layout.offsets[index] + lo * param.itemsize
            assert layout.cuts[rank] <= start, "the piece begins before its shard"
            assert start + (hi - lo) * param.itemsize <= layout.cuts[rank + 1], "the piece ends after its shard"
            assert lo % 64 == 0
            assert hi % 64 == 0 or hi == param.numel
        assert covered == param.numel, "elements that no rank has"


@settings(deadline=None, max_examples=300)
@given(layouts("element"))
def test_elements(case: tuple[UnitLayout, Partition, int]) -> None:
    layout, partition, ranks = case
    check(layout, ranks)
    shares = partition.shares or (1.0,) * ranks
    for rank in range(ranks):
        ideal = layout.nbytes * shares[rank] / sum(shares)
        assert abs(layout.shard_bytes(rank) - ideal) <= granule(layout) * (1 if partition.shares is None else 1.001)
    if partition.shares is None:
        assert len({layout.shard_bytes(rank) for rank in range(ranks)}) == 1
        needed = sum(math.ceil(p.nbytes / granule(layout)) for p in layout.params)
        assert layout.nbytes == math.ceil(needed / ranks) * ranks * granule(layout)


@settings(deadline=None, max_examples=300)
@given(layouts("row"))
def test_rows(case: tuple[UnitLayout, Partition, int]) -> None:
    layout, _, ranks = case
    check(layout, ranks)
    for index, param in enumerate(layout.params):
        row = math.prod(param.shape[1:])
        for rank in range(ranks):
            lo, hi = layout.piece(index, rank)
            assert lo == hi or (lo % row == 0 and hi % row == 0)


@settings(deadline=None, max_examples=300)
@given(layouts("tensor"))
def test_tensors(case: tuple[UnitLayout, Partition, int]) -> None:
    layout, _, ranks = case
    check(layout, ranks)
    for index, param in enumerate(layout.params):
        assert [layout.piece(index, r) for r in range(ranks) if len(set(layout.piece(index, r))) == 2] in (
            [],
            [(0, param.numel)],
        )
