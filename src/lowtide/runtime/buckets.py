"""How the reduction of a unit is cut into buckets: a few of every rank's elements at a time, so that the buffers of a reduction
are as large as a bucket and not as the largest unit. Sums are elementwise, and so are the codecs that exist, so that no cut
changes a bit.

Gradients on a shelf are put there chunk by chunk: a bucket is then one chunk of every rank, or chunks would be read again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lowtide.spec.chunks import Chunk
from lowtide.spec.layout import CUT_NUMEL, UnitLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``lo:hi`` of parameter ``index``."""

    index: int
    lo: int
    hi: int


Bucket = list[list[Piece]]
"""Pieces of every rank, by rank."""


def even_buckets(layout: UnitLayout, chosen: Sequence[int], *, most: int) -> list[Bucket]:
    """The parameters ``chosen`` in buckets of at most about ``most`` elements of all ranks, with as many of each as it has."""
    rows = [[Piece(i, *layout.piece(i, rank)) for i in chosen] for rank in range(layout.ranks)]
    counts = [sum(p.hi - p.lo for p in row) for row in rows]
    buckets = max(1, -(-sum(counts) // max(most, 1)))
    cuts = [[_cut(count, k, buckets) for k in range(buckets + 1)] for count in counts]
    return [[_between(row, at[k], at[k + 1]) for row, at in zip(rows, cuts, strict=True)] for k in range(buckets)]


def chunk_buckets(chunks: Sequence[Sequence[Chunk]], chosen: Collection[int]) -> list[Bucket]:
    """The parameters ``chosen`` in buckets of one chunk of each rank; ``chunks[r]``: those of rank ``r``."""
    rows = [[[Piece(p.index, p.lo, p.hi) for p in c.parts if p.index in chosen] for c in mine] for mine in chunks]
    buckets = [[row[k] if k < len(row) else [] for row in rows] for k in range(max(map(len, rows)))]
    return [bucket for bucket in buckets if any(bucket)] or buckets[:1]


def numel(pieces: Sequence[Piece]) -> int:
    return sum(p.hi - p.lo for p in pieces)


def _cut(count: int, number: int, buckets: int) -> int:
    return count if number == buckets else count * number // buckets // CUT_NUMEL * CUT_NUMEL


def _between(row: Sequence[Piece], lo: int, hi: int) -> list[Piece]:
    """Elements ``lo:hi`` of the pieces of ``row``, one after another."""
    found: list[Piece] = []
    at = 0
    for piece in row:
        a, b = max(lo - at, 0), min(hi - at, piece.hi - piece.lo)
        if a < b:
            found.append(Piece(piece.index, piece.lo + a, piece.lo + b))
        at += piece.hi - piece.lo
    return found
