"""Ranks that are started again when one of them has failed. No torch here: the parent of the ranks stays small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lowtide.job.events import Events
from lowtide.job.failure import Failure
from lowtide.job.launch import start_ranks
from lowtide.job.options import Options
from lowtide.job.ways import ways_out_of
from lowtide.reporting.report import leave_post_mortem


def start_with_restarts(options: Options, *, output: str, say: Callable[[str], None]) -> Failure | None:
    """Run the ranks of a job, again and again as ``options.restarts`` allows; the last failure if they do not succeed.

    Each time they go on from the newest checkpoint of the run. What ended them is said once, and stands in the run's events.
    """
    for attempt in range(options.restarts + 1):
        this = replace(options, attempt=options.attempt + attempt)
        command = [sys.executable, "-m", "lowtide.job.worker", this.to_json(), output]
        failure = start_ranks(command, options.ranks)
        if failure is None:
            return None
        again = failure.may_be_retried and attempt < options.restarts
        _note(options, failure, attempt + 1 if again else None)
        _tell_of_memory(options, say)
        if not again:
            return failure
        say(f"restart {attempt + 1} of {options.restarts}: {failure.message}")
    return None


def _tell_of_memory(options: Options, say: Callable[[str], None]) -> None:
    """What took the memory and what would help, if that is what ended the ranks."""
    if options.run is not None and (told := leave_post_mortem(Path(options.run), ways=ways_out_of)) is not None:
        say(told)


def _note(options: Options, failure: Failure, restart: int | None) -> None:
    """In the run's folder, if the ranks came so far as to make it."""
    if options.run is None or not Path(options.run).is_dir():
        return
    events = Events(Path(options.run))
    events.note("failure", failure.message, rank=failure.rank, kind=failure.kind)
    if restart is not None:
        events.note("restart", failure.message, attempt=restart)
