"""Every number of a sharded model and its optimizer that this rank answers for: kind by kind, chunk by chunk, wherever it is.

What a checkpoint reads and what it writes. Kinds are ``parameters``, ``masters`` and ``optimizer.<state>``. Of every kind a
rank answers for the elements of its shard, also where it holds more (the parameters of stages 0 to 2), so that nothing is
saved twice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import InternalError
from lowtide.runtime.assembly import Assembly
from lowtide.runtime.optimizer_copy import shared_state
from lowtide.runtime.probe import large_states
from lowtide.runtime.stream import MASTERS, UnitStream
from lowtide.runtime.unit import Unit, flat_view
from lowtide.runtime.update import Piece
from lowtide.spec.chunks import Part
from lowtide.tiers.shelf import Access, borrowed
from lowtide.tiers.store import Extent, Priority

PARAMETERS = "parameters"
STATE = "optimizer."


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``lo:hi`` of parameter ``index`` of a unit, in memory order."""

    index: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A kind of bytes that is in a store: chunk ``i`` is block ``i``, and holds its parts at ``offsets[i]``."""

    extent: Extent
    offsets: Sequence[Sequence[int]]


class Contents:
    """See the module's docstring. ``optimizer`` is the sharded one, or None."""

    def __init__(self, engine: Assembly, optimizer: Optimizer | None) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._rank = engine.group.shard.rank
        self._members = {p for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()

    # -- what there is ------------------------------------------------------------------------------------------------

    def kinds(self, unit: Unit) -> list[str]:
        """The kinds that any parameter of ``unit`` has."""
        stream = self._stream(unit)
        if stream is not None:
            states = [k for k in stream.kinds() if k.startswith(STATE)] if self._optimizer is not None else []
            return [PARAMETERS, *([MASTERS] if MASTERS in stream.kinds() else []), *states]
        masters = [MASTERS] if any(d.master is not d.param for d in unit.dtypes) else []
        names = dict.fromkeys(n for p in unit.params for n in self.large_names(p))
        return [PARAMETERS, *masters, *(STATE + n for n in names)]

    def has(self, unit: Unit, kind: str, index: int) -> bool:
        """Whether a parameter has this kind: states are there after its first step only."""
        if kind == PARAMETERS:
            return True
        if kind == MASTERS:
            return unit.dtypes[index].master is not unit.dtypes[index].param
        return kind.removeprefix(STATE) in self.large_names(unit.params[index])

    def large_names(self, param: nn.Parameter) -> tuple[str, ...]:
        """The states of ``param`` that have as many elements as it has."""
        if not self.stepped(param):
            return ()
        state = self._state(param)
        stream = self._stream(self._engine.unit_of[param])
        if stream is not None:
            return stream.large_names(param)
        piece = self._engine.update.pieces[param]
        shape = tuple(param.shape) if piece.is_whole else (piece.hi - piece.lo,)
        alike = tuple(n for n, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == shape)
        if shape:
            return alike
        # A counter has the shape of a parameter without dimensions; a trial step on a larger one tells them apart.
        found = large_states(self._optimizer, param, piece.target.dtype) if self._optimizer is not None else ()
        return tuple(n for n in alike if n in {state.name for state in found})

    def small_states(self, param: nn.Parameter) -> dict[str, Any]:
        """The other states: counters, factors of matrices that this rank holds whole."""
        large = self.large_names(param)
        return {n: v for n, v in self._state(param).items() if n not in large}

    def stepped(self, param: nn.Parameter) -> bool:
        """Whether the optimizer has updated ``param`` here; what it keeps of it may be nothing."""
        return self._optimizer is not None and param in self._members and param in self._optimizer.state

    def dtype(self, unit: Unit, kind: str, index: int) -> torch.dtype:
        if kind == PARAMETERS:
            return unit.dtypes[index].param
        stream = self._stream(unit)
        if stream is not None:
            return stream.dtype(kind, index)
        if kind == MASTERS:
            return unit.dtypes[index].master
        return self._state(unit.params[index])[kind.removeprefix(STATE)].dtype

    def mine(self, unit: Unit, index: int) -> tuple[int, int]:
        """The elements of a parameter that this rank answers for."""
        return unit.layout.piece(index, self._rank)

    def slices(self, unit: Unit, kind: str, number: int, how: Access = Access.READ) -> list[Slice | None]:
        """What chunk ``number`` holds; None for a part that this rank does not answer for, or that is not there. Who writes
        replaces all that is held: other ranks' elements too, where each has its own copy of them."""
        return [self._slice(unit, kind, part, how) for part in unit.chunks[number].parts]

    def _slice(self, unit: Unit, kind: str, part: Part, how: Access) -> Slice | None:
        lo, hi = part.lo, part.hi
        if how is Access.READ:
            first, end = self.mine(unit, part.index)
            lo, hi = max(lo, first), min(hi, end)
        empty = not unit.layout.params[part.index].numel
        return Slice(part.index, lo, hi) if (lo < hi or empty) and self.has(unit, kind, part.index) else None

    def on_disk(self, unit: Unit, kind: str) -> OnDisk | None:
        """Where a kind is, if it is in a store."""
        if kind == PARAMETERS:
            extent = self._engine.residency.home(unit).extent
            return None if extent is None else OnDisk(extent, [[part.at for part in chunk.parts] for chunk in unit.chunks])
        stream = self._stream(unit)
        if stream is None:
            return None
        shelf, offsets = stream.shelf(kind)
        return None if shelf.extent is None else OnDisk(shelf.extent, offsets)

    # -- the numbers --------------------------------------------------------------------------------------------------

    @contextmanager
    def open(self, unit: Unit, kind: str, number: int, how: Access = Access.READ) -> Generator[list[tuple[Slice, Tensor]]]:
        """The slices of a chunk, flat, in memory for a while."""
        with self._parts(unit, kind, number, how) as tensors:
            out: list[tuple[Slice, Tensor]] = []
            rows = zip(unit.chunks[number].parts, self.slices(unit, kind, number, how), tensors, strict=True)
            for part, slice_, tensor in rows:
                if slice_ is None:
                    continue
                if tensor is None:
                    raise InternalError(f"{kind} of {unit.names[part.index]!r} is not here")
                out.append((slice_, tensor[slice_.lo - part.lo : slice_.hi - part.lo]))
            yield out

    @contextmanager
    def _parts(self, unit: Unit, kind: str, number: int, how: Access) -> Generator[Sequence[Tensor | None]]:
        stream = self._stream(unit)
        if kind == PARAMETERS:
            buffers = self._engine.buffers_arena
            fresh = how is Access.REPLACE
            lease = self._engine.residency.open_chunk(unit, number, buffers, Priority.NOW, fresh=fresh)
            with borrowed(lease, changed=how is not Access.READ) as tensor:
                yield [_view(tensor, part, unit.dtypes[part.index].param) for part in unit.chunks[number].parts]
        elif stream is not None:
            with stream.chunk(kind, number, how) as tensors:
                yield tensors
        else:
            yield [self._in_memory(unit, kind, part) for part in unit.chunks[number].parts]

    def _in_memory(self, unit: Unit, kind: str, part: Part) -> Tensor | None:
        if not self.has(unit, kind, part.index):
            return None
        piece = self._engine.update.pieces[unit.params[part.index]]
        if kind == MASTERS:
            flat = _flat(piece, piece.target.detach())
        else:
            flat = _flat(piece, self._state(piece.record.param)[kind.removeprefix(STATE)])
        return flat[part.lo - piece.lo : part.hi - piece.lo]

    # -- states that are about to be loaded ---------------------------------------------------------------------------

    def holds(self, param: nn.Parameter) -> bool:
        """Whether this rank updates any of ``param``."""
        piece = self._engine.update.pieces[param]
        return param in self._members and (piece.lo < piece.hi or piece.is_whole)

    def seen_as(self, param: nn.Parameter) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype in which the optimizer sees ``param`` here."""
        piece, unit = self._engine.update.pieces[param], self._engine.unit_of[param]
        shape = unit.layout.params[unit.index_of[param]].shape if piece.is_whole else (piece.hi - piece.lo,)
        return tuple(shape), unit.dtypes[unit.index_of[param]].master

    def lacks_room(self, param: nn.Parameter, large: Iterable[str]) -> str | None:
        """The first of these large states for which no room was taken before training began; None if there is room for all."""
        stream = self._stream(self._engine.unit_of[param])
        return None if stream is None else next((name for name in large if not stream.has_room(param, name)), None)

    def set_states(self, param: nn.Parameter, small: dict[str, Any], large: dict[str, torch.dtype]) -> None:
        """Make ``small`` the small states of ``param`` and room for the ``large`` ones, whose values follow."""
        if self._optimizer is None:
            return
        piece, unit = self._engine.update.pieces[param], self._engine.unit_of[param]
        state, stream = dict(small), self._stream(unit)
        if stream is not None:
            stream.note_states(param, large)
        else:
            dtypes = unit.dtypes[unit.index_of[param]]
            for name, saved in large.items():
                kept = dtypes.moments if saved.is_floating_point else saved
                state[name] = _room(piece, kept, piece.target.device)
        self._optimizer.state[param] = state

    def forget_states(self) -> None:
        """All states are about to be replaced."""
        if self._optimizer is not None:
            kept = shared_state(self._optimizer)
            self._optimizer.state.clear()
            self._optimizer.state.update(kept)
            self._engine.update.forget_states(self._optimizer)

    def _state(self, param: nn.Parameter) -> dict[str, Any]:
        if self._optimizer is None or not self.stepped(param):
            return {}
        return self._optimizer.state[param]

    def _stream(self, unit: Unit) -> UnitStream | None:
        return self._engine.update.streams.get(unit)


def _view(tensor: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    return tensor[part.at : part.at + part.numel * dtype.itemsize].view(dtype)


def _flat(piece: Piece, value: Tensor) -> Tensor:
    """A state or master of a piece, as a flat view: whole parameters keep their shape and strides."""
    if not piece.is_whole:
        return value
    return flat_view(value, piece.record.unit.layout.params[piece.record.index].stride)


def _room(piece: Piece, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not piece.is_whole:
        return torch.zeros(piece.hi - piece.lo, dtype=dtype, device=device)
    param = piece.record.unit.layout.params[piece.record.index]
    return torch.zeros(param.numel, dtype=dtype, device=device).as_strided(param.shape, param.stride)
