"""However gradients are cut into pieces at multiples of 64 and dealt to ranks, every rank gets the same bits of the norm."""

from __future__ import annotations

import itertools
import math
import struct

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.runtime.norm import Combine, NormCollector, norms, total_norm

SEGMENT = 64 * 4096
numels = st.one_of(st.integers(0, 700), st.sampled_from([SEGMENT - 64, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 64 * 3 + 5]))
# one factor per parameter, over the whole range of fp32
scales = st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30])


Piece = tuple[int, int, int, Tensor]
"""Of which gradient, its first element, how many the whole gradient has, the values."""


def norms_of(pieces: list[Piece], order: float, combine: Combine) -> dict[int, float]:
    """The norms that one rank finds."""
    collectors: dict[int, NormCollector] = {}
    for key, lo, numel, values in pieces:
        collectors.setdefault(key, NormCollector(numel, order)).add(lo, values)
    return norms({key: c.finish() for key, c in collectors.items()}, order, combine)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[list[Tensor], list[list[Piece]]]:
    """Gradients, and the pieces of each rank: its part in up to three of them, in any order."""
    ranks = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    wholes = [
        torch.randn(numel, generator=generator) * draw(scales) for numel in draw(st.lists(numels, min_size=1, max_size=4))
    ]
    if draw(st.integers(0, 9)) == 0 and wholes[0].numel():
        wholes[0][draw(st.integers(0, wholes[0].numel() - 1))] = draw(st.sampled_from([math.inf, math.nan]))
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for key, whole in enumerate(wholes):
        blocks = -(-whole.numel() // 64)
        cuts = sorted(draw(st.lists(st.integers(0, blocks), min_size=ranks - 1, max_size=ranks - 1)))
        edges = [0, *(min(64 * c, whole.numel()) for c in cuts), whole.numel()]
        for rank in range(ranks):
            lo, hi = edges[rank], edges[rank + 1]
            inner = sorted(draw(st.lists(st.integers(lo // 64, hi // 64), max_size=2)))
            ends = [lo, *(min(max(64 * c, lo), hi) for c in inner), hi]
            pieces[rank] += [(key, a, whole.numel(), whole[a:b]) for a, b in itertools.pairwise(ends)]
    return wholes, [draw(st.permutations(mine)) for mine in pieces]


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def on_all_ranks(pieces: list[list[Piece]], order: float) -> list[dict[int, float]]:
    messages: list[Tensor] = []

    def collect(mine: Tensor) -> list[Tensor]:
        messages.append(mine.clone())
        return [mine]

    for mine in pieces:
        norms_of(mine, order, collect)
    return [norms_of(mine, order, lambda _: [m.clone() for m in messages]) for mine in pieces]


@settings(deadline=None, max_examples=60)
@given(dealt(), st.sampled_from([2.0, 1.0, 3.0, math.inf]))
def test_cuts_change_no_bit(case: tuple[list[Tensor], list[list[Piece]]], order: float) -> None:
    wholes, pieces = case
    expected = norms_of([(k, 0, w.numel(), w) for k, w in enumerate(wholes)], order, lambda mine: [mine])
    for found in on_all_ranks(pieces, order):
        assert {k: bits(v) for k, v in found.items() if v} == {k: bits(v) for k, v in expected.items() if v}
        assert bits(total_norm(found.values(), order)) == bits(total_norm(expected.values(), order))
