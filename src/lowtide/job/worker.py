"""One rank of ``lowtide train --ranks N``, ``python -m lowtide.job.worker '<options>' text|json``, or of one side of a
comparison, ``python -m lowtide.job.worker '<options>' plain|lowtide RESULT``."""

from __future__ import annotations

import sys
from pathlib import Path

from lowtide.job.interrupt import ends_at_once, exit_code
from lowtide.job.options import Options
from lowtide.job.words import speak_warnings


def run_member(options: Options, *, output: str) -> int:
    """Join the job, train, and let rank 0 show the result; returns the exit code."""
    with ends_at_once():  # torch, above all
        from rich.console import Console

        from lowtide.job.progress import Reporter, Silent, reporter_for
        from lowtide.job.ranks import joined
        from lowtide.job.show import show_result
        from lowtide.job.train import train

    console = Console(stderr=output == "json")
    with joined() as member:
        reporter: Reporter = Silent() if output == "json" or member.rank != 0 else reporter_for(console)
        result = train(options, member, reporter)
        if member.rank == 0:
            show_result(result, options, console, output=output)
    return exit_code(result.stopped_by, saved=options.saves)


def _run_side(options: Options, *, name: str, result: str) -> int:
    with ends_at_once():
        from lowtide.job.compare import write_side

    write_side(name, options, Path(result))
    return 0


if __name__ == "__main__":
    speak_warnings()
    asked, how = Options.from_json(sys.argv[1]), sys.argv[2]
    sys.exit(_run_side(asked, name=how, result=sys.argv[3]) if sys.argv[3:] else run_member(asked, output=how))
