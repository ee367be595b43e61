"""What is known of a reduced gradient without looking at it: whether it is finite, and its norm.

[Note: one look at every gradient] A gradient is read once for this, where it is stored and its bytes are at hand: on the
thread that reduces, or in the update. The result travels with the ticket of the reduction. It is believed only for
gradients that nobody can change behind our back: those that ``param.grad`` shows as a ``ShardedGrad``, whose every operation
comes through us. Where ``param.grad`` is an ordinary tensor, ``param.grad.data.mul_()`` would leave no trace, and it is read
when a norm is asked for, as in plain PyTorch.

One rank has whole gradients and its norms are torch's own, of the whole accumulated gradient; several ranks have parts, and
norms that do not depend on where the parts are cut ([Note: the same norm for every partition]).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lowtide.runtime.norm import NormCollector, PartialNorm

# torch's kernel for the 2-norm of these walks through memory once, in an order that neither the thread nor the number of
# threads changes (for fp16 it does; tests/unit/test_grad_summary.py shows both).
_ONE_ORDER = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class GradSummary:
    """What is known of one gradient as it is now; frozen, and replaced when the gradient changes."""

    finite: bool
    """Whether this rank's part is known to be finite."""
    norms: Mapping[float, float] = field(default_factory=dict[float, float])
    """By order, on one rank: the norm."""
    parts: Mapping[float, PartialNorm] = field(default_factory=dict[float, PartialNorm])
    """By order, on several ranks: what this rank contributes to it."""

    def changed(self, *, keeps_finite: bool) -> GradSummary:
        """What is still known after an elementwise change."""
        return GradSummary(finite=self.finite and keeps_finite)


class SummaryReader:
    """Reads the gradients of one unit as they are stored, and makes a summary of each.

    ``numels`` are those of the whole gradients; ``alone``: there is one rank, which has them whole.
    """

    def __init__(self, numels: Sequence[int], orders: Iterable[float], *, alone: bool) -> None:
        self._numels, self._orders = numels, tuple(orders)
        self.whole = alone
        self._summaries: dict[int, GradSummary] = {}
        self._collectors: dict[int, dict[float, NormCollector]] = {}

    def read(self, index: int, lo: int, values: Tensor) -> None:
        """Read elements ``lo`` … of the gradient of parameter ``index``, 1-D."""
        if not self.whole:
            self._read_part(index, lo, values)
        elif (lo, values.numel()) == (0, self._numels[index]):
            self._summaries[index] = summary_of_whole(values, self._orders)
        else:  # a gradient that is never whole in memory: its norm is read when it is asked for
            self._add(index, finite=all_finite(values))

    def finish(self) -> dict[int, GradSummary]:
        """The summaries by index."""
        return {
            index: replace(summary, parts={o: c.finish() for o, c in self._collectors.get(index, {}).items()})
            for index, summary in self._summaries.items()
        }

    def _read_part(self, index: int, lo: int, values: Tensor) -> None:
        if index not in self._collectors:
            self._collectors[index] = {order: NormCollector(self._numels[index], order) for order in self._orders}
        known = [collector.add(lo, values) for collector in self._collectors[index].values()]
        self._add(index, finite=any(known) or all_finite(values))

    def _add(self, index: int, *, finite: bool) -> None:
        known = self._summaries.get(index)
        self._summaries[index] = GradSummary(finite and (known is None or known.finite))


def summary_of_whole(values: Tensor, orders: Iterable[float]) -> GradSummary:
    """What there is to know of a whole gradient."""
    norms = {
        order: norm_of_whole(values, order)
        for order in orders
        if math.isinf(order) or (order == 2 and values.dtype in _ONE_ORDER)
    }
    return GradSummary(any(map(math.isfinite, norms.values())) or all_finite(values), norms=norms)


def norm_of_whole(values: Tensor, order: float) -> float:
    """torch's norm of a whole gradient."""
    # An empty tensor has no maximum, and torch raises.
    return float(torch.linalg.vector_norm(values, order)) if values.numel() else 0.0


def all_finite(values: Tensor) -> bool:
    """Whether every element is finite. A sum is one pass without a temporary; only if that is not finite is each element
    looked at."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
