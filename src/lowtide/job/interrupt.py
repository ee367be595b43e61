"""Signals that end a job after the current step, with a checkpoint; a second Ctrl-C ends it at once.

SIGTERM comes from SLURM, Kubernetes and spot machines when a job must leave; SIGUSR1 is what SLURM's ``--signal`` sends
before a time limit. Both may reach a rank twice, from the scheduler and from whoever started the ranks, so only Ctrl-C is
impatient.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a job to stop."""


@dataclass(slots=True)
class StopRequest:
    """The signal that asked this process to stop, 0 if none did. Set by the signal handler, read between steps."""

    number: int = 0


@contextmanager
def ends_at_once() -> Generator[None, None, None]:
    """For imports, which take seconds and leave nothing to put in order: Ctrl-C ends the process there, without a word.

    As an exception it would come out of the middle of an import: as a traceback, as another exception, or not at all.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # or the caller of this process chose otherwise
    if not raises or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_torch() -> None:
    """Ahead of what needs it, so that Ctrl-C finds nothing half imported."""
    with ends_at_once():
        import_module("torch")


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Generator[StopRequest, None, None]:
    """Turn the first signal into a request, a later SIGINT into KeyboardInterrupt."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python lets the main thread alone handle signals
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not request.number:
            request.number = number
            again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
            tell(f"{signal.Signals(number).name}: stopping after this step{again}")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def exit_code(stopped_by: str | None, *, saved: bool) -> int:
    """How a job that was asked to stop ends.

    0 after SIGTERM or SIGUSR1 and a checkpoint: torchrun and SLURM must not take it for a failure and start it again on a
    machine that is about to go. Ctrl-C is 130, as in a shell, and so is, with its own number, a stop that could save nothing.
    """
    if stopped_by is None or (saved and stopped_by != signal.SIGINT.name):
        return 0
    return 128 + signal.Signals[stopped_by].value
