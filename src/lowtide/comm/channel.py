"""Exchanges between ranks, one after the other, next to compute.

A channel is one daemon thread that takes work from a queue in order. Before each piece of work the ranks show each other
one header of fixed size, which says what they are about to do. Ranks that would do different things all learn it there
and raise; they never enter an exchange whose sizes differ, which with gloo would end the process.

[Note: how a wait ends] A caller waits for a ticket in short slices of Python, never in C, so Ctrl-C and the watch get
through. The thread itself waits in C; when a rank fails, the watch closes the connections under it, and it comes back. A wait
that takes longer than its deadline is the watch's business: it asks all ranks where they stand, and every rank fails with one
report.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
import xxhash
from torch import Tensor

from lowtide.comm.deadlines import Deadlines
from lowtide.comm.hang import COMES, DONE, MOVES, Place
from lowtide.comm.transport import Alone, LinkBroken, Transport
from lowtide.comm.watch import NEWS, Watch
from lowtide.errors import Error, InternalError, Mismatch, PeerFailed, Refused
from lowtide.tiers.latch import Latch

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SAME_ORDER = (
    "Every rank must run the same units in the same order; routing that differs by rank must stay inside a unit (units=)"
)
_HEADER_BYTES = 256
_HEADER = struct.Struct("<QqQIB")  # hash of the label, unit, sequence number, bytes of the note, bytes of the label's text
_TEXT_BYTES = 96
_NOTE_BYTES = _HEADER_BYTES - _HEADER.size - _TEXT_BYTES
_SLICE = 0.05  # seconds a caller sleeps at most before it looks up
_LAST_WORDS = 0.3  # seconds that work may take to come to its own end after a failure has become known
_DRAIN = 5.0  # seconds that closing waits for work under way
_MESH_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Label:
    """What a piece of work does: a verb, the number of a unit (-1: none) and a name for people."""

    kind: str
    unit: int
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name!r}"


@dataclass(frozen=True)
class Wire:
    """The transports that work may use: the ranks that share shards, those that hold copies of this one, and all."""

    shard: Transport
    replicate: Transport
    world: Transport

    @property
    def bucket_bytes(self) -> int:
        """How many bytes of a reduction are handled at once, on all ranks. Rows of a mesh measure by themselves; where their
        sums are added up in between, all must cut alike."""
        return self.shard.bucket_bytes if self.replicate.size == 1 else _MESH_BUCKET_BYTES

    def abort(self) -> None:
        """End every pending exchange, from any thread."""
        for transport in {id(t): t for t in (self.world, self.shard, self.replicate)}.values():
            transport.abort()


Work = Callable[[Wire, list[bytes]], T]
Observer = Callable[[str, str, str, float], None]


class Ticket(Generic[T]):
    """One piece of work under way. ``wait`` gives its result, or raises what it raised, or what made it impossible."""

    def __init__(self, channel: Channel, label: Label, work: Work[T], note: bytes) -> None:
        self.label = label
        self._channel = channel
        self._work = work
        self._note = note
        self._finished = Latch()
        self.agreed = False  # all ranks have shown their header: from here on every rank takes part
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns, or raises, at once."""
        return self._finished.is_set

    def done_within(self, seconds: float) -> bool:
        """Whether the work is done, or becomes so in time; whatever came of it is for ``wait``."""
        if self._finished.is_set:
            return True
        since = time.monotonic()
        done = self._finished.wait(seconds)
        self._channel.note_wait(self.label, since)
        return done

    def wait(self) -> T:
        """Block until the work is done on this rank."""
        if not self._finished.is_set:
            since = time.monotonic()
            while not self._finished.wait(_SLICE):
                self._channel.look_up(self.label, since=since, agreed=self.agreed)
            self._channel.note_wait(self.label, since)
        if self._error is not None:
            self._channel.delivered()
            # The traceback is cut back to what the thread saw, or it would grow with every wait.
            raise self._error.with_traceback(self._error.__traceback__)
        return cast("T", self._result)

    def carry_out(self, wire: Wire, sequence: int) -> None:
        """Called once, by the channel."""
        notes = _show_headers(wire.world, self.label, sequence, self._note)
        self.agreed = True
        self._result = self._work(wire, notes)

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the channel. Drops the work, which may hold large tensors."""
        self._error = error
        del self._work
        self._finished.set()


class Channel:
    """A queue of work that all ranks submit in the same order. See the module's text for the rules."""

    def __init__(self, name: str, wire: Wire, *, watch: Watch, deadline: float | Deadlines) -> None:
        self.name = name
        self._deadlines = deadline if isinstance(deadline, Deadlines) else Deadlines.fixed(deadline)
        self._wire = wire
        self._watch = watch
        self._queue: queue.SimpleQueue[Ticket[Any] | None] = queue.SimpleQueue()
        self._sequence = 0
        self._progress = time.monotonic()  # when work last started or ended
        self._current: Ticket[Any] | None = None  # what the thread is at
        self._last: Label | None = None  # what it has done last
        self.observer: Observer | None = None
        """Hears of exchanges: ``work`` or ``wait``, the label, and when it began. Must not refer to what owns the channel."""
        self._cause: BaseException | None = None  # once set, nothing goes through any more
        self._untold: BaseException | None = None  # an error that has not been raised to anybody yet
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if wire.world.size > 1:
            self._thread = threading.Thread(target=self._serve, name=f"lowtide-{name}", daemon=True)
            self._thread.start()
            watch.on_failure(self._on_peer_failure)
            watch.add_place(self, self.place)

    @property
    def deadline(self) -> float:
        """Seconds that a wait may take now."""
        return self._deadlines.seconds

    def submit(self, label: Label, work: Work[T], note: bytes = b"") -> Ticket[T]:
        """Queue ``work(wire, notes)``; ``notes`` are the notes of all ranks, which have one length. Runs under no_grad."""
        ticket = Ticket(self, label, work, note)
        if self._cause is None:
            self._watch.raise_if_failed(str(label))  # this channel may not have heard of it yet
        with self._lock:
            if self._closed:
                raise Refused(f"{label} was asked for after the model's group was closed; shard the model again.")
            if self._cause is None and self._thread is not None:
                self._queue.put(ticket)
                return ticket
        self._raise_cause(label)
        self._perform(ticket)
        return ticket

    def run(self, label: Label, work: Work[T], note: bytes = b"") -> T:
        """Submit and wait."""
        return self.submit(label, work, note).wait()

    def close(self) -> None:
        """Finish what is queued, within reason, and end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join(0 if self._cause is not None else _DRAIN)
            if self._thread.is_alive():
                self._wire.abort()
                self._thread.join(_DRAIN)
        self._watch.remove_place(self)
        # Connections close when nothing refers to them any more; this channel may be referred to for long.
        self._wire = Wire(Alone(), Alone(), Alone())
        if self._untold is not None:
            _log.error("channel %r was closed with an error that nobody waited for: %r", self.name, self._untold)

    def look_up(self, label: Label, *, since: float, agreed: bool) -> None:
        """Called by a waiting ticket every few moments: raise if its work cannot come to an end any more."""
        now = time.monotonic()
        if self._watch.failure is not None:
            # A rank that has all it needed from this one may fail while we are still about to notice that it was there.
            if now - self._watch.failed_at > _LAST_WORDS:
                self._watch.raise_if_failed(str(label))
            return
        if not agreed:
            for rank, when in self._watch.left().items():
                if now - max(when, since) > NEWS:
                    self._break(PeerFailed(rank, "left in good order while others still needed it", str(label)))
                    self._raise_cause(label)
        waited = now - max(self._progress, since)
        if waited > self.deadline:
            raise self._overdue(label, waited)

    def note_wait(self, label: Label, since: float) -> None:
        """Called by a ticket whose caller has stood still until now."""
        self._watch.note_wait(time.monotonic() - since)
        if (observer := self.observer) is not None:
            observer("wait", label.kind, label.name, since)

    def delivered(self) -> None:
        """Called by a ticket that raises its error."""
        self._untold = None
        self._watch.told()

    def place(self) -> Place | None:
        """What this channel is at, or was at last; for a report, from any thread."""
        current, last, seconds = self._current, self._last, time.monotonic() - self._progress
        if current is not None:
            return Place(self._where, str(current.label), MOVES if current.agreed else COMES, seconds, self._sequence)
        return Place(self._where, str(last), DONE, seconds, self._sequence - 1) if last is not None else None

    @property
    def _where(self) -> str:
        return f"channel {self.name!r}"

    def _overdue(self, label: Label, waited: float) -> Exception:
        """Every rank reports where it stands, and fails; the error for the caller here."""
        error = self._watch.overdue(str(label), where=self._where, waited=waited, deadline=self.deadline)
        self._break(error, tell=False)
        with self._lock:
            self._cause, self._untold = error, None  # the watch has broken this channel as all others, with fewer words
        return error

    def _serve(self) -> None:
        while (ticket := self._queue.get()) is not None:
            self._perform(ticket)
            del ticket  # or the tensors of this work would live until the next

    def _perform(self, ticket: Ticket[Any]) -> None:
        if self._cause is not None:
            ticket.finish(_seen_from(self._cause, ticket.label))
            return
        self._progress = time.monotonic()
        self._current = ticket
        error: BaseException | None = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                ticket.carry_out(self._wire, self._sequence)
        except _HeadersDiffer as differ:
            error = Mismatch(differ.difference, _SAME_ORDER)
            self._break(error, tell=False)  # every rank has seen the same headers
        except Mismatch as mismatch:
            error = mismatch  # raised on every rank by its contract, after the exchange: the channel is in order
        except LinkBroken as broken:
            error = self._explain(broken, ticket.label)
            self._break(error)
        except BaseException as failure:
            error = failure
            self._break(error)
        self._current, self._last = None, ticket.label
        self._sequence += 1
        began, self._progress = self._progress, time.monotonic()
        if (observer := self.observer) is not None:
            observer("work", ticket.label.kind, ticket.label.name, began)
        ticket.finish(error)

    def _explain(self, broken: LinkBroken, label: Label) -> BaseException:
        """Turn a lost connection into the failure of a rank; the watch hears of it at about the same time."""
        if self._cause is not None:
            return _seen_from(self._cause, label)
        if broken.timed_out and self._watch.failure is None:
            return self._overdue(label, time.monotonic() - self._progress)
        failure = self._watch.await_news(NEWS)
        if failure is not None:
            return PeerFailed(failure.rank, failure.cause, str(label), failure.report)
        for rank in self._watch.left():
            return PeerFailed(rank, "left in good order while others still needed it", str(label))
        return PeerFailed(-1, f"a connection was lost ({broken})", str(label))

    def _break(self, cause: BaseException, *, tell: bool = True) -> None:
        with self._lock:
            if self._cause is not None:
                return
            self._untold = cause
            if self._thread is None:
                return  # one rank: nobody is out of step, and the next work goes through
            self._cause = cause
        if tell:
            self._watch.report(cause)
            self._wire.abort()

    def _on_peer_failure(self) -> None:
        failure = self._watch.failure
        if failure is not None:
            self._break(failure, tell=False)
            self._wire.abort()
            self._untold = None  # the watch tells it at the next call

    def _raise_cause(self, label: Label) -> None:
        if self._cause is not None:
            self.delivered()
            raise _seen_from(self._cause, label).with_traceback(None)


def _seen_from(cause: BaseException, label: Label) -> BaseException:
    """The failure of a rank, told to a caller who was at ``label``."""
    return PeerFailed(cause.rank, cause.cause, str(label), cause.report) if isinstance(cause, PeerFailed) else cause


class _HeadersDiffer(Error):
    def __init__(self, difference: str) -> None:
        super().__init__(difference)
        self.difference = difference


@dataclass(frozen=True)
class _Header:
    kind: int
    unit: int
    sequence: int
    note_bytes: int
    text: str
    note: bytes  # as much as fits

    def at(self, rank: int) -> str:
        return f"rank {rank} is at {self.text}"


def _pack(label: Label, sequence: int, note: bytes) -> Tensor:
    text = str(label).encode()[:_TEXT_BYTES]
    kind = xxhash.xxh3_64_intdigest(str(label).encode())
    fixed = _HEADER.pack(kind, label.unit, sequence, len(note), len(text))
    packed = fixed + text.ljust(_TEXT_BYTES, b"\0") + note[:_NOTE_BYTES]
    return torch.frombuffer(bytearray(packed.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _unpack(packed: bytes) -> _Header:
    kind, unit, sequence, note_bytes, text_bytes = _HEADER.unpack_from(packed)
    text = packed[_HEADER.size : _HEADER.size + text_bytes].decode(errors="replace")
    start = _HEADER.size + _TEXT_BYTES
    return _Header(kind, unit, sequence, note_bytes, text, packed[start : start + min(note_bytes, _NOTE_BYTES)])


def _show_headers(world: Transport, label: Label, sequence: int, note: bytes) -> list[bytes]:
    """Compare what all ranks are about to do, and hand over their notes."""
    if world.size == 1:
        return [note]
    if len(note) >= 1 << 32:
        raise InternalError(f"the note of {label} has {len(note)} bytes")
    headers = [_unpack(_to_bytes(row)) for row in world.all_gather_small(_pack(label, sequence, note))]
    first = headers[0]
    for rank, header in enumerate(headers):
        if (header.kind, header.unit) != (first.kind, first.unit):
            raise _HeadersDiffer(f"{first.at(0)}, {header.at(rank)}")
        if header.sequence != first.sequence:
            raise _HeadersDiffer(f"{first.at(0)} as exchange {first.sequence}, {header.at(rank)} as exchange {header.sequence}")
        if header.note_bytes != first.note_bytes:
            mine, other = first.note_bytes, header.note_bytes
            raise _HeadersDiffer(f"{first.at(0)} with {mine} bytes of note, {header.at(rank)} with {other}")
    if len(note) <= _NOTE_BYTES:
        return [header.note for header in headers]
    whole = world.all_gather_small(torch.frombuffer(bytearray(note), dtype=torch.uint8))
    return [_to_bytes(row) for row in whole]


def _to_bytes(row: Tensor) -> bytes:
    return row.numpy().tobytes()
