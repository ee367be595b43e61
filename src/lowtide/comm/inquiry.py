"""One inquiry into a wait that took too long: the answers so far, and what was found. The watch sends and hears for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lowtide.comm.hang import Finding, Hang, Status

_CAP = 256 << 10  # bytes of a text from another rank


class Inquiry:
    """Any thread may add to it; one thread of the watch sees it through."""

    def __init__(self, hang: Hang, *, asked: set[int]) -> None:
        self.hang = hang
        self.asked = asked
        """The ranks that can answer this one."""
        self.began = time.monotonic()
        self.failed: tuple[int, str] | None = None
        """A failure of a rank, and its cause, that was heard of meanwhile."""
        self.closed = threading.Event()
        """Set when the report is printed and the failure known."""
        self._changed = threading.Condition()
        self._statuses: dict[int, Status] = {}
        self._finding: Finding | None = None

    def add(self, status: Status) -> None:
        with self._changed:
            self._statuses[status.rank] = status
            self._changed.notify_all()

    def offer(self, finding: Finding) -> Finding:
        """The first finding is the one that counts."""
        with self._changed:
            if self._finding is None:
                self._finding = finding
            self._changed.notify_all()
            return self._finding

    def note_failure(self, rank: int, cause: str) -> None:
        """The first failure is the one that the others speak of. The inquiry goes on: it is short."""
        with self._changed:
            if self.failed is None:
                self.failed = (rank, cause)

    def statuses(self) -> dict[int, Status]:
        with self._changed:
            return dict(self._statuses)

    def wait_for_answers(self, seconds: float, *, gone: set[int]) -> Finding | None:
        """Until all who were asked have answered, a finding has come, or ``seconds`` have passed since it began."""
        return self._wait(seconds, lambda: self.asked - gone <= self._statuses.keys())

    def wait_for_finding(self, seconds: float) -> Finding | None:
        """Until a finding has come, or ``seconds`` have passed since the inquiry began."""
        return self._wait(seconds, lambda: False)

    def _wait(self, seconds: float, enough: Callable[[], bool]) -> Finding | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._finding is not None or enough(),
                max(0.0, self.began + seconds - time.monotonic()),
            )
            return self._finding


class Pieces:
    """A text that comes in messages of limited size, in order, from one rank: all but the last say that more follows."""

    def __init__(self) -> None:
        self._text = bytearray()

    def add(self, body: bytes) -> bytes | None:
        """The whole text with its last piece, else None. What is too long is cut."""
        more, piece = body[:1], body[1:]
        if len(self._text) < _CAP:
            self._text += piece
        if more == b"+":
            return None
        whole, self._text = bytes(self._text), bytearray()
        return whole


def cut(text: bytes, size: int) -> list[bytes]:
    """``text`` in pieces of at most ``size`` bytes, as :class:`Pieces` wants them."""
    parts = [text[start : start + size - 1] for start in range(0, len(text), size - 1)] or [b""]
    return [b"+" + part for part in parts[:-1]] + [b"." + parts[-1]]
