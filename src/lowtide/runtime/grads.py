"""Local gradients in, reduced gradients out.

Autograd leaves a whole local gradient in ``param.grad``. When a unit's gradients are all there, they are multiplied by 1/W,
exchanged, added along one fixed tree over rank numbers (whatever the stage or transport) and stored: this rank's piece
where the stage shards gradients, else the whole. ``param.grad`` then shows the stored gradient. A further backward is
reduced the same way and added to what is stored.

[Note: param.grad is the truth] Whether a parameter has a gradient is what ``param.grad`` says: a caller who sets it to
None has dropped the stored one, and the next reduction overwrites it.

Units are reduced in one order on all ranks, so that ranks whose graphs differ still meet: what a rank does not reach is
sent at the end of its backward, as "nothing here". A parameter with a gradient on no rank gets none; with one on some, the
others count as zero.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowtide.comm.channel import Channel, Label, Ticket, Wire
from lowtide.comm.group import Group
from lowtide.errors import DiskError, Refused
from lowtide.runtime.grad_store import Segment, ShelvedGrads
from lowtide.runtime.grad_summary import GradSummary, NormQuery, SummaryReader, first_not_finite
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.pace import Pace
from lowtide.runtime.reduction import Reduction
from lowtide.runtime.sharded_grad import GradOwner, ShardedGrad
from lowtide.runtime.trace import Trace
from lowtide.runtime.unit import Unit, flat_view
from lowtide.runtime.unread import Unread, read_together
from lowtide.runtime.used_grad import UsedGrad
from lowtide.stages import Stage


class GradRecord:
    """The gradient of one parameter."""

    __slots__ = (
        *("_known", "hooked", "index", "key", "lent", "local", "param", "set_aside", "shown", "store", "summed", "unit"),
        *("torn", "unreduced", "version"),
    )

    def __init__(self, unit: Unit, index: int, key: int) -> None:
        self.unit, self.index, self.key = unit, index, key
        self.param: nn.Parameter = unit.params[index]
        self.local: Tensor | None = None  # whole, this rank's own, waiting to be reduced
        self.set_aside: Tensor | None = None  # what param.grad showed before autograd began to accumulate
        self.store: Tensor | None = None  # reduced; 1-D; until a forward finds that ``param.grad`` is None
        self.shown: Tensor | None = None  # what param.grad shows when ``store`` is valid
        self.lent: Tensor | None = None  # a whole copy of ``set_aside``, which autograd accumulates into for hooks to see
        self.summed = False  # ``local`` began as such a copy
        self.torn = False  # ``store`` was added to by a backward pass that failed on several ranks
        self.version = 0  # of the parameter, before hooks of the caller's ran
        self.hooked = False
        self.unreduced = False  # ``param.grad`` came from a backward inside no_sync
        self._known: GradSummary | None = None

    @property
    def known(self) -> GradSummary | None:
        """What is known of the gradient that ``param.grad`` shows, if nobody can have changed it unseen."""
        return self._known if self.is_shown and isinstance(self.shown, ShardedGrad) else None

    @known.setter
    def known(self, summary: GradSummary | None) -> None:
        self._known = summary

    @property
    def is_shown(self) -> bool:
        """Whether ``param.grad`` is what was reduced."""
        return self.shown is not None and self.param.grad is self.shown

    @property
    def is_zeroed(self) -> bool:
        """Whether an update in backward must take zeros for it, see [Note: zeroed, not gone]."""
        return isinstance(self.param.grad, UsedGrad) and self.param.grad.zeroed


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of reducing a unit's gradients."""

    present: list[bool]
    """Which parameters have a gradient on some rank."""
    known: Mapping[int, Unread[GradSummary]]
    """What was learned of the gradients that this rank keeps, by parameter."""


