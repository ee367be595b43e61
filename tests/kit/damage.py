"""Reading a checkpoint without a model, and finding out whether damage to it was noticed.

What counts: *detected* is a flip that ``verify`` refuses with a CheckpointError. *Harmless* is one that no block of the
checkpoint covers, which can only be so in a spool file (its free room, or what lies behind the end of a block): there,
``verify`` passes. In both cases whoever reads the numbers gets a CheckpointError or exactly the numbers that were written.
Anything else is *missed*.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.checkpoint.manifest import DTYPES, OBJECT
from lowtide.checkpoint.source import open_source, verify
from lowtide.errors import CheckpointError

Numbers = dict[tuple[str, str], bytes]


def numbers_of(path: Path) -> Numbers:
    """Everything in a checkpoint: all kinds of all parameters, all other tensors, and all that is no tensor."""
    out: Numbers = {}
    with open_source(path) as source:
        for name, facts in source.parameters.items():
            for kind in source.kinds(name):
                into = torch.empty(facts.numel, dtype=source.dtype(kind, name))
                source.read_into(kind, name, 0, facts.numel, into)
                out[kind, name] = into.view(torch.uint8).numpy().tobytes()
        for table in source.tables:
            out["json", str(table.rank)] = table.model_dump_json().encode()
            for name, (count, dtype) in _objects(table).items():
                value = source.object(table.rank, name, (count,), dtype)
                out[f"{OBJECT} {table.rank}", name] = value.view(torch.uint8).numpy().tobytes()
    return out


def _objects(table: object) -> dict[str, tuple[int, torch.dtype]]:
    sizes: dict[str, tuple[int, torch.dtype]] = {}
    for block in table.blocks:  # type: ignore[attr-defined]
        for part in block.parts:
            kind = table.kinds[part.kind]  # type: ignore[attr-defined]
            if kind.kind == OBJECT:
                name = table.names[part.name]  # type: ignore[attr-defined]
                sizes[name] = (max(part.hi, sizes.get(name, (0, None))[0]), DTYPES[kind.dtype])
    return sizes


@dataclass(frozen=True)
class Region:
    """A range of a file of a checkpoint."""

    file: str
    what: str
    start: int
    stop: int


def regions(path: Path) -> list[Region]:
    """All of all files, cut into parts that mean something different."""
    out: list[Region] = []
    with open_source(path) as source:
        used: dict[str, list[tuple[int, int]]] = {}
        for table in source.tables:
            for block in table.blocks:
                used.setdefault(table.files[block.file], []).append((block.offset, block.offset + block.nbytes))
        out.append(Region("manifest.json", "manifest", 0, (path / "manifest.json").stat().st_size))
        for file in source.manifest.files:
            size = (path / file.name).stat().st_size
            if file.name.endswith(".json"):
                out.append(Region(file.name, "table", 0, size))
            elif file.name.endswith(".safetensors"):
                with open(path / file.name, "rb") as opened:
                    header = 8 + int.from_bytes(opened.read(8), "little")
                out += [Region(file.name, "payload header", 0, header), Region(file.name, "payload", header, size)]
            else:
                end = 0
                for start, stop in [*sorted(used.get(file.name, [])), (size, size)]:
                    if start > end:
                        out.append(Region(file.name, "free room", end, start))
                    out.append(Region(file.name, "spool", start, stop))
                    end = max(end, stop)
    return [region for region in out if region.start < region.stop]


def flip(path: Path, offset: int, bit: int) -> None:
    """Change one bit of a file; twice is as if never."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ (1 << bit)]), offset)
    finally:
        os.close(fd)


def judged(path: Path, region: Region, expected: Numbers | None) -> str:
    """ "detected", "harmless", or what was missed. Without ``expected``, only ``verify`` is asked."""
    detected = _refuses(path)
    if not detected and region.what != "free room":
        return "missed: it verifies"
    if expected is not None:
        try:
            found = numbers_of(path)
        except CheckpointError:
            found = expected
        if found != expected:
            return "missed: other numbers are read"
    return "detected" if detected else "harmless"


def _refuses(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return True
    return False
