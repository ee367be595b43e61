"""What happens to a run beside its steps: one line each in ``events.jsonl``, with its cause, and how often. No torch here.

Rank 0 writes, and the process that started the ranks when they have failed; never both at once. A process that was killed could
not say so: the next one that goes on with the run adds the line.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.files import open_plain, read_plain

_log = logging.getLogger("lowtide")

FILE = "events.jsonl"
_MOST_BYTES = 256 * 2**20
"""More is not read."""
COUNTED = ("save", "save_failed", "resume", "passed_over", "skip", "signal", "restart", "failure")
"""What is counted; ``start`` and ``end`` of a process stand in the file as well."""


class Events:
    """The events of one run, in a file if the run has a folder; counts are those of the whole run."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None
        self._seen = _read(self._path) if self._path is not None else []
        self.listener: Callable[[str, str], None] = lambda what, text: None
        """Hears of every event: what, and its cause."""

    def note(self, event: str, cause: str, *, step: int | None = None, **facts: Any) -> None:
        """Add one event; it is in the file when this returns, unless the disk is full: that alone ends no job."""
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, "step": step, "cause": cause, **facts}
        self._seen.append(entry)
        self.listener(event, cause)
        if self._path is not None:
            try:
                with open(open_plain(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab", buffering=0) as file:
                    file.write(f"{_after_torn_line(self._path)}{json.dumps(entry)}\n".encode())
            except OSError as error:
                _log.warning("%s was not noted in %s: %s", event, self._path, error.strerror)

    def counts(self) -> dict[str, int]:
        """How often each thing happened."""
        seen = Counter(entry["event"] for entry in self._seen)
        return {event: seen[event] for event in COUNTED}

    def note_silent_end(self) -> None:
        """If the last process of this run neither ended nor failed in writing, it was killed; for memory, if so it seems."""
        last = next((entry for entry in reversed(self._seen) if entry["event"] in ("start", "end", "failure")), None)
        if last is None or last["event"] != "start" or self._path is None:
            return
        from lowtide.job.ways import ways_out_of
        from lowtide.reporting.report import leave_post_mortem

        told = leave_post_mortem(self._path.parent, goes_on=True, ways=ways_out_of)
        if told is None:
            self.note("failure", "the job before this one ended without a word: killed, or crashed")
        else:
            self.note("failure", f"the job before this one ran out of memory: {told}")
            _log.warning("the job before this one ran out of memory: %s", told)


def _after_torn_line(path: Path) -> str:
    """What keeps a new line apart from one that a crash has torn."""
    with open(open_plain(path), "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return ""
        file.seek(-1, os.SEEK_END)
        return "" if file.read(1) == b"\n" else "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """The events so far; a line that a crash has torn is none."""
    entries: list[dict[str, Any]] = []
    try:
        lines = read_plain(path, _MOST_BYTES).splitlines()
    except OSError:  # not there; or what is there is no run's, which writing to it will say
        return entries
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "event" in entry:
            entries.append(entry)
    return entries
