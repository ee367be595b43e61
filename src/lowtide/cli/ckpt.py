"""``lowtide ckpt``: checkpoints from the command line. How each command answers is in ``ckpt_answer.py``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli import ckpt_answer as answer
from lowtide.config import parse_bytes
from lowtide.errors import ArgumentError, CheckpointError
from lowtide.job.interrupt import import_torch
from lowtide.job.run_folder import CHECKPOINTS

if TYPE_CHECKING:
    from lowtide.checkpoint.folder import Found

Report = Callable[[int, int], None]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

app = typer.Typer(
    name="ckpt",
    help="Look at checkpoints, check, compare, convert and clean them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Json = Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON.")]
_One = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them: its newest.")]
_New = Annotated[str, typer.Argument(metavar="TARGET", help="A new folder.")]


@app.command("ls")
def list_all(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.")] = ".", *, json: _Json = False
) -> int:
    """List the checkpoints of a folder, the newest first, and what is wrong there."""
    where = _folder(folder)
    with _explained():
        from lowtide.checkpoint import folder as folders

        found, refused = folders.checkpoints(where)
        answer.listing(where, found, refused, folders.leftovers(where), json=json)
    return 0


@app.command()
def show(
    checkpoint: _One,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every parameter too: shape, dtype, states.")] = False,
    json: _Json = False,
) -> int:
    """Show what is in a checkpoint."""
    _refuse_no_checkpoint(checkpoint)
    with _explained():
        from lowtide.checkpoint.source import open_source

        with open_source(_checkpoint(checkpoint)) as source:
            answer.contents(source, tensors=tensors, json=json)
    return 0


@app.command()
def verify(
    path: Annotated[str, typer.Argument(metavar="CHECKPOINT|FOLDER", help="A checkpoint, or a folder: all of its.")],
    *,
    json: _Json = False,
) -> int:
    """Read every byte and check it. Exit code 1 if anything is not what was written."""
    _refuse_no_checkpoint(path)
    with _explained():
        from lowtide.checkpoint.source import verify as verify_one

        results: list[answer.Verified] = []
        for each in _all(path):
            try:
                with _progress(f"reading {each.name}", json=json) as report:
                    results.append(answer.Verified(str(each), verify_one(each, report), None))
            except CheckpointError as error:
                results.append(answer.Verified(str(each), 0, error.problem + _loads_all_the_same(each)))
        answer.verified(results, json=json)
    return 1 if any(result.problem is not None for result in results) else 0


@app.command()
def export(
    checkpoint: _One,
    target: _New,
    *,
    whole: Annotated[
        bool, typer.Option("--checkpoint", help="A checkpoint again, with everything that is linked copied into it.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|fp16|bf16", help="Convert all floating-point tensors. Default: as they are.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of one file, unless a tensor is larger. Default: 5GB.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="A Hugging Face folder to copy configuration and tokenizer from.")
    ] = None,
    json: _Json = False,
) -> int:
    """Write a Hugging Face folder (safetensors) from a checkpoint, or a checkpoint that needs no other file.

    Memory: a few MiB and one tensor, whatever the model's size.
    """
    if whole and (dtype, shard_size, like) != (None, None, None):
        raise ArgumentError("--checkpoint copies everything as it is; leave out --dtype, --shard-size and --like.")
    if dtype is not None and dtype not in _DTYPES:
        raise ArgumentError(f"--dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}.")
    shard_bytes = parse_bytes("--shard-size", shard_size)
    _refuse_no_checkpoint(checkpoint)
    _refuse_taken(target)
    if like is not None and not os.path.isfile(os.path.join(like, "config.json")):
        raise ArgumentError(f"--like is {like!r}, which is not a Hugging Face folder: it has no config.json.")
    with _explained():
        import torch

        from lowtide.checkpoint import export as exports

        options: dict[str, Any] = {"dtype": None if dtype is None else getattr(torch, _DTYPES[dtype]), "like": like}
        options["shard_bytes"] = shard_bytes or exports.SHARD_BYTES
        source = _checkpoint(checkpoint)
        with _progress(f"writing {target}", json=json) as report:
            if whole:
                done = exports.export_whole(source, target, progress=report)
            else:
                done = exports.export_hf(source, target, progress=report, **options)
        answer.written(source, done, json=json)
    return 0


@app.command("import")
def import_folder(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, or a .safetensors file.")],
    target: _New,
    *,
    json: _Json = False,
) -> int:
    """Make a checkpoint of a Hugging Face folder: weights only, step 0."""
    if not os.path.isdir(source) and not os.path.isfile(source):
        raise ArgumentError(f"{source!r} does not exist; give a folder with model.safetensors, or such a file.")
    _refuse_taken(target)
    with _explained():
        from lowtide.checkpoint.importing import import_hf

        with _progress(f"writing {target}", json=json) as report:
            done = import_hf(source, target, progress=report)
        answer.written(Path(source), done, json=json)
    return 0


@app.command()
def diff(
    first: _One,
    second: _One,
    *,
    model: Annotated[bool, typer.Option("--model", help="Only parameters and buffers.")] = False,
    json: _Json = False,
) -> int:
    """Say what differs between two checkpoints, bit by bit. Exit code 1 if anything does."""
    _refuse_no_checkpoint(first)
    _refuse_no_checkpoint(second)
    with _explained():
        from lowtide.checkpoint.compare import diff as compare

        one, two = _checkpoint(first), _checkpoint(second)
        with _progress("comparing", json=json) as report:
            found = compare(one, two, model_only=model, progress=report)
        answer.compared(found, model_only=model, json=json)
    return 0 if found.identical else 1


@app.command()
def gc(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.")],
    *,
    keep: Annotated[int | None, typer.Option(metavar="N", help="Remove all but the newest N. Default: keep all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait until nothing was changed for an hour in what a save left.")
    ] = False,
    json: _Json = False,
) -> int:
    """Remove what saves that never ended left behind, and give back the space of spool files that dead jobs shared.

    Checkpoints are removed only with --keep; live saves and jobs are never touched.
    """
    if keep is not None and keep < 1:
        raise ArgumentError(f"--keep is {keep}; at least 1 checkpoint stays.")
    where = _folder(folder)
    with _explained():
        from lowtide.checkpoint.collect import MINUTES, collect

        done = collect(where, keep=keep, dry_run=dry_run, minutes=0 if now else MINUTES)
        answer.collected(where, done, dry_run=dry_run, json=json)
    return 0


# -- what paths mean --------------------------------------------------------------------------------------------------


def _folder(path: str) -> Path:
    if not os.path.isdir(path):
        raise ArgumentError(f"{path!r} is not a folder.")
    where = Path(os.path.abspath(path))
    if (where / "manifest.json").is_file():
        raise ArgumentError(f"{path!r} is a checkpoint; give the folder around it.")
    return where


def _refuse_no_checkpoint(path: str) -> None:
    """Raise where none is to be seen, before torch is imported; whether one can be read is another question."""
    if not os.path.isdir(path):
        raise ArgumentError(f"{path!r} is not a folder; a checkpoint is one.")
    if any(next(Path(path).glob(where), None) for where in ("manifest.json", "*/manifest.json")):
        return
    inside = os.path.join(path, CHECKPOINTS)
    run = f"; if it is a run, name {inside!r}" if os.path.isdir(inside) else ""
    raise ArgumentError(f"there is no checkpoint in {path!r}{run}.")


def _refuse_taken(target: str) -> None:
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise ArgumentError(f"{target!r} is there already; give a new folder.")


def _checkpoint(path: str) -> Path:
    """The checkpoint ``path``, or the newest one in it."""
    found, refused = _found(path)
    if not found:
        raise refused[0][1]
    return found[0]


def _loads_all_the_same(checkpoint: Path) -> str:
    """A word more about a damaged checkpoint of which a load reads nothing that is damaged: a job that resumes will take it."""
    from lowtide.checkpoint.source import open_source

    try:
        with open_source(checkpoint) as source:
            for number, table in enumerate(source.tables):
                for block in range(len(table.blocks)):
                    source.read_block(number, block)
    except CheckpointError:
        return ""
    return "; every number in it is, so that lowtide loads it and goes on from it, but other programs may not read that file"


def _all(path: str) -> list[Path]:
    found, refused = _found(path)
    return [*found, *(where for where, _ in refused)]


def _found(path: str) -> tuple[list[Path], list[tuple[Path, CheckpointError]]]:
    from lowtide.checkpoint import folder as folders

    where = Path(os.path.abspath(path))
    if folders.is_checkpoint(where):
        return [where], []
    found: list[Found]
    found, refused = folders.checkpoints(where)
    if not found and not refused:
        raise ArgumentError(f"there is no checkpoint in {path!r} that can be listed; see lowtide ckpt gc.")
    return [f.path for f in found], refused


@contextlib.contextmanager
def _explained() -> Generator[None]:
    """What the system refuses is a mistake in a path, not a traceback."""
    import_torch()
    try:
        yield
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(f"{error.filename}: {error.strerror}.") from error


@contextlib.contextmanager
def _progress(what: str, *, json: bool) -> Generator[Report | None]:
    """A bar on a terminal, nothing elsewhere."""
    if json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
