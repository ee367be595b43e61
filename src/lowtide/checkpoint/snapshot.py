"""What one rank puts into a checkpoint: which bytes can stay where they are, which are copied, and the table of all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import JsonValue
from torch import Tensor

from lowtide.checkpoint.manifest import OBJECT, Block, File, Kind, Part, Table
from lowtide.checkpoint.payload import Entry, PayloadWriter, Written
from lowtide.runtime.contents import PARAMETERS, Contents, OnDisk, Slice
from lowtide.runtime.unit import Unit
from lowtide.tiers.pins import Pin

Progress = Callable[[int], None]
"""Called with the bytes that were just written."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One kind of one unit, as it was when the snapshot was made: training may go on while it is written."""

    unit: Unit
    kind: str
    slices: tuple[tuple[Slice | None, ...], ...]
    """What each chunk holds, part by part."""
    dtypes: Mapping[int, torch.dtype]
    """By index of the parameter."""
    where: OnDisk | None
    """None if it is in memory."""

    @property
    def stored(self) -> bool:
        return self.where is not None

    def all_slices(self) -> Iterator[Slice]:
        for row in self.slices:
            yield from (cut for cut in row if cut is not None)

    def is_frozen(self, index: int) -> bool:
        """Values that no step changes: they are written once, and linked from then on."""
        return self.kind == PARAMETERS and not self.unit.params[index].requires_grad


@dataclass(slots=True)
class TableBuilder:
    """Collects where everything lies."""

    rank: int
    files: dict[str, File | None] = field(default_factory=dict[str, File | None])
    blocks: list[Block] = field(default_factory=list[Block])
    _names: dict[str, int] = field(default_factory=dict[str, int])
    _kinds: dict[Kind, int] = field(default_factory=dict[Kind, int])

    def add_file(self, file: File) -> None:
        self.files[file.name] = file

    def add(self, file: str, offset: int, nbytes: int, xxh3: int, parts: Iterable[Part]) -> None:
        self.files.setdefault(file, None)
        self.blocks.append(Block(list(self.files).index(file), offset, nbytes, xxh3, tuple(parts)))

    def part(self, kind: str, dtype: torch.dtype, name: str, lo: int, hi: int, at: int) -> Part:
        key = Kind(kind, str(dtype).removeprefix("torch."))
        kind_number = self._kinds.setdefault(key, len(self._kinds))
        return Part(kind_number, self._names.setdefault(name, len(self._names)), lo, hi, at)

    def written(self, file: str, pieces: list[Written], kind: str, dtype: torch.dtype, name: str, lo: int) -> None:
        """Pieces of a payload: each is a block with one part. A tensor without elements is one without bytes."""
        for piece in pieces or [Written(0, 0, xxhash.xxh3_64_intdigest(b""))]:
            hi = lo + piece.nbytes // dtype.itemsize
            self.add(file, piece.offset, piece.nbytes, piece.xxh3, [self.part(kind, dtype, name, lo, hi, 0)])
            lo = hi

    def table(self, objects: dict[str, JsonValue]) -> Table:
        return Table(
            rank=self.rank,
            files=tuple(self.files),
            names=tuple(self._names),
            kinds=tuple(self._kinds),
            blocks=tuple(self.blocks),
            objects=objects,
        )


