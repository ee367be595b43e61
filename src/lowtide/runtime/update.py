"""The caller's optimizer, run on shards: the only writer of optimizer state and of the bytes parameters are made from.

For the length of one step, the optimizer's ``param_groups`` list this rank's pieces and its ``state`` is keyed by them;
outside a step both show the caller's parameters. A piece that is a whole parameter keeps its shape and strides; a cut one
is flat. Where bytes may be on disk, units are updated chunk by chunk instead (runtime/stream.py): in ``optimizer.step()``,
or each unit by itself as soon as its gradients are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.comm.group import Group
from lowtide.config import Config
from lowtide.runtime.chunked_step import ChunkedStep
from lowtide.runtime.grads import GradRecord, Grads, is_sparse
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.optimizer_copy import plain_class, plain_step
from lowtide.runtime.residency import Residency
from lowtide.runtime.shown import Shown
from lowtide.runtime.stream import OpenChunk, UnitStream
from lowtide.runtime.unit import Unit, flat_view, is_whole
from lowtide.tiers.arena import Arena, ArenaFull
from lowtide.tiers.store import Priority

_AHEAD = 64  # chunks that may be open at once, if memory for their buffers is not limited


class Piece:
    """What this rank updates of one parameter: elements ``lo:hi`` in memory order. For a unit that is updated by chunks,
    ``target`` has the right dtype and no elements."""

    __slots__ = ("hi", "lo", "low_precision", "record", "target")

    def __init__(self, record: GradRecord, lo: int, hi: int, target: nn.Parameter, low_precision: Tensor | None) -> None:
        self.record = record
        self.lo, self.hi = lo, hi
        self.target = target  # what the optimizer sees: the parameter's own bytes, or its master copy
        self.low_precision = low_precision  # the parameter's bytes, if ``target`` is a master copy

    @property
    def is_whole(self) -> bool:
        return is_whole((self.lo, self.hi), self.record.unit.layout.params[self.record.index])

    def cut(self, value: Any) -> Any:
        """This piece's part of a tensor shaped like the parameter; anything else (a step counter) as it is."""
        if not isinstance(value, Tensor) or value.shape != self.record.param.shape:
            return value
        return flat_view(value, self.record.unit.layout.params[self.record.index].stride)[self.lo : self.hi].clone()


