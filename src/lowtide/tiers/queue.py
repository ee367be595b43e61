"""Requests to a store, carried out by a few threads, the most urgent first.

[Note: order of requests] Requests with the same key (one block of one extent) run in the order in which they were made; only
the first of them is ever in the heap. A request must not wait behind less urgent work: when an urgent one queues up
after others of its key, these become as urgent as it is, and so does a request that somebody waits for.

[Note: what callers do] A caller may be interrupted between any two lines, by an exception of a signal's handler; the threads
never are. So a caller changes nothing but the inbox, by one append, and rings; only threads move what lies there into chains
and heap. A request whose caller was interrupted before it rang is found with the next ring, and who waits goes on ringing.

[Note: who keeps whom alive] The threads hold the line, never the queue or the store, so a store that is dropped is collected;
its finalizer abandons the line. A request holds its store and its memory until it is done and not longer.

A process that was forked from the one that made the queue has no threads and perhaps a lock that stays taken: every entry
looks at the process id before it touches a lock.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress

from lowtide.errors import DiskStalled, Error, Refused
from lowtide.tiers.latch import Latch
from lowtide.tiers.store import Priority, Traffic

_log = logging.getLogger(__name__)

_SLICE = 0.2  # seconds a caller sleeps at most before Ctrl-C and the deadline are looked at


class Ticket:
    """A request in the line. ``wait`` may return a moment before callbacks have run; ``IOQueue.drain`` waits for those too.

    A callback must be short and must not wait: it runs in a thread that other requests need. What it raises is raised by
    the next use of the queue.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_line",
        "failure",
        "key",
        "label",
        "over",
        "priority",
        "remembered",
        "sequence",
        "work",
    )

    def __init__(self, line: _Line, key: Hashable, label: str, priority: int, work: Callable[[], None]) -> None:
        self._line = line
        self._done = Latch()
        self.over = Latch()  # callbacks have run, too
        self._callbacks: list[Callable[[], None]] = []
        self.key = key
        self.label = label
        self.priority = priority
        self.sequence = -1  # until a thread has found it in the inbox
        self.work: Callable[[], None] | None = work
        self.failure: BaseException | None = None
        self.remembered = False

    @property
    def done(self) -> bool:
        return self._done.is_set

    def wait(self) -> None:
        if not self._done.is_set:
            self._line.wait_for(self)
        if self.failure is not None:
            self._line.claim(self)
            raise self.failure

    def on_done(self, callback: Callable[[], None]) -> None:
        self._line.check_process()
        with self._line.lock:
            if not self._done.is_set:
                self._callbacks.append(callback)
                return
        callback()

    def sleep(self, seconds: float) -> bool:
        """Sleep until the request is done, or so long; whether it is."""
        return self._done.wait(seconds)

    def settle(self, failure: BaseException | None) -> list[Callable[[], None]]:
        """Mark as done; under the line's lock. Gives the callbacks, to be run without it."""
        self.failure = failure
        callbacks, self._callbacks = self._callbacks, []
        self._done.set()
        return callbacks


