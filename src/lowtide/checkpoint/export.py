"""A checkpoint as a Hugging Face folder, or as a checkpoint that needs nothing outside itself.

Both read and write from beginning to end in small pieces. What else is in memory is two blocks of the checkpoint, a buffer of
the model, or a tensor whose elements have to change their order (channels_last): never more than the largest tensor. The folder
is made under another name, made durable, and appears by a rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from pydantic import JsonValue
from torch import Tensor

from lowtide.checkpoint import folder, tree
from lowtide.checkpoint.appearing import Counter, Exported, PathLike, Report, appearing, refuse_taken, write_table
from lowtide.checkpoint.described import ParamFacts
from lowtide.checkpoint.manifest import DTYPES, OBJECT, PIECE_BYTES, File, Table
from lowtide.checkpoint.payload import SAFETENSORS_DTYPES, Entry, PayloadWriter
from lowtide.checkpoint.snapshot import TableBuilder
from lowtide.checkpoint.source import Source, open_source
from lowtide.errors import ArgumentError, CheckpointCorrupted, Refused
from lowtide.files import NotPlain, read_plain
from lowtide.runtime.contents import PARAMETERS

SHARD_BYTES = 5_000_000_000
"""Of tensors in one file, unless a single tensor is larger."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PIECE = 1 << 20
_BESIDE = (".json", ".txt", ".model", ".jinja")
"""Endings of the small files of a Hugging Face folder: configuration and tokenizer."""
_BESIDE_LIMIT = 100 << 20


# -- to Hugging Face --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the model: a parameter, by its facts, or a buffer, by what the table of rank 0 says of it."""

    entry: Entry
    facts: ParamFacts | None = None
    buffer: JsonValue = None


def export_hf(
    checkpoint: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: PathLike | None = None,
    progress: Report | None = None,
) -> Exported:
    """Write the model of a checkpoint to the new folder ``target`` as ``model.safetensors``, or as several files and an index.

    Names are those of the model's ``state_dict()``; tied parameters are there once, under their first name. ``dtype`` converts
    every floating-point tensor, from the fp32 masters where there are some. ``like``: a Hugging Face folder whose configuration
    and tokenizer are copied, so that ``from_pretrained`` finds them.
    """
    where = refuse_taken(target)
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype={dtype}: weights are converted to floating-point numbers only.")
    if shard_bytes < 1:
        raise ArgumentError(f"shard_bytes={shard_bytes}: give at least 1 byte; a tensor that is larger gets a file of its own.")
    beside = _files_beside(Path(like)) if like is not None else []
    with open_source(Path(checkpoint)) as source:
        weights = [*_parameters(source, dtype), *_buffers(source, dtype)]
        shards = _cut(weights, shard_bytes)
        counter = Counter(progress, sum(w.entry.nbytes for w in weights))
        with appearing(where, counter.total) as working:
            written = _write_shards(source, shards, working, counter)
            for path in beside:
                _copy_small(path, working / path.name)
            folder.sync_folder(working)
            os.rename(working, where)
            folder.sync_folder(where.parent)
    return Exported(where, (*written, *(p.name for p in beside)), len(weights), counter.total)


def _parameters(source: Source, dtype: torch.dtype | None) -> Iterator[_Weight]:
    for name, facts in source.parameters.items():
        wanted = dtype if dtype is not None and facts.dtype.is_floating_point else facts.dtype
        _refuse_unnamed(name, wanted)
        yield _Weight(Entry(name, wanted, facts.shape), facts=facts)


def _buffers(source: Source, dtype: torch.dtype | None) -> Iterator[_Weight]:
    for name, row in source.model.buffers.items():
        value = _decode(source, row)  # one at a time: a model may have large ones
        if not isinstance(value, Tensor):
            raise CheckpointCorrupted(f"the buffer {name!r} is not a tensor", str(source.path))
        wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
        _refuse_unnamed(name, wanted)
        yield _Weight(Entry(name, wanted, tuple(value.shape)), buffer=row)