class Snapshot:
    """The numbers of this rank, as they are between two steps."""

    def __init__(self, contents: Contents, units: list[Unit], *, writes_parameters: bool) -> None:
        """``writes_parameters``: whether this rank's copy of the model is the one that is saved."""
        self._contents, self._units = contents, units if writes_parameters else []
        self.tensors: list[tuple[str, Tensor]] = []  # of no parameter
        self._copies: dict[tuple[Unit, str, int], list[tuple[Slice, Tensor]]] = {}
        self._pin: Pin | None = None

    def put(self, name: str, value: Tensor) -> None:
        """A tensor that belongs to no parameter; what a caller changes later must not change it."""
        self.tensors.append((name, value.detach().cpu().contiguous().clone().reshape(-1)))

    def sections(self) -> list[Section]:
        """All kinds of all units; what is in memory comes first, because it changes first."""
        made = [self._section(unit, kind) for unit in self._units for kind in self._contents.kinds(unit)]
        return sorted(made, key=lambda section: section.stored)

    def _section(self, unit: Unit, kind: str) -> Section:
        slices = tuple(tuple(self._contents.slices(unit, kind, number)) for number in range(len(unit.chunks)))
        indices = {cut.index for row in slices for cut in row if cut is not None}
        dtypes = {index: self._contents.dtype(unit, kind, index) for index in indices}
        return Section(unit, kind, slices, dtypes, self._contents.on_disk(unit, kind))

    def nbytes(self, sections: Iterable[Section]) -> int:
        return sum((cut.hi - cut.lo) * s.dtypes[cut.index].itemsize for s in sections for cut in s.all_slices())

    # -- what stays where it is ---------------------------------------------------------------------------------------

    def add_pinned(self, sections: Iterable[Section], pin: Pin, names: dict[Any, str], builder: TableBuilder) -> None:
        """Blocks of the spool files, which get a name in the checkpoint."""
        for section in sections:
            if section.where is None:
                continue
            for number, block in enumerate(pin.blocks[section.where.extent]):
                rows = zip(section.slices[number], section.where.offsets[number], strict=True)
                parts = [
                    self._pinned_part(section, number, at, cut, offset, builder)
                    for at, (cut, offset) in enumerate(rows)
                    if cut is not None
                ]
                if block is not None and parts:
                    builder.add(names[block.place.spool], block.place.offset, block.nbytes, block.digest, parts)

    def _pinned_part(self, section: Section, number: int, at: int, cut: Slice, offset: int, builder: TableBuilder) -> Part:
        dtype = section.dtypes[cut.index]
        first = section.unit.chunks[number].parts[at].lo
        name = section.unit.names[cut.index]
        return builder.part(section.kind, dtype, name, cut.lo, cut.hi, offset + (cut.lo - first) * dtype.itemsize)

    # -- what is read later, while training goes on -------------------------------------------------------------------

    def freeze(self, sections: Iterable[Section], pin: Pin | None) -> None:
        """From here on, what ``write`` reads is as it is now: copies of what is in memory, and pinned blocks."""
        self._pin = pin
        for section in sections:
            for number in range(0 if section.stored else len(section.unit.chunks)):
                with self._contents.open(section.unit, section.kind, number) as rows:
                    self._copies[section.unit, section.kind, number] = [(cut, t.detach().cpu().clone()) for cut, t in rows]

    @contextmanager
    def _open(self, section: Section, number: int) -> Generator[list[tuple[Slice, Tensor]]]:
        copies = self._copies.get((section.unit, section.kind, number))
        if copies is not None:
            yield copies
        elif self._pin is not None and section.where is not None:
            yield self._read_pinned(section, number, self._pin, section.where)
        else:
            with self._contents.open(section.unit, section.kind, number) as rows:
                yield rows

    def _read_pinned(self, section: Section, number: int, pin: Pin, where: OnDisk) -> list[tuple[Slice, Tensor]]:
        block = pin.blocks[where.extent][number]
        if block is None:
            return []
        memory = torch.empty(block.nbytes, dtype=torch.uint8)
        pin.owner.read_pinned(block, memory, f"{section.unit.name}/{section.kind}").wait()
        out: list[tuple[Slice, Tensor]] = []
        rows = zip(section.unit.chunks[number].parts, section.slices[number], where.offsets[number], strict=True)
        for part, cut, offset in rows:
            if cut is not None:
                dtype = section.dtypes[cut.index]
                start = offset + (cut.lo - part.lo) * dtype.itemsize
                out.append((cut, memory[start : start + (cut.hi - cut.lo) * dtype.itemsize].view(dtype)))
        return out

    # -- what is copied -----------------------------------------------------------------------------------------------

    def write(
        self, sections: list[Section], path: Path, builder: TableBuilder, *, frozen: bool, dry: bool = False, progress: Progress
    ) -> File:
        """A payload of ``sections``: of the frozen parameters in them, or of everything else."""
        chosen = [(s, group) for s in sections for group in self._tensors_of(s, frozen=frozen)]
        entries = [Entry(f"{s.kind}/{s.unit.names[i]}", dtype, (hi - lo,)) for s, (i, dtype, lo, hi) in chosen]
        objects = [] if frozen else self.tensors
        entries += [Entry(f"{OBJECT}/{name}", t.dtype, (t.numel(),)) for name, t in objects]
        writer = PayloadWriter(None if dry else path, entries)
        try:
            for section in sections:
                self._write_section(section, writer, path.name, builder, frozen=frozen, progress=progress)
            for name, tensor in objects:
                builder.written(path.name, writer.add(tensor), OBJECT, tensor.dtype, name, 0)
            return File(name=path.name, nbytes=writer.nbytes, xxh3=writer.finish())
        finally:
            writer.close()

    def _tensors_of(self, section: Section, *, frozen: bool) -> list[tuple[int, torch.dtype, int, int]]:
        """Parameter, dtype and elements of every tensor of a section, in the order in which they are written."""
        out: list[tuple[int, torch.dtype, int, int]] = []
        slices = [cut for cut in section.all_slices() if section.is_frozen(cut.index) is frozen]
        for index, group in itertools.groupby(slices, key=lambda cut: cut.index):
            rows = list(group)
            out.append((index, section.dtypes[index], rows[0].lo, rows[-1].hi))
        return out

    def _write_section(
        self, section: Section, writer: PayloadWriter, file: str, builder: TableBuilder, *, frozen: bool, progress: Progress
    ) -> None:
        for number, row in enumerate(section.slices):
            if not any(cut is not None and section.is_frozen(cut.index) is frozen for cut in row):
                continue
            with self._open(section, number) as rows:
                for cut, tensor in rows:
                    if section.is_frozen(cut.index) is frozen:
                        pieces = writer.add(tensor)
                        name = section.unit.names[cut.index]
                        builder.written(file, pieces, section.kind, tensor.dtype, name, cut.lo)
                        progress(tensor.nbytes)

    def has_frozen(self, sections: Iterable[Section]) -> bool:
        return any(section.is_frozen(cut.index) for section in sections for cut in section.all_slices())


def free_bytes(folder: Path) -> int:
    numbers = os.statvfs(folder)
    return numbers.f_bavail * numbers.f_frsize
