"""The caller's optimizer, run on shards: the only writer of optimizer state and of the bytes parameters are made from.

For the length of one step, the optimizer's ``param_groups`` list this rank's pieces and its ``state`` is keyed by them;
outside a step both show the caller's parameters. A piece that is a whole parameter keeps its shape and strides; a cut one
is flat.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.comm.group import Group
from lowtide.config import Config
from lowtide.runtime.grads import GradRecord, Grads
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.norm import GradPiece
from lowtide.runtime.probe import plain_step
from lowtide.runtime.residency import Residency
from lowtide.runtime.unit import Unit, flat_view, is_whole


class Piece:
    """What this rank updates of one parameter: elements ``lo:hi`` in memory order."""

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

    def __init__(self, *, config: Config, group: Group, residency: Residency, grads: Grads, ledger: Ledger) -> None:
        self._config, self._group, self._residency, self._grads, self._ledger = config, group, residency, grads, ledger
        self.pieces: dict[nn.Parameter, Piece] = {}
        self.begun = False  # whether the last step got as far as changing anything
        self._master_bytes = 0

    def take_over(self, unit: Unit, values: Sequence[Tensor]) -> None:
        """Make this rank's pieces of ``unit``. ``values`` are its parameters as they were built, for master copies."""
        for record, value in zip(self._grads.records[unit], values, strict=True):
            piece = self.pieces[record.param] = self._piece(record, value)
            if piece.low_precision is not None:
                self._master_bytes += piece.target.nbytes

    def _piece(self, record: GradRecord, value: Tensor) -> Piece:
        unit, index = record.unit, record.index
        param, dtypes = unit.layout.params[index], unit.dtypes[index]
        lo, hi = unit.layout.piece(index, self._group.shard.rank) if self._config.stage.optimizer else (0, param.numel)
        flat = self._residency.piece(unit, index, lo, hi)
        low_precision = None
        if dtypes.master is not dtypes.param:
            low_precision, flat = flat, value[lo:hi].to(dtypes.master, copy=True)
        shaped = flat.as_strided(param.shape, param.stride) if is_whole((lo, hi), param) else flat
        return Piece(record, lo, hi, nn.Parameter(shaped, requires_grad=shaped.is_floating_point()), low_precision)

    def refresh_masters(self, params: Iterable[nn.Parameter]) -> None:
        """These parameters may have been written from outside: masters follow, element by element, where they no longer round
        to what is there; elsewhere they keep what rounding would lose."""
        for piece in (self.pieces[p] for p in params):
            low = piece.low_precision
            if low is not None:
                master = flat_view(piece.target, self._stride(piece)).detach()
                master.copy_(torch.where(master.to(low.dtype) == low, master, low.to(master.dtype)))

    def write_master(self, param: nn.Parameter, value: Tensor) -> None:
        """Keep this rank's part of ``value``, a whole tensor, as the master copy, before it is rounded."""
        piece = self.pieces[param]
        if piece.low_precision is not None:
            target = flat_view(piece.target, self._stride(piece)).detach()
            target.copy_(flat_view(value, piece.record.unit.layout.params[piece.record.index].stride)[piece.lo : piece.hi])

    # -- gradients of this rank's part, for norm and finiteness -------------------------------------------------------

    def grad_pieces(self) -> list[GradPiece]:
        """This rank's part of every gradient that is shown now; over all ranks of a copy they make up the whole."""
        out: list[GradPiece] = []
        for record in self._grads.by_param.values():
            lo, hi = record.unit.layout.piece(record.index, self._group.shard.rank)
            values = self._grads.piece(record, lo, hi)
            if values is not None:
                out.append(GradPiece(record.key, lo, record.unit.layout.params[record.index].numel, values))
        return out

    # -- the step -----------------------------------------------------------------------------------------------------

    def run(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Update every piece that has a gradient; returns the parameters that have one."""
        updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.begun = False
        with torch.no_grad(), self.on_pieces(optimizer) as pieces:
            for piece in pieces:
                piece.target.grad = self._grad(piece)
                self._widen(optimizer, piece)
            self.begun = True
            plain_step(type(optimizer).plain_class)(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
            for piece in pieces:
                if piece.target.grad is not None and piece.low_precision is not None:
                    piece.low_precision.copy_(flat_view(piece.target, self._stride(piece)))
                piece.target.grad = None
                self._narrow(optimizer, piece)
            self._ledger.set("optimizer", self._master_bytes + _state_bytes(optimizer))
        return updated

    @contextmanager
    def on_pieces(self, optimizer: Optimizer) -> Generator[list[Piece]]:
        """Show the optimizer pieces instead of parameters."""
        params = [group["params"] for group in optimizer.param_groups]
        pieces = [self.pieces[p] for group in params for p in group]
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p].target for p in group["params"]]
        _rekey(optimizer, {p.record.param: p.target for p in pieces})
        try:
            yield pieces
        finally:
            for group, own in zip(optimizer.param_groups, params, strict=True):
                group["params"] = own
            _rekey(optimizer, {p.target: p.record.param for p in pieces})

    def cut_state(self, optimizer: Optimizer) -> None:
        """Replace whole states (of an optimizer that ran before, or of a loaded state_dict) by this rank's part of them."""
        whole = dict(optimizer.state)
        for param, state in whole.items():
            piece = self.pieces.get(param)  # type: ignore[arg-type]
            if piece is None or piece.is_whole:
                continue
            if piece.lo == piece.hi:
                del optimizer.state[param]
            else:
                optimizer.state[param] = {name: piece.cut(value) for name, value in state.items()}
        self._ledger.set("optimizer", self._master_bytes + _state_bytes(optimizer))

    def _stride(self, piece: Piece) -> tuple[int, ...]:
        if piece.target.dim() == 1 and not piece.is_whole:
            return (1,)
        return piece.record.unit.layout.params[piece.record.index].stride

    def _grad(self, piece: Piece) -> Tensor | None:
        if piece.lo == piece.hi and not piece.is_whole:
            return None
        flat = self._grads.piece(piece.record, piece.lo, piece.hi)
        if flat is None:
            return None
        flat = flat.to(piece.target.dtype)
        return flat.as_strided(piece.target.shape, self._stride(piece)) if piece.target.dim() != 1 else flat

    def _widen(self, optimizer: Optimizer, piece: Piece) -> None:
        self._cast(optimizer, piece, piece.target.dtype)

    def _narrow(self, optimizer: Optimizer, piece: Piece) -> None:
        self._cast(optimizer, piece, piece.record.unit.dtypes[piece.record.index].moments)

    def _cast(self, optimizer: Optimizer, piece: Piece, dtype: torch.dtype) -> None:
        dtypes = piece.record.unit.dtypes[piece.record.index]
        if dtypes.moments is dtypes.master:
            return
        state: dict[str, Any] = optimizer.state.get(piece.target, {})  # type: ignore[arg-type]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == piece.target.shape and value.dim():
                state[name] = value.to(dtype)


def _rekey(optimizer: Optimizer, new_key: dict[Any, Any]) -> None:
    items = [(new_key.get(key, key), value) for key, value in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(items)


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
