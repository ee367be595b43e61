"""One rank of ``lowtide train --ranks N``: ``python -m lowtide.job.worker '<options>' bar|lines|json``."""

from __future__ import annotations

import sys

from rich.console import Console

from lowtide.job.interrupt import exit_code
from lowtide.job.options import Options
from lowtide.job.progress import Reporter, Silent, reporter_for
from lowtide.job.ranks import joined
from lowtide.job.show import show_result
from lowtide.job.train import train


def run_member(options: Options, *, output: str) -> int:
    """Join the job, train, and let rank 0 show the result; returns the exit code."""
    console = Console(stderr=output == "json")
    with joined() as member:
        reporter: Reporter = Silent() if output == "json" or member.rank != 0 else reporter_for(console)
        result = train(options, member, reporter)
        if member.rank == 0:
            show_result(result, options, console, output=output)
    return exit_code(result.stopped_by, saved=options.saves)


if __name__ == "__main__":
    sys.exit(run_member(Options.from_json(sys.argv[1]), output=sys.argv[2]))
