"""One unit whose bytes are not all in memory, and its update: read a chunk, run the optimizer on it, write it back.

Masters and every large state of the optimizer are on shelves of their own; what is small (a step counter) stays in
``optimizer.state``, where the caller sees it. Which states are large is found by a trial step (runtime/probe.py), so that
their room is taken before training begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import Refused
from lowtide.runtime.chunked_step import ChunkedStep, Entry
from lowtide.runtime.grad_store import ShelvedGrads
from lowtide.runtime.optimizer_copy import plain_class
from lowtide.runtime.probe import LargeState, large_states
from lowtide.runtime.profiling import profiled
from lowtide.runtime.residency import Residency
from lowtide.runtime.trace import Spans
from lowtide.runtime.unit import Unit, flat_view, is_whole
from lowtide.spec.chunks import Packing, Part, pack
from lowtide.tiers.arena import Arena
from lowtide.tiers.shelf import Access, Lease, Shelf, borrowed
from lowtide.tiers.store import Key, Priority, Store

MASTERS = "masters"
_STATE = "optimizer."


class _Kind:
    """One kind of bytes of a unit on its shelf: how its parts lie there."""

    def __init__(self, unit: Unit, kind: str, dtypes: Sequence[torch.dtype], *, memory: Arena, store: Store | None) -> None:
        self._unit, self.dtypes = unit, dtypes
        packing: Packing = pack(unit.chunks, [d.itemsize for d in dtypes])
        self.offsets = packing.offsets
        self.shelf = Shelf(Key(unit.name, kind), packing.cuts, memory=memory, store=store)

    def views(self, number: int, tensor: Tensor) -> Iterator[Tensor]:
        """The parts of a chunk, from the bytes of a lease."""
        for part, offset in zip(self._unit.chunks[number].parts, self.offsets[number], strict=True):
            dtype = self.dtypes[part.index]
            yield tensor[offset : offset + part.numel * dtype.itemsize].view(dtype)


class OpenChunk:
    """A chunk on its way into memory, or there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leases: dict[str, Lease] = {}  # of masters and states, by kind
        self.values: Lease | None = None  # of the parameters; None if they are elsewhere
        self.grads: Lease | None = None  # of their gradients; None if they are elsewhere

    def close(self, *, changed: bool) -> None:
        """Give everything back, whatever goes wrong with a part of it."""
        with ExitStack() as stack:
            for lease in self.leases.values():
                stack.callback(lease.close, changed=changed)
            if self.values is not None:
                stack.callback(self.values.close, changed=changed)
            if self.grads is not None:
                stack.callback(self.grads.close, changed=False)


