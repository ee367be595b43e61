"""A rank that fails, or hangs, is known to all at once.

The ranks form two stars over a gloo group of its own: ranks 0 and 1 listen to everybody, everybody listens to them, each in
daemon threads that are blocked in a receive. A failure is told to the centres, which tell all; a connection that closes
without a word is a rank that died, and so is one whose process ends without a word. There are two centres because one of them
may be the rank that does not answer.

[Note: one last word per direction] Over each connection each side says exactly one last word, ``bye`` or ``failed``, and
answers the other's last word with its own. Both listeners then end by themselves. This is what makes the end of
the process safe: a thread that comes back from a blocked receive while the interpreter shuts down kills the process.

[Note: an inquiry] Who has waited longer than its deadline says so (``hang``). Whoever hears of it for the first time passes it
on and answers the centres (``status``); its listeners can, whatever its other threads wait for. A centre makes one report when
all have answered, or a second later, and sends it to all (``report``). Every rank prints the first that it gets, or, if no
centre speaks, what it knows itself; then it fails. Nothing waits for these messages to arrive: a rank that is stopped takes
none, and a send that times out would close every connection of the group.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lowtide.comm.hang import COMES, Finding, Hang, Place, Status, find, stacks_here
from lowtide.comm.inquiry import Inquiry, Pieces, cut
from lowtide.comm.processes import ProcessEnds, identity
from lowtide.comm.transport import abort_gloo
from lowtide.errors import DeadlineExceeded, PeerFailed

_log = logging.getLogger(__name__)

_CENTRES = 2
_MESSAGE_BYTES = 1024
_MESSAGE = struct.Struct("<BiH")  # what, rank it is about, length of the text that follows
_TAG = 1
_FOREVER = timedelta(days=3650)
# How long a message may take to leave, and how long the end waits for the others' last word.
_PATIENCE = 2.0
# A process that has ended may have said its last word just before: how long that may take to be heard.
_ECHO = 0.2
_ANSWERS = 1.0  # seconds that a centre waits for the others' answers
_REPORT = 1.5  # seconds after which a rank that has heard from no centre makes a report of its own
# A rank whose program does not come back to lowtide within this time after a hang is ended: the others have gone.
_LAST_RESORT = 30.0

NEWS = 1.0
"""Seconds that a closed connection is given to be explained by the watch."""
DIED = "ended without a word: killed, or crashed"


class _Word(enum.IntEnum):
    BYE = 1  # the sender left in good order
    FAILED = 2  # a rank failed; the text is the cause
    LEFT = 3  # a centre passes on that a rank left in good order; not a last word, and neither are those below
    HANG = 4  # a rank has waited too long
    STATUS = 5  # a piece of where the sender stands
    REPORT = 6  # a piece of what a centre has found


def describe(error: BaseException) -> str:
    """One line that names an exception."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Watch:
    """What this rank knows about the others. All methods may be called from any thread."""

    def __init__(self, process_group: Any | None, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.phase = ""
        """What this rank is doing, in a few words, for a report; whoever knows may set it."""
        self._pg = process_group  # None for one rank: nobody to watch
        self._pid = os.getpid()  # a forked child has no listeners and must not speak for this rank
        self._lock = threading.Lock()
        self._failure: PeerFailed | None = None
        self.failed_at = 0.0
        """When this rank heard of the first failure (``time.monotonic``)."""
        self._left: dict[int, float] = {}
        self._closing = False
        self._unsaid: set[int] = set()  # peers that have not had our last word yet
        self._silent: set[int] = set()  # peers that do not take messages any more
        self._posted: list[Any] = []  # sends that nobody waits for: gloo needs them to live
        self._on_failure: list[Callable[[], None]] = []
        self._places: dict[object, Callable[[], Place | None]] = {}
        self._waited = 0.0
        self._inquiry: Inquiry | None = None
        self._inquirer: threading.Thread | None = None
        self._told = threading.Event()  # somebody on this rank has been given the failure
        self._listeners: dict[int, threading.Thread] = {}
        self._ends: ProcessEnds | None = None
        self._centres = set(range(min(_CENTRES, size)))
        self._peers = (set(range(size)) if rank in self._centres else self._centres) - {rank}
        if process_group is not None:
            self._unsaid.update(self._peers)
            everybody = _exchange_identities(process_group)
            for peer in sorted(self._peers):
                self._listeners[peer] = threading.Thread(
                    target=self._listen, args=(process_group, peer), name=f"lowtide-watch-{peer}", daemon=True
                )
                self._listeners[peer].start()
            self._ends = ProcessEnds({peer: everybody[peer] for peer in sorted(self._peers)}, self._process_ended)

    # -- failures -----------------------------------------------------------------------------------------------------

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
            self.told()
            raise PeerFailed(failure.rank, failure.cause, waiting_for, failure.report)

    def told(self) -> None:
        """The program on this rank has been given the failure: it ends by itself."""
        self._told.set()

    def await_news(self, seconds: float) -> PeerFailed | None:
        """The failure of a rank, if one becomes known within ``seconds``, or by an inquiry that begins within them."""
        end = time.monotonic() + seconds
        while self._failure is None and time.monotonic() < end:
            inquiry = self._inquiry
            if inquiry is not None:
                inquiry.closed.wait(_REPORT + _PATIENCE)
                break
            time.sleep(0.01)
        return self._failure

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
        self.told()
        if self._inquirer is not None:
            self._inquirer.join(_REPORT + _PATIENCE)
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
        self._posted.clear()
        self._pg = None

    # -- waits that take too long -------------------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """How long this rank's threads have stood still for other ranks, from the start."""
        return self._waited

    def note_wait(self, seconds: float) -> None:
        """Somebody on this rank has stood still for others for so long."""
        with self._lock:
            self._waited += seconds

    def add_place(self, owner: object, place: Callable[[], Place | None]) -> None:
        """From now on a report says where ``owner`` stands, as ``place`` tells it from any thread."""
        with self._lock:
            self._places[owner] = place

    def remove_place(self, owner: object) -> None:
        with self._lock:
            self._places.pop(owner, None)

    @contextlib.contextmanager
    def waiting(self, what: str, *, deadline: float, awaited: int = -1) -> Generator[Callable[[], None], None, None]:
        """For a wait outside a channel: gives a function to be called every few moments, which raises if the wait is in vain.

        ``awaited`` is the rank whose turn it is, if that is known.
        """
        since, owner, where = time.monotonic(), object(), "memory that ranks share"

        def look_up() -> None:
            self.raise_if_failed(what)
            waited = time.monotonic() - since
            if waited > deadline:
                raise self.overdue(what, where=where, waited=waited, deadline=deadline, awaited=awaited)

        self.add_place(owner, lambda: Place(where, what, COMES, time.monotonic() - since))
        try:
            yield look_up
        finally:
            self.remove_place(owner)
            self.note_wait(time.monotonic() - since)

    def overdue(self, what: str, *, where: str, waited: float, deadline: float, awaited: int = -1) -> Exception:
        """A wait on this rank has taken too long: see that every rank reports and fails, and give the error for the caller."""
        inquiry = self._begin(Hang(self.rank, what, where, waited, awaited))
        self.told()
        if inquiry is None:
            failure = self._failure
            if failure is None:
                return DeadlineExceeded(what, deadline)
            return PeerFailed(failure.rank, failure.cause, what, failure.report)
        inquiry.closed.wait(_REPORT + _PATIENCE)
        finding = inquiry.wait_for_finding(0.0)
        if finding is None:
            return DeadlineExceeded(what, deadline)
        return DeadlineExceeded(what, deadline, finding.because, finding.report)

    def _begin(self, hang: Hang) -> Inquiry | None:
        """The inquiry that is under way, which may be this one; None if a failure explains it, or nobody can be asked."""
        with self._lock:
            if self._pg is None or os.getpid() != self._pid or self._closing:
                return None
            if self._inquiry is not None or self._failure is not None:
                return self._inquiry
            self._inquiry = Inquiry(hang, asked={*self._peers, self.rank})
            self._inquirer = threading.Thread(target=self._inquire, args=(self._inquiry,), name="lowtide-hang", daemon=True)
            self._inquirer.start()
            return self._inquiry

    def _inquire(self, inquiry: Inquiry) -> None:
        """See an inquiry through, in a thread of its own. See [Note: an inquiry]."""
        try:
            self._fail_with_report(inquiry)
        finally:
            inquiry.closed.set()
        if not self._told.wait(_LAST_RESORT):
            _log.error("rank %d was told %.0f s ago and does not end by itself: it is ended now", self.rank, _LAST_RESORT)
            logging.shutdown()
            os._exit(1)

    def _fail_with_report(self, inquiry: Inquiry) -> None:
        mine = self._status()
        inquiry.add(mine)
        self._post(self._peers, _Word.HANG, [inquiry.hang.to_bytes()])
        self._post(self._peers & self._centres, _Word.STATUS, cut(mine.to_bytes(), _MESSAGE_BYTES - _MESSAGE.size))
        if self.rank in self._centres:
            finding = inquiry.wait_for_answers(_ANSWERS, gone=set(self.left()))
        else:
            finding = inquiry.wait_for_finding(_REPORT)
        if finding is None:
            finding = inquiry.offer(self._find(inquiry))
            if self.rank in self._centres:
                self._post(self._peers, _Word.REPORT, cut(finding.to_bytes(), _MESSAGE_BYTES - _MESSAGE.size))
        with self._lock:
            self._silent.update(finding.silent)
        _log.error("%s", finding.report)
        hang = inquiry.hang
        cause = f"{DeadlineExceeded.__name__}: no answer for {hang.what} within {hang.seconds:.0f} s: {finding.because}"
        rank, cause = inquiry.failed or (hang.rank, cause)
        self._fail(rank, cause, finding.report)

    def _find(self, inquiry: Inquiry) -> Finding:
        answers = inquiry.statuses()
        return find(inquiry.hang, answers, asked=sorted(inquiry.asked), left=sorted(self.left()), size=self.size)

    def _status(self) -> Status:
        with self._lock:
            places = list(self._places.values())
        known = [place for call in places if (place := call()) is not None]
        return Status(self.rank, self.phase, tuple(known), stacks_here())

    # -- messages -----------------------------------------------------------------------------------------------------

    def _fail(self, rank: int, cause: str, report: str = "") -> None:
        with self._lock:
            first = self._failure is None
            if first:
                self.failed_at = time.monotonic()
                self._failure = PeerFailed(rank, cause, "", report)
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
        pieces = {word: Pieces() for word in (_Word.STATUS, _Word.REPORT)}
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
            word, rank, body = _unpack(message)
            if word is _Word.FAILED:
                self._hear_failure(rank, body.decode(errors="replace"))
                self._say_last(_Word.BYE, self.rank, "", to=peer)  # only if our failure message has not been the last word
                return
            if word in pieces:
                whole = pieces[word].add(body)
                if whole is not None:
                    self._hear_of_hang(word, whole, peer)
            elif word is _Word.HANG:
                self._hear_of_hang(word, body, peer)
            else:
                self._note_left(rank)
            if word is _Word.BYE:
                self._say_last(_Word.BYE, self.rank, "", to=peer)
                return

    def _hear_failure(self, rank: int, cause: str) -> None:
        inquiry = self._inquiry
        if inquiry is None or inquiry.closed.is_set():
            self._fail(rank, cause)
            return
        # The report comes first. The sender has our last word from the inquiry's thread; its own will not be missed.
        inquiry.note_failure(rank, cause)
        inquiry.closed.wait(_REPORT + _PATIENCE)

    def _hear_of_hang(self, word: _Word, text: bytes, peer: int) -> None:
        try:
            if word is _Word.HANG:
                self._begin(Hang.from_bytes(text))
                return
            inquiry = self._inquiry
            if inquiry is None:
                return  # a failure is known, which explains the rest
            if word is _Word.STATUS:
                inquiry.add(Status.from_bytes(text))
            else:
                inquiry.offer(Finding.from_bytes(text))
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("what rank %d said about a hang was not understood: %s", peer, error)

    def _note_left(self, rank: int) -> None:
        with self._lock:
            news = rank not in self._left
            self._left.setdefault(rank, time.monotonic())
            # Only news is passed on, or the centres would tell each other for ever.
            tells = news and self.rank in self._centres and not self._closing
            others = sorted(self._unsaid - {rank}) if tells else []
        self._send(others, _Word.LEFT, rank, "")

    def _say_last(self, word: _Word, rank: int, text: str, to: int | None = None) -> None:
        with self._lock:
            peers = self._unsaid & ({to} if to is not None else self._unsaid)
            self._unsaid -= peers
        self._send(sorted(peers), word, rank, text)

    def _send(self, peers: list[int], word: _Word, rank: int, text: str) -> None:
        """Send, and wait until it has left; but not for a rank that does not answer."""
        started = self._start(peers, _pack(word, rank, text.encode()))
        for peer, work in started:
            if peer not in self._silent:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=_PATIENCE))

    def _post(self, peers: set[int], word: _Word, bodies: list[bytes]) -> None:
        """Send without waiting, to those that have not had our last word."""
        for body in bodies:
            with self._lock:
                open_to = sorted(peers & self._unsaid)
            self._start(open_to, _pack(word, self.rank, body))

    def _start(self, peers: list[int], message: Tensor) -> list[tuple[int, Any]]:
        process_group = self._pg
        if process_group is None:
            return []
        started: list[tuple[int, Any]] = []
        for peer in peers:
            # A peer whose connection is closed is its listener's business.
            with contextlib.suppress(RuntimeError):
                started.append((peer, process_group.send([message], peer, _TAG)))
        self._posted += [(message, work) for _, work in started]
        return started


def _exchange_identities(process_group: Any) -> list[bytes]:
    mine = torch.frombuffer(bytearray(identity()), dtype=torch.uint8)
    rows = mine.new_empty((process_group.size(), mine.numel()))
    try:
        process_group._allgather_base(rows.view(-1), mine).wait()
    except RuntimeError as error:
        raise PeerFailed(-1, f"a connection was lost ({error})", "joining the group") from error
    return [row.numpy().tobytes() for row in rows]


def _pack(word: _Word, rank: int, body: bytes) -> Tensor:
    body = body[: _MESSAGE_BYTES - _MESSAGE.size]
    packed = _MESSAGE.pack(word, rank, len(body)) + body
    return torch.frombuffer(bytearray(packed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)


def _unpack(message: Tensor) -> tuple[_Word, int, bytes]:
    packed = message.numpy().tobytes()
    word, rank, length = _MESSAGE.unpack_from(packed)
    return _Word(word), rank, packed[_MESSAGE.size : _MESSAGE.size + length]
