"""``lowtide demo``: what lowtide does, told in five short chapters and a closing box."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lowtide.job.failure import Failure
from lowtide.job.larger import MEMORY, STEPS, closing_line, compare_larger, held, larger_lines, larger_table
from lowtide.job.larger import PRESET as LARGER
from lowtide.job.launch import start_ranks
from lowtide.job.machine import machine_facts
from lowtide.job.options import Options, cores
from lowtide.job.placement import mebibytes, place
from lowtide.job.presets import PRESETS
from lowtide.job.sides import Pair, run_fresh
from lowtide.stages import STAGES

PRESET = "gpt-17m"
"""The model of the story."""
_STEPS = 3
RANKS = 2
"""Ranks of the story's second half."""
_FEWEST, _MOST = 5, 400
"""Bounds on the steps of the training chapter, whatever the machine's speed."""
_WIDTH = 92


@dataclass(frozen=True, slots=True)
class Ending:
    """How it went: whether all bits were the same and the memory number held, and why the training failed, if it did."""

    identical: bool
    held: bool
    failure: Failure | None


def tell_story(console: Console, *, seconds: float, training: Options) -> Ending:
    """Tell all chapters; ``seconds`` is about how long to train on text, ``training`` the job that does it."""
    console = _narrow(console)
    started = time.perf_counter()
    _chapter(console, 1, "This machine")
    for name, value in machine_facts():
        console.print(f"  {name:<10} {value}", highlight=False, markup=False)
    _chapter(console, 2, "What the model needs, and where it will live")
    _show_needs(console)
    _chapter(console, 3, f"{_STEPS} steps of plain PyTorch and of lowtide, each in fresh processes")
    pairs = _compare(console)
    _show_pairs(console, pairs)
    run = Path(training.run or ".")
    _chapter(console, 4, f"Larger than its memory number: {STEPS} steps of {LARGER} in {MEMORY}")
    larger = compare_larger(run.parent, partial(_busy, console))
    _show_larger(console, larger)
    text = training.data or "Python's own standard library"
    _chapter(console, 5, f"Training on text ({text}), {training.ranks} ranks, stage 3")
    training = replace(training, steps=_steps_for(seconds, pairs[-1].lowtide.step_seconds), save_every=0)
    failure = start_ranks([sys.executable, "-m", "lowtide.job.worker", training.to_json(), "text"], training.ranks)
    if failure is None:
        _close(console, pairs, larger, run, time.perf_counter() - started)
    return Ending(all(pair.identical for pair in (*pairs, larger)), held(larger), failure)


def _narrow(console: Console) -> Console:
    """The same console, not wider than is pleasant to read."""
    console.width = min(console.width, _WIDTH)
    return console


def _chapter(console: Console, number: int, title: str) -> None:
    console.print()
    console.rule(f"[bold]{number}[/]  {title}", align="left", style="dim")


