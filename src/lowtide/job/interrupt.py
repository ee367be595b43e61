"""Ctrl-C that ends a job after the current step; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """Whether somebody asked this process to stop. Set by the signal handler, read between steps."""

    asked: bool = False


@contextmanager
def stop_on_signals(tell: Callable[[str], None]) -> Generator[StopRequest, None, None]:
    """Turn the first SIGINT or SIGTERM into a request, the second into KeyboardInterrupt."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python lets the main thread alone handle signals
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True
        tell("stopping after this step (Ctrl-C again: at once)")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, old in before.items():
            signal.signal(number, old)