class Update:
    """Pieces of every parameter, and the step on them."""

    def __init__(
        self, *, config: Config, group: Group, residency: Residency, grads: Grads, buffers: Arena, ledger: Ledger
    ) -> None:
        self._config, self._group, self._residency, self._grads, self._ledger = config, group, residency, grads, ledger
        self._buffers = buffers
        self.pieces: dict[nn.Parameter, Piece] = {}
        self.streams: dict[Unit, UnitStream] = {}
        """Units that are updated by chunks."""
        self.may_put_off = False
        """Whether the last step showed that the optimizer counts steps nowhere but in its states."""
        self._master_bytes = 0
        self._pieces_begun = False
        self._shown: Shown | None = None  # pieces, in the place of parameters
        self._step: ChunkedStep | None = None  # that is under way, in backward until ``finish_step``, or was the last
        self._updated: list[nn.Parameter] = []  # in it
        self.options: list[dict[str, Any]] = []
        """The options with which the last step in backward ran, group by group."""
        self._ahead: dict[Unit, deque[OpenChunk]] = {}

    def take_over(self, unit: Unit, values: Sequence[Tensor]) -> None:
        """Make this rank's pieces of ``unit``. ``values`` are its parameters as they were built, for master copies."""
        if unit in self.streams:
            self.streams[unit].write_masters(values)
            for record in self._grads.records[unit]:
                lo, hi = self._range(record)
                master = record.unit.dtypes[record.index].master
                stand_in = nn.Parameter(
                    torch.empty(0, dtype=master), requires_grad=master.is_floating_point or master.is_complex
                )
                self.pieces[record.param] = Piece(record, lo, hi, stand_in, None)
            return
        for record, value in zip(self._grads.records[unit], values, strict=True):
            piece = self.pieces[record.param] = self._piece(record, value)
            if piece.low_precision is not None:
                self._master_bytes += piece.target.nbytes

    def _piece(self, record: GradRecord, value: Tensor) -> Piece:
        unit, index = record.unit, record.index
        param, dtypes = unit.layout.params[index], unit.dtypes[index]
        lo, hi = self._range(record)
        flat = self._residency.piece(unit, index, lo, hi)
        low_precision = None
        if dtypes.master is not dtypes.param:
            low_precision, flat = flat, value[lo:hi].to(dtypes.master, copy=True)
        shaped = flat.as_strided(param.shape, param.stride) if is_whole((lo, hi), param) else flat
        trained = shaped.is_floating_point() or shaped.is_complex()
        return Piece(record, lo, hi, nn.Parameter(shaped, requires_grad=trained), low_precision)

    def _range(self, record: GradRecord) -> tuple[int, int]:
        """Elements of a parameter that this rank updates."""
        layout = record.unit.layout
        if self._config.stage.optimizer:
            return layout.piece(record.index, self._group.shard.rank)
        return 0, layout.params[record.index].numel

    def refresh_masters(self, params: Iterable[nn.Parameter]) -> None:
        """These parameters may have been written from outside: masters follow, element by element, where they no longer round
        to what is there; elsewhere they keep what rounding would lose."""
        pieces = [self.pieces[p] for p in params]
        for unit in {piece.record.unit for piece in pieces} & set(self.streams):
            self.streams[unit].refresh_masters()
        for piece in pieces:
            low = piece.low_precision
            if low is not None:
                master = flat_view(piece.target, self._stride(piece)).detach()
                master.copy_(torch.where(master.to(low.dtype) == low, master, low.to(master.dtype)))

    def write_masters(self, unit: Unit, given: Mapping[nn.Parameter, Tensor]) -> None:
        """Keep this rank's part of ``given``, whole tensors, as the master copies of ``unit``, before they are rounded."""
        flats = [
            flat_view(given[param], spec.stride) if param in given else None
            for param, spec in zip(unit.params, unit.layout.params, strict=True)
        ]
        if unit in self.streams:
            if any(flat is not None for flat in flats):
                self.streams[unit].write_masters(flats)
            return
        for piece, flat in zip((self.pieces[p] for p in unit.params), flats, strict=True):
            if flat is not None and piece.low_precision is not None:
                flat_view(piece.target, self._stride(piece)).detach().copy_(flat[piece.lo : piece.hi])

    def forget_states(self, optimizer: Optimizer) -> None:
        """All states of ``optimizer`` are about to be loaded anew."""
        replaced = {param for group in optimizer.param_groups for param in group["params"]}
        for stream in self.streams.values():
            stream.forget_states(replaced)

    # -- the step -----------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether the step under way, or the last one, got as far as changing anything."""
        return self._pieces_begun or (self._step is not None and self._step.begun)

    def forget_last(self) -> None:
        """Another step begins, which has not changed anything yet."""
        self._pieces_begun, self._step = False, None

    def put_back(self) -> None:
        """A call was broken off: whatever the caller's optimizer shows, let it show his parameters again."""
        for shown in (self._shown, self._step.shown if self._step is not None else None):
            if shown is not None:
                shown.put_back()
        self._shown = None

    def give_back_buffers(self) -> None:
        """Calls were broken off, and nothing reads or writes any more: chunks that they had open are not needed."""
        self._ahead.clear()
        self._buffers.reclaim(())

    def run(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Update every piece that has a gradient; returns the parameters that have one."""
        updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            if self.streams:
                self._run_streams(optimizer)
            else:
                self._run_pieces(optimizer)
        return updated

    def _run_pieces(self, optimizer: Optimizer) -> None:
        """All pieces are in memory: the optimizer's own step, once."""
        with self.on_pieces(optimizer) as pieces:
            for piece in pieces:
                piece.target.grad = self._grad(piece)
                self._cast(optimizer, piece, piece.target.dtype)
            self._pieces_begun = True
            plain_step(plain_class(optimizer))(optimizer)
            for piece in pieces:
                if piece.target.grad is not None and piece.low_precision is not None:
                    piece.low_precision.copy_(flat_view(piece.target, self._stride(piece)))
                piece.target.grad = None
                self._cast(optimizer, piece, piece.record.unit.dtypes[piece.record.index].moments)
            self._ledger.set("optimizer", self._master_bytes + _state_bytes(optimizer))

    def _run_streams(self, optimizer: Optimizer) -> None:
        """Chunk after chunk: while one is updated, the next are read and the last are written."""
        step = self._step = ChunkedStep(optimizer)
        work = [(s, n) for s in self.streams.values() for n in range(len(s.unit.chunks)) if self._has_grads(s, n)]
        opened: deque[OpenChunk] = deque()
        try:
            for at, (stream, _) in enumerate(work):
                while (following := at + len(opened)) < len(work):
                    ahead, number = work[following]
                    if not self._open_next(ahead, number, opened, with_values=True):
                        break
                changed = stream.update(opened[0], step, self._grads_of(stream, opened[0]))
                opened.popleft().close(changed=changed)
        finally:
            _close_all(opened)
        self.may_put_off = not step.changed_more_than_states()
        step.finish()

    def _open_next(self, stream: UnitStream, number: int, opened: deque[OpenChunk], *, with_values: bool) -> bool:
        """Open one more chunk; whether there was memory for it. The first one is needed, so it waits for memory."""
        if not opened:
            opened.append(stream.open(number, Priority.NOW, with_values=with_values))
            return True
        if not self._has_room(stream, opened):
            return False
        with suppress(ArenaFull):
            opened.append(stream.open(number, Priority.MOMENTS, with_values=with_values, wait=False))
            return True
        return False

    def _has_grads(self, stream: UnitStream, number: int) -> bool:
        return any(stream.unit.params[part.index].grad is not None for part in stream.unit.chunks[number].parts)

    def _has_room(self, stream: UnitStream, opened: Sequence[OpenChunk]) -> bool:
        capacity = self._buffers.capacity
        if capacity is None:
            return len(opened) < _AHEAD
        return len(opened) < _AHEAD and self._buffers.taken_bytes + stream.largest_chunk_bytes <= capacity

    def _grads_of(self, stream: UnitStream, chunk: OpenChunk) -> list[Tensor | None]:
        """The gradient of every part of an open chunk."""
        records = self._grads.records[stream.unit]
        parts = stream.unit.chunks[chunk.number].parts
        stored: list[Tensor] = []
        if chunk.grads is not None and stream.shelved is not None:
            stored = stream.shelved.ready(chunk.number, chunk.grads.wait())
        out: list[Tensor | None] = []
        for at, part in enumerate(parts):
            record = records[part.index]
            out.append(stored[at] if self._grads.is_shelved(record) else self._grads.piece(record, part.lo, part.hi))
        return out

    # -- the step, unit by unit inside backward -----------------------------------------------------------------------

    def expect(self, unit: Unit) -> None:
        """The gradients of ``unit`` are being computed: start reading its states."""
        if unit in self.streams and unit not in self._ahead:
            self._ahead[unit] = deque()
        self.read_ahead()

    def read_ahead(self) -> None:
        """Open as many of the expected chunks as there is memory for."""
        for unit, opened in self._ahead.items():
            stream = self.streams[unit]
            with suppress(ArenaFull):
                while len(opened) < len(unit.chunks) and self._has_room(stream, opened):
                    opened.append(stream.open(len(opened), Priority.MOMENTS, with_values=False, wait=False))

    def forget_expected(self, but: Unit | None = None) -> None:
        """Give back what was read in vain."""
        for unit in [u for u in self._ahead if u is not but]:
            _close_all(self._ahead.pop(unit))

    def forget_step(self) -> None:
        """A step in backward came to nothing, or what it did was replaced by other values."""
        self.forget_expected()
        self._step, self._updated = None, []

    def run_unit(self, optimizer: Optimizer, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Update one unit from its reduced gradients, flat and cut as this rank keeps them."""
        if self._step is None:
            self._step, self._updated = ChunkedStep(optimizer, in_backward=True), []
        self.forget_expected(but=unit)
        with torch.no_grad():
            self._run_chunks(self._step, unit, lambda chunk: self._cut_grads(unit, chunk, grads))
        self._updated += [p for p, g in zip(unit.params, grads, strict=True) if g is not None and self._step.owns(p)]

    def run_due(self, step: ChunkedStep, unit: Unit, present: frozenset[int]) -> None:
        """Update one unit from its gradients on the shelf; ``present``: the parameters that had one when the step was taken."""
        self.forget_expected(but=unit)
        with torch.no_grad():
            self._run_chunks(step, unit, lambda chunk: self._shelved_grads(unit, chunk, present))

    def _shelved_grads(self, unit: Unit, chunk: OpenChunk, present: frozenset[int]) -> list[Tensor | None]:
        parts, shelved = unit.chunks[chunk.number].parts, self.streams[unit].shelved
        if chunk.grads is None or shelved is None:
            return [None] * len(parts)
        stored = shelved.ready(chunk.number, chunk.grads.wait())
        return [grad if part.index in present else None for part, grad in zip(parts, stored, strict=True)]

    def _cut_grads(self, unit: Unit, chunk: OpenChunk, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        row: list[Tensor | None] = []
        for part in unit.chunks[chunk.number].parts:
            grad, start = grads[part.index], self._grads.kept_range(unit, part.index)[0]
            row.append(None if grad is None else grad[part.lo - start : part.hi - start])
        return row

    def _run_chunks(self, step: ChunkedStep, unit: Unit, grads_of: Callable[[OpenChunk], Sequence[Tensor | None]]) -> None:
        stream = self.streams[unit]
        opened = self._ahead.pop(unit, deque())
        count = len(unit.chunks)
        try:
            for number in range(count):
                while (following := number + len(opened)) < count:
                    if not self._open_next(stream, following, opened, with_values=False):
                        break
                changed = stream.update(opened[0], step, grads_of(opened[0]))
                opened.popleft().close(changed=changed)
        finally:
            _close_all(opened)

    def finish_step(self) -> list[nn.Parameter]:
        """The step that ran in backward is over; returns the parameters it updated."""
        if self._step is None:
            return []
        self._step.finish()
        self.options = self._step.options
        updated, self._step, self._updated = self._updated, None, []
        return updated

    @contextmanager
    def on_pieces(self, optimizer: Optimizer) -> Generator[list[Piece]]:
        """Show the optimizer pieces instead of parameters."""
        groups = [[self.pieces[p] for p in group["params"]] for group in optimizer.param_groups]
        pieces = [piece for group in groups for piece in group]
        targets: dict[Any, Tensor] = {p.record.param: p.target for p in pieces}
        states = cast("dict[Any, Any]", optimizer.state).items()
        shown = self._shown = Shown(optimizer, {p.target: p.record.param for p in pieces})
        try:
            state = {targets.get(key, key) if isinstance(key, Tensor) else key: value for key, value in states}
            shown.show([[p.target for p in group] for group in groups], state)
            yield pieces
        finally:
            shown.put_back()
            self._shown = None

    def cut_state(self, optimizer: Optimizer) -> None:
        """Replace whole states (of an optimizer that ran before, or of a loaded state_dict) by this rank's part of them."""
        whole = dict(optimizer.state)
        for param, state in whole.items():
            piece = self.pieces.get(param) if isinstance(param, Tensor) else None  # type: ignore[arg-type]
            if piece is None:
                continue
            if piece.lo == piece.hi and not piece.is_whole:
                del optimizer.state[param]  # another rank has it; a copy here would grow old
            elif piece.record.unit in self.streams:
                self._put_on_shelves(self.streams[piece.record.unit], piece, state)
            elif not piece.is_whole:
                optimizer.state[param] = {name: piece.cut(value) for name, value in state.items()}
        self._ledger.set("optimizer", self._master_bytes + _state_bytes(optimizer))

    def _put_on_shelves(self, stream: UnitStream, piece: Piece, state: dict[str, Any]) -> None:
        param = piece.record.param
        stream.note_states(param, state)
        for name in stream.large_names(param):
            stream.write_state(param, name, piece.cut(state.pop(name)), piece.lo)

    def _stride(self, piece: Piece) -> tuple[int, ...]:
        if piece.target.dim() == 1 and not piece.is_whole:
            return (1,)
        return piece.record.unit.layout.params[piece.record.index].stride

    def _grad(self, piece: Piece) -> Tensor | None:
        if piece.lo == piece.hi and not piece.is_whole:
            return None
        if is_sparse(piece.record.param.grad):
            return piece.record.param.grad
        flat = self._grads.piece(piece.record, piece.lo, piece.hi)
        if flat is None:
            return None
        flat = flat.to(piece.target.dtype)
        return flat.as_strided(piece.target.shape, self._stride(piece)) if piece.target.dim() != 1 else flat

    def _cast(self, optimizer: Optimizer, piece: Piece, dtype: torch.dtype) -> None:
        dtypes = piece.record.unit.dtypes[piece.record.index]
        if dtypes.moments is dtypes.master:
            return
        state: dict[str, Any] = optimizer.state.get(piece.target, {})  # type: ignore[arg-type]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == piece.target.shape and value.dim():
                state[name] = value.to(dtype)


def _close_all(opened: deque[OpenChunk]) -> None:
    with ExitStack() as stack:
        for chunk in opened:
            stack.callback(chunk.close, changed=False)


def _state_bytes(optimizer: Optimizer) -> int:
    every = cast("dict[Any, Any]", optimizer.state)
    states = (state for key, state in every.items() if isinstance(key, Tensor))
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))
