"""Folders that commands write: made under another name, locked while they are written, there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from lowtide.checkpoint import folder
from lowtide.checkpoint.manifest import File, table_name
from lowtide.checkpoint.save import refuse_target
from lowtide.checkpoint.snapshot import TableBuilder, free_bytes
from lowtide.errors import ArgumentError, CheckpointError, Error

Report = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to be written."""
PathLike = str | os.PathLike[str]

_SMALL = 4 << 20  # for headers, tables and the manifest


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


@dataclass(slots=True)
class Counter:
    """Bytes that were written, for whoever watches."""

    report: Report | None
    total: int
    done: int = 0

    def note(self, nbytes: int) -> None:
        self.done += nbytes
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)


def refuse_taken(target: PathLike) -> Path:
    """The new folder ``target``, or an error that says why it cannot be made."""
    where = refuse_target(target)
    if os.path.lexists(where) and any(where.iterdir()):
        raise ArgumentError(f"{str(target)!r} is there already; give a new folder.")
    return where


@contextlib.contextmanager
def appearing(target: Path, nbytes: int) -> Generator[Path]:
    """A private folder beside ``target`` that the caller renames to it; if anything fails, nothing is left."""
    try:
        folder.make_around(target)
        free = free_bytes(target.parent)
        if nbytes + _SMALL > free:
            needed = f"{(nbytes + _SMALL) / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free"
            raise CheckpointError(f"{needed}. Make room, or write to another disk", str(target))
        working = target.parent / folder.new_name(target)
        mark = folder.make_marked(working)
        try:
            yield working
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.rmtree(working)
            raise
        finally:
            del mark
    except OSError as error:
        if isinstance(error, Error):
            raise
        raise CheckpointError(f"it was not written: {error.strerror or error}", str(target)) from error


def write_table(builder: TableBuilder, objects: Mapping[str, JsonValue], working: Path) -> File:
    """The table of one rank, on the disk when this returns."""
    text = builder.table(dict(objects)).model_dump_json().encode()
    name = table_name(builder.rank)
    return File(name=name, nbytes=len(text), xxh3=folder.write_file(working / name, text))
