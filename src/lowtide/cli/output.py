"""How the command line speaks: results on standard output, and what is wrong as one line on standard error."""

from __future__ import annotations

import sys

from lowtide.job.failure import Failure
from lowtide.job.words import in_flags, spoken
from lowtide.planning.text import clean


def say(*lines: str) -> None:
    """Lines on standard output. What is no character, or none that its encoding knows, becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        sys.stdout.write(clean(line).encode(encoding, errors="replace").decode(encoding) + "\n")


def say_wrong(message: str) -> None:
    """``lowtide: <message>`` as one line, in the words of the command line."""
    sys.stderr.write("lowtide: " + spoken(" ".join(message.split())) + "\n")
    sys.stderr.flush()


def say_failure(failure: Failure, *, ranks: int) -> int:
    """Show why a job failed, once, and return its exit code. A traceback is shown only for what nobody foresaw."""
    rank = f"rank {failure.rank}: " if ranks > 1 and failure.kind not in ("argument", "died") else ""
    if failure.kind == "interrupted":
        return failure.exit_code
    if failure.kind in ("bug", "died") and failure.traceback:
        sys.stderr.write(failure.traceback.rstrip() + "\n")
    say_wrong(rank + in_flags(failure.message))
    return failure.exit_code
