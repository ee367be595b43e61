"""What a checkpoint says about itself: the manifest, and one table per rank. Nothing in them is believed before it was checked.

The manifest names every file with its size and checksum and ends in the checksum of its own bytes. A table says where every
piece of every tensor lies: in *blocks* (a range of a file, with a checksum), which hold *parts* (elements ``lo:hi`` of one kind
of one parameter). That is all a reader needs, whatever ranks, units, tiers and chunks the writer had.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, Literal, NamedTuple

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lowtide.errors import CheckpointCorrupted, CheckpointTooNew
from lowtide.files import allowed_bytes, json_bytes

FORMAT = "lowtide checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

MANIFEST_LIMIT = 16 << 20
"""Bytes of a manifest that are read at most; a rank and its files take about 500."""
TABLE_LIMIT = 1 << 30
BLOCK_LIMIT = 1 << 31
PIECE_BYTES = 8 << 20
"""A writer makes blocks of at most this size, unless an optimizer needs larger chunks."""

OBJECT = "object"
"""The kind of tensors that belong to no parameter."""

DTYPES: dict[str, torch.dtype] = {
    str(d).removeprefix("torch."): d
    for d in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
}

_FILE_NAME = r"^[a-z0-9][a-z0-9.-]{0,99}$"
_KIND = r"^(parameters|masters|object|optimizer\.(?s:.+))$"
_TAIL = re.compile(rb'"digest":"([0-9a-f]{32})"}\n\Z')

COUNT_LIMIT = 2**62
Count = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
Hash64 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class File(_Frozen):
    """One file of a checkpoint."""

    name: Annotated[str, Field(pattern=_FILE_NAME)]
    nbytes: Count
    xxh3: Hash64 | None = None
    """Of the whole file. None for a spool file, which a job may go on writing beside the checkpoint's blocks."""


