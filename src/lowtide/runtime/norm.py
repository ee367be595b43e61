"""Norms of gradients that lie in parts on several ranks: the same bits however they are cut.

[Note: the same norm for every partition] A sum in floating point depends on its order, so the norm of
a sharded gradient would differ in its last bits from one stage or world size to another, and clipping
would carry that into the weights. Here the order is fixed. Blocks of 64 elements from a parameter's own
start (cuts fall between them) are reduced one by one: by torch's kernel for the norm of a row, which
sees 64 elements whatever lies around them, or by halves in fp64 where fp32 would overflow or vanish.
4096 blocks make a segment, whose squares are added by halves in fp64; adding a zero changes nothing, so
a segment that is cut between ranks is the sum of its parts, each padded with zeros; segments are added
exactly (``math.fsum``). Every element takes part in the same operations whoever holds it.

One rank does not need any of this: it has whole gradients, and asks torch (runtime/grad_facts.py).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.runtime.unread import Unread, read_together
from lowtide.spec.layout import CUT_NUMEL

_SEGMENT_BLOCKS = 4096
# Norms of blocks outside of these bounds may have lost squares to overflow or to underflow in fp32.
# A norm of zero is believed: what vanishes then is below 1e-22, and vanishes in torch's kernel, too.
_LEAST, _MOST = 2.0**-55, 2.0**60


@dataclass(frozen=True, slots=True)
class PartialNorm:
    """What one rank knows of the norm of one gradient: sums of powers (for order infinity, a maximum)."""

    whole: tuple[tuple[int, float], ...]
    """Segments that lie on this rank whole: number and sum."""
    cut: tuple[tuple[int, int, Tensor], ...] = ()
    """Segments that do not: number, first block in it, and the fp64 sums of the blocks that are here."""

    @property
    def is_finite(self) -> bool:
        """Whether all sums are finite, and so all elements."""
        sums = [value for _, value in self.whole] + [float(blocks.sum()) for *_, blocks in self.cut]
        return all(map(math.isfinite, sums))


Combine = Callable[[Tensor], list[Tensor]]
"""Exchange of one fp64 vector per rank: returns everybody's, in rank order."""


