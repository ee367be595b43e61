"""``lowtide top``: a running job, looked at from another terminal."""

from __future__ import annotations

import json as json_text
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowtide.errors import ArgumentError

_Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder: --run of lowtide train, run= of lowtide.shard.")]
_Every = Annotated[float, typer.Option("--every", metavar="SECONDS", help="How often to look.")]
_Once = Annotated[bool, typer.Option("--once", help="Look once and end.")]
_Json = Annotated[bool, typer.Option("--json", help="One line of JSON per look, and nothing else.")]


def top(run: _Run, *, every: _Every = 1.0, once: _Once = False, json: _Json = False) -> int:
    """Watch a running job: memory and disk against their limits, speed, waits, time left. Ends when the run has ended."""
    from rich.console import Console
    from rich.live import Live as Screen

    from lowtide.reporting.live import Live, Snapshot
    from lowtide.reporting.live_screen import screen

    if not Path(run).is_dir():
        raise ArgumentError(f"{run!r} is not a folder; name the folder of a run.")
    if not 0.05 <= every <= 3600:
        raise ArgumentError(f"--every is {every:g}; give seconds between 0.05 and 3600.")

    def as_json(seen: Snapshot) -> str:
        ranks = [{**asdict(rank), "words": rank.ending.words} for rank in seen.ranks]
        return json_text.dumps({**asdict(seen), "ranks": ranks, "words": seen.words, "is_over": seen.is_over}) + "\n"

    live = Live(Path(run))
    seen = live.look()
    if json:
        while True:
            sys.stdout.write(as_json(seen))
            sys.stdout.flush()
            if once or seen.is_over:
                return 0
            time.sleep(every)
            seen = live.look()
    console = Console()
    if once or not console.is_terminal:
        console.print(screen(seen))
        return 0
    with Screen(screen(seen), console=console, auto_refresh=False) as shown:
        while not seen.is_over:
            time.sleep(every)
            seen = live.look()
            shown.update(screen(seen), refresh=True)
    return 0
