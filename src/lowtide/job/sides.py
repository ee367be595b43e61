"""What one side of a comparison came to, and how to run it in fresh processes. No torch here: the parent stays small."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import Error
from lowtide.job.failure import Failure
from lowtide.job.launch import start_ranks
from lowtide.job.options import Options


@dataclass(eq=False)
class SideFailed(Error, RuntimeError):
    """One side of a comparison did not run to its end."""

    side: str
    failure: Failure

    def __str__(self) -> str:
        return f"{self.side} failed on rank {self.failure.rank}: {self.failure.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideDisk:
    """What rank 0 of one side had on disk, and what it moved there and back in each step; nothing for plain PyTorch."""

    room_bytes: int = 0
    read_bytes: list[int]
    written_bytes: list[int]
    wait_seconds: list[float]
    activations: str = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A few steps of one system. Losses are rank 0's, unrounded; ``weights`` is a digest of all parameters afterwards."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int
    rank_peaks: list[int]
    counted_bytes: int
    """The part of ``peak_bytes`` that counts against a memory number: without pages of files."""
    weights: str
    disk: SideDisk

    @property
    def step_seconds(self) -> float:
        """The median step without the first, which allocates."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def same_bits(self, other: Side) -> bool:
        return self.losses == other.losses and self.weights == other.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two sides of one comparison."""

    ranks: int
    plain: Side
    lowtide: Side

    @property
    def identical(self) -> bool:
        return self.plain.same_bits(self.lowtide)

    @property
    def speed(self) -> float:
        """Above 1: lowtide is faster."""
        return self.plain.step_seconds / self.lowtide.step_seconds


def run_fresh(name: str, options: Options) -> Side:
    """Run one side in processes of its own, so that its peak is its own."""
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "lowtide.job.worker", options.to_json(), name, str(result)]
        failure = start_ranks(command, options.ranks)
        if failure is not None:
            if failure.kind == "interrupted":
                raise KeyboardInterrupt
            raise SideFailed(name, failure)
        fields: dict[str, Any] = json.loads(result.read_text())
        fields["disk"] = SideDisk(**fields["disk"])
        return Side(**fields)
