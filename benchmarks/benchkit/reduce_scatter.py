"""How fast ranks on one host reduce through shared memory, over how fast the same ranks copy memory at the same time.

Counted are all bytes that are read and written. A copy of N bytes reads N and writes N. A reduction of N bytes per rank on W
ranks copies them into shared memory (2 N), and adds up a piece of N / W bytes W - 1 times, reading two and writing one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchkit.stats import interval
from benchkit.team import Job, Team, TeamFailed
from benchkit.turns import say

WORKER = Path(__file__).resolve().parent.parent / "workers" / "reduce_scatter.py"
REPEATS, WARM_UP = 40, 5
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class _Nothing:
    """No model is trained here."""


def bytes_moved(nbytes: int, ranks: int) -> float:
    """What one rank reads and writes in a reduction of ``nbytes`` per rank."""
    return 2 * nbytes + 3 * (ranks - 1) * nbytes / ranks


def measure(folder: Path, *, ranks: int, sizes: Sequence[int], source: Path) -> dict[str, Any]:
    say("reductions through shared memory")
    job = Job(
        system="reduce-scatter",
        python=sys.executable,
        python_path=str(source),
        world_size=ranks,
        shape=_Nothing(),
        deadline_seconds=DEADLINE_SECONDS,
        worker=WORKER,
    )
    team = Team(job, folder)
    try:
        transport = team.answers()[0]["transport"]
        found = [_of_size(team, nbytes, ranks) for nbytes in sizes]
    except (TeamFailed, OSError) as error:
        say(f"  failed: {error}")
        return {"failure": str(error), "ranks": ranks, "sizes": []}
    finally:
        team.stop()
    return {"failure": None, "ranks": ranks, "transport": transport, "repeats": REPEATS, "sizes": found}


def _of_size(team: Team, nbytes: int, ranks: int) -> dict[str, Any]:
    answers = team.ask("measure", nbytes=nbytes, repeats=REPEATS, warm_up=WARM_UP)
    # All ranks work at the same time, so the slower one's seconds count, and everybody's bytes.
    copies, reductions = ([max(pair) for pair in zip(*(a[name] for a in answers), strict=True)] for name in ("copy", "reduce"))
    copied = [ranks * 2 * nbytes / seconds for seconds in copies]
    reduced = [ranks * bytes_moved(nbytes, ranks) / seconds for seconds in reductions]
    ratio = interval([a / b for a, b in zip(reduced, copied, strict=True)])
    say(f"  {nbytes / 1e6:.1f} MB per rank: {ratio.median:.2f} × the bytes per second of a copy")
    return {
        "bytes_per_rank": nbytes,
        "copy_bytes_per_second": asdict(interval(copied)),
        "reduce_bytes_per_second": asdict(interval(reduced)),
        "ratio": asdict(ratio),
    }


def markdown(result: dict[str, Any] | None) -> str:
    """A table, or nothing if it was not measured."""
    if result is None:
        return ""
    if result["failure"] is not None:
        return f"\nReduce-scatter through shared memory was not measured: {result['failure']}\n"
    rows = [
        "",
        f"| reduce-scatter, {result['ranks']} ranks, bytes per rank | read and written, GB/s | a copy, GB/s | ratio |",
        "|---|---|---|---|",
    ]
    for size in result["sizes"]:
        speed, copy, ratio = size["reduce_bytes_per_second"], size["copy_bytes_per_second"], size["ratio"]
        rows.append(
            f"| {size['bytes_per_rank'] / 1e6:g} MB | {speed['median'] / 1e9:.1f} | {copy['median'] / 1e9:.1f} "
            f"| {ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f}) |"
        )
    return "\n".join(rows) + "\n"