class _Line:
    """What the threads and the callers share; see the notes above."""

    def __init__(self, threads: int, traffic: Traffic, deadline: float) -> None:
        self.pid = os.getpid()
        # reentrant, because a garbage collection inside may run the finalizer that abandons this very line
        self.lock = threading.RLock()
        self.deadline = deadline
        self.traffic = traffic
        self.pending: dict[int, Ticket] = {}  # in the order of their sequence
        self.workers: list[threading.Thread] = []
        self._inbox: deque[tuple[Ticket, int]] = deque()  # new requests, and how urgent known ones have become
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._max_workers = threads
        self._idle = 0  # threads that wait for the bell
        self._running = 0
        self._finished = 0
        self._busy_since = 0.0
        self._closed = False
        self._heap: list[tuple[int, int, Ticket]] = []
        self._chains: dict[Hashable, deque[Ticket]] = {}
        self._sequence = itertools.count()
        self._unclaimed: list[tuple[Ticket | None, BaseException]] = []

    # ---- callers ----

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise Refused(
                "a store was used in a process forked from the one that made it (a loader worker?); only that one may use it. "
                "Keep the model out of loader workers, or start them with multiprocessing_context='spawn'."
            )

    def submit(self, ticket: Ticket) -> None:
        self.check_process()
        self.raise_unclaimed()
        if self._closed:
            raise Refused(f"{ticket.label}: the store is closed")
        self._inbox.append((ticket, ticket.priority))
        self._ring()

    def wait_for(self, ticket: Ticket) -> None:
        self.check_process()
        start = time.monotonic()
        try:
            if ticket.work is not None:
                self._inbox.append((ticket, Priority.NOW))
                self._ring()
            while not ticket.sleep(_SLICE):
                if time.monotonic() - start > self.deadline:
                    raise DiskStalled(ticket.label, self.deadline)
                self._ring()
        finally:
            self._waited(start)
            if (observer := self.traffic.observer) is not None:
                observer("wait", ticket.label, ticket.key, start)

    def drain(self) -> None:
        """Wait until everything submitted so far is done, callbacks too. The deadline starts anew with each one done."""
        self.check_process()
        start = last = time.monotonic()
        try:
            with self.lock:
                tickets = dict.fromkeys((*self.pending.values(), *(ticket for ticket, _ in list(self._inbox))))
            self._ring()
            count = self._finished
            for ticket in tickets:
                while not ticket.over.wait(_SLICE):
                    if self._finished != count:
                        count, last = self._finished, time.monotonic()
                    if time.monotonic() - last > self.deadline:
                        raise DiskStalled(ticket.label, self.deadline)
                    self._ring()
        finally:
            self._waited(start)

    def raise_unclaimed(self) -> None:
        """Raise the first failure that was remembered and that nobody has seen."""
        with self.lock:
            if self._unclaimed:
                raise self._unclaimed.pop(0)[1]

    def claim(self, ticket: Ticket) -> None:
        self.check_process()
        with self.lock:
            self._unclaimed = [entry for entry in self._unclaimed if entry[0] is not ticket]

    def _waited(self, start: float) -> None:
        with self.lock:
            self.traffic.wait_seconds += time.monotonic() - start

    def _ring(self) -> None:
        """Have the inbox looked at: wake a thread, or start one."""
        self._bell.put(None)
        if not self._idle:
            self._start_worker()

    def _start_worker(self) -> None:
        if len(self.workers) >= self._max_workers:
            if all(worker.is_alive() for worker in self.workers):
                return
            self.workers[:] = [worker for worker in self.workers if worker.is_alive()]  # an interrupt came before it began
        worker = threading.Thread(target=_serve, args=(self,), name=f"lowtide-io-{len(self.workers)}", daemon=True)
        self.workers.append(worker)
        worker.start()

    # ---- the heap; under the lock, by the threads only (and by who closes) ----

    def _look_at_inbox(self) -> None:
        while self._inbox:
            ticket, priority = self._inbox.popleft()
            if ticket.sequence < 0:
                ticket.sequence = next(self._sequence)
                self._chains.setdefault(ticket.key, deque()).append(ticket)
                self.pending[ticket.sequence] = ticket
                if self._chains[ticket.key][0] is ticket:
                    self._push(ticket)
            for earlier in self._chains.get(ticket.key, ()) if ticket.sequence in self.pending else ():
                self._urge(earlier, priority)
                if earlier is ticket:
                    break

    def _push(self, ticket: Ticket) -> None:
        heapq.heappush(self._heap, (ticket.priority, ticket.sequence, ticket))

    def _urge(self, ticket: Ticket, priority: int) -> None:
        """Make a request at least so urgent. Its old entry in the heap stays and is skipped later."""
        if priority < ticket.priority:
            ticket.priority = priority
            if ticket.work is not None and self._chains[ticket.key][0] is ticket:
                self._push(ticket)

    # ---- the threads ----

    def take(self) -> tuple[Ticket, Callable[[], None]] | None:
        """The most urgent request, with its work; sleeps until there is one. None: the line is closed."""
        while True:
            with self.lock:
                with suppress(queue.Empty):
                    while True:  # what was rung for is in the inbox by now
                        self._bell.get_nowait()
                self._look_at_inbox()
                job = self._most_urgent()
                if job is not None:
                    self._begin()
                    if self._heap:
                        self._ring()
                    return job
                if self._closed:
                    self._bell.put(None)  # for the next thread
                    return None
                self._idle += 1
            self._bell.get()
            with self.lock:
                self._idle -= 1

    def _most_urgent(self) -> tuple[Ticket, Callable[[], None]] | None:
        while self._heap:
            priority, _, ticket = heapq.heappop(self._heap)
            work = ticket.work
            if work is not None and priority == ticket.priority:
                ticket.work = None  # started: from here on only the thread holds it
                return ticket, work
        return None

    def _begin(self) -> None:
        if not self._running:
            self._busy_since = time.monotonic()
        self._running += 1

    def end(self) -> None:
        """A thread has carried out what it took."""
        with self.lock:
            self._running -= 1
            now = time.monotonic()  # also while others run: a disk that never rests must not look idle
            self.traffic.busy_seconds += now - self._busy_since
            self._busy_since = now

    def finish(self, ticket: Ticket, failure: BaseException | None) -> None:
        """Let waiters and the next request of the same key go on, then run the callbacks."""
        with self.lock:
            if failure is not None and ticket.remembered:
                self._unclaimed.append((ticket, failure))
            chain = self._chains.get(ticket.key)
            if chain is not None:
                chain.remove(ticket)
                if not chain:
                    del self._chains[ticket.key]
                elif chain[0].work is not None:
                    self._push(chain[0])
                    self._ring()
            callbacks = ticket.settle(failure)
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # the thread must live on; the next caller gets it
                with self.lock:
                    self._unclaimed.append((None, error))
        with self.lock:
            del self.pending[ticket.sequence]
            self._finished += 1
        ticket.over.set()

    def abandon(self) -> None:
        """The threads end when nothing is left to do. Changes nothing else: a garbage collection may call it anywhere."""
        if os.getpid() == self.pid:
            self._closed = True
            self._bell.put(None)

    def close(self) -> None:
        """Requests that have not started fail; the threads end after the ones they are at. Idempotent, does not wait."""
        with self.lock:
            self._closed = True
            self._look_at_inbox()
            waiting = [ticket for ticket in self.pending.values() if ticket.work is not None]
            works = [ticket.work for ticket in waiting]  # let go outside the lock: they may be the last to hold the store
            for ticket in waiting:
                ticket.work = None
            self._heap.clear()
            self._bell.put(None)
        for ticket in waiting:
            self.finish(ticket, Refused(f"{ticket.label}: the store was closed before it was done"))
        works.clear()


