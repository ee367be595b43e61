"""What is known of a reduced gradient without looking at it: whether it is finite, and its norm.

[Note: one look at every gradient] A gradient is read once for this, where it is stored and its bytes are at hand: on the
thread that reduces, or in the update. The result travels with the ticket of the reduction. It is believed only for
gradients that nobody can change behind our back: those that ``param.grad`` shows as a ``ShardedGrad``, whose every operation
comes through us. Where ``param.grad`` is an ordinary tensor, ``param.grad.data.mul_()`` would leave no trace, and it is read
when a norm is asked for, as in plain PyTorch.

One rank has whole gradients and its norms are torch's own, of the whole accumulated gradient; several ranks have parts, and
norms that do not depend on where the parts are cut ([Note: the same norm for every partition]).

[Note: norms of scaled gradients] A loss scaler multiplies all gradients by a power of two before their norm is asked for.
The norm of the product is not always the product of the norm: small elements and their squares vanish otherwise. So the
norm that is wanted is part of the question (``NormQuery``): one that was asked of gradients that had been multiplied by such a
factor is from then on taken of the products, too, when gradients are stored. Any other change makes the norm unknown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from lowtide.runtime.norm import NormCollector, PartialNorm, largest
from lowtide.runtime.unread import Unread, read_together

T = TypeVar("T")

# torch's kernel for the 2-norm of these walks through memory once, in an order that neither the thread nor the number of
# threads changes (for fp16 it does; tests/unit/test_grad_summary.py shows both).
_ONE_ORDER = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class NormQuery:
    """The norm of order ``order`` of a gradient that is multiplied by ``factor``."""

    order: float
    factor: float = 1.0

    def of(self, values: Tensor) -> Tensor:
        """The values that the norm is taken of."""
        return values if self.factor == 1.0 else values * self.factor


def is_power_of_two(factor: float) -> bool:
    """Whether a product with ``factor`` has the same bits however it is computed."""
    return math.isfinite(factor) and abs(math.frexp(factor)[0]) == 0.5


@dataclass(frozen=True, slots=True)
class GradSummary:
    """What is known of one gradient as it is now; frozen, and replaced when the gradient changes."""

    finite: bool
    """Whether this rank's part is known to be finite."""
    norms: Mapping[NormQuery, float] = field(default_factory=dict[NormQuery, float])
    """On one rank: the norms of the gradient as it was stored."""
    parts: Mapping[NormQuery, PartialNorm] = field(default_factory=dict[NormQuery, PartialNorm])
    """On several ranks: what this rank contributes to them."""
    factor: float | None = 1.0
    """By what the gradient has been multiplied since it was stored; None: it was changed otherwise."""

    def norm(self, order: float) -> float | None:
        """The norm of the gradient as it is now, on one rank, if it is known."""
        return None if self.factor is None else self.norms.get(NormQuery(order, self.factor))

    def part(self, order: float) -> PartialNorm | None:
        """What this rank contributes to the norm of the gradient as it is now, if it is known."""
        return None if self.factor is None else self.parts.get(NormQuery(order, self.factor))

    def changed(self, *, keeps_finite: bool, factor: float | None) -> GradSummary:
        """What is still known after an elementwise change; ``factor``: it was a multiplication by that."""
        finite = self.finite and keeps_finite
        # A second factor could undo what the first has made of small numbers, which then have been rounded.
        if factor is None or self.factor != 1.0 or not is_power_of_two(factor):
            return GradSummary(finite, factor=None)
        return replace(self, finite=finite, factor=factor)


class SummaryReader:
    """Reads the gradients of one unit as they are stored, and makes a summary of each.

    ``numels`` are those of the whole gradients; ``alone``: there is one rank, which has them whole.
    """

    def __init__(self, numels: Sequence[int], queries: Iterable[NormQuery], *, alone: bool) -> None:
        self._numels, self._queries = numels, tuple(queries)
        self.whole = alone
        self._whole: dict[int, Unread[GradSummary]] = {}
        self._largest: dict[int, list[Tensor]] = {}
        self._collectors: dict[int, dict[NormQuery, NormCollector]] = {}

    def read(self, index: int, lo: int, values: Tensor) -> None:
        """Read elements ``lo`` … of the gradient of parameter ``index``, 1-D."""
        if not self.whole:
            collectors = self._collectors.setdefault(
                index, {query: NormCollector(self._numels[index], query.order) for query in self._queries}
            )
            for query, collector in collectors.items():
                collector.add(lo, query.of(values))
        elif (lo, values.numel()) == (0, self._numels[index]):
            self._whole[index] = summary_of_whole(values, self._queries)
        else:  # a gradient that is never whole in memory: its norm is read when it is asked for
            self._largest.setdefault(index, []).append(largest(values))

    def unread(self) -> dict[int, Unread[GradSummary]]:
        """The summaries by index, still where the gradients are."""
        bounds = {
            index: Unread(torch.stack(found), lambda read: GradSummary(all(map(math.isfinite, read.tolist()))))
            for index, found in self._largest.items()
        }
        return bounds | self._whole | {index: _unread_parts(one) for index, one in self._collectors.items()}


def _unread_parts(collectors: Mapping[NormQuery, NormCollector]) -> Unread[GradSummary]:
    unread = {query: collector.unread() for query, collector in collectors.items()}
    lengths = [one.numbers.numel() for one in unread.values()]

    def make(read: Tensor) -> GradSummary:
        numbers = zip(unread.items(), read.split(lengths), strict=True)
        parts = {query: one.make(mine) for (query, one), mine in numbers}
        return GradSummary(any(part.is_finite for query, part in parts.items() if query.factor == 1.0), parts=parts)

    return Unread(torch.cat([one.numbers for one in unread.values()]), make)


def summary_of_whole(values: Tensor, queries: Iterable[NormQuery]) -> Unread[GradSummary]:
    """What there is to know of a whole gradient."""
    answered = [q for q in queries if math.isinf(q.order) or (q.order == 2 and values.dtype in _ONE_ORDER)]
    found = [norm_of_whole(query.of(values), query.order) for query in answered]
    if not any(query.factor == 1.0 for query in answered):
        found.append(largest(values))

    def make(read: Tensor) -> GradSummary:
        numbers = read.tolist()
        finite = any(math.isfinite(n) for n, q in itertools.zip_longest(numbers, answered) if q is None or q.factor == 1.0)
        return GradSummary(finite, norms=dict(zip(answered, numbers, strict=False)))

    return Unread(torch.stack([number.to(torch.float64) for number in found]), make)


def norm_of_whole(values: Tensor, order: float) -> Tensor:
    """torch's norm of a whole gradient, without looking at it."""
    return largest(values) if math.isinf(order) else torch.linalg.vector_norm(values, order)


def first_not_finite(tensors: Iterable[tuple[T, Tensor]]) -> T | None:
    """The label of the first tensor with an element that is not finite. Each is needed only until the next is asked for."""
    found = [(label, largest(values)) for label, values in tensors]
    if not found:
        return None
    read = read_together([Unread(torch.stack([number for _, number in found]), Tensor.tolist)])[0]
    return next((label for (label, _), number in zip(found, read, strict=True) if not math.isfinite(number)), None)
