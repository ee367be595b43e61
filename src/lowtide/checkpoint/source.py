"""A checkpoint, open for reading: any elements of any kind of any parameter, checked on the way.

Blocks are read whole, because their checksums are of the whole; the last few stay in memory, because what a reader asks for
next is mostly in the same block.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from lowtide.checkpoint import folder
from lowtide.checkpoint.manifest import DTYPES, OBJECT, TABLE_LIMIT, Manifest, Table, parse_table, table_name
from lowtide.errors import CheckpointCorrupted
from lowtide.runtime.contents import PARAMETERS
from lowtide.runtime.stream import MASTERS

_KEPT_BLOCKS = 2


class _Where(NamedTuple):
    """Elements ``lo:hi`` are in a block of a table."""

    lo: int
    hi: int
    table: int
    block: int
    at: int


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """What the checkpoint says of one parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Source:
    """See the module's docstring."""

    def __init__(self, opened: folder.OpenFolder, manifest: Manifest) -> None:
        self._folder, self.manifest = opened, manifest
        self.path = opened.path
        self.tables: list[Table] = [self._read_table(rank) for rank in range(manifest.world_size)]
        self._file_bytes = sum(file.nbytes for file in manifest.files)
        self.parameters = self._parameters()
        self._index: dict[tuple[str, str], list[_Where]] = defaultdict(list)
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        for number, table in enumerate(self.tables):
            self._add(number, table)
        for rows in self._index.values():
            rows.sort()
        self._kinds_of: dict[str, list[str]] = defaultdict(list)
        for kind, name in self._dtypes:
            if name in self.parameters and not kind.startswith(OBJECT):
                self._kinds_of[name].append(kind)
        self._kept: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def _read_table(self, rank: int) -> Table:
        file = self.manifest.file(table_name(rank))
        text = self._folder.read(file.name, min(TABLE_LIMIT, file.nbytes))
        if len(text) != file.nbytes or xxhash.xxh3_64_hexdigest(text) != file.xxh3:
            raise self._corrupted(f"{file.name} is not what was written")
        return parse_table(text, self.manifest, rank, str(self.path))

    def _parameters(self) -> dict[str, ParamFacts]:
        out: dict[str, ParamFacts] = {}
        try:
            rows: Any = self.tables[0].objects["model"]
            for name, row in rows["parameters"].items():
                shape, stride = (tuple(row[key]) for key in ("shape", "stride"))
                sizes = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, *stride))
                if len(shape) != len(stride) or len(shape) > 64 or not sizes:
                    raise ValueError(name)
                out[name] = ParamFacts(shape, stride, DTYPES[row["dtype"]])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise self._corrupted(f"the table of rank 0 does not describe the model: {error!s:.80}") from None
        return out

    def _add(self, number: int, table: Table) -> None:
        for at, block in enumerate(table.blocks):
            for part in block.parts:
                kind, name = table.kinds[part.kind], table.names[part.name]
                key = (f"{OBJECT} {table.rank}" if kind.kind == OBJECT else kind.kind, name)
                if self._dtypes.setdefault(key, DTYPES[kind.dtype]) is not DTYPES[kind.dtype]:
                    raise self._corrupted(f"{kind.kind} of {name!r} has two dtypes")
                if kind.kind != OBJECT and (name not in self.parameters or part.hi > self.parameters[name].numel):
                    raise self._corrupted(f"{kind.kind} of {name!r} does not belong to the model")
                self._index[key].append(_Where(part.lo, part.hi, number, at, part.at))

    # -- what there is ------------------------------------------------------------------------------------------------

    def kinds(self, name: str) -> list[str]:
        """The kinds that a parameter has in it."""
        return self._kinds_of.get(name, [])

    def dtype(self, kind: str, name: str) -> torch.dtype | None:
        return self._dtypes.get((kind, name))

    def best(self, kind: str, name: str, dtype: torch.dtype) -> str | None:
        """Which kind to read for ``kind``: masters know more than parameters that were rounded from them."""
        if kind not in (PARAMETERS, MASTERS):
            return kind if (kind, name) in self._dtypes else None
        masters = self.dtype(MASTERS, name)
        if kind == MASTERS and masters is not None:
            return MASTERS
        if self.dtype(PARAMETERS, name) is not dtype and masters is not None:
            return MASTERS
        return PARAMETERS

    # -- the numbers --------------------------------------------------------------------------------------------------

    def read_into(self, kind: str, name: str, lo: int, hi: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``lo:hi`` in memory order; another dtype is converted."""
        self._fill(self._index.get((kind, name), []), self._dtypes.get((kind, name)), f"{kind} of {name!r}", lo, hi, out)

    def object(self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that belongs to no parameter."""
        kind = f"{OBJECT} {rank}"
        if self._dtypes.get((kind, name), dtype) is not dtype:
            raise self._corrupted(f"{name[:100]!r} of rank {rank} has another dtype")
        rows = self._index.get((kind, name), [])
        count = math.prod(shape)
        if count * dtype.itemsize > self._file_bytes:
            raise self._corrupted(f"{name[:100]!r} of rank {rank} is larger than all files")
        self.refuse_gaps(kind, name, count)
        out = torch.empty(count, dtype=dtype)
        self._fill(rows, dtype, name, 0, count, out)
        return out.reshape(shape)

    def _fill(self, rows: list[_Where], dtype: torch.dtype | None, what: str, lo: int, hi: int, out: Tensor) -> None:
        at = max(bisect.bisect_right(rows, lo, key=lambda row: row.lo) - 1, 0)
        done = lo
        while done < hi:
            row = rows[at] if at < len(rows) else None
            if row is None or dtype is None or not row.lo <= done < row.hi:
                raise self._corrupted(f"elements {done}:{hi} of {what} are in no file")
            end = min(row.hi, hi)
            start = row.at + (done - row.lo) * dtype.itemsize
            raw = self._block(row.table, row.block)[start : start + (end - done) * dtype.itemsize]
            out[done - lo : end - lo].copy_(_typed(raw, dtype))
            done, at = end, at + 1

    def refuse_gaps(self, kind: str, name: str, numel: int) -> None:
        """Raise unless elements 0 to ``numel`` are there."""
        end = 0
        for row in self._index.get((kind, name), []):
            if row.lo != end:
                break
            end = row.hi
        if end != numel:
            raise self._corrupted(f"elements from {end} on of {kind} of {name[:100]!r} are in no file, or in two")

    def _block(self, table: int, number: int) -> Tensor:
        key = (table, number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) >= _KEPT_BLOCKS:
            self._kept.popitem(last=False)
        memory = self.read_block(table, number)
        self._kept[key] = memory
        return memory

    def read_block(self, table: int, number: int) -> Tensor:
        """The bytes of one block, checked; read once more if they are not what was written."""
        block = self.tables[table].blocks[number]
        name = self.tables[table].files[block.file]
        fd, size = self._folder.file(name)
        if block.offset + block.nbytes > size:
            raise self._corrupted(f"{name} has {size} bytes; a block of it ends at {block.offset + block.nbytes}")
        memory = torch.empty(block.nbytes, dtype=torch.uint8)
        view = memory.numpy().data
        for _ in range(2):
            self._folder.fill(name, fd, view, block.offset)
            if xxhash.xxh3_64_intdigest(view) == block.xxh3:
                return memory
        raise self._corrupted(f"{name}: the {block.nbytes} bytes at {block.offset} are not what was written")

    def _corrupted(self, problem: str) -> CheckpointCorrupted:
        return CheckpointCorrupted(problem, str(self.path))


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # a part may begin anywhere in its block, a view of a wider dtype only at multiples of its width
    return (raw if not raw.storage_offset() % dtype.itemsize else raw.clone()).view(dtype)


@contextmanager
def open_source(path: Path) -> Generator[Source]:
    """The checkpoint in ``path``."""
    with folder.opened(path) as opened:
        manifest = folder.read_manifest(path)
        yield Source(opened, manifest)


def verify(path: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Read everything and check it; how many bytes that were. Raises CheckpointError with the first difference."""
    checked = total = 0

    def note(nbytes: int) -> None:
        nonlocal checked
        checked += nbytes
        if progress is not None:
            progress(checked, total)

    with folder.opened(path) as opened:
        manifest = folder.read_manifest(path)
        source = Source(opened, manifest)
        spools = {file.name for file in manifest.files if file.xxh3 is None}
        total = sum(file.nbytes for file in manifest.files if file.name not in spools)
        total += sum(block.nbytes for table in source.tables for block in table.blocks if table.files[block.file] in spools)
        for file in manifest.files:
            if file.xxh3 is not None:
                if opened.checksum(file.name, file.nbytes) != file.xxh3:
                    raise CheckpointCorrupted(f"{file.name} is not what was written", str(path))
                note(file.nbytes)
        for number, table in enumerate(source.tables):
            for at, block in enumerate(table.blocks):
                if table.files[block.file] in spools:
                    source.read_block(number, at)
                    note(block.nbytes)
        _refuse_gaps(source)
    return checked


def _refuse_gaps(source: Source) -> None:
    """Every element of every parameter is somewhere."""
    for name, facts in source.parameters.items():
        for kind in {PARAMETERS, *source.kinds(name)}:
            source.refuse_gaps(kind, name, facts.numel)
