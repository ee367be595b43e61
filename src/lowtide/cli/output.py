"""How the command line speaks when something is wrong: one line, on standard error."""

from __future__ import annotations

import sys

from lowtide.job.failure import Failure


def say_wrong(message: str) -> None:
    """``lowtide: <message>`` as one line."""
    sys.stderr.write("lowtide: " + " ".join(message.split()) + "\n")
    sys.stderr.flush()


def say_failure(failure: Failure, *, ranks: int) -> int:
    """Show why a job failed, once, and return its exit code. A traceback is shown only for what nobody foresaw."""
    rank = f"rank {failure.rank}: " if ranks > 1 and failure.kind not in ("argument", "died") else ""
    if failure.kind == "interrupted":
        return failure.exit_code
    if failure.kind in ("bug", "died") and failure.traceback:
        sys.stderr.write(failure.traceback.rstrip() + "\n")
    say_wrong(rank + failure.message)
    return failure.exit_code
