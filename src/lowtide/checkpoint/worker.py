"""Work in a thread of its own, which no signal can break off.

Python runs signal handlers in the main thread, between any two instructions, and they may raise: Ctrl-C, a time limit. What has
to end in order runs here; the caller waits for it and may be interrupted, which calls the work off. It may then end early, at a
place that it chooses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

from lowtide.runtime.exchange import said_by

_SLICE = 0.05  # seconds between two looks: a wait that was interrupted may have missed a notification


class CalledOff(Exception):
    """The caller does not want the work any more."""


class Worker:
    """``work`` in a thread. It brackets what must not go on without its caller by ``attended``."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name)
        self._claim, self._changed = threading.Lock(), threading.Lock()
        self._changed.acquire()
        self._attended = False
        self.off: BaseException | None = None
        """Why the caller has called it off."""
        self.failure: BaseException | None = None
        self.detached = False
        """Whether the caller need not wait any more."""
        self.over = False

    # -- the caller's side --------------------------------------------------------------------------------------------

    def run(self, provide: Callable[[], Any]) -> None:
        """``provide`` what it needs, start it, and wait until it is over, or detached.

        Whatever is raised here, also by a signal handler, calls the work off. It is raised again as soon as the work does not
        use anything of the caller's any more.
        """
        try:
            provide()
            self._thread.start()
            while not (self.over or self.detached):
                self._look()
        except BaseException as error:
            self.off = error
            self._leave()
            raise
        if self.over:
            self._thread.join()
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure

    def wait(self) -> None:
        """Until it is over. An interruption leaves it as it is."""
        while not self.over and self._thread.is_alive():
            self._look()
        if self._thread.ident is not None:
            self._thread.join()

    def _leave(self) -> None:
        """Wait for the end; after one more interruption only until nothing is used any more that is the caller's."""
        patient = True
        while not self.over and (patient or self._attended):
            try:
                if self._claim.acquire(blocking=False):
                    self._finish()  # it was never started: the other ranks still have to be told
                while not self.over and (patient or self._attended):
                    self._look()
            except BaseException:  # the first one is raised
                patient = False

    def _look(self) -> None:
        self._changed.acquire(timeout=_SLICE)

    # -- the thread's side --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attended(self) -> Generator[None]:
        """Around work on what is the caller's, who waits meanwhile. Raises CalledOff instead of beginning it in vain."""
        self._attended = True  # first: who calls it off looks at this afterwards
        try:
            self.look_up()
            yield
        finally:
            self._attended = False
            self._notify()

    def look_up(self) -> None:
        """Raise if the work was called off."""
        if self.off is not None:
            raise CalledOff(said_by(self.off)) from self.off

    def detach(self) -> None:
        """From here on the caller goes on."""
        self.detached = True
        self._notify()

    def _run(self) -> None:
        if self._claim.acquire(blocking=False):
            self._finish()

    def _finish(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised where somebody waits
            self.failure = _without_frames(error) if self.detached else error
        finally:
            self._work = _nothing  # it holds copies of the caller's numbers
            self.over = True
            self._notify()

    def _notify(self) -> None:
        if self._changed.locked():
            self._changed.release()


def _nothing() -> None: ...


def _without_frames(error: BaseException) -> BaseException:
    """An error that may be kept for long; its frames would keep the numbers that were to be written."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
