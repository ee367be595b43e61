"""Buckets of a reduction: together they are every chosen element of every rank, once, in order, and none is much too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.config import Partition
from lowtide.runtime.buckets import Bucket, chunk_buckets, even_buckets, numel
from lowtide.spec.chunks import cut_into_chunks
from lowtide.spec.layout import ALIGNMENT, CUT_NUMEL, UnitLayout, lay_out
from tests.property.test_chunks import params, partitions


@st.composite
def layouts(draw: st.DrawFn) -> tuple[UnitLayout, list[int]]:
    layout = lay_out(draw(params), Partition(draw(partitions)), draw(st.integers(1, 4)), align=ALIGNMENT)
    chosen = [i for i in range(len(layout.params)) if draw(st.booleans())]
    return layout, chosen


def check_tiles(layout: UnitLayout, chosen: list[int], buckets: list[Bucket]) -> None:
    assert all(len(bucket) == layout.ranks for bucket in buckets)
    for rank in range(layout.ranks):
        found = [(p.index, e) for bucket in buckets for p in bucket[rank] for e in range(p.lo, p.hi)]
        assert found == [(i, e) for i in chosen for e in range(*layout.piece(i, rank))]


@given(layouts(), st.integers(1, 20_000))
def test_even_buckets(case: tuple[UnitLayout, list[int]], most: int) -> None:
    layout, chosen = case
    buckets = even_buckets(layout, chosen, most=most)
    check_tiles(layout, chosen, buckets)
    for bucket in buckets:
        assert sum(map(numel, bucket)) <= most + 2 * CUT_NUMEL * layout.ranks


@given(layouts(), st.integers(1, 20))
def test_chunk_buckets(case: tuple[UnitLayout, list[int]], pages: int) -> None:
    layout, chosen = case
    covers = [(layout.cuts[r], layout.cuts[r + 1]) for r in range(layout.ranks)]
    chunks = [cut_into_chunks(layout, c, chunk_bytes=pages * ALIGNMENT, whole=False) for c in covers]
    buckets = chunk_buckets(chunks, chosen)
    check_tiles(layout, chosen, buckets)
    assert len(buckets) == 1 or all(map(any, buckets)), "none without anything to add"
    for bucket in buckets:
        for rank, row in enumerate(bucket):
            parts = [{(p.index, p.lo, p.hi) for p in chunk.parts} for chunk in chunks[rank]]
            assert any({(p.index, p.lo, p.hi) for p in row} <= whole for whole in parts), "of one chunk, all that it has"