def _decode(source: Source, row: JsonValue) -> Any:
    def get(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return source.object(0, name, shape, dtype)

    return tree.decode(row, get, str(source.path))


def _refuse_unnamed(name: str, dtype: torch.dtype) -> None:
    if name == "__metadata__":
        raise Refused("a parameter or buffer is called '__metadata__', which safetensors files use themselves. Rename it.")
    if dtype not in SAFETENSORS_DTYPES:
        raise Refused(f"{name!r} is {dtype}, which safetensors files cannot hold. Convert that parameter and save again.")


def _cut(weights: list[_Weight], shard_bytes: int) -> list[list[_Weight]]:
    """In the order of the model, as many into each file as fit."""
    shards: list[list[_Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.entry.nbytes
    return shards


def _write_shards(source: Source, shards: list[list[_Weight]], working: Path, counter: Counter) -> list[str]:
    count = len(shards)
    names = [_SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    aliases = source.model.aliases
    for file, weights in zip(names, shards, strict=True):
        own = {w.entry.name for w in weights}
        # the other names of tied parameters, as safetensors' own writer notes them; transformers asks for the format
        metadata = {**{alias: name for alias, name in aliases.items() if name in own}, "format": "pt"}
        writer = PayloadWriter(working / file, [w.entry for w in weights], metadata)
        try:
            for weight in weights:
                _write_weight(source, weight, writer, counter)
            writer.finish()
        finally:
            writer.close()
    if count == 1:
        return names
    facts: dict[str, Any] = {"total_size": counter.total, **({"aliases": aliases} if aliases else {})}
    places = {w.entry.name: file for file, weights in zip(names, shards, strict=True) for w in weights}
    text = json.dumps({"metadata": facts, "weight_map": dict(sorted(places.items()))}, indent=2)
    folder.write_file(working / _INDEX, f"{text}\n".encode())
    return [*names, _INDEX]


def _write_weight(source: Source, weight: _Weight, writer: PayloadWriter, counter: Counter) -> None:
    entry = weight.entry
    if weight.facts is None:
        pieces = iter([_decode(source, weight.buffer).to(entry.dtype).reshape(-1)])
    elif is_row_by_row(weight.facts.shape, weight.facts.stride):
        pieces = _in_order(source, entry, weight.facts)
    else:
        pieces = _reordered(source, entry, weight.facts)
    for piece in pieces:
        writer.add(piece)
        counter.note(piece.nbytes)


def _in_order(source: Source, entry: Entry, facts: ParamFacts) -> Iterator[Tensor]:
    kind = source.best(PARAMETERS, entry.name, entry.dtype) or PARAMETERS
    step = _PIECE // entry.dtype.itemsize
    memory = torch.empty(min(step, facts.numel), dtype=entry.dtype)
    for lo in range(0, facts.numel, step):
        hi = min(lo + step, facts.numel)
        source.read_into(kind, entry.name, lo, hi, memory[: hi - lo])
        yield memory[: hi - lo]


def _reordered(source: Source, entry: Entry, facts: ParamFacts) -> Iterator[Tensor]:
    """A file holds rows; these elements lie in memory in another order, so the tensor has to be here whole."""
    kind = source.best(PARAMETERS, entry.name, entry.dtype) or PARAMETERS
    whole = torch.empty(facts.numel, dtype=entry.dtype)
    source.read_into(kind, entry.name, 0, facts.numel, whole)
    for rows in _rows(whole.as_strided(facts.shape, facts.stride), _PIECE // entry.dtype.itemsize):
        yield rows.reshape(-1)


def _rows(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views of at most ``limit`` elements that follow one another row by row."""
    if tensor.numel() <= limit:
        yield tensor
    elif tensor.shape[0] == 1:
        yield from _rows(tensor[0], limit)
    else:
        for part in tensor.split(max(1, limit // (tensor.numel() // tensor.shape[0]))):
            yield from _rows(part, limit)


def is_row_by_row(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether memory order is the order of rows; dimensions of one element have no say."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _files_beside(like: Path) -> list[Path]:
    if not (like / "config.json").is_file():
        raise ArgumentError(f"{str(like)!r} is not a Hugging Face folder: it has no config.json.")
    names = sorted(p for p in like.iterdir() if p.name.endswith(_BESIDE) and not p.name.endswith(".index.json"))
    return [p for p in names if _is_of(like, p) and p.stat().st_size <= _BESIDE_LIMIT]


def _is_of(like: Path, path: Path) -> bool:
    """Whether it is a file of the folder; a link of Hugging Face's own cache leads to the blobs beside. Another one would
    make a file public that nobody meant to."""
    if path.is_symlink():
        home, target = Path(os.path.realpath(like)), Path(os.path.realpath(path))
        blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
        if target.parent not in (home, blobs):
            raise ArgumentError(
                f"{str(path)!r} is a link out of its folder, and so is not copied. Remove it, or put a copy there."
            )
    return path.is_file()


def _copy_small(path: Path, to: Path) -> None:
    try:
        folder.write_file(to, read_plain(Path(os.path.realpath(path)), _BESIDE_LIMIT))
    except NotPlain as error:
        raise ArgumentError(f"{str(path)!r} is not a regular file.") from error


# -- a checkpoint that needs nothing outside itself -------------------------------------------------------------------


class _Run(NamedTuple):
    """Elements ``lo:hi`` of a kind of a name, that one rank wrote."""

    kind: str
    dtype: torch.dtype
    name: str
    lo: int
    hi: int


def export_whole(checkpoint: PathLike, target: PathLike, *, progress: Report | None = None) -> Exported:
    """Copy a checkpoint to the new folder ``target``, with everything that was linked inside: one safetensors file per rank.

    Every block is checked on the way. Step, sequence and all values stay, so the copy is as old as the original.
    """
    where = refuse_taken(target)
    with open_source(Path(checkpoint)) as source:
        runs = [_runs(table) for table in source.tables]
        counter = Counter(progress, sum((r.hi - r.lo) * r.dtype.itemsize for rows in runs for r in rows))
        with appearing(where, counter.total) as working:
            files: list[File] = []
            for table, rows in zip(source.tables, runs, strict=True):
                files += _write_rank(source, table, rows, working, counter)
            folder.sync_folder(working)
            ordered = tuple(sorted(files, key=lambda f: f.name))
            manifest = source.manifest.model_copy(update={"name": where.name, "files": ordered})
            with folder.locked(where.parent):
                folder.commit(working, where, manifest)
    return Exported(where, tuple(f.name for f in ordered), sum(map(len, runs)), counter.total)


def _runs(table: Table) -> list[_Run]:
    """What is in a table, without the cuts between its blocks, in the order in which blocks name it first."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for block in table.blocks:
        for part in block.parts:
            spans.setdefault((part.kind, part.name), []).append((part.lo, part.hi))
    out: list[_Run] = []
    for (kind, name), cuts in spans.items():
        joined: list[list[int]] = []
        for lo, hi in sorted(cuts):
            if joined and joined[-1][1] == lo:
                joined[-1][1] = hi
            else:
                joined.append([lo, hi])
        row = table.kinds[kind]
        out += [_Run(row.kind, DTYPES[row.dtype], table.names[name], lo, hi) for lo, hi in joined]
    return out


def _write_rank(source: Source, table: Table, runs: list[_Run], working: Path, counter: Counter) -> list[File]:
    file = f"rank-{table.rank:05d}.safetensors"
    builder = TableBuilder(table.rank)
    writer = PayloadWriter(working / file, _entries(runs))
    try:
        for run in runs:
            for lo, piece in _run_pieces(source, table.rank, run):
                builder.written(file, writer.add(piece), run.kind, run.dtype, run.name, lo)
                counter.note(piece.nbytes)
            if run.lo == run.hi:  # a reader still wants to know that it is there, and its dtype
                part = builder.part(run.kind, run.dtype, run.name, run.lo, run.hi, 0)
                builder.add(file, 0, 0, xxhash.xxh3_64_intdigest(b""), [part])
        builder.add_file(File(name=file, nbytes=writer.nbytes, xxh3=writer.finish()))
    finally:
        writer.close()
    return [write_table(builder, table.objects, working), *(f for f in builder.files.values() if f is not None)]


def _entries(runs: Iterable[_Run]) -> list[Entry]:
    taken: set[str] = set()
    out: list[Entry] = []
    for run in runs:
        name = f"{run.kind}/{run.name}"
        name = name if name not in taken else f"{name}[{run.lo}:{run.hi}]"  # a writer that left gaps
        taken.add(name)
        out.append(Entry(name, run.dtype, (run.hi - run.lo,)))
    return out


def _run_pieces(source: Source, rank: int, run: _Run) -> Iterator[tuple[int, Tensor]]:
    if run.kind == OBJECT:
        yield 0, source.object(rank, run.name, (run.hi,), run.dtype)
        return
    step = PIECE_BYTES // run.dtype.itemsize
    memory = torch.empty(min(step, run.hi - run.lo), dtype=run.dtype)
    for lo in range(run.lo, run.hi, step):
        hi = min(lo + step, run.hi)
        source.read_into(run.kind, run.name, lo, hi, memory[: hi - lo])
        yield lo, memory[: hi - lo]
