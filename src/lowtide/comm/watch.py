"""A rank that fails is known to all at once.

The ranks form a star over a gloo group of its own: rank 0 listens to everybody, everybody listens to rank 0, each in
a daemon thread that is blocked in a receive. A failure is told to rank 0, which tells all; a connection that closes
without a word is a rank that died, and so is one whose process ends without a word.

[Note: one last word per direction] Over each connection each side says exactly one last word, ``bye`` or ``failed``, and
answers the other's last word with its own. Both listeners then end by themselves. This is what makes the end of
the process safe: a thread that comes back from a blocked receive while the interpreter shuts down kills the process.
"""

from __future__ import annotations

import contextlib
import enum
import os
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lowtide.comm.processes import ProcessEnds, identity
from lowtide.comm.transport import abort_gloo
from lowtide.errors import PeerFailed

_MESSAGE_BYTES = 1024
_MESSAGE = struct.Struct("<BiH")  # what, rank it is about, length of the text that follows
_TAG = 1
_FOREVER = timedelta(days=3650)
# How long a message may take to leave, and how long the end waits for the others' last word.
_PATIENCE = 2.0
# A process that has ended may have said its last word just before: how long that may take to be heard.
_ECHO = 0.2

DIED = "ended without a word: killed, or crashed"


class _Word(enum.IntEnum):
    BYE = 1  # the sender left in good order
    FAILED = 2  # a rank failed; the text is the cause
    LEFT = 3  # rank 0 passes on that a rank left in good order; not a last word


def describe(error: BaseException) -> str:
    """One line that names an exception."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Watch:
    """What this rank knows about the others. All methods may be called from any thread."""

    def __init__(self, process_group: Any | None, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._pg = process_group  # None for one rank: nobody to watch
        self._pid = os.getpid()  # a forked child has no listeners and must not speak for this rank
        self._lock = threading.Lock()
        self._failure: PeerFailed | None = None
        self._left: dict[int, float] = {}
        self._closing = False
        self._unsaid: set[int] = set()  # peers that have not had our last word yet
        self._on_failure: list[Callable[[], None]] = []
        self._listeners: dict[int, threading.Thread] = {}
        self._ends: ProcessEnds | None = None
        if process_group is not None:
            peers = range(1, size) if rank == 0 else range(1)
            self._unsaid.update(peers)
            everybody = _exchange_identities(process_group)
            for peer in peers:
                self._listeners[peer] = threading.Thread(
                    target=self._listen, args=(process_group, peer), name=f"lowtide-watch-{peer}", daemon=True
                )
                self._listeners[peer].start()
            self._ends = ProcessEnds({peer: everybody[peer] for peer in peers}, self._process_ended)

    @property
    def failure(self) -> PeerFailed | None:
        """The first failure of any rank that this rank heard of."""
        return self._failure

    def left(self) -> dict[int, float]:
        """Ranks that left in good order, and when this rank heard of it (``time.monotonic``)."""
        with self._lock:
            return dict(self._left)

    def raise_if_failed(self, waiting_for: str) -> None:
        """Raise the first failure of any rank, saying what this rank was at."""
        failure = self._failure
        if failure is not None:
            raise PeerFailed(failure.rank, failure.cause, waiting_for)

    def on_failure(self, call: Callable[[], None]) -> None:
        """Have ``call`` run, in a thread of the watch, when a failure becomes known; at once if one is."""
        with self._lock:
            if self._failure is None:
                self._on_failure.append(call)
                return
        call()

    def report(self, error: BaseException) -> None:
        """Tell all ranks that this one failed. If it failed because of another, they hear of that one."""
        if self._pg is None or os.getpid() != self._pid:
            return
        first = error if isinstance(error, PeerFailed) and error.rank >= 0 else PeerFailed(self.rank, describe(error), "")
        self._fail(first.rank, first.cause)

    def close(self) -> None:
        """Leave in good order: say the last word, hear the others', end the listeners. Takes seconds at most."""
        if self._pg is None or os.getpid() != self._pid:
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._say_last(_Word.BYE, self.rank, "")
        if self._ends is not None:
            self._ends.close()
        end = time.monotonic() + (_PATIENCE if self._failure is None else _PATIENCE / 4)
        for thread in self._listeners.values():
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._listeners.values()):
            abort_gloo(self._pg)
            for thread in self._listeners.values():
                thread.join(_PATIENCE)
        self._pg = None

    def _fail(self, rank: int, cause: str) -> None:
        with self._lock:
            first = self._failure is None
            if first:
                self._failure = PeerFailed(rank, cause, "")
            calls, self._on_failure = self._on_failure, []
        if first:
            self._say_last(_Word.FAILED, rank, cause)
        for call in calls:
            call()

    def _process_ended(self, peer: int) -> None:
        listener = self._listeners[peer]
        listener.join(_ECHO)
        if listener.is_alive() and not self._closing:
            with self._lock:
                self._unsaid.discard(peer)
            self._fail(peer, DIED)

    def _listen(self, process_group: Any, peer: int) -> None:
        message = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
        while True:
            try:
                process_group.recv([message], peer, _TAG).wait(_FOREVER)
            except RuntimeError:
                with self._lock:
                    self._unsaid.discard(peer)
                    expected = self._closing or peer in self._left
                if not expected:
                    self._fail(peer, DIED)
                return
            word, rank, text = _unpack(message)
            if word is _Word.FAILED:
                self._fail(rank, text)
                self._say_last(_Word.BYE, self.rank, "", to=peer)  # only if our failure message has not been the last word
                return
            self._note_left(rank)
            if word is _Word.BYE:
                self._say_last(_Word.BYE, self.rank, "", to=peer)
                return

    def _note_left(self, rank: int) -> None:
        with self._lock:
            self._left.setdefault(rank, time.monotonic())
            others = sorted(self._unsaid - {rank}) if self.rank == 0 and not self._closing else []
        self._send(others, _Word.LEFT, rank, "")

    def _say_last(self, word: _Word, rank: int, text: str, to: int | None = None) -> None:
        with self._lock:
            peers = self._unsaid & ({to} if to is not None else self._unsaid)
            self._unsaid -= peers
        self._send(sorted(peers), word, rank, text)

    def _send(self, peers: list[int], word: _Word, rank: int, text: str) -> None:
        process_group = self._pg
        if process_group is None:
            return
        message = _pack(word, rank, text)
        started: list[Any] = []
        for peer in peers:
            # A peer whose connection is closed is its listener's business.
            with contextlib.suppress(RuntimeError):
                started.append(process_group.send([message], peer, _TAG))
        for work in started:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=_PATIENCE))


def _exchange_identities(process_group: Any) -> list[bytes]:
    mine = torch.frombuffer(bytearray(identity()), dtype=torch.uint8)
    rows = mine.new_empty((process_group.size(), mine.numel()))
    try:
        process_group._allgather_base(rows.view(-1), mine).wait()
    except RuntimeError as error:
        raise PeerFailed(-1, f"a connection was lost ({error})", "joining the group") from error
    return [row.numpy().tobytes() for row in rows]


def _pack(word: _Word, rank: int, text: str) -> Tensor:
    body = text.encode()[: _MESSAGE_BYTES - _MESSAGE.size]
    packed = _MESSAGE.pack(word, rank, len(body)) + body
    return torch.frombuffer(bytearray(packed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


def _unpack(message: Tensor) -> tuple[_Word, int, str]:
    packed = message.numpy().tobytes()
    word, rank, length = _MESSAGE.unpack_from(packed)
    return _Word(word), rank, packed[_MESSAGE.size : _MESSAGE.size + length].decode(errors="replace")
