"""What is true of gradients over all ranks and tiers: their norms, whether they are finite, and the whole of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lowtide.comm.group import Group
from lowtide.errors import InternalError
from lowtide.runtime import norm
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grad_store import Change
from lowtide.runtime.grad_summary import NormQuery, first_not_finite, norm_of_whole
from lowtide.runtime.grads import GradRecord, Grads
from lowtide.runtime.sharded_grad import ShardedGrad
from lowtide.runtime.trace import Spans
from lowtide.runtime.unit import Unit
from lowtide.runtime.unread import read_together
from lowtide.stages import Stage


class GradFacts:
    """Answers what a ``ShardedGrad`` cannot know by itself. Every rank must ask in the same order."""

    def __init__(self, group: Group, exchange: Exchange, stage: Stage, name_of: dict[nn.Parameter, str]) -> None:
        self._group, self._exchange, self._stage, self._name_of = group, exchange, stage, name_of
        self._norm_cache: dict[float, dict[int, float]] = {}
        self.grads: Grads  # set once they exist; they need an owner first
        self.before_change: Callable[[Unit], None] = lambda _: None
        """Called before a gradient on a shelf changes: an update that was put off still needs the old one."""
        self.before_operation: Callable[[str, Any, Any], None] = lambda *_: None
        """Called before anything is done with a sharded gradient, with the name of the operation and its arguments."""
        self.spans: Spans | None = None
        """Where norms that torch's own clipping asks for are noted; None: nowhere."""
        self.listener: Callable[[str], None] | None = None
        """Hears, while norms are computed, of every gradient that has come to memory for it (``clip``)."""

    # -- norms --------------------------------------------------------------------------------------------------------

    def norms(self, order: float) -> dict[int, float]:
        """The norm of every gradient by key, over all ranks."""
        records = [r for r in self.grads.by_param.values() if r.param.grad is not None]
        self._will_be_asked_again(order, records)
        if self._group.size == 1:
            return {r.key: self._norm_of_whole(r, order) for r in records}
        known = {r.key: part for r in records if r.known is not None and (part := r.known.part(order)) is not None}
        collectors: dict[int, norm.NormCollector] = {}
        for record, lo, values in self.grads.pieces(lambda r: r.key not in known):
            if self.listener is not None:
                self.listener("clip")
            if record.key not in collectors:
                numel = record.unit.layout.params[record.index].numel
                collectors[record.key] = norm.NormCollector(numel, order)
            collectors[record.key].add(lo, values)
        read = read_together([collector.unread() for collector in collectors.values()])
        return norm.norms(known | dict(zip(collectors, read, strict=True)), order, self._exchange.vectors)

    def _will_be_asked_again(self, order: float, records: Iterable[GradRecord]) -> None:
        """From the next backward on, this norm is known when it ends, see [Note: norms of scaled gradients]."""
        self.grads.queries.add(NormQuery(order))
        factors = {record.known.factor for record in records if record.known is not None} - {None, 1.0}
        self.grads.queries -= {q for q in self.grads.queries if q.order == order and q.factor not in (1.0, *factors)}
        self.grads.queries |= {NormQuery(order, factor) for factor in factors if factor is not None}

    def _norm_of_whole(self, record: GradRecord, order: float) -> float:
        """torch's norm of a gradient that is whole on this rank."""
        grad = record.param.grad
        if grad is None:
            raise InternalError("the norm of a gradient that is not there")
        if record.known is not None and (known := record.known.norm(order)) is not None:
            return known
        if self.listener is not None:
            self.listener("clip")
        with self._recorded():
            if not isinstance(grad, ShardedGrad):
                return float(norm_of_whole(grad, order))
            if grad.piece is not None:
                return float(norm_of_whole(grad.piece, order))
            with self.grads.whole_from_shelf(record) as values:
                return float(norm_of_whole(values, order))

    def norm_of(self, grad: ShardedGrad, order: float) -> float:
        """The norm of one gradient."""
        if self._group.size == 1:
            record = self.grads.by_key[grad.key]
            self._will_be_asked_again(order, [record])
            return self._norm_of_whole(record, order)
        if order not in self._norm_cache:  # torch asks for one norm at a time; one exchange answers for all
            with self._recorded():
                self._norm_cache[order] = self.norms(order)
        return self._norm_cache[order].get(grad.key, 0.0)

    def _recorded(self) -> AbstractContextManager[None]:
        """A timeline must not lose the time that a norm takes which is read from the disk."""
        return nullcontext() if self.spans is None else self.spans.during("update", "clip")

    def grads_changed(self) -> None:
        self._norm_cache.clear()

    def about_to(self, operation: str, args: Any, kwargs: Any) -> None:
        self.before_operation(operation, args, kwargs)

    # -- finite or not ------------------------------------------------------------------------------------------------

    def first_not_finite(self) -> int | None:
        """The key of the first parameter whose gradient is not finite on some rank; all ranks get the same answer."""
        unknown = {r.key for r in self.grads.by_param.values() if r.known is None or not r.known.finite}
        mine = first_not_finite((r.key, values) for r, _, values in self.grads.pieces(lambda r: r.key in unknown))
        bad = [key for key in self._exchange.numbers("finite gradients", -1 if mine is None else mine) if key >= 0]
        return min(bad, default=None)

    def is_finite(self, grad: ShardedGrad) -> bool:
        """Whether this rank's part of a gradient is finite."""
        record = self.grads.by_key[grad.key]
        if record.known is not None and record.known.finite:
            return True
        return first_not_finite((r.key, values) for r, _, values in self.grads.pieces(lambda r: r is record)) is None

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001
        return any(self._exchange.numbers("a flag", int(flag)))

    # -- one gradient -------------------------------------------------------------------------------------------------

    def change(self, grad: ShardedGrad, change: Change) -> None:
        """Change a gradient in place, or note it."""
        if grad.piece is not None:
            change.apply(grad.piece)
        else:
            record = self.grads.by_key[grad.key]
            self.before_change(record.unit)
            self.grads.shelves[record.unit].change(record.index, change)
        self.was_changed(grad, change)

    def was_changed(self, grad: ShardedGrad, change: Change) -> None:
        """A gradient was changed: what was known of it may not hold any more."""
        record = self.grads.by_key[grad.key]
        if record.known is not None:
            record.known = record.known.changed(keeps_finite=change.keeps_finite, factor=change.factor)
        self.grads_changed()

    def whole_of(self, grad: ShardedGrad) -> Tensor:
        """A sharded gradient, whole."""
        record = self.grads.by_key[grad.key]
        param = record.unit.layout.params[record.index]
        piece = grad.piece
        if piece is None:
            piece = self.grads.piece(record, *self.grads.kept_range(record.unit, record.index))
        if piece is None:
            raise InternalError("a gradient that is shown has no bytes")
        if not self._stage.gradients:
            return piece.as_strided(param.shape, param.stride).clone()
        name = f"the gradient of {self._name_of[record.param]}"
        return self._exchange.whole(name, record.unit.layout, record.index, piece).as_strided(param.shape, param.stride)
