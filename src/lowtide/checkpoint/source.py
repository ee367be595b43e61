"""A checkpoint, open for reading: any elements of any kind of any parameter, checked on the way.

What can be said of it without a model is checked when it is opened, by everybody who opens one: to load it, to verify it, to
convert or compare it. So none of them takes what another refuses.

Blocks are read whole, because their checksums are of the whole; the last few stay in memory, because what a reader asks for
next is mostly in the same block.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor

from lowtide.checkpoint import folder, rng, tree
from lowtide.checkpoint.described import ParamFacts, describe
from lowtide.checkpoint.manifest import DTYPES, OBJECT, TABLE_LIMIT, Manifest, Table, parse_table, table_name
from lowtide.errors import CheckpointCorrupted
from lowtide.files import allowed_bytes
from lowtide.runtime.contents import PARAMETERS, STATE
from lowtide.runtime.stream import MASTERS

_KEPT_BLOCKS = 2
_KEPT_BYTES = 64 << 20


class _Where(NamedTuple):
    """Elements ``lo:hi`` are in a block of a table."""

    lo: int
    hi: int
    table: int
    block: int
    at: int


class Source:
    """See the module's docstring."""

    def __init__(self, opened: folder.OpenFolder, manifest: Manifest) -> None:
        self._folder, self.manifest = opened, manifest
        self.path = opened.path
        stored = opened.stored_bytes(file.name for file in manifest.files)
        self.tables: list[Table] = [self._read_table(rank, stored) for rank in range(manifest.world_size)]
        self._refuse_holes(stored)
        self.model, self.parameters = describe(self.tables[0].objects, str(self.path))
        self._index: dict[tuple[str, str], list[_Where]] = defaultdict(list)
        self._dtypes: dict[tuple[str, str], torch.dtype] = {}
        for number, table in enumerate(self.tables):
            self._add(number, table)
        self._kinds_of: dict[str, list[str]] = defaultdict(list)
        for kind, name in self._dtypes:
            if name in self.parameters and not kind.startswith(f"{OBJECT} "):
                self._kinds_of[name].append(kind)
        self._refuse_blocks_in_two()
        for (kind, name), rows in self._index.items():
            rows.sort()
            self._refuse_gaps(kind, name, rows)
        for name, facts in self.parameters.items():
            self._refuse_parts(name, facts)
        for table in self.tables:
            self._refuse_values(table)
        known = self.small_states()
        for name in self.parameters:
            if name not in known and any(kind.startswith(STATE) for kind in self.kinds(name)):
                raise self._corrupted(f"of {name[:100]!r} it has large states of the optimizer, and not the small ones")
        self._kept: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def _read_table(self, rank: int, stored: int) -> Table:
        file = self.manifest.file(table_name(rank))
        text = self._folder.read(file.name, min(TABLE_LIMIT, file.nbytes))
        if len(text) != file.nbytes or xxhash.xxh3_64_hexdigest(text) != file.xxh3:
            raise self._corrupted(f"{file.name} is not what was written")
        return parse_table(text, self.manifest, rank, str(self.path), stored)

    def _add(self, number: int, table: Table) -> None:
        for at, block in enumerate(table.blocks):
            for part in block.parts:
                kind, name = table.kinds[part.kind], table.names[part.name]
                key = (f"{OBJECT} {table.rank}" if kind.kind == OBJECT else kind.kind, name)
                if self._dtypes.setdefault(key, DTYPES[kind.dtype]) is not DTYPES[kind.dtype]:
                    raise self._corrupted(f"{kind.kind} of {name[:100]!r} has two dtypes")
                if kind.kind != OBJECT and (name not in self.parameters or part.hi > self.parameters[name].numel):
                    raise self._corrupted(f"{kind.kind} of {name[:100]!r} does not belong to the model")
                if part.lo < part.hi:
                    self._index[key].append(_Where(part.lo, part.hi, number, at, part.at))

    # -- what is wrong with it, as far as that can be known without reading a block ------------------------------------

    def _refuse_holes(self, stored: int) -> None:
        """What is read takes memory, whether it is written or a hole in a file."""
        listed = sum(block.nbytes for table in self.tables for block in table.blocks)
        if listed > allowed_bytes(stored):
            raise self._corrupted(f"it lists {listed} bytes, and its files hold {stored}: the rest are holes")

    def _refuse_blocks_in_two(self) -> None:
        """No byte of a file belongs to two blocks: reading all of them reads no file more than once."""
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for table in self.tables:
            for block in table.blocks:
                if block.nbytes:
                    places[table.files[block.file]].append((block.offset, block.offset + block.nbytes))
        for file, spans in places.items():
            spans.sort()
            for (_, end), (start, _) in itertools.pairwise(spans):
                if start < end:
                    raise self._corrupted(f"two blocks of {file} have byte {start} in common")

    def _refuse_gaps(self, kind: str, name: str, rows: list[_Where]) -> None:
        """Every element is in one place: from 0 to the end of the parameter, or of what there is of another tensor."""
        end = 0
        for row in rows:
            if row.lo != end:
                how = "in no file" if row.lo > end else "in two places"
                raise self._corrupted(f"elements {min(end, row.lo)}:{max(end, row.lo)} of {kind} of {name[:100]!r} are {how}")
            end = row.hi
        if not kind.startswith(f"{OBJECT} ") and end != self.parameters[name].numel:
            raise self._corrupted(f"elements from {end} on of {kind} of {name[:100]!r} are in no file")

    def _refuse_parts(self, name: str, facts: ParamFacts) -> None:
        """Values, a master and states are all there, as numbers of the same sort."""
        found = self.dtype(PARAMETERS, name)
        if found is not facts.dtype and (facts.numel or found is not None):
            raise self._corrupted(f"{name[:100]!r} is {facts.dtype}, and {found or 'nothing'} in the files")
        for kind in self.kinds(name):
            dtype = self.dtype(kind, name) or facts.dtype
            if facts.numel and (kind, name) not in self._index:
                raise self._corrupted(f"elements of {kind} of {name[:100]!r} are in no file")
            if kind == MASTERS and _sort(dtype) != _sort(facts.dtype):
                raise self._corrupted(f"{name[:100]!r} is {facts.dtype}, and its master {dtype}")

    def _refuse_values(self, table: Table) -> None:
        """All that is no part of a parameter can be decoded, and is what the format says."""
        where = str(self.path)

        def look(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
            self._look_at(table.rank, name, shape, dtype)

        objects = table.objects
        for key in ("small", "state"):
            if not isinstance(objects.get(key), dict):
                raise self._corrupted(f"the table of rank {table.rank} has no {key!r}")
        small: Any = objects["small"]
        for name, states in small.items():
            known = {kind.removeprefix(STATE) for kind in self.kinds(name) if kind.startswith(STATE)}
            if name not in self.parameters or not isinstance(states, dict) or states.get("$", "dict") != "dict":
                raise self._corrupted(f"the small states of {name[:100]!r} of rank {table.rank} are none")
            if twice := known & _keys(cast("dict[str, Any]", states)):
                raise self._corrupted(f"the state {min(twice)[:100]!r} of {name[:100]!r} is there twice")
        if "rng" not in objects:
            raise self._corrupted(f"the table of rank {table.rank} has no 'rng'")
        for value in (objects["rng"], *small.values(), *cast("dict[str, Any]", objects["state"]).values()):
            tree.check(value, look, where)
        if table.rank == 0:
            options: list[Any] = [group.options for group in self.model.groups or ()]
            for value in (*self.model.buffers.values(), *options, self.model.extra):
                tree.check(value, look, where)

    def random_states(self, rank: int) -> dict[str, Any] | None:
        """Of a rank that wrote a part of it; None if it was imported. Checked: a generator may have them."""
        saved = self.tables[rank].objects["rng"]
        if saved is None:
            return None
        found = tree.decode(saved, functools.partial(self.object, rank), str(self.path))
        if (problem := rng.problem_of(found)) is not None:
            raise self._corrupted(f"the random numbers of rank {rank}: {problem}")
        return found

    def small_states(self) -> dict[str, tuple[int, Any]]:
        """By name of the parameter: the rank that has its small states, and what they are, encoded."""
        out: dict[str, tuple[int, Any]] = {}
        for table in self.tables:
            for name, row in cast("dict[str, Any]", table.objects["small"]).items():
                out.setdefault(name, (table.rank, row))
        return out

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
        self._look_at(rank, name, shape, dtype)
        out = torch.empty(math.prod(shape), dtype=dtype)
        self._fill(self._index.get((f"{OBJECT} {rank}", name), []), dtype, name, 0, out.numel(), out)
        return out.reshape(shape)

    def _look_at(self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise unless rank ``rank`` wrote such a tensor; then the files have all of its elements."""
        key = (f"{OBJECT} {rank}", name)
        if self._dtypes.get(key) is not dtype:
            raise self._corrupted(f"{name[:100]!r} of rank {rank} is not there, or has another dtype")
        rows = self._index.get(key, [])
        end = rows[-1].hi if rows else 0
        if math.prod(shape) != end:
            raise self._corrupted(f"{name[:100]!r} of rank {rank} has {end} elements, which is not the shape {str(shape)[:80]}")

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

    def _block(self, table: int, number: int) -> Tensor:
        key = (table, number)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        room = _KEPT_BYTES - self.tables[table].blocks[number].nbytes
        while self._kept and (len(self._kept) >= _KEPT_BLOCKS or sum(kept.nbytes for kept in self._kept.values()) > room):
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


def _keys(states: dict[str, Any]) -> set[str]:
    """The names of states that are encoded (checkpoint/tree.py)."""
    if "$" not in states:
        return set(states)
    pairs: Any = states.get("pairs")
    rows: list[Any] = pairs if isinstance(pairs, list) else []
    return {row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], str)}


def _sort(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_complex, dtype.is_floating_point


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # a part may begin anywhere in its block, a view of a wider dtype only at multiples of its width
    return (raw if not raw.storage_offset() % dtype.itemsize else raw.clone()).view(dtype)


@contextmanager
def open_source(path: Path) -> Generator[Source]:
    """The checkpoint in ``path``. What of it is open can be read to the end, also if it is removed meanwhile."""
    with folder.opened(path) as opened:
        manifest = opened.manifest()
        opened.hold(file.name for file in manifest.files)
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
        manifest = opened.manifest()
        opened.hold(file.name for file in manifest.files)
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
        for rank in range(manifest.world_size):
            source.random_states(rank)
    return checked