class NormCollector:
    """Reads one rank's part of one gradient, piece by piece in any order, and makes a ``PartialNorm`` of it.

    ``numel`` is the whole gradient's. Pieces begin at multiples of 64 elements, and end at one or at the end.
    """

    def __init__(self, numel: int, order: float) -> None:
        self._blocks, self._order = -(-numel // CUT_NUMEL), order
        self._found: list[tuple[int, Tensor]] = []

    def add(self, lo: int, values: Tensor) -> None:
        """Read elements ``lo`` … of the gradient, 1-D."""
        if not values.numel():
            return
        sums = largest(values).view(1) if math.isinf(self._order) else _block_sums(values, self._order)
        self._found.append((lo // CUT_NUMEL, sums))

    def unread(self) -> Unread[PartialNorm]:
        """What was read, a few numbers for each segment, still where the gradient is."""
        found = sorted(self._found, key=lambda piece: piece[0])
        if not found:
            return Unread(torch.empty(0, dtype=torch.float64), lambda _: PartialNorm(()))
        if math.isinf(self._order):
            values = torch.cat([value for _, value in found])
            return Unread(values, lambda read: PartialNorm(((0, _maximum(read.tolist())),)))
        folded = [part for first, sums in _joined(found) for part in self._fold(first, sums)]
        return Unread(torch.cat([part.numbers for part in folded]), functools.partial(_partial_norm, folded))

    def finish(self) -> PartialNorm:
        return read_together([self.unread()])[0]

    def _fold(self, first: int, sums: Tensor) -> list[_Folded]:
        """Add up the segments that lie in blocks ``first`` … whole; keep the blocks of the others."""
        folded: list[_Folded] = []
        end = first + sums.numel()
        begin, last = -(-first // _SEGMENT_BLOCKS), end // _SEGMENT_BLOCKS
        if begin < last:
            full = sums[begin * _SEGMENT_BLOCKS - first : last * _SEGMENT_BLOCKS - first]
            folded.append(_Folded(_halves(full.view(-1, _SEGMENT_BLOCKS)), begin, None))
        # What is left lies in at most two segments: the first one, and the last.
        for segment in dict.fromkeys((first // _SEGMENT_BLOCKS, last)):
            start = segment * _SEGMENT_BLOCKS
            stop = min(start + _SEGMENT_BLOCKS, self._blocks)
            a, b = max(start, first), min(stop, end)
            if a >= b or begin <= segment < last:
                continue
            blocks = sums[a - first : b - first]
            if (a, b) == (start, stop):
                folded.append(_Folded(_halves(blocks).view(1), segment, None))
            else:
                folded.append(_Folded(blocks, segment, a - start))
        return folded


@dataclass(frozen=True, slots=True)
class _Folded:
    """Sums of whole segments from ``segment`` on, or the blocks of one segment from ``first_block`` on."""

    numbers: Tensor
    segment: int
    first_block: int | None


def _partial_norm(folded: Sequence[_Folded], read: Tensor) -> PartialNorm:
    """``read``: the numbers of ``folded``, in host memory."""
    whole: list[tuple[int, float]] = []
    cut: list[tuple[int, int, Tensor]] = []
    for part, numbers in zip(folded, read.split([part.numbers.numel() for part in folded]), strict=True):
        if part.first_block is None:
            whole += enumerate(numbers.tolist(), part.segment)
        else:
            cut.append((part.segment, part.first_block, numbers))
    return PartialNorm(tuple(whole), tuple(cut))


def norms(parts: Mapping[int, PartialNorm], order: float, combine: Combine) -> dict[int, float]:
    """The norm of every gradient by key over all ranks, from this rank's ``parts``."""
    whole = [(float(key), float(s), value) for key, part in parts.items() for s, value in part.whole]
    cut = [(key, *piece) for key, part in parts.items() for piece in part.cut]
    body = [torch.tensor([len(whole), len(cut)], dtype=torch.float64)]
    body.append(torch.tensor(whole, dtype=torch.float64).flatten())
    for key, segment, first, sums in cut:
        body += [torch.tensor([key, segment, first, sums.numel()], dtype=torch.float64), sums]
    sums_of: dict[int, list[float]] = defaultdict(list)
    shared: dict[tuple[int, int], Tensor] = {}
    for message in combine(torch.cat(body)):
        _read(message, sums_of, shared)
    for (key, _), blocks in sorted(shared.items()):
        sums_of[key].append(float(_halves(blocks)))
    if math.isinf(order):
        return {key: _maximum(values) for key, values in sums_of.items()}
    return {key: exact_sum(values) ** (1.0 / order) for key, values in sums_of.items()}


def total_norm(parts: Iterable[float], order: float) -> float:
    """The norm of a vector of norms."""
    values = list(parts)
    if math.isinf(order):
        return _maximum(values)
    return exact_sum([v**order for v in values]) ** (1.0 / order)


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once; NaN or infinity if one of them is."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _maximum(values: Iterable[float]) -> float:
    """The largest of some numbers that are not negative; NaN if one of them is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _read(message: Tensor, sums_of: dict[int, list[float]], shared: dict[tuple[int, int], Tensor]) -> None:
    """Add what one rank has sent: sums of whole segments by key, and blocks of segments that are cut."""
    wholes, cuts = int(message[0]), int(message[1])
    at = 2 + 3 * wholes
    for key, _, value in message[2:at].view(-1, 3).tolist():
        sums_of[int(key)].append(value)
    for _ in range(cuts):
        key, segment, first, count = (int(x) for x in message[at : at + 4])
        blocks = shared.setdefault((key, segment), torch.zeros(_SEGMENT_BLOCKS, dtype=torch.float64))
        blocks[first : first + count] = message[at + 4 : at + 4 + count]
        at += 4 + count


def _joined(found: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Pieces (first block, sums), in order, with those that follow one another made one."""
    runs: list[tuple[int, list[Tensor], int]] = []
    for first, sums in found:
        if runs and runs[-1][2] == first:
            begin, pieces, end = runs[-1]
            runs[-1] = (begin, [*pieces, sums], end + sums.numel())
        else:
            runs.append((first, [sums], first + sums.numel()))
    return [(begin, torch.cat(pieces) if len(pieces) > 1 else pieces[0]) for begin, pieces, _ in runs]


def largest(values: Tensor) -> Tensor:
    """The largest absolute value, fp64, without looking at it; NaN if there is one. torch's kernel for the norm of order
    infinity finds the same number, and takes 17 times as long on a CPU."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.is_complex():
        values = values.abs()
    return torch.stack(torch.aminmax(values)).abs().amax().to(torch.float64)


def _block_sums(values: Tensor, order: float) -> Tensor:
    """The sum of the powers of each 64 elements, fp64. The last block is filled up with zeros."""
    if values.is_complex():
        values = values.abs()
    full = values.numel() // CUT_NUMEL * CUT_NUMEL
    of_rows = _square_sums if order == 2 else _power_sums(order)
    sums = of_rows(values[:full].view(-1, CUT_NUMEL))
    if full == values.numel():
        return sums
    tail = torch.nn.functional.pad(values[full:], (0, CUT_NUMEL - (values.numel() - full)))
    return torch.cat((sums, of_rows(tail.view(1, CUT_NUMEL))))


def _square_sums(rows: Tensor) -> Tensor:
    """The sum of squares of each row of 64, at the speed of memory: torch's kernel reads each number once."""
    if rows.dtype not in (torch.float32, torch.float64):
        rows = rows.to(torch.float32)
    if not len(rows):
        return rows.new_empty(0, dtype=torch.float64)
    if not rows.is_cpu:  # one kernel that does not overflow, where looking at its results would be a wait
        return torch.linalg.vector_norm(rows, 2, dim=1, dtype=torch.float64).square_()
    found = torch.linalg.vector_norm(rows, 2, dim=1)
    least, most = (float(bound) for bound in torch.aminmax(found))
    sums = found.to(torch.float64).square_()
    if not (least > _LEAST and most < _MOST):  # NaN is odd
        odd = ~(((found > _LEAST) & (found < _MOST)) | (found == 0))
        sums[odd] = _power_sums(2)(rows[odd])
    return sums


def _power_sums(order: float) -> Callable[[Tensor], Tensor]:
    """The sum of powers of each row of 64, by halves in fp64."""

    def of_rows(rows: Tensor) -> Tensor:
        wide = rows.to(torch.float64)
        # Turned, so that each addition runs along many rows and not along the few elements of one.
        turned = (wide.square() if order == 2 else wide.abs().pow(order)).t().contiguous()
        while len(turned) > 1:
            half = len(turned) // 2
            turned = turned[:half] + turned[half:]
        return turned[0]

    return of_rows


def _halves(blocks: Tensor) -> Tensor:
    """The sum along the last dimension of up to 4096 block sums, by halves of the padded segment; always the same
    additions, because those with zeros change nothing."""
    count = blocks.shape[-1]
    short = (1 << (count - 1).bit_length()) - count
    row = torch.nn.functional.pad(blocks, (0, short)) if short else blocks
    while row.shape[-1] > 1:
        half = row.shape[-1] // 2
        row = row[..., :half] + row[..., half:]
    return row[..., 0]
