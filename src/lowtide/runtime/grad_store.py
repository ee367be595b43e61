"""Where reduced gradients are kept until they are used: in memory, on a shelf (which may be on disk), or only for a moment.

[Note: changes to a gradient on disk are noted, not made] Clipping, scaling and zeroing are elementwise. Done on the disk they
would cost a read and a write of every gradient; instead the operation is noted and applied whenever the bytes come to
memory. The bits are the same, because each element goes through the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lowtide.runtime.unit import Unit
from lowtide.spec.chunks import Part, pack
from lowtide.tiers.arena import Arena, ArenaFull
from lowtide.tiers.shelf import Lease, Shelf, borrowed
from lowtide.tiers.store import Key, Priority, Store


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``lo:hi`` of the reduced gradient of parameter ``index``, 1-D. ``values`` may be overwritten after use."""

    index: int
    lo: int
    hi: int
    values: Tensor

    def covers(self, part: Part) -> bool:
        return self.lo <= part.lo and part.hi <= self.hi

    def part(self, part: Part) -> Tensor:
        """The values of ``part``, which this segment covers."""
        return self.values[part.lo - self.lo : part.hi - self.lo]


class Reader(Protocol):
    """Reads gradients as they are stored: see runtime/grad_summary.py."""

    @property
    def whole(self) -> bool:
        """Whether a gradient is wanted in one piece, where it is in memory as one."""
        ...

    def read(self, index: int, lo: int, values: Tensor) -> None:
        """Read elements ``lo`` … of the gradient of parameter ``index``, 1-D."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """An elementwise in-place operation. ``keeps_finite``: it cannot turn a finite number into one that is not; ``factor``: it
    is a multiplication by that, and nothing else."""

    apply: Callable[[Tensor], Any]
    keeps_finite: bool
    factor: float | None


class ShelvedGrads:
    """The gradients of one unit on a shelf."""

    def __init__(self, unit: Unit, *, memory: Arena, buffers: Arena, store: Store | None) -> None:
        self._unit, self._buffers = unit, buffers
        self._dtypes = [d.gradient for d in unit.dtypes]
        self._packing = pack(unit.chunks, [d.itemsize for d in self._dtypes])
        self.shelf = Shelf(Key(unit.name, "gradients"), self._packing.cuts, memory=memory, store=store)
        self._noted: dict[int, list[Change]] = {}

    def keep(self, batches: Iterable[Sequence[Segment]], add: Sequence[bool], reader: Reader) -> None:
        """Store the reduced gradients of one backward, batch by batch; ``add[i]``: to what is stored already for parameter
        ``i``. A segment has all that a chunk has of its parameter, or nothing. ``reader`` sees what is then stored."""
        stored: set[tuple[int, int]] = set()  # chunks, and whose part of them
        kept: set[int] = set()
        for segments in batches:
            kept |= {segment.index for segment in segments}
            by_index = {s.index: s for s in segments}
            wholes = {i for i, s in by_index.items() if reader.whole and self._is_whole(s)}
            self._keep_batch(by_index, add, stored, reader, wholes)
            for index in wholes:
                reader.read(index, 0, by_index[index].values)
        for index in kept:
            self._noted.pop(index, None)

    def _is_whole(self, segment: Segment) -> bool:
        """Whether the segment will hold exactly what is stored: all of the parameter, in the type in which it is stored."""
        whole = (segment.lo, segment.hi) == (0, self._unit.layout.params[segment.index].numel)
        return whole and segment.values.dtype is self._dtypes[segment.index]

    def _keep_batch(
        self,
        by_index: dict[int, Segment],
        add: Sequence[bool],
        stored: set[tuple[int, int]],
        reader: Reader,
        wholes: set[int],
    ) -> None:
        for number, chunk in enumerate(self._unit.chunks):
            given = {p.index for p in chunk.parts if p.index in by_index and by_index[p.index].covers(p)}
            if not given:
                continue
            # What is added to, and what other parameters have in this chunk, must be there first.
            needed = any(add[part.index] or (number, part.index) in stored for part in chunk.parts)
            lease = self.shelf.open(number, self._buffers, Priority.NOW, fresh=not (needed and self.shelf.has(number)))
            with borrowed(lease, changed=True) as tensor:
                for part, view in self._views(number, tensor):
                    if part.index not in given:
                        continue
                    source = by_index[part.index].part(part)
                    if add[part.index]:
                        self._make_changes(part.index, view)
                        view.add_(source)
                        if part.index in wholes:
                            source.copy_(view)
                    else:
                        view.copy_(source)
                    if part.index not in wholes:
                        reader.read(part.index, part.lo, view)
            stored |= {(number, index) for index in given}

    def change(self, index: int, change: Change) -> None:
        """Change the gradient of parameter ``index``, or note it until its bytes come to memory."""
        if not self.shelf.in_memory:
            self._noted.setdefault(index, []).append(change)
            return
        for number, chunk in enumerate(self._unit.chunks):
            if any(part.index == index for part in chunk.parts):
                with borrowed(self.shelf.open(number, self._buffers, Priority.NOW), changed=True) as tensor:
                    for part, view in self._views(number, tensor):
                        if part.index == index:
                            change.apply(view)

    def move(self, store: Store | None) -> None:
        """Between two steps: into memory (``None``) or into ``store``."""
        self.shelf.move(store)
        if store is not None:
            return
        noted, self._noted = self._noted, {}
        for index, changes in noted.items():
            for change in changes:
                self.change(index, change)

    def open(self, number: int, priority: Priority, *, wait: bool = True) -> Lease:
        """A lease on the gradients of chunk ``number``; give its bytes to ``ready``. ``wait``: see ``Shelf.open``."""
        return self.shelf.open(number, self._buffers, priority, wait=wait)

    def ready(self, number: int, tensor: Tensor) -> list[Tensor]:
        """The gradients of the chunk's parts, with noted changes made, from the bytes of a lease that will not be kept."""
        out: list[Tensor] = []
        for part, view in self._views(number, tensor):
            self._make_changes(part.index, view)
            out.append(view)
        return out

    def parts(self, wanted: Callable[[int], bool]) -> Iterator[tuple[Part, Tensor]]:
        """Every stored part of the wanted parameters, one after another; each is valid until the next."""
        chosen = [n for n, c in enumerate(self._unit.chunks) if any(wanted(p.index) for p in c.parts) and self.shelf.has(n)]
        open_leases: list[Lease] = []
        try:
            for at, number in enumerate(chosen):
                if not open_leases:
                    open_leases.append(self.open(number, Priority.NOW))
                with suppress(ArenaFull):
                    for following in chosen[at + len(open_leases) : at + 2]:
                        open_leases.append(self.open(following, Priority.NEXT, wait=False))
                views = self.ready(number, open_leases[0].wait())
                yield from ((p, v) for p, v in zip(self._unit.chunks[number].parts, views, strict=True) if wanted(p.index))
                del views
                open_leases.pop(0).close(changed=False)
        finally:
            for lease in open_leases:
                lease.close(changed=False)

    def _views(self, number: int, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        for part, offset in zip(self._unit.chunks[number].parts, self._packing.offsets[number], strict=True):
            dtype = self._dtypes[part.index]
            yield part, tensor[offset : offset + part.numel * dtype.itemsize].view(dtype)

    def _make_changes(self, index: int, view: Tensor) -> None:
        for change in self._noted.get(index, ()):
            change.apply(view)
