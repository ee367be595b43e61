"""The commands of ``lowtide``: every mistake in them is one line on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, cast

import typer

import lowtide
from lowtide.cli import ckpt
from lowtide.cli.demo import demo
from lowtide.cli.doctor import doctor
from lowtide.cli.output import say_wrong
from lowtide.cli.plan import plan
from lowtide.cli.report import report
from lowtide.cli.top import top
from lowtide.cli.train import train
from lowtide.errors import ArgumentError, Error
from lowtide.job.failure import INTERRUPTED
from lowtide.job.words import speak_warnings

# typer carries click inside or beside itself, depending on its version; the base of its own exception is right for both.
_UsageError = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="lowtide",
    help="Train PyTorch models that do not fit in memory, with the same results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(demo)
app.command()(doctor)
app.command()(plan)
app.command()(report)
app.command()(top)
app.add_typer(ckpt.app)


def _print_version(*, wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"lowtide {lowtide.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction] - typer calls it
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def answer(arguments: list[str]) -> int:
    """Run one command; returns its exit code."""
    speak_warnings()
    try:
        code = app(arguments, prog_name="lowtide", standalone_mode=False)
    except _UsageError as error:
        say_wrong(f"{_text(error)} (lowtide --help shows what is allowed)")
        return 2
    except ArgumentError as error:
        say_wrong(str(error))
        return 2
    except Error as error:
        say_wrong(str(error))
        return 1
    except (KeyboardInterrupt, typer.Abort):  # typer makes the second of the first
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _text(error: BaseException) -> str:
    format_message: Callable[[], str] = getattr(error, "format_message", lambda: str(error))
    text = format_message()
    return text if text.endswith((".", "?", ")")) else text + "."
