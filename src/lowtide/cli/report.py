"""``lowtide report``: what happened in a run, as a page, a picture, a trace, or a few lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.output import say
from lowtide.errors import ArgumentError

_Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder: --run of lowtide train, run= of lowtide.shard.")]
_Out = Annotated[str | None, typer.Option(metavar="FILE.html", help="The page. Default: report.html in the run's folder.")]
_Svg = Annotated[str | None, typer.Option(metavar="FILE", help="All pictures on one sheet, for a paper.")]
_Png = Annotated[str | None, typer.Option(metavar="FILE", help="The same as PNG; needs matplotlib.")]
_Trace = Annotated[str | None, typer.Option(metavar="FILE", help="A trace for Perfetto (ui.perfetto.dev) or chrome://tracing.")]
_Json = Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON; the page is written only with --out.")]


def report(
    run: _Run, *, out: _Out = None, svg: _Svg = None, png: _Png = None, trace: _Trace = None, json: _Json = False
) -> int:
    """Show what happened in a run: what limited it, memory of every tier over time, one step in detail.

    Works while the run goes on, and after it has died: then the page begins with why.
    """
    from lowtide.reporting.report import open_report, write_file

    if not Path(run).is_dir():
        raise ArgumentError(f"{run!r} is not a folder; name the folder of a run.")
    made = open_report(run)
    if made.findings.post_mortem is not None and made.findings.post_mortem.is_about_memory:
        from lowtide.job.ways import ways_out_of

        made = made.with_ways_out(ways_out_of(made.findings))
    written: list[Path] = []
    wants_page = out is not None or not (json or svg or png or trace)
    if wants_page:
        written.append(write_file(Path(out) if out is not None else Path(run, "report.html"), made.html().encode()))
    if svg is not None:
        written.append(write_file(Path(svg), made.svg().encode()))
    if png is not None:
        written.append(write_file(Path(png), made.png()))
    if trace is not None:
        written.append(made.save_trace(trace))
    if json:
        sys.stdout.write(made.json() + "\n")
        return 0
    say(*str(made).split("\n"), "", *(f"written: {path}" for path in written))
    return 0
