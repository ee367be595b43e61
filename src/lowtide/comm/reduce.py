"""The one order in which numbers of several ranks are added, so that no transport can change a bit of the sum."""

from __future__ import annotations

from torch import Tensor

from lowtide.errors import ArgumentError


def tree_sum(blocks: list[Tensor]) -> Tensor:
    """Add ``blocks`` in place along one fixed binary tree over their indices, ``((0 + 1) + (2 + 3)) + ...``.

    The odd last block of a level is carried up unchanged. The sum is in ``blocks[0]``, which is returned;
    the other blocks hold partial sums afterwards.
    """
    if not blocks:
        raise ArgumentError("tree_sum needs at least one block.")
    step = 1
    while step < len(blocks):
        for left in range(0, len(blocks) - step, 2 * step):
            blocks[left].add_(blocks[left + step])
        step *= 2
    return blocks[0]