def _show_needs(console: Console) -> None:
    count = PRESETS[PRESET].parameters
    whole = place(parameters=count, stage=STAGES[0], ranks=RANKS)
    sharded = place(parameters=count, stage=STAGES[3], ranks=RANKS)
    console.print(f"  {PRESET}: {count:,} parameters, fp32, AdamW. Bytes on each rank:", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind of bytes", "plain PyTorch, DDP", f"lowtide, {RANKS} ranks"):
        table.add_column(heading, justify="left" if heading.startswith("kind") else "right")
    for plain, ours in zip(whole, sharded, strict=True):
        table.add_row(plain.kind, mebibytes(plain.rank_bytes), mebibytes(ours.rank_bytes))
    table.add_section()
    table.add_row("together", mebibytes(sum(k.rank_bytes for k in whole)), mebibytes(sum(k.rank_bytes for k in sharded)))
    console.print(table)
    console.print("  All in host memory; on top come units in use, activations, Python and torch.", highlight=False)


def _compare(console: Console) -> list[Pair]:
    pairs: list[Pair] = []
    for ranks in (1, RANKS):
        options = Options(preset=PRESET, ranks=ranks, steps=_STEPS, synthetic=True)
        with _busy(console, f"plain PyTorch, {ranks} rank{'s' if ranks > 1 else ''}"):
            plain = run_fresh("plain", options)
        with _busy(console, f"lowtide, {ranks} rank{'s' if ranks > 1 else ''}"):
            ours = run_fresh("lowtide", options)
        pairs.append(Pair(ranks=ranks, plain=plain, lowtide=ours))
    return pairs


@contextmanager
def _busy(console: Console, what: str) -> Generator[None, None, None]:
    """A moving sign on a terminal; in a log there is nothing to show."""
    with console.status(f"  {what} ...") if console.is_terminal else nullcontext():
        yield


def _show_pairs(console: Console, pairs: list[Pair]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("PyTorch\n1 process", "lowtide\n1 rank", f"DDP\n{RANKS} ranks", f"lowtide\n{RANKS} ranks"):
        table.add_column(heading, justify="right")
    sides = [side for pair in pairs for side in (pair.plain, pair.lowtide)]
    for step in range(_STEPS):
        # Nine digits tell any two fp32 numbers apart.
        table.add_row(f"loss of step {step + 1}", *(f"{side.losses[step]:.9g}" for side in sides))
    table.add_row("weights after it", *(side.weights[:12] for side in sides))
    table.add_section()
    table.add_row("seconds per step", *(f"{side.step_seconds:.3f}" for side in sides))
    table.add_row("peak of each rank", *(mebibytes(max(side.rank_peaks)) for side in sides))
    console.print(table)
    for pair in pairs:
        _show_identity(console, pair)


def _show_identity(console: Console, pair: Pair) -> None:
    versus = "plain PyTorch" if pair.ranks == 1 else f"DDP on {pair.ranks} ranks"
    answer = "[bold green]yes[/]" if pair.identical else "[bold red]NO[/]"
    console.print(f"  identical bits, lowtide and {versus}: {answer}", highlight=False)


def _show_larger(console: Console, pair: Pair) -> None:
    console.print(larger_table(pair))
    _show_identity(console, pair)
    for line in larger_lines(pair):
        console.print(f"  {line}", highlight=False, markup=False)


def _steps_for(seconds: float, step_seconds: float) -> int:
    """As many steps as fit, a multiple of five."""
    return max(_FEWEST, min(_MOST, int(seconds / step_seconds) // 5 * 5))


def _close(console: Console, pairs: list[Pair], larger: Pair, run: Path, spent: float) -> None:
    alone, several = pairs
    losses = _metric(run, "loss")
    held_out = _metric(run, "validation_loss")
    alone_peaks = f"lowtide {mebibytes(alone.lowtide.peak_bytes)}, plain PyTorch {mebibytes(alone.plain.peak_bytes)}"
    ours, ddp = max(several.lowtide.rank_peaks), max(several.plain.rank_peaks)
    lines = [
        f"peak, 1 rank     {alone_peaks}",
        f"peak, {RANKS} ranks    lowtide {mebibytes(ours)} a rank, DDP {mebibytes(ddp)} a rank ({ours / ddp - 1:+.0%})",
        f"speed            {alone.speed:.2f} x plain PyTorch on 1 rank, {several.speed:.2f} x DDP on {RANKS} ranks",
        f"memory number    {closing_line(larger)}",
        f"identical bits   {'yes' if all(pair.identical for pair in (*pairs, larger)) else 'NO'}",
        f"loss on text     {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps; held-out text {held_out[-1]:.2f}",
        f"time             {spent:.0f} s for all of this on {cores()} cores",
        "",
        "Next:",
        f"  {command_name()} train --preset gpt-98m --memory 1GiB --disk .   larger than memory",
        f"  {command_name()} train --data FOLDER --steps 500                 your own text",
        f"  {command_name()} train --model package.module:function           your own model",
    ]
    console.print()
    console.print(Panel(Text("\n".join(lines)), title="lowtide", box=box.ROUNDED, expand=False))


def command_name() -> str:
    """``lowtide`` as a shell finds it: alone if it is on the path, else where it was installed, beside Python."""
    beside = os.path.relpath(os.path.join(os.path.dirname(sys.executable), "lowtide"))
    return "lowtide" if shutil.which("lowtide") else beside


def _metric(run: Path, name: str) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]
