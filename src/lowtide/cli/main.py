"""The ``lowtide`` command: where it begins.

Almost nothing is imported here: what a process imports before ``main`` answers Ctrl-C with a traceback out of an import.
"""

from __future__ import annotations

import sys

from lowtide.job.interrupt import ends_at_once


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit code."""
    with ends_at_once():
        from lowtide.cli.app import answer
    return answer(arguments)


if __name__ == "__main__":
    main()
