"""The one order in which numbers of several ranks are added, so that no transport can change a bit of the sum.

It is a binary tree over rank numbers, ``((0 + 1) + (2 + 3)) + ...``; the odd last block of a level is carried up unchanged. A
*node* ``(first, end)`` is the sum of the ranks in that range. Ranks that are together somewhere (on one host) can add up whole
nodes before they send anything, and the tree stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lowtide.errors import ArgumentError

Node = tuple[int, int]


def tree_sum(blocks: Sequence[Tensor], *, mine: int | None = None) -> Tensor:
    """Add ``blocks`` in place along the tree, and return the one that holds the sum: ``blocks[0]``, unless ``mine`` says which
    of them this rank fills again and again, in memory that others read. That one stays as it is, if there are several.

    [Note: shared lines] A processor that has only read what another wrote shares those lines of cache with it, and each must be
    taken back before it is written again. That made filling 4 MB take 280 instead of 90 µs (an EPYC). So a rank writes where it
    has to read another rank's numbers, and reads its own."""
    if not blocks:
        raise ArgumentError("tree_sum needs at least one block.")
    sums = list(blocks)
    step = 1
    while step < len(sums):
        for left in range(0, len(sums) - step, 2 * step):
            one, other = sums[left], sums[left + step]
            sums[left] = torch.add(one, other, out=other if step == 1 and left == mine else one)
        step *= 2
    return sums[0]


def nodes_within(ranks: Collection[int], size: int) -> list[Node]:
    """The largest nodes of the tree over ``size`` ranks that consist of ``ranks`` only, from left to right."""

    def visit(first: int, end: int) -> list[Node]:
        if all(rank in ranks for rank in range(first, end)):
            return [(first, end)]
        if end - first == 1:
            return []
        middle = _middle(first, end)
        return visit(first, middle) + visit(middle, end)

    return visit(0, size)


def sum_of_nodes(given: Mapping[Node, Tensor], size: int) -> Tensor:
    """The sum over ``size`` ranks from the sums of nodes that cover all of them; in place, in the leftmost of ``given``."""

    def value(first: int, end: int) -> Tensor:
        found = given.get((first, end))
        if found is not None:
            return found
        middle = _middle(first, end)
        return value(first, middle).add_(value(middle, end))

    return value(0, size)


def _middle(first: int, end: int) -> int:
    """Where the node of ranks ``first:end`` is made of two: the left one has a power of two of ranks."""
    half = 1
    while 2 * half < end - first:
        half *= 2
    return first + half
