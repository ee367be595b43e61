"""A report of a run: what happened, as a page, a picture, a trace, or a few lines of text. No torch here.

``lowtide.report(model)`` and ``lowtide report RUN`` end here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lowtide.errors import ArgumentError, DoesNotFit, Error
from lowtide.files import replace_plain
from lowtide.reporting.findings import Findings, find
from lowtide.reporting.page import refusal_page, report_page
from lowtide.reporting.paper import paper_sheet, png
from lowtide.reporting.perfetto import trace_events
from lowtide.reporting.postmortem import examine_before, refused_before

_log = logging.getLogger("lowtide")

POST_MORTEM = "post-mortem.html"
_KINDS = (".html", ".svg", ".png", ".json")


class Report:
    """Made by ``lowtide.report``. ``print`` shows the few lines that matter; ``save`` writes all of it."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    @property
    def sentence(self) -> str:
        """What limited the run."""
        return self.findings.verdict.sentence

    def html(self) -> str:
        """One page, which needs nothing else."""
        return report_page(self.findings)

    def svg(self) -> str:
        """All pictures on one sheet."""
        return paper_sheet(self.findings).svg()

    def png(self) -> bytes:
        """The same, if matplotlib is installed."""
        return png(paper_sheet(self.findings))

    def json(self) -> str:
        """What was found, for programs."""
        return json.dumps(self.findings.to_dict(), allow_nan=False)

    def trace(self) -> str:
        """For Perfetto and chrome://tracing."""
        return json.dumps(trace_events(self.findings.run), separators=(",", ":"), allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file; what it is follows from how its name ends: ``.html``, ``.svg``, ``.png`` or ``.json``."""
        target = Path(path)
        match target.suffix.lower():
            case ".html" | ".htm":
                data = self.html().encode()
            case ".svg":
                data = self.svg().encode()
            case ".png":
                data = self.png()
            case ".json":
                data = self.json().encode()
            case suffix:
                raise ArgumentError(f"a report is saved as {', '.join(_KINDS)}, not as {suffix or 'a name without an end'!r}.")
        return write_file(target, data)

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace for Perfetto."""
        return write_file(Path(path), self.trace().encode())

    def with_ways_out(self, changes: Sequence[str]) -> Report:
        """The same report, with changes that a planner found for a run that ran out of memory."""
        return Report(self.findings.with_ways_out(changes))

    def __str__(self) -> str:
        found = self.findings
        width = max((len(name) for name, _ in found.facts()), default=0)
        lines = [found.verdict.sentence, "", *(f"{name:<{width}}  {value}" for name, value in found.facts())]
        lines.append(f"{'state':<{width}}  {found.ending.words}")
        if found.post_mortem is not None:
            lines = [found.post_mortem.text(), "", *lines]
        return "\n".join(lines)


def open_report(run: str | os.PathLike[str]) -> Report:
    """The report of the run in a folder, also of one that runs still."""
    return Report(find(Path(run)))


def write_file(path: Path, data: bytes) -> Path:
    """A reader sees the old file or the new one."""
    try:
        replace_plain(path, data)
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be written ({error.strerror}).") from error
    return path


def no_ways(found: Findings) -> Sequence[str]:
    """Of a run of which no planner knows anything."""
    return ()


def leave_post_mortem(run: Path, *, goes_on: bool = False, ways: Callable[[Findings], Sequence[str]] = no_ways) -> str | None:
    """If the last process of a run ran out of memory: write a page into its folder and return what a person should be told.

    ``goes_on``: the caller goes on with the run, and the processes before it are meant. ``ways``: what a planner would change.
    Never raises: whoever calls this has a failure to tell of already.
    """
    try:
        found = find(run)
        post = examine_before(found.run) if goes_on else found.post_mortem
        if post is None or not post.is_about_memory:
            return None
        found = replace(found, post_mortem=post)
        found = found.with_ways_out(ways(found))
        page = write_file(run / POST_MORTEM, report_page(found).encode())
    except Exception as error:
        _log.debug("no post-mortem of %s: %r", run, error)
        return None
    told = (found.post_mortem or post).text()
    return f"{told}\nThe page {page} has more."


def leave_refusal(run: Path, error: DoesNotFit) -> None:
    """A model did not fit before anything was recorded: a page that says so, for whoever looks into the run's folder later.
    Never raises, as above."""
    with contextlib.suppress(Error, OSError):
        run.mkdir(parents=True, exist_ok=True)
        write_file(run / POST_MORTEM, refusal_page(run.resolve().name, refused_before(error)).encode())
