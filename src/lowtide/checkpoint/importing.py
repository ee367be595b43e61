"""A Hugging Face folder as a checkpoint: what is in its safetensors files, one rank, step 0, no optimizer.

A file does not say which of its tensors are buffers. Integers and the statistics of batch normalization are taken for buffers,
everything else for parameters; ``lowtide.load`` looks for each under its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch
from pydantic import JsonValue

from lowtide.checkpoint import folder
from lowtide.checkpoint.appearing import Counter, Exported, PathLike, Report, appearing, refuse_taken, write_table
from lowtide.checkpoint.manifest import OBJECT, File, Manifest
from lowtide.checkpoint.payload import Entry, PayloadWriter
from lowtide.checkpoint.snapshot import TableBuilder
from lowtide.runtime.contents import PARAMETERS
from lowtide.spec.weights import Weights, open_weights
from lowtide.version import __version__

_ALWAYS_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(slots=True)
class _Description:
    """What the table of an imported checkpoint says of the model."""

    parameters: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    buffers: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])

    def objects(self) -> dict[str, JsonValue]:
        model: dict[str, JsonValue] = {
            "parameters": self.parameters,
            "aliases": {},
            "buffers": self.buffers,
            "groups": None,
            "optimizer": None,
            "scale": {"value": 1.0, "good_steps": 0},
            "extra": {},
        }
        return {"rng": None, "small": {}, "state": {}, "model": model}


def import_hf(folder_or_file: PathLike, target: PathLike, *, progress: Report | None = None) -> Exported:
    """Make the checkpoint ``target`` (one rank, step 0, no optimizer) of a Hugging Face folder or a safetensors file.

    ``lowtide.load(target, model)`` reads it, under the names in the files. A file does not say what is a buffer: integers and
    the statistics of batch normalization are taken for buffers, everything else for parameters.
    """
    where = refuse_taken(target)
    weights = open_weights(folder_or_file)
    sizes = {n: math.prod(weights.shape(n)) * weights.dtype(n).itemsize for n in weights.names}
    counter = Counter(progress, sum(sizes.values()))
    with appearing(where, counter.total) as working:
        files = _write_imported(weights, working, counter)
        folder.sync_folder(working)
        with folder.locked(where.parent):
            manifest = Manifest(
                lowtide=__version__,
                torch=str(torch.__version__),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                name=where.name,
                step=0,
                sequence=folder.next_sequence(where.parent),
                world_size=1,
                stage=0,
                plan="",
                files=tuple(sorted(files, key=lambda f: f.name)),
            )
            folder.commit(working, where, manifest)
    return Exported(where, tuple(f.name for f in manifest.files), len(weights.names), counter.total)


def _write_imported(weights: Weights, working: Path, counter: Counter) -> list[File]:
    file = "rank-00000.safetensors"
    builder, described = TableBuilder(0), _Description()
    stored = {name: f"buffers.{name}" if _is_buffer(weights, name) else name for name in weights.names}
    kinds = {name: OBJECT if stored[name] != name else PARAMETERS for name in weights.names}
    entries = [Entry(f"{kinds[n]}/{stored[n]}", weights.dtype(n), (math.prod(weights.shape(n)),)) for n in weights.names]
    writer = PayloadWriter(working / file, entries)
    try:
        for name in weights.names:
            shape, dtype = weights.shape(name), weights.dtype(name)
            whole = torch.empty(shape, dtype=dtype)
            weights.read_into(name, whole)
            builder.written(file, writer.add(whole.reshape(-1)), kinds[name], dtype, stored[name], 0)
            counter.note(whole.nbytes)
            text, sizes = str(dtype).removeprefix("torch."), [*shape]
            if kinds[name] == OBJECT:
                described.buffers[name] = {"$": "tensor", "name": stored[name], "dtype": text, "shape": [*sizes]}
            else:
                described.parameters[name] = {"shape": [*sizes], "stride": [*whole.stride()], "dtype": text}
        builder.add_file(File(name=file, nbytes=writer.nbytes, xxh3=writer.finish()))
    finally:
        writer.close()
    return [write_table(builder, described.objects(), working), *(f for f in builder.files.values() if f is not None)]


def _is_buffer(weights: Weights, name: str) -> bool:
    dtype = weights.dtype(name)
    return not (dtype.is_floating_point or dtype.is_complex) or name.rpartition(".")[2] in _ALWAYS_BUFFERS
