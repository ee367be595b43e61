"""The chapter of the story about a model that is larger than its memory number: plain PyTorch beside everything on disk."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from rich import box
from rich.table import Table

from lowtide.job.options import Options
from lowtide.job.placement import mebibytes
from lowtide.job.show import budget_text, traffic_text
from lowtide.job.sides import Pair, Side, run_fresh

PRESET = "gpt-98m"
MEMORY_BYTES = 768 << 20
MEMORY = f"{MEMORY_BYTES >> 20}MiB"
"""The memory number: parameters, gradients and Adam's averages alone need twice as much."""
STEPS = 3


class Busy(Protocol):
    """Shows that something is being done."""

    def __call__(self, what: str) -> AbstractContextManager[None]: ...


def compare_larger(beside: Path, busy: Busy) -> Pair:
    """Both sides in fresh processes; the disk tier lives in ``beside``."""
    options = Options(preset=PRESET, steps=STEPS, synthetic=True)
    with busy(f"{PRESET}, plain PyTorch"):
        plain = run_fresh("plain", options)
    with busy(f"{PRESET}, lowtide in {MEMORY}"):
        ours = run_on_disk(replace(options, memory=MEMORY), beside)
    return Pair(ranks=1, plain=plain, lowtide=ours)


def run_on_disk(options: Options, beside: Path) -> Side:
    """lowtide's side with a disk tier in a folder of its own in ``beside``, which is gone afterwards, whatever happens."""
    beside.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="lowtide-demo-", dir=beside) as folder:
        return run_fresh("lowtide", replace(options, disk=(folder,)))


def larger_table(pair: Pair) -> Table:
    """Losses, memory and disk of both sides."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("PyTorch\nno limit", f"lowtide\nmemory={MEMORY!r}"):
        table.add_column(heading, justify="right")
    sides = (pair.plain, pair.lowtide)
    for step in range(STEPS):
        table.add_row(f"loss of step {step + 1}", *(f"{side.losses[step]:.9g}" for side in sides))
    table.add_row("weights after it", *(side.weights[:12] for side in sides))
    table.add_section()
    table.add_row("seconds per step", *(f"{side.step_seconds:.2f}" for side in sides))
    table.add_row("peak", *(mebibytes(side.peak_bytes) for side in sides))
    table.add_row("  without pages of files", *(mebibytes(side.counted_bytes) for side in sides))
    table.add_row("room on disk", "–", mebibytes(pair.lowtide.disk.room_bytes))
    table.add_row("activations", *(side.disk.activations for side in sides))
    return table


def larger_lines(pair: Pair) -> list[str]:
    """What the table comes to. The memory number counts what the kernel cannot drop, so pages of files are left out."""
    disk = pair.lowtide.disk
    return [
        f"memory number {budget_text(pair.lowtide.counted_bytes, MEMORY_BYTES)}",
        f"plain PyTorch needs {pair.plain.counted_bytes / MEMORY_BYTES:.1f} times as much",
        f"disk: {traffic_text(disk.read_bytes, disk.written_bytes, disk.wait_seconds)}",
    ]


def held(pair: Pair) -> bool:
    """Whether lowtide stayed within its memory number."""
    return pair.lowtide.counted_bytes <= MEMORY_BYTES


def closing_line(pair: Pair) -> str:
    """The chapter in one line."""
    verdict = "held" if held(pair) else "EXCEEDED"
    ours = f"{mebibytes(pair.lowtide.counted_bytes)} of {mebibytes(MEMORY_BYTES)} ({verdict})"
    return f"{PRESET} {ours}, PyTorch {mebibytes(pair.plain.counted_bytes)}"
