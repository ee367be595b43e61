"""What is true of gradients over all ranks and tiers: their norms, whether they are finite, and the whole of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from lowtide.comm.group import Group
from lowtide.errors import InternalError
from lowtide.runtime import norm
from lowtide.runtime.exchange import Exchange
from lowtide.runtime.grad_store import Change, all_finite
from lowtide.runtime.grads import GradRecord, Grads
from lowtide.runtime.sharded_grad import ShardedGrad
from lowtide.runtime.trace import Spans
from lowtide.runtime.unit import Unit
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
        return norm.norms(self._pieces(), order, self._exchange.vectors)

    def _pieces(self) -> Iterator[norm.GradPiece]:
        for record, lo, values in self.grads.pieces():
            if self.listener is not None:
                self.listener("clip")
            yield norm.GradPiece(record.key, lo, record.unit.layout.params[record.index].numel, values)

    def norm_of(self, grad: ShardedGrad, order: float) -> float:
        if order not in self._norm_cache:  # torch asks for one norm at a time; one exchange answers for all
            with nullcontext() if self.spans is None else self.spans.during("update", "clip"):
                self._norm_cache[order] = self.norms(order)
        return self._norm_cache[order].get(grad.key, 0.0)

    def grads_changed(self) -> None:
        self._norm_cache.clear()

    def about_to(self, operation: str, args: Any, kwargs: Any) -> None:
        self.before_operation(operation, args, kwargs)

    # -- finite or not ------------------------------------------------------------------------------------------------

    def first_not_finite(self) -> int | None:
        """The key of the first parameter whose gradient is not finite on some rank; all ranks get the same answer."""
        mine = next((r.key for r in self.grads.by_param.values() if not self._is_finite(r)), -1)
        bad = [key for key in self._exchange.numbers("finite gradients", mine) if key >= 0]
        return min(bad, default=None)

    def is_finite(self, grad: ShardedGrad) -> bool:
        return self._is_finite(self.grads.by_key[grad.key])

    def any_rank(self, flag: bool) -> bool:  # noqa: FBT001
        return any(self._exchange.numbers("a flag", int(flag)))

    def _is_finite(self, record: GradRecord) -> bool:
        """Whether this rank's part of a gradient is finite."""
        if self.grads.is_shelved(record):
            shelf = self.grads.shelves[record.unit]
            return shelf.surely_finite(record.index) or all(
                all_finite(values) for _, values in shelf.parts(lambda index: index == record.index)
            )
        values = self.grads.piece(record, *record.unit.layout.piece(record.index, self._group.shard.rank))
        return values is None or all_finite(values)

    # -- one gradient -------------------------------------------------------------------------------------------------

    def note_change(self, grad: ShardedGrad, change: Change) -> None:
        record = self.grads.by_key[grad.key]
        self.before_change(record.unit)
        self.grads.shelves[record.unit].change(record.index, change)

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
