"""The one order in which numbers of several ranks are added, so that no transport can change a bit of the sum.

It is a binary tree over rank numbers, ``((0 + 1) + (2 + 3)) + ...``; the odd last block of a level is carried up unchanged. A
*node* ``(first, end)`` is the sum of the ranks in that range. Ranks that are together somewhere (on one host) can add up whole
nodes before they send anything, and the tree stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from lowtide.errors import ArgumentError

Node = tuple[int, int]


def tree_sum(blocks: Sequence[Tensor]) -> Tensor:
    """Add ``blocks`` in place along the tree. The sum is in ``blocks[0]``, which is returned; the others hold partial sums."""
    if not blocks:
        raise ArgumentError("tree_sum needs at least one block.")
    step = 1
    while step < len(blocks):
        for left in range(0, len(blocks) - step, 2 * step):
            blocks[left].add_(blocks[left + step])
        step *= 2
    return blocks[0]


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