def _serve(line: _Line) -> None:
    while (job := line.take()) is not None:
        ticket, work = job
        del job
        failure: BaseException | None = None
        begin = time.monotonic()
        try:
            work()
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            failure = error
        del work  # before anybody learns that the request is done: it holds the caller's memory
        line.end()
        if (observer := line.traffic.observer) is not None:
            observer("work", ticket.label, ticket.key, begin)
        if failure is not None:
            _forget_frames(ticket.label, failure)
        line.finish(ticket, failure)
        del ticket, failure


def _forget_frames(label: str, failure: BaseException) -> None:
    """An error may be kept for long; its frames would keep the memory of the request. A bug's go to the log instead."""
    if not isinstance(failure, Error):
        _log.error("%s failed in a thread:\n%s", label, "".join(traceback.format_exception(failure)))
    link: BaseException | None = failure
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


class IOQueue:
    """A few threads that carry out requests by urgency, in order for each key. Threads start when they are needed.

    ``traffic`` is where the seconds that callers waited are added; ``deadline`` is how long one request may take in seconds.
    """

    def __init__(self, threads: int = 4, *, traffic: Traffic | None = None, deadline: float = 300.0) -> None:
        self._line = _Line(threads, Traffic() if traffic is None else traffic, deadline)
        self._finalizer = weakref.finalize(self, _Line.abandon, self._line)

    @property
    def lock(self) -> threading.RLock:
        """Held while the traffic is changed."""
        return self._line.lock

    def check_process(self) -> None:
        """Raise in a process that was forked from the one that made this queue."""
        self._line.check_process()

    @property
    def foreign(self) -> bool:
        """Whether this is a process that was forked from the one that made this queue."""
        return os.getpid() != self._line.pid

    def submit(self, key: Hashable, label: str, priority: int, work: Callable[[], None], *, remembered: bool = False) -> Ticket:
        """Queue ``work``. ``remembered``: if it fails and nobody waits for it, the next ``submit`` or ``drain`` raises."""
        ticket = Ticket(self._line, key, label, priority, work)
        ticket.remembered = remembered
        self._line.submit(ticket)
        return ticket

    def settle(self) -> None:
        """Wait for everything submitted so far, failed or not."""
        self._line.drain()

    def drain(self) -> None:
        """Wait for everything submitted so far and its callbacks; raises what failed unseen."""
        self._line.drain()
        self._line.raise_unclaimed()

    def close(self) -> None:
        """Fail what has not started, wait for what has, end the threads. Does nothing in a forked process."""
        if self.foreign:
            return
        self._line.close()
        deadline = time.monotonic() + self._line.deadline
        for worker in self._line.workers:
            while worker.is_alive() and worker is not threading.current_thread():
                worker.join(_SLICE)
                if time.monotonic() > deadline:
                    raise DiskStalled("closing the store", self._line.deadline)
