"""``lowtide demo``, which ``make run`` starts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.output import say_failure, say_wrong
from lowtide.cli.train import new_run_folder
from lowtide.errors import ArgumentError
from lowtide.job.options import Options, check_run_folder
from lowtide.job.run_folder import refuse_unusable_run
from lowtide.job.sides import SideFailed
from lowtide.job.story import PRESET, RANKS, tell_story


def demo(
    *,
    seconds: Annotated[float, typer.Option(help="About how long to train on text.")] = 30.0,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="A text file or a folder. Default: Python's own standard library.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the training's files go. Default: runs/<time>-demo.")
    ] = None,
) -> int:
    """Show what lowtide does on this machine, in about two minutes."""
    if not 0 < seconds < 1e6:
        raise ArgumentError(f"--seconds is {seconds}; give a number > 0, such as 60.")
    folder = run or new_run_folder("demo")
    check_run_folder(folder)
    refuse_unusable_run(folder)
    training = Options(preset=PRESET, ranks=RANKS, data=data, run=folder)
    try:
        ending = tell_story(Console(), seconds=seconds, training=training)
    except SideFailed as error:
        return say_failure(error.failure, ranks=RANKS)
    if ending.failure is not None:
        return say_failure(ending.failure, ranks=RANKS)
    if not ending.identical:
        say_wrong("lowtide and plain PyTorch gave different bits on this machine; please report this with the table above.")
        return 1
    if not ending.held:
        say_wrong("the memory number was exceeded on this machine; please report this with the table above.")
        return 1
    return 0