class Manifest(_Frozen):
    """See the module's docstring."""

    format: Literal["lowtide checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    lowtide: Annotated[str, Field(max_length=100)]
    torch: Annotated[str, Field(max_length=100)]
    created: Annotated[str, Field(max_length=40)]
    name: Annotated[str, Field(max_length=255)]
    step: Count
    sequence: Count
    """Larger than that of every checkpoint that was in the same folder before: which one is the newest."""
    world_size: Annotated[int, Field(ge=1, le=1 << 20)]
    stage: Annotated[int, Field(ge=0, le=3)]
    plan: Annotated[str, Field(max_length=64)]
    """A hash of where everything lived."""
    files: Annotated[tuple[File, ...], Field(max_length=1 << 22)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = "0" * 32

    @functools.cached_property
    def _by_name(self) -> dict[str, File]:
        return {file.name: file for file in self.files}

    def file(self, name: str) -> File:
        if name not in self._by_name:
            raise CheckpointCorrupted(f"its manifest does not list {name[:100]!r}", self.name)
        return self._by_name[name]


class Part(NamedTuple):
    """Elements ``lo:hi`` of kind ``kinds[kind]`` of ``names[name]``, in memory order, at byte ``at`` of their block."""

    kind: Count
    name: Count
    lo: Count
    hi: Count
    at: Count


class Block(NamedTuple):
    """Bytes ``offset:offset + nbytes`` of ``files[file]``, and what is in them."""

    file: Count
    offset: Count
    nbytes: Count
    xxh3: Annotated[int, Field(ge=0, lt=2**64)]
    parts: tuple[Part, ...]


class Kind(NamedTuple):
    """A kind of bytes, and the dtype of its elements."""

    kind: Annotated[str, Field(max_length=300, pattern=_KIND)]
    dtype: Annotated[str, Field(max_length=20)]


class Table(_Frozen):
    """What one rank wrote."""

    rank: Count
    files: tuple[str, ...]
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]
    objects: dict[str, JsonValue]
    """Everything that is not a tensor: small states, random number generators, what the caller gave."""


class _Version(BaseModel):
    format: str
    version: int
    lowtide: str = "?"


def table_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def to_text(manifest: Manifest) -> bytes:
    """The bytes of a manifest, the last of which are their checksum."""
    empty = manifest.model_copy(update={"digest": "0" * 32})
    body = empty.model_dump_json().encode()
    head = body[: -len('"digest":""}') - 32]
    return head + b'"digest":"' + xxhash.xxh3_128_hexdigest(head).encode() + b'"}\n'


def parse_manifest(text: bytes, where: str) -> Manifest:
    """The manifest in ``text``, or a CheckpointCorrupted or CheckpointTooNew that says what is wrong with it."""
    end = _TAIL.search(text[-64:])
    head = text[: len(text) - 64 + end.start()] if end is not None and len(text) >= 64 else b""
    if end is None or xxhash.xxh3_128_hexdigest(head).encode() != end[1]:
        raise CheckpointCorrupted("its manifest is not what was written: the checksum at its end differs", where)
    _refuse_costly("its manifest", text, len(text), where)
    try:
        manifest = Manifest.model_validate_json(text)
    except (ValidationError, RecursionError) as error:
        _refuse_other_version(text, where)
        raise CheckpointCorrupted(f"its manifest is not valid: {first_problem(error)}", where) from None
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise CheckpointCorrupted("its manifest lists a file twice", where)
    for rank in range(min(manifest.world_size, len(manifest.files) + 1)):  # more ranks than files cannot all be there
        manifest.file(table_name(rank))
    return manifest


def _refuse_costly(what: str, text: bytes, stored: int, where: str) -> None:
    if (needed := json_bytes(text)) > (allowed := allowed_bytes(stored)):
        mebibytes = f"{needed / 2**20:.0f} MiB of memory, and {allowed / 2**20:.0f} MiB are allowed for files of its size"
        raise CheckpointCorrupted(f"{what} would take {mebibytes}", where)


def parse_table(text: bytes, manifest: Manifest, rank: int, where: str, stored: int = 0) -> Table:
    """The table of one rank, with every number in it checked against the files and the others. ``stored``: bytes that the
    files of the checkpoint hold; a table may take memory in proportion."""
    _refuse_costly(f"the table of rank {rank}", text, max(stored, len(text)), where)
    try:
        table = Table.model_validate_json(text)
    except (ValidationError, RecursionError) as error:
        raise CheckpointCorrupted(f"the table of rank {rank} is not valid: {first_problem(error)}", where) from None
    if table.rank != rank:
        raise CheckpointCorrupted(f"the table of rank {rank} is that of rank {table.rank}", where)
    sizes = [manifest.file(name).nbytes for name in table.files]
    widths = [DTYPES[kind.dtype].itemsize if kind.dtype in DTYPES else 0 for kind in table.kinds]
    if 0 in widths:
        raise CheckpointCorrupted(f"unknown dtype {table.kinds[widths.index(0)].dtype!r}", where)
    for block in table.blocks:
        if problem := _problem_of(block, table, sizes, widths):
            raise CheckpointCorrupted(f"the table of rank {rank}: {problem}", where)
    return table


def _problem_of(block: Block, table: Table, sizes: list[int], widths: list[int]) -> str | None:
    if block.file >= len(sizes):
        return f"a block in file {block.file} of {len(sizes)}"
    if block.nbytes > BLOCK_LIMIT or block.offset + block.nbytes > sizes[block.file]:
        return f"a block of {block.nbytes} bytes at {block.offset} of {table.files[block.file]}, which has {sizes[block.file]}"
    for part in block.parts:
        if part.kind >= len(widths) or part.name >= len(table.names):
            return f"a part of kind {part.kind} of name {part.name}"
        if part.lo > part.hi or part.at + (part.hi - part.lo) * widths[part.kind] > block.nbytes:
            return f"elements {part.lo}:{part.hi} at byte {part.at} of a block of {block.nbytes} bytes"
    return None


def _refuse_other_version(text: bytes, where: str) -> None:
    """A newer lowtide may write manifests that look different, except for their end; say so instead of calling them damaged."""
    try:
        found = _Version.model_validate_json(text)
    except (ValidationError, RecursionError):
        return
    if found.format == FORMAT and found.version > VERSION:
        raise CheckpointTooNew(where, found.version, VERSION, found.lowtide[:40])


def first_problem(error: Exception) -> str:
    """What a parser found first, in a few words."""
    if not isinstance(error, ValidationError):
        return "nested too deeply"
    first: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    at = ".".join(str(step)[:60] for step in first["loc"][:6])
    return f"{at}: {first['msg'][:120]}" if at else str(first["msg"])[:160]
