"""A sum over ranks by recursive halving, along the very tree of comm/reduce.py.

Rank ``r`` and ``r ^ 1`` swap: each gives the other the pieces whose owners are on the other's side (the last bit of the owner's
number is the other's), and adds what it gets to the rest. Then ``r ^ 2`` by the next bit, ``r ^ 4``, and so on, until only the
own piece is left. After the swap at distance ``d`` a rank holds sums over ``2 * d`` neighbours: whole nodes of the tree, made
of the same two halves in the same order (which matters for nothing but the payload of NaNs, and is kept for that).

Every byte crosses as often as in an exchange of all with all, in fewer messages: log2(size) instead of size - 1 per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import InternalError


class Pairs(Protocol):
    """What it needs of a transport."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def scratch(self, name: str, nbytes: int) -> Tensor: ...

    def swap(self, peer: int, give: Tensor, get: Tensor) -> None: ...


def can_halve(size: int) -> bool:
    """Whether every node of the tree over so many ranks has two halves of the same size."""
    return size > 0 and size & (size - 1) == 0


def halved_sum(over: Pairs, values: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum over all ranks of this rank's piece; ``values`` are ``counts[r]`` numbers for each rank ``r``. In place."""
    if not can_halve(over.size):
        raise InternalError(f"recursive halving among {over.size} ranks")
    ends = list(accumulate(counts, initial=0))
    held = list(range(over.size))  # pieces of which this rank has a partial sum
    distance = 1
    while distance < over.size:
        peer = over.rank ^ distance
        kept = [piece for piece in held if (piece ^ over.rank) & distance == 0]
        given = [piece for piece in held if (piece ^ over.rank) & distance]
        # One buffer to pack in and to receive in: together they are as large as what an exchange receives.
        widths = [sum(counts[p] for p in kept), sum(counts[p] for p in given)]
        get, packed = over.scratch("recv", sum(widths) * values.itemsize).view(values.dtype).split(widths)
        give = _together([values[ends[p] : ends[p + 1]] for p in given], packed)
        over.swap(peer, give, get)
        for piece, theirs in zip(kept, get.split([counts[p] for p in kept]), strict=True):
            mine = values[ends[piece] : ends[piece + 1]]
            left, right = (mine, theirs) if over.rank < peer else (theirs, mine)
            torch.add(left, right, out=mine)
        held, distance = kept, 2 * distance
    return values[ends[over.rank] : ends[over.rank + 1]]


def _together(pieces: Sequence[Tensor], packed: Tensor) -> Tensor:
    """One after the other, for one message."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), out=packed)