class UnitStream:
    """Masters and states of one unit, by chunks."""

    def __init__(
        self,
        unit: Unit,
        residency: Residency,
        shelved: ShelvedGrads | None,
        *,
        memory: Arena,
        buffers: Arena,
        store: Store | None,
    ) -> None:
        self.unit = unit
        self.shelved = shelved
        self._residency, self._memory, self._buffers, self._store = residency, memory, buffers, store
        self._kinds: dict[str, _Kind] = {}
        self._large: dict[int, tuple[LargeState, ...]] = {}  # by index of the parameter: those that it will ever have
        self._there: dict[int, frozenset[str]] = {}  # and those that it has: an optimizer may make some later than others
        self._made: dict[int, frozenset[str]] = {}  # and will have when the step in progress is done
        self.spans: Spans | None = None
        """Where the update of every chunk is noted; None: nowhere."""
        self.listener: Callable[[str], None] | None = None
        """Hears of every chunk that was updated, while its buffers are still there (``update``)."""
        if any(d.master is not d.param for d in unit.dtypes):
            self._add_kind(MASTERS, [d.master for d in unit.dtypes])

    # -- set-up -------------------------------------------------------------------------------------------------------

    def _add_kind(self, name: str, dtypes: Sequence[torch.dtype]) -> None:
        self._kinds[name] = _Kind(self.unit, name, dtypes, memory=self._memory, store=self._store)

    def reserve(self, optimizer: Optimizer) -> None:
        """Take room for the states that ``optimizer`` will have."""
        found: dict[str, dict[int, torch.dtype]] = {}
        is_ours = plain_class(optimizer) is not type(optimizer)  # it gets more parameters: a state on a shelf cannot be tried
        for group in optimizer.param_groups:
            for param in group["params"]:
                index = self.unit.index_of.get(param)
                if index is None or not (param.is_floating_point() or param.is_complex()):
                    continue
                dtypes = self.unit.dtypes[index]
                if not (is_ours and index in self._large):
                    self._large[index] = large_states(optimizer, param, dtypes.master)
                for state in self._large[index]:
                    kept = dtypes.moments if state.dtype is dtypes.master else state.dtype
                    found.setdefault(state.name, {})[index] = kept
        for name, by_index in found.items():
            if f"optimizer.{name}" not in self._kinds:
                as_moments = all(self.unit.dtypes[i].moments is dtype for i, dtype in by_index.items())
                some = next(iter(by_index.values()))  # for parameters that join the optimizer later
                others = [d.moments if as_moments else some for d in self.unit.dtypes]
                self._add_kind(f"optimizer.{name}", [by_index.get(i, dtype) for i, dtype in enumerate(others)])

    def write_masters(self, values: Sequence[Tensor | None]) -> None:
        """Keep this rank's part of ``values``, whole flat parameters (``None``: leave), as masters before they are rounded."""
        for number in range(len(self.unit.chunks)) if MASTERS in self._kinds else ():
            lease = self._kinds[MASTERS].shelf.open(
                number, self._buffers, Priority.NOW, fresh=all(v is not None for v in values)
            )
            with borrowed(lease, changed=True) as tensor:
                views = self._kinds[MASTERS].views(number, tensor)
                for part, view in zip(self.unit.chunks[number].parts, views, strict=True):
                    value = values[part.index]
                    if value is not None:
                        view.copy_(value[part.lo : part.hi])

    def refresh_masters(self) -> None:
        """Parameters were written from outside: masters follow where they no longer round to what is there."""
        for number in range(len(self.unit.chunks)) if MASTERS in self._kinds else ():
            opened = self.open(number, Priority.NOW, with_values=True, only=MASTERS)
            try:
                for low, master in self._low_and_master(opened):
                    master.copy_(torch.where(master.to(low.dtype) == low, master, low.to(master.dtype)))
            except BaseException:
                opened.close(changed=False)
                raise
            opened.close(changed=True)

    def _low_and_master(self, opened: OpenChunk) -> Iterator[tuple[Tensor, Tensor]]:
        masters = self._kinds[MASTERS].views(opened.number, opened.leases[MASTERS].wait())
        for low, master in zip(self._values(opened), masters, strict=True):
            if low.dtype is not master.dtype:
                yield low, master

    # -- the update ---------------------------------------------------------------------------------------------------

    @property
    def largest_chunk_bytes(self) -> int:
        """The most memory that one open chunk takes."""
        shelves = [k.shelf for k in self._kinds.values()] + ([self.shelved.shelf] if self.shelved else [])
        loans = [s.cuts for s in shelves if not s.in_memory] + (
            [self.unit.chunk_cuts] if not self._residency.home(self.unit).in_memory else []
        )
        return max((sum(c[i + 1] - c[i] for c in loans) for i in range(len(self.unit.chunks))), default=0)

    def open(
        self, number: int, priority: Priority, *, with_values: bool, only: str | None = None, wait: bool = True
    ) -> OpenChunk:
        """Start bringing a chunk. ``with_values``: its parameters too; else they are in a slot when it is updated.
        ``wait``: see ``Shelf.open``."""
        opened = OpenChunk(number)
        try:
            for name, kind in self._kinds.items():
                if only == name or (only is None and self._needs(number, name)):
                    fresh = not kind.shelf.has(number)
                    opened.leases[name] = kind.shelf.open(number, self._buffers, priority, fresh=fresh, wait=wait)
            if with_values:
                opened.values = self._residency.open_chunk(self.unit, number, self._buffers, priority, wait=wait)
            if only is None and self.shelved is not None and self.shelved.shelf.has(number):
                opened.grads = self.shelved.open(number, priority, wait=wait)
        except BaseException:
            opened.close(changed=False)
            raise
        return opened

    def _needs(self, number: int, kind: str) -> bool:
        """Whether any parameter in a chunk has bytes of a kind."""
        indices = {part.index for part in self.unit.chunks[number].parts}
        return kind == MASTERS or any(f"{_STATE}{s.name}" == kind for i in indices for s in self._large.get(i, ()))

    def update(self, opened: OpenChunk, step: ChunkedStep, grads: Sequence[Tensor | None]) -> bool:
        """Run the optimizer on an open chunk; ``grads``: the gradient of each part, flat, or None. Whether anything changed."""
        begin = time.perf_counter()
        with profiled("update", self.unit.name):
            changed = self._update(opened, step, grads)
        if self.spans is not None and changed:
            chunk = self.unit.chunks[opened.number]
            self.spans.add("update", "update", self.unit.name, begin, time.perf_counter(), chunk.hi - chunk.lo)
        if self.listener is not None:
            self.listener("update")
        return changed

    def _update(self, opened: OpenChunk, step: ChunkedStep, grads: Sequence[Tensor | None]) -> bool:
        number = opened.number
        parts = self.unit.chunks[number].parts
        chosen = [
            at
            for at, (part, grad) in enumerate(zip(parts, grads, strict=True))
            if grad is not None and step.owns(self.unit.params[part.index])
        ]
        if not chosen:
            return False
        values = list(self._values(opened))
        views = {n: list(self._kinds[n].views(number, lease.wait())) for n, lease in opened.leases.items()}
        entries: list[Entry] = []
        for at in chosen:
            part, grad = parts[at], grads[at]
            flat = views[MASTERS][at] if MASTERS in views else values[at]
            target = nn.Parameter(self._shaped(part, flat), requires_grad=flat.is_floating_point() or flat.is_complex())
            target.grad = self._shaped(part, grad.to(flat.dtype)) if grad is not None else None
            state = self._state_of(part, step, {n: v[at] for n, v in views.items()}, target.dtype)
            entries.append(Entry(self.unit.params[part.index], target, state))
        step.run(entries)
        step.at_finish(self, self._step_done)
        for at, entry in zip(chosen, entries, strict=True):
            self._put_back(parts[at], step, entry, {n: v[at] for n, v in views.items()})
            if MASTERS in views and values[at].dtype is not views[MASTERS][at].dtype:
                values[at].copy_(views[MASTERS][at])
        return True

    def _values(self, opened: OpenChunk) -> Iterator[Tensor]:
        if opened.values is None:
            opened.values = self._residency.open_chunk(self.unit, opened.number, self._buffers, Priority.NOW)
        tensor = opened.values.wait()
        for part in self.unit.chunks[opened.number].parts:
            dtype = self.unit.dtypes[part.index].param
            yield tensor[part.at : part.at + part.numel * dtype.itemsize].view(dtype)

    def _shaped(self, part: Part, flat: Tensor) -> Tensor:
        param = self.unit.layout.params[part.index]
        return flat.as_strided(param.shape, param.stride) if is_whole((part.lo, part.hi), param) else flat

    def _state_of(self, part: Part, step: ChunkedStep, views: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
        """The optimizer's state of one part; empty before the parameter's first step, when the optimizer makes it."""
        small = step.small_state(self.unit.params[part.index])
        if small is None:
            return {}
        for large in self._large.get(part.index, ()):
            if large.name in self._there.get(part.index, ()):
                view = self._shaped(part, views[_STATE + large.name])
                small[large.name] = view if view.dtype is large.dtype else view.to(dtype)
        return small

    def _put_back(self, part: Part, step: ChunkedStep, entry: Entry, views: dict[str, Tensor]) -> None:
        small, made = dict(entry.state), set[str]()
        is_cut = part.numel < self.unit.layout.params[part.index].numel
        for large in self._large.get(part.index, ()):
            value = small.get(large.name)
            if not isinstance(value, Tensor) or value.shape != entry.target.shape or value.dtype is not large.dtype:
                continue  # not there yet, or told below
            made.add(large.name)
            del small[large.name]
            view = views[_STATE + large.name]
            if value.data_ptr() != view.data_ptr():
                view.copy_(self._flat(part, value))
        late = [
            n for n, v in small.items() if isinstance(v, Tensor) and v.numel() > 1 and (is_cut or v.shape == entry.target.shape)
        ]
        if late:
            value = small[late[0]]
            raise Refused(
                f"the optimizer made a state {late[0]!r} ({value.dtype}, {tuple(value.shape)}) that it did not have in a trial "
                f"of eleven steps; there is no room for it. Set the optimizer's options before lowtide.shard."
            )
        if not step.keep_small_state(entry.param, small):
            raise Refused(
                f"what the optimizer keeps of {self.unit.names[part.index]!r} ({', '.join(small)}) depends on how the "
                f"parameter was cut. Give lowtide.shard an update with larger chunks, or leave disk= and update= out."
            )
        self._made[part.index] = frozenset(made)

    def _step_done(self) -> None:
        self._there |= self._made
        self._made = {}

    def _flat(self, part: Part, value: Tensor) -> Tensor:
        param = self.unit.layout.params[part.index]
        return flat_view(value, param.stride if is_whole((part.lo, part.hi), param) else (1,))

    def move(self, store: Store | None) -> None:
        """Between two steps: masters and states into memory (``None``) or into ``store``."""
        for kind in self._kinds.values():
            kind.shelf.move(store)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def dtype(self, kind: str, index: int) -> torch.dtype:
        return self._kinds[kind].dtypes[index]

    def shelf(self, kind: str) -> tuple[Shelf, Sequence[Sequence[int]]]:
        """The shelf of one kind, and where the parts of each chunk lie in it."""
        return self._kinds[kind].shelf, self._kinds[kind].offsets

    @contextmanager
    def chunk(self, kind: str, number: int, how: Access) -> Generator[list[Tensor]]:
        """One kind of the parts of a chunk, flat, in memory for a while."""
        shelf = self._kinds[kind].shelf
        fresh = how is Access.REPLACE or not shelf.has(number)
        lease = shelf.open(number, self._buffers, Priority.NOW, fresh=fresh)
        with borrowed(lease, changed=how is not Access.READ) as tensor:
            yield list(self._kinds[kind].views(number, tensor))

    # -- state_dicts --------------------------------------------------------------------------------------------------

    def large_names(self, param: nn.Parameter) -> tuple[str, ...]:
        index = self.unit.index_of[param]
        there = self._there.get(index, ())
        return tuple(large.name for large in self._large.get(index, ()) if large.name in there)

    def note_states(self, param: nn.Parameter, names: Iterable[str]) -> None:
        """``param`` has these large states from now on, as far as there is room for them; their values follow."""
        index = self.unit.index_of[param]
        self._there[index] = frozenset(names) & {large.name for large in self._large.get(index, ())}

    def has_room(self, param: nn.Parameter, name: str) -> bool:
        """Whether a large state of ``param`` has a place on a shelf."""
        return name in {large.name for large in self._large.get(self.unit.index_of[param], ())}

    def read_state(self, param: nn.Parameter, name: str, lo: int, hi: int) -> Tensor:
        """Elements ``lo:hi`` of a large state, flat: this rank's part."""
        kind = self._kinds[f"optimizer.{name}"]
        out = torch.empty(hi - lo, dtype=kind.dtypes[self.unit.index_of[param]])
        for part, view in self._parts_of(param, kind, changed=False):
            out[part.lo - lo : part.hi - lo].copy_(view)
        return out

    def forget_states(self, replaced: Container[nn.Parameter]) -> None:
        """The states of ``replaced`` are about to be written anew: chunks that hold no other states need not be read first."""
        self._made = {}
        self._there = {i: names for i, names in self._there.items() if self.unit.params[i] not in replaced}
        for number, chunk in enumerate(self.unit.chunks):
            if all(p.index not in self._large or self.unit.params[p.index] in replaced for p in chunk.parts):
                for name, kind in self._kinds.items():
                    if name != MASTERS:
                        kind.shelf.forget(number)

    def write_state(self, param: nn.Parameter, name: str, value: Tensor, lo: int) -> None:
        """Keep ``value``, flat, which begins at element ``lo``, as this rank's part of a large state."""
        for part, view in self._parts_of(param, self._kinds[f"optimizer.{name}"], changed=True):
            view.copy_(value[part.lo - lo : part.hi - lo])

    def _parts_of(self, param: nn.Parameter, kind: _Kind, *, changed: bool) -> Iterator[tuple[Part, Tensor]]:
        index, shelf = self.unit.index_of[param], kind.shelf
        for number, chunk in enumerate(self.unit.chunks):
            if any(part.index == index for part in chunk.parts):
                lease = shelf.open(number, self._buffers, Priority.NOW, fresh=not shelf.has(number))
                with borrowed(lease, changed=changed) as tensor:
                    views = kind.views(number, tensor)
                    yield from ((p, v) for p, v in zip(chunk.parts, views, strict=True) if p.index == index)