class Grads:
    """Collects, reduces and stores gradients."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        stage: Stage,
        group: Group,
        channel: Channel,
        owner: GradOwner,
        in_backward: bool,
        ledger: Ledger,
        trace: Trace,
    ) -> None:
        self._group, self._channel, self._owner, self._ledger, self._trace = group, channel, owner, ledger, trace
        self._in_backward = in_backward
        self._cut = stage.gradients or (in_backward and stage.optimizer)  # whether a rank keeps its part only
        self.shelves: dict[Unit, ShelvedGrads] = {}
        """Units whose gradients are on a shelf."""
        self.reduced: dict[Unit, list[Tensor | None]] = {}
        """With updates in backward: this rank's reduced gradients, by parameter, until ``update`` takes them."""
        self.used: list[nn.Parameter] = []
        """And the parameters that had any, on some rank."""
        self._used: list[GradRecord] = []  # that the last backward pass has updated
        self.finite: dict[Unit, bool] = {}
        """And whether they are finite on every rank."""
        self.queries = {NormQuery(2.0)}
        """The norms that are computed while gradients are stored: those that were asked for before."""
        self.scratch: Callable[[Unit, int], AbstractContextManager[Tensor]] = _empty
        """Lends memory for so many bytes of a unit."""
        self._pace = Pace()
        self._reduction = Reduction(group.size, cut=self._cut, ledger=ledger)
        keys = iter(range(sum(len(u.params) for u in units)))
        self.records: dict[Unit, list[GradRecord]] = {
            u: [GradRecord(u, i, next(keys)) for i in range(len(u.params))] for u in units
        }
        self.by_param: dict[nn.Parameter, GradRecord] = {r.param: r for rs in self.records.values() for r in rs}
        self.by_key = {r.key: r for r in self.by_param.values()}
        self.sync = True
        self.active = False  # between the first gradient that a backward accumulates and its end
        self._order = list(reversed(units))  # in which units are reduced; the same on every rank
        self._seen: list[Unit] | None = []  # in which they became ready in the first backward, until it has been agreed
        self._ready: set[Unit] = set()
        self._tickets: dict[Unit, Ticket[Reduced]] = {}
        self._unkept: dict[Unit, DiskError] = {}  # whose gradients could not be stored
        self.kept_in_forward: bool | None = None
        """Whether a forward began with gradients that stayed; None: no forward has found any since somebody last looked."""
        self.before_reduction: Callable[[], None] = lambda: None
        """Called before the first reduction of a backward pass."""

    def divide_by(self, scale: float) -> None:
        """Gradients of this backward were multiplied by ``scale`` on their way."""
        self._reduction.scale = scale

    def divide_among(self, ranks: int) -> None:
        """Sums are divided by this number: of all ranks, or of those that had a batch."""
        self._reduction.ranks = ranks

    # -- from autograd ------------------------------------------------------------------------------------------------

    def arriving(self, record: GradRecord, grad: Tensor, *, watched: bool) -> None:
        """Autograd is about to accumulate, or only computes (``torch.autograd.grad``): what is shown must not be added to,
        it holds other ranks' gradients too.

        ``watched``: a hook of the caller's will look at ``param.grad``. On one rank it sees the sum, as in plain PyTorch; on
        several this rank's own gradient, as in DDP."""
        if is_sparse(grad):
            name = record.unit.names[record.index]
            raise Refused(f"the gradient of {name!r} is sparse; build the embedding with sparse=False to train it sharded.")
        if isinstance(record.param.grad, UsedGrad):  # of zeros; others are refused before a backward begins
            record.set_aside = record.param.grad
            record.param.grad = None
        record.version = record.param._version  # pyright: ignore[reportPrivateUsage]
        if record.is_shown:
            _refuse_torn(record)
            if not self.sync:
                if self._is_zero(record):  # zero_grad(set_to_none=False): what is added to is this rank's own from here on
                    record.param.grad = torch.zeros_like(grad)
                    return
                raise Refused(
                    "a backward inside no_sync() follows one that was reduced. Call zero_grad() first, or run only the last "
                    "micro-batch outside no_sync()."
                )
            record.set_aside = record.param.grad
            record.param.grad = record.lent = self._whole_copy(record) if watched else None

    def arrived(self, record: GradRecord, *, take: bool = True) -> Unit | None:
        """Autograd has accumulated. Returns the unit if this was the last gradient it waited for. ``take``: nobody else has to
        see ``param.grad``; else it stays until backward ends."""
        self.active = True
        if record.param.grad is not None and record.param.grad.requires_grad:
            raise Refused(
                f"backward(create_graph=True) makes the gradient of {record.unit.names[record.index]!r} a part of a graph, "
                f"which ends where gradients are reduced or stored: what is computed from param.grad would have none. Take "
                f"torch.autograd.grad(loss, parameters, create_graph=True), whose results are ordinary tensors."
            )
        record.summed |= record.lent is not None
        record.lent = None
        if self._group.size > 1:
            _refuse_used_by_hook(record)
        if not self.sync:
            record.unreduced = True
            return None
        if record.param.grad is None:  # a hook has used it, and what was added up before with it
            record.set_aside = None
        if not take:
            return None
        self._collect(record)
        unit = record.unit
        if any(r.local is None and r.param.requires_grad for r in self.records[unit]):
            return None
        if unit in self._ready or unit in self._tickets:
            return None
        self._ready.add(unit)
        if self._seen is not None:
            self._seen.append(unit)
        while (following := self._next_to_submit()) in self._ready:
            self._submit(following)
        self._pace.hold(self._tickets.values())
        return unit

    def finish(self) -> None:
        """The backward pass is over: reduce what is left, wait, and show the results."""
        if not self.active:
            self._restore()
            return
        self.active = False
        if not self.sync:
            self._restore()
            return
        self.submit_rest()
        unread: dict[GradRecord, Unread[GradSummary]] = {}
        try:
            for unit, ticket in self._tickets.items():
                reduced = ticket.wait()
                if unit in self._unkept:
                    raise self._unkept[unit]
                self._show_reduced(unit, reduced)
                for record, present in zip(self.records[unit], reduced.present, strict=True):
                    if not present:
                        continue
                    if self._in_backward:
                        self.used.append(record.param)
                    if record.index in reduced.known:
                        unread[record] = reduced.known[record.index]
                self._trace("reduced", unit.name)
            for record, summary in zip(unread, read_together(list(unread.values())), strict=True):
                record.known = summary
        except BaseException:
            self._drop_pass()
            raise
        self._tickets = {}
        self._ready.clear()
        self._pace.end_pass()
        self._restore()
        self._owner.grads_changed()
        # A gradient that came after its unit had been sent is a second contribution of the same backward: all ranks go again.
        if self._owner.any_rank(any(r.local is not None for r in self.by_param.values())):
            if self._in_backward:
                raise Refused(
                    "a gradient arrived twice in one backward (reentrant checkpointing?), and with update='backward' the "
                    "first one has been used. Use non-reentrant checkpointing, or update='step'."
                )
            self.active = True
            self.finish()
        elif self._seen is not None:
            self._order = _order_of_rank_0(self._channel, list(dict.fromkeys((*self._seen, *self._order))))
            self._seen = None

    def abandon(self) -> None:
        """A backward pass ended with an exception: forget what it left behind."""
        for ticket in self._tickets.values():
            with suppress(Exception):  # told by whoever uses the channel next
                ticket.wait()
        self._drop_pass()

    def put_back(self) -> None:
        """A backward pass has failed. Called before the caller goes on, who may clear gradients, or add to them.

        On one rank they are left as plain PyTorch leaves them: with what this pass has added. On several it is not known how
        far the others came: gradients are what they were, or, if they were added to, must be cleared before they are used."""
        alone = self._group.size == 1 and not self._in_backward
        for unit, ticket in self._tickets.items():
            for record in self.records[unit]:
                record.torn = not alone and record.set_aside is not None
            if alone:
                with suppress(Exception):  # told by whoever uses the channel next
                    self._show_reduced(unit, ticket.wait())
        for record in self.by_param.values():
            if alone and record.local is not None:
                self._show_unreduced(record)
            elif record.set_aside is not None and record.param.grad is not None:  # a hook of the caller's has raised
                if alone and record.param.grad is record.lent:
                    record.set_aside = None
                else:
                    record.torn, record.param.grad = record.torn or alone, record.set_aside
        self._restore()

    def _show_reduced(self, unit: Unit, reduced: Reduced) -> None:
        for record, present in zip(self.records[unit], reduced.present, strict=True):
            if not present:
                continue
            record.known = None
            if unit in self.shelves and record.shown is None:
                record.shown = self._sharded(record, None)
            record.param.grad = record.shown
            record.set_aside = None

    def _show_unreduced(self, record: GradRecord) -> None:
        """On one rank: a gradient that waits for others of its unit."""
        local, record.local = record.local, None
        if record.set_aside is not None and not record.summed and local is not None:
            record.param.grad = record.set_aside
            whole = self._whole_copy(record)
            if whole is None:  # kept in another dtype, in which it cannot be shown
                record.torn = True
                return
            local = whole.add_(local)
        record.param.grad, record.set_aside, record.summed = local, None, False

    def _drop_pass(self) -> None:
        self._tickets, self._unkept = {}, {}
        self._ready.clear()
        self.used.clear()
        self._pace.end_pass()
        self._seen = [] if self._seen is not None else None
        self.active = False
        for record in self.by_param.values():
            record.local = record.known = None
            record.summed = False
        self._restore()
        self._owner.grads_changed()

    def forget_known(self) -> None:
        """An update runs, and an optimizer may change gradients in place."""
        for record in self.by_param.values():
            record.known = None
        self._owner.grads_changed()

    def give_back(self) -> None:
        """A forward begins: gradients that the caller has set to None since leave their room to activations, as in PyTorch."""
        there = [record for record in self.by_param.values() if record.store is not None]
        for record in there:
            # One that the caller holds may be put back, and must be known again.
            if record.param.grad is None and record.store is not None and sys.getrefcount(record.shown) <= 2:
                nbytes, record.store, record.shown = record.store.nbytes, None, None
                self._ledger.remove("gradients", nbytes)
        if there:
            self.kept_in_forward = bool(self.kept_in_forward) or any(record.store is not None for record in there)

    # -- for ranks without a batch of their own -----------------------------------------------------------------------

    def submit_rest(self) -> None:
        """Reduce what is left: on a rank without a batch of its own nothing, or what no_sync() has left."""
        for record in self.by_param.values():
            self._collect(record)
        while (following := self._next_to_submit()) is not None:
            self._submit(following)

    def show_only(self, keys: set[int], *, zeroed: set[int]) -> None:
        """Other ranks have dropped all reduced gradients but these, and zeroed some that an update in backward has used."""
        for record in self.by_param.values():
            grad = record.param.grad
            if isinstance(grad, UsedGrad):
                grad.zeroed = record.key in zeroed
            if record.key not in keys and (record.is_shown or isinstance(grad, UsedGrad)):
                record.param.grad = None
            elif record.key in keys and record.param.grad is None and record.shown is not None:
                record.param.grad = record.shown

    def replace(self, record: GradRecord, values: Tensor) -> None:
        """Other ranks have changed a whole gradient to ``values``, flat."""
        param = record.unit.layout.params[record.index]
        record.param.grad = values.as_strided(param.shape, param.stride)
        if record.store is not None and not isinstance(record.shown, ShardedGrad):
            record.store.copy_(values)
            record.param.grad = record.shown
        self._owner.grads_changed()

    # -- reducing -----------------------------------------------------------------------------------------------------

    def _collect(self, record: GradRecord) -> None:
        """Move a local gradient from ``param.grad`` to where the next reduction takes it."""
        grad = record.param.grad
        if grad is None or grad is record.shown or grad is record.lent or isinstance(grad, ShardedGrad | UsedGrad):
            return
        record.local = grad.detach() if record.local is None else record.local.add_(grad.detach())
        record.param.grad = None
        record.unreduced = False

    def _is_zero(self, record: GradRecord) -> bool:
        """Whether this rank's part of the gradient that is shown is all zeros."""
        values = self.piece(record, *self.kept_range(record.unit, record.index))
        return values is not None and not values.count_nonzero()

    def _whole_copy(self, record: GradRecord) -> Tensor | None:
        """What is shown, whole and plain, for autograd to add to; None where that would not be the sum that is kept."""
        dtype, shown = record.unit.dtypes[record.index], record.shown
        if self._group.size > 1 or dtype.gradient is not dtype.param or shown is None:
            return None
        return self._owner.whole_of(shown).clone() if isinstance(shown, ShardedGrad) else shown.clone()

    def _next_to_submit(self) -> Unit | None:
        return next((unit for unit in self._order if unit not in self._tickets), None)

    def _restore(self) -> None:
        for record in self.by_param.values():
            if record.set_aside is not None and (record.param.grad is None or record.param.grad is record.lent):
                record.param.grad = record.set_aside  # autograd computed it without accumulating (torch.autograd.grad)
            record.set_aside = record.lent = None

    def _submit(self, unit: Unit) -> None:
        if not self._tickets:
            self.before_reduction()
        records = self.records[unit]
        present = [r.local is not None for r in records]
        add = [(r.set_aside is not None or r.is_shown) and not r.summed for r in records]
        for record, added in zip(records, add, strict=True):
            record.torn = record.torn and added
        locals_: list[Tensor | None] = [r.local for r in records]
        for record in records:
            record.local = None
            record.summed = False
        self._make_room(unit, present)
        note = bytes(sum(b << i for i, b in enumerate(present[k : k + 8])) for k in range(0, len(present), 8))
        self._trace("reduce", unit.name)
        label = Label("reduce", unit.index, unit.name)
        self._tickets[unit] = self._channel.submit(label, self._work(unit, locals_, add), note)

    def _work(self, unit: Unit, locals_: list[Tensor | None], add: list[bool]) -> Callable[[Wire, list[bytes]], Reduced]:
        reader = SummaryReader([p.numel for p in unit.layout.params], self.queries, alone=self._group.size == 1)

        def work(wire: Wire, notes: list[bytes]) -> Reduced:
            count = len(locals_)
            union = [any(note[i // 8] >> (i % 8) & 1 for note in notes) for i in range(count)]
            try:
                by_chunks = unit in self.shelves and not self._in_backward
                batches = self._reduction.segments(wire, unit, union, locals_, by_chunks=by_chunks)
                self._keep(wire, unit, batches, add, reader)
            except DiskError as error:
                if wire.world.size > 1:
                    raise  # the other ranks hear of it through the channel, which is of no use any more
                self._unkept[unit] = error
            return Reduced(union, reader.unread())

        return work

    def _keep(self, wire: Wire, unit: Unit, batches: Iterator[list[Segment]], add: list[bool], reader: SummaryReader) -> None:
        """Store reduced gradients where this unit's gradients are kept."""
        if self._in_backward:
            pieces = self._until_update(unit, batches)
            mine = torch.tensor([first_not_finite(enumerate(g for g in pieces if g is not None)) is None])
            self.finite[unit] = bool(wire.world.all_gather_small(mine).all())
            self.reduced[unit] = pieces
            return
        shelf = self.shelves.get(unit)
        if shelf is not None:
            shelf.keep(batches, add, reader)
            return
        kept: set[int] = set()
        for segments in batches:
            for segment in segments:
                self._add_to_store(unit, segment, add[segment.index], reader)
                kept.add(segment.index)
        if reader.whole:
            for index in kept:
                if isinstance(self.records[unit][index].shown, ShardedGrad):
                    reader.read(index, 0, self._store(unit, index))

    def _until_update(self, unit: Unit, batches: Iterator[list[Segment]]) -> list[Tensor | None]:
        """Gradients that are used at once: kept where they are on one rank, copied out of the buffers otherwise."""
        out: list[Tensor | None] = [None] * len(unit.params)
        for segments in batches:
            for segment in segments:
                lo, hi = self.kept_range(unit, segment.index)
                dtype = unit.dtypes[segment.index].gradient  # rounded as a gradient that is kept would be
                if (segment.lo, segment.hi) == (lo, hi) and self._group.size == 1 and self._reduction.scale == 1.0:
                    out[segment.index] = segment.values.to(dtype)
                    continue
                target = out[segment.index]
                if target is None:
                    target = out[segment.index] = segment.values.new_empty(hi - lo, dtype=dtype)
                target[segment.lo - lo : segment.hi - lo].copy_(segment.values)
        for record in self.records[unit]:
            if out[record.index] is None and record.is_zeroed:
                lo, hi = self.kept_range(unit, record.index)
                out[record.index] = torch.zeros(hi - lo, dtype=unit.dtypes[record.index].gradient, device=record.param.device)
        return out

    def show_used(self, owned: Container[nn.Parameter]) -> None:
        """The update in backward is over; ``owned``: the parameters that it is for."""
        used, self.used = self.used, []
        self._used = [self.by_param[param] for param in used if param in owned]
        for record in self._used:
            spec = record.unit.layout.params[record.index]
            like = torch.empty((), dtype=record.unit.dtypes[record.index].param, device=record.param.device)
            name = record.unit.names[record.index]
            record.param.grad = UsedGrad.make(like.expand(spec.shape), stride=spec.stride, name=name)

    def refuse_given(self, params: Iterable[nn.Parameter]) -> None:
        """An update in backward of ``params`` is to be ended: it has not seen gradients that the caller gave since."""
        for record in map(self.by_param.__getitem__, params):
            if record.param.grad is not None and not isinstance(record.param.grad, UsedGrad):
                raise Refused(
                    f"param.grad of {record.unit.names[record.index]!r} was set outside of loss.backward(), and "
                    f"update='backward' uses gradients inside it: this one would have no effect. Use update='step'."
                )

    def refuse_used(self, why: str, *, but_zeroed: bool = False) -> None:
        """Raise if a gradient that was used is still shown (``but_zeroed``: not as zeros), where plain PyTorch would use it."""
        for record in self.by_param.values():
            used = record.param.grad
            if isinstance(used, UsedGrad) and not (used.zeroed and but_zeroed):
                raise Refused(
                    f"the gradient of {used.parameter!r} was used by update='backward' and is still there: {why}, but it is "
                    f"gone. Call zero_grad() after every step, and step() once after every backward."
                )

    def refuse_dropped(self) -> None:
        """Raise if the caller has dropped, zeroed or replaced a gradient since it was used."""
        for record in self._used:
            grad = record.param.grad
            if not isinstance(grad, UsedGrad) or grad.zeroed:
                raise Refused(
                    f"the gradient of {record.unit.names[record.index]!r} was dropped or changed between backward and step(), "
                    f"but update='backward' had used it in loss.backward(). Use update='step' to choose after backward."
                )

    def kept_range(self, unit: Unit, index: int) -> tuple[int, int]:
        """Elements ``lo:hi`` of a parameter whose reduced gradient this rank keeps."""
        if self._cut:
            return unit.layout.piece(index, self._group.shard.rank)
        return 0, unit.layout.params[index].numel

    def _add_to_store(self, unit: Unit, segment: Segment, add: bool, reader: SummaryReader) -> None:  # noqa: FBT001
        base = self.kept_range(unit, segment.index)[0]
        target = self._store(unit, segment.index)[segment.lo - base : segment.hi - base]
        if add:
            target.add_(segment.values)
        else:
            target.copy_(segment.values)
        if reader.whole or not isinstance(self.records[unit][segment.index].shown, ShardedGrad):
            return
        # Of a gradient that every rank keeps whole, each looks at its own piece.
        lo, hi = unit.layout.piece(segment.index, self._group.shard.rank)
        a = max(lo, segment.lo)
        b = max(a, min(hi, segment.hi))
        reader.read(segment.index, a, target[a - segment.lo : b - segment.lo])

    def _store(self, unit: Unit, index: int) -> Tensor:
        record = self.records[unit][index]
        if record.store is None:
            param, dtype = unit.layout.params[index], unit.dtypes[index]
            lo, hi = self.kept_range(unit, index)
            with torch.inference_mode(mode=False):  # backward may be called inside it, and the reduction is not
                store = torch.empty(hi - lo, dtype=dtype.gradient, device=record.param.device)
            if self._cut or dtype.gradient is not dtype.param:
                shown = self._sharded(record, store)
            else:
                shown = store.as_strided(param.shape, param.stride)
            self._ledger.add("gradients", store.nbytes)
            record.store, record.shown = store, shown  # both or none
        return record.store

    def _make_room(self, unit: Unit, present: list[bool]) -> None:
        """Take the room for reduced gradients here and not on the thread that reduces: the C library's allocator would give
        that thread a heap of its own, and what is freed there is of no use to activations (187 MB of 1.3 GB: measured)."""
        for index, here in enumerate(present):
            if here and not self._in_backward and unit not in self.shelves:
                self._store(unit, index)

    def _sharded(self, record: GradRecord, piece: Tensor | None) -> ShardedGrad:
        unit, index = record.unit, record.index
        dtype, param = unit.dtypes[index].param, unit.layout.params[index]
        like = torch.empty((), dtype=dtype, device=record.param.device).expand(param.shape)
        return ShardedGrad.make(
            like, stride=param.stride, piece=piece, key=record.key, name=unit.names[index], owner=self._owner
        )

    # -- for update, norm and checkpoints -----------------------------------------------------------------------------

    def is_shelved(self, record: GradRecord) -> bool:
        """Whether the gradient that ``param.grad`` shows is on a shelf."""
        return isinstance(record.param.grad, ShardedGrad) and record.param.grad.piece is None

    def piece(self, record: GradRecord, lo: int, hi: int) -> Tensor | None:
        """Elements ``lo:hi`` of the gradient that ``param.grad`` shows now, 1-D: a view of it, or a copy from its shelf."""
        grad = record.param.grad
        if grad is None:
            return None
        if not isinstance(grad, ShardedGrad):
            return flat_view(grad, record.unit.layout.params[record.index].stride)[lo:hi]
        if grad.piece is not None:
            base = self.kept_range(record.unit, record.index)[0]
            return grad.piece[lo - base : hi - base]
        out = torch.empty(hi - lo, dtype=record.unit.dtypes[record.index].gradient)
        for part, values in self.shelves[record.unit].parts(lambda index: index == record.index):
            a, b = max(part.lo, lo), min(part.hi, hi)
            if a < b:
                out[a - lo : b - lo].copy_(values[a - part.lo : b - part.lo])
        return out

    @contextmanager
    def whole_from_shelf(self, record: GradRecord) -> Generator[Tensor]:
        """The gradient of ``record``, which is on a shelf of its only rank, whole, 1-D."""
        numel = record.unit.layout.params[record.index].numel
        dtype = record.unit.dtypes[record.index].gradient
        with self.scratch(record.unit, numel * dtype.itemsize) as room:
            whole = room[: numel * dtype.itemsize].view(dtype)
            for part, values in self.shelves[record.unit].parts(lambda index: index == record.index):
                whole[part.lo : part.hi].copy_(values)
            yield whole

    def pieces(self, wanted: Callable[[GradRecord], bool]) -> Iterator[tuple[GradRecord, int, Tensor]]:
        """This rank's part of every gradient that is ``wanted`` and shown now, as (record, first element, values); each is
        valid until the next. Over the ranks that hold one copy of the model they make up the whole."""
        for unit, every in self.records.items():
            records = [record for record in every if wanted(record)]
            shelved = {r.index for r in records if self.is_shelved(r)}
            if shelved:
                for part, values in self.shelves[unit].parts(shelved.__contains__):
                    yield every[part.index], part.lo, values
            for record in records:
                if record.index not in shelved:
                    if is_sparse(record.param.grad):  # of one rank that shards nothing: others refuse them
                        yield record, 0, record.param.grad._values().flatten()  # pyright: ignore
                        continue
                    lo, hi = unit.layout.piece(record.index, self._group.shard.rank)
                    values = self.piece(record, lo, hi)
                    if values is not None:
                        yield record, lo, values


@contextmanager
def _empty(_: Unit, nbytes: int) -> Generator[Tensor]:
    yield torch.empty(nbytes, dtype=torch.uint8)


def is_sparse(grad: Tensor | None) -> bool:
    """Whether a gradient lists the rows that it has (``nn.Embedding(sparse=True)``)."""
    return grad is not None and grad.layout is not torch.strided


def _refuse_torn(record: GradRecord) -> None:
    if record.torn and record.is_shown:
        raise Refused(
            f"a backward pass failed after it had added to the gradient of {record.unit.names[record.index]!r}, which is "
            f"neither what it was nor what it was to be. Call zero_grad() before the next backward."
        )


def refuse_unreduced(records: Iterable[GradRecord]) -> None:
    """Raise if a gradient is this rank's own still: an update from it would differ from rank to rank."""
    for record in records:
        _refuse_torn(record)
        if record.unreduced and record.param.grad is not None and not record.is_shown:
            raise Refused(
                f"the gradient of {record.unit.names[record.index]!r} was made inside no_sync() and has not been reduced. "
                f"Run the last micro-batch's backward outside no_sync()."
            )


def _refuse_used_by_hook(record: GradRecord) -> None:
    """Raise if a hook has updated the parameter, or dropped its gradient, before the ranks' gradients were added up."""
    param, name = record.param, record.unit.names[record.index]
    if param.grad is None or param._version != record.version:  # pyright: ignore[reportPrivateUsage]
        what = "dropped the gradient of" if param.grad is None else "changed"
        raise Refused(
            f"a post-accumulate-grad hook has {what} parameter {name!r}: on several ranks it sees this rank's own gradient, "
            f"before ranks are added up, and ranks would part. Give the optimizer to lowtide.shard with update='backward'."
        )


def _order_of_rank_0(channel: Channel, order: list[Unit]) -> list[Unit]:
    """In which rank 0's units became ready: from now on all reduce in that."""
    note = struct.pack(f"<{len(order)}H", *(u.index for u in order))
    by_index = {u.index: u for u in order}

    def first(wire: Wire, notes: list[bytes]) -> list[int]:
        return list(struct.unpack(f"<{len(order)}H", notes[0]))

    return [by_index[i] for i in channel.run(Label("order", 0, "the order of reductions"), first, note)]
