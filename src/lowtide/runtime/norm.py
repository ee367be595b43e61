"""Norms that do not depend on where a gradient is cut.

[Note: the same norm for every partition] A sum in floating point depends on its order, so the norm of a sharded gradient
would differ in its last bits from one stage or world size to another, and clipping would carry that into the weights. Here
the order is fixed: blocks of 64 elements from a parameter's own start (cuts fall between them) are added by halves in fp64,
4096 blocks make a segment, added by halves too; adding a zero changes nothing, so a segment that is cut between ranks is
the sum of their two halves, each padded with zeros; segments are added exactly (``math.fsum``). Every element takes part in
the same additions whoever holds it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.spec.layout import CUT_NUMEL

_SEGMENT_BLOCKS = 4096
_SEGMENT_NUMEL = CUT_NUMEL * _SEGMENT_BLOCKS


@dataclass(frozen=True)
class GradPiece:
    """Elements ``lo`` … of parameter ``key``'s gradient, 1-D in memory order; ``numel`` is the whole parameter's."""

    key: int
    lo: int
    numel: int
    values: Tensor


Combine = Callable[[Tensor], list[Tensor]]
"""Exchange of one fp64 vector per rank: returns everybody's, in rank order."""


def alone(mine: Tensor) -> list[Tensor]:
    """The exchange of a single rank."""
    return [mine]


def norms(pieces: Iterable[GradPiece], order: float, combine: Combine) -> dict[int, float]:
    """The norm of every parameter's gradient, by key, over all ranks."""
    if math.isinf(order):
        return _largest(pieces, combine)
    rows = [row for piece in pieces for row in _segments(piece, order)]
    whole = [(k, s, float(v)) for k, s, v in rows if v.dim() == 0]
    cut = [(k, s, v) for k, s, v in rows if v.dim() == 1]
    header = torch.tensor([len(whole), len(cut)], dtype=torch.float64)
    body = [torch.tensor(whole, dtype=torch.float64).flatten()]
    body += [torch.cat((torch.tensor((k, s), dtype=torch.float64), v)) for k, s, v in cut]
    sums: dict[int, list[float]] = defaultdict(list)
    shared: dict[tuple[int, int], Tensor] = {}
    for message in combine(torch.cat((header, *body))):
        wholes, cuts = int(message[0]), int(message[1])
        for key, _, value in message[2 : 2 + 3 * wholes].view(-1, 3).tolist():
            sums[int(key)].append(value)
        rest = message[2 + 3 * wholes : 2 + 3 * wholes + cuts * (2 + _SEGMENT_BLOCKS)].view(cuts, 2 + _SEGMENT_BLOCKS)
        for row in rest:
            place = (int(row[0]), int(row[1]))
            shared[place] = shared[place] + row[2:] if place in shared else row[2:]
    for (key, _), blocks in sorted(shared.items()):
        sums[key].append(float(_halves(blocks)))
    return {key: exact_sum(values) ** (1.0 / order) for key, values in sums.items()}


def total_norm(parts: Iterable[float], order: float) -> float:
    """The norm of a vector of norms."""
    values = list(parts)
    if math.isinf(order):
        return math.nan if any(math.isnan(v) for v in values) else max(values, default=0.0)
    return exact_sum([v**order for v in values]) ** (1.0 / order)


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN or infinity if one of them is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _largest(pieces: Iterable[GradPiece], combine: Combine) -> dict[int, float]:
    mine = [(float(p.key), float(p.values.abs().max())) for p in pieces if p.values.numel()]
    rows = [
        row for message in combine(torch.tensor(mine, dtype=torch.float64).flatten()) for row in message.view(-1, 2).tolist()
    ]
    out: dict[int, float] = {}
    for key, value in rows:
        known = out.get(int(key), 0.0)
        out[int(key)] = math.nan if math.isnan(value) or math.isnan(known) else max(value, known)
    return out


def _segments(piece: GradPiece, order: float) -> Iterable[tuple[int, int, Tensor]]:
    """(key, segment, sum) for segments that lie in this piece whole, (key, segment, 4096 block sums) for those that are cut."""
    values, lo = piece.values, piece.lo
    hi = lo + values.numel()
    if not values.numel():
        return
    for segment in range(lo // _SEGMENT_NUMEL, -(-hi // _SEGMENT_NUMEL)):
        start, end = segment * _SEGMENT_NUMEL, min((segment + 1) * _SEGMENT_NUMEL, piece.numel)
        a, b = max(start, lo), min(end, hi)
        powers = values[a - lo : b - lo].to(torch.float64)
        powers = powers.square() if order == 2 else powers.abs().pow(order)
        blocks = _block_sums(powers)
        if (a, b) == (start, end):
            yield piece.key, segment, _halves(blocks)
        else:
            padded = torch.zeros(_SEGMENT_BLOCKS, dtype=torch.float64)
            first = (a - start) // CUT_NUMEL
            padded[first : first + blocks.numel()] = blocks.cpu()
            yield piece.key, segment, padded


def _block_sums(powers: Tensor) -> Tensor:
    """The sum of each 64 elements, by halves. First the blocks are turned, so that each addition runs along many of them and
    not along a few elements of one: the same additions, 20 times faster (measured)."""
    short = -powers.numel() % CUT_NUMEL
    rows = (torch.nn.functional.pad(powers, (0, short)) if short else powers).view(-1, CUT_NUMEL).t().contiguous()
    while len(rows) > 1:
        half = len(rows) // 2
        rows = rows[:half] + rows[half:]
    return rows[0]


def _halves(blocks: Tensor) -> Tensor:
    """Sum of up to 4096 block sums, by halves of the padded segment; always the same additions."""
    short = _SEGMENT_BLOCKS - blocks.numel()
    row = torch.nn.functional.pad(blocks, (0, short)) if short else blocks
    while row.numel() > 1:
        half = row.numel() // 2
        row = row[:half] + row[half:]
    return row[0]
