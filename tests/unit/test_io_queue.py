"""The queue of I/O requests: urgency, order per key, failures that nobody waits for, forks, and its end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lowtide.errors import DiskStalled, Refused
from lowtide.tiers import queue as queue_module
from lowtide.tiers.queue import IOQueue
from lowtide.tiers.store import Priority, Traffic
from tests.kit.interrupts import Spot, executed, interrupted


class Gate:
    """Work that holds a thread until it is opened."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def queue() -> Iterator[IOQueue]:
    queue = IOQueue(1, deadline=30)
    yield queue
    queue.close()


def nothing() -> None: ...


def blocked(queue: IOQueue, gate: Gate) -> None:
    queue.submit("gate", "gate", Priority.NOW, gate)
    assert gate.started.wait(30)


def recorder(seen: list[str], name: str) -> Callable[[], None]:
    return lambda: seen.append(name)


def test_the_most_urgent_goes_first_and_equals_in_their_order(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    seen: list[str] = []
    for name, priority in [("c", 4), ("w", 3), ("n1", 0), ("m", 2), ("x", 1), ("n2", 0), ("w2", 3)]:
        queue.submit(name, name, priority, recorder(seen, name))
    gate.open()
    queue.drain()
    assert seen == ["n1", "n2", "x", "m", "w", "w2", "c"]


def test_an_urgent_request_pulls_those_of_its_key_before_it(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    seen: list[str] = []
    queue.submit("other", "other", Priority.NEXT, recorder(seen, "other"))
    queue.submit("key", "old", Priority.CHECKPOINT, recorder(seen, "old"))
    queue.submit("key", "mid", Priority.WRITE_BACK, recorder(seen, "mid"))
    queue.submit("key", "urgent", Priority.NOW, recorder(seen, "urgent"))
    queue.submit("key", "late", Priority.CHECKPOINT, recorder(seen, "late"))
    gate.open()
    queue.drain()
    assert seen == ["old", "mid", "urgent", "other", "late"]


def test_what_somebody_waits_for_becomes_urgent(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    seen: list[str] = []
    queue.submit("other", "other", Priority.NEXT, recorder(seen, "other"))
    queue.submit("key", "first", Priority.CHECKPOINT, recorder(seen, "first"))
    second = queue.submit("key", "second", Priority.CHECKPOINT, recorder(seen, "second"))
    waiter = threading.Thread(target=second.wait)
    waiter.start()
    while (second, Priority.NOW) not in list(queue._line._inbox):
        time.sleep(0.001)
    gate.open()
    waiter.join(30)
    queue.drain()
    assert seen == ["first", "second", "other"]


def test_one_key_at_a_time_in_order_with_many_threads() -> None:
    queue = IOQueue(8)
    seen: dict[int, list[int]] = {key: [] for key in range(5)}
    inside: dict[int, int] = dict.fromkeys(range(5), 0)
    overlaps: list[int] = []

    def work(key: int, number: int) -> None:
        inside[key] += 1
        if inside[key] > 1:
            overlaps.append(key)
        time.sleep(0.0002)
        seen[key].append(number)
        inside[key] -= 1

    for number in range(60):
        for key in range(5):
            queue.submit(key, "w", (number * 7 + key) % 5, lambda key=key, number=number: work(key, number))
    queue.drain()
    assert not overlaps
    assert all(numbers == list(range(60)) for numbers in seen.values())
    queue.close()


def test_threads_start_when_needed_and_end_on_close() -> None:
    queue = IOQueue(3)
    before = {t for t in threading.enumerate() if t.name.startswith("lowtide-io")}
    gates = [Gate() for _ in range(5)]
    for number, gate in enumerate(gates):
        queue.submit(number, "gate", 0, gate)
    assert all(gate.started.wait(30) for gate in gates[:3])
    mine = {t for t in threading.enumerate() if t.name.startswith("lowtide-io")} - before
    assert len(mine) == 3
    assert not gates[3].started.is_set()
    for gate in gates:
        gate.open()
    queue.drain()
    queue.close()
    queue.close()
    assert not any(t.is_alive() for t in mine)
    with pytest.raises(Refused, match="closed"):
        queue.submit(0, "late", 0, nothing)


def test_close_fails_what_has_not_started(gate: Gate) -> None:
    queue = IOQueue(1)
    blocked(queue, gate)
    ran: list[str] = []
    told: list[str] = []
    ticket = queue.submit("x", "write of x", 0, recorder(ran, "x"), remembered=True)
    after = queue.submit("x", "second write of x", 0, recorder(ran, "x"))
    ticket.on_done(recorder(told, "x"))

    def open_when_closed() -> None:
        while not queue._line._closed:
            time.sleep(0.001)
        gate.open()

    threading.Thread(target=open_when_closed).start()
    queue.close()
    for each in (ticket, after):
        with pytest.raises(Refused, match="write of x: the store was closed"):
            each.wait()
    assert (ran, told) == ([], ["x"])


def fail() -> None:
    raise ValueError("broken")


def test_a_failure_is_raised_by_every_wait(queue: IOQueue) -> None:
    ticket = queue.submit("x", "x", 0, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            ticket.wait()
    assert ticket.done
    queue.drain()
    queue.submit("y", "y", 0, nothing).wait()


@pytest.mark.parametrize("use", ["submit", "drain"])
def test_a_remembered_failure_that_nobody_saw_is_raised_by_the_next_use(queue: IOQueue, use: str) -> None:
    queue.submit("x", "x", 0, fail, remembered=True)
    queue.settle()
    with pytest.raises(ValueError, match="broken"):
        queue.drain() if use == "drain" else queue.submit("y", "y", 0, nothing)
    queue.submit("y", "y", 0, nothing).wait()
    queue.drain()


def test_a_remembered_failure_that_was_seen_is_not_raised_again(queue: IOQueue) -> None:
    ticket = queue.submit("x", "x", 0, fail, remembered=True)
    with pytest.raises(ValueError, match="broken"):
        ticket.wait()
    queue.drain()
    queue.submit("y", "y", 0, nothing).wait()


def test_callbacks_run_once_failed_or_not(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    told: list[str] = []
    good = queue.submit("x", "x", 0, nothing)
    bad = queue.submit("y", "y", 0, fail)
    for ticket, name in ((good, "good"), (bad, "bad"), (bad, "bad again")):
        ticket.on_done(recorder(told, name))
    assert told == []
    gate.open()
    queue.drain()
    assert told == ["good", "bad", "bad again"]
    good.on_done(recorder(told, "at once"))
    assert told[-1] == "at once"


def test_a_callback_that_raises_stops_nothing_and_is_heard(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    told: list[str] = []
    ticket = queue.submit("x", "x", 0, nothing)
    ticket.on_done(fail)
    ticket.on_done(recorder(told, "second"))
    gate.open()
    queue.settle()
    ticket.wait()
    assert told == ["second"]
    with pytest.raises(ValueError, match="broken"):
        queue.drain()
    queue.submit("y", "y", 0, nothing).wait()


def test_a_callback_may_submit(queue: IOQueue, gate: Gate) -> None:
    blocked(queue, gate)
    seen: list[str] = []
    ticket = queue.submit("x", "x", 0, nothing)
    ticket.on_done(lambda: queue.submit("x", "next", 0, recorder(seen, "next")) and None)
    gate.open()
    queue.drain()
    queue.drain()
    assert seen == ["next"]


def test_a_wait_has_a_deadline_and_says_for_what(gate: Gate) -> None:
    traffic = Traffic()
    queue = IOQueue(1, traffic=traffic, deadline=0.1)
    blocked(queue, gate)
    ticket = queue.submit("x", "read of moments of 'head'", 0, nothing)
    with pytest.raises(DiskStalled, match="read of moments of 'head' was not done within 0 s"):
        ticket.wait()
    with pytest.raises(DiskStalled, match="gate"):
        queue.drain()
    assert traffic.wait_seconds >= 0.2
    queue._line.deadline = 30.0
    gate.open()
    queue.settle()
    waited = traffic.wait_seconds
    ticket.wait()
    assert traffic.wait_seconds == waited
    queue.close()


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("wait", ["ticket", "drain"])
def test_ctrl_c_gets_through(queue: IOQueue, gate: Gate, wait: str) -> None:
    blocked(queue, gate)
    ticket = queue.submit("x", "x", 0, nothing)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come any time after the timer was set
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            ticket.wait() if wait == "ticket" else queue.drain()
    finally:
        signal.signal(signal.SIGALRM, before)
    gate.open()
    ticket.wait()
    queue.drain()


class Memory:
    """Something whose end can be seen."""


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_request_that_is_done_holds_nothing(queue: IOQueue, end: str) -> None:
    memory = Memory()
    seen = weakref.ref(memory)

    def work(held: Memory) -> None:
        local = held
        if end == "failed":
            raise ValueError(type(local).__name__)

    ticket = queue.submit("x", "x", 0, lambda memory=memory: work(memory))
    del memory
    queue.settle()
    assert ticket.done
    assert seen() is None


def test_a_dropped_queue_finishes_and_ends_its_threads(gate: Gate) -> None:
    queue = IOQueue(2)
    seen_work: list[str] = []
    blocked(queue, gate)
    for name in ("a", "b"):
        queue.submit("gate", name, 0, recorder(seen_work, name))
    workers = list(queue._line.workers)
    seen = weakref.ref(queue)
    del queue
    gc.collect()
    assert seen() is None
    gate.open()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert seen_work == ["a", "b"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_and_disturbs_nothing(queue: IOQueue, gate: Gate, tmp_path: Path) -> None:
    blocked(queue, gate)
    seen: list[str] = []
    ticket = queue.submit("x", "x", 0, recorder(seen, "x"))
    queue._line.lock.acquire()  # the worst moment: the child's copy of the lock is never released
    child = os.fork()
    if child == 0:
        refusals = 0
        for use in (lambda: queue.submit("y", "y", 0, nothing), queue.drain, ticket.wait, lambda: ticket.on_done(nothing)):
            try:
                use()
            except Refused:
                refusals += 1
        queue.close()
        queue._finalizer()
        os._exit(refusals)
    queue._line.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    gate.open()
    ticket.wait()
    queue.drain()
    assert seen == ["x"]


def test_a_disk_that_never_rests_is_seen_to_work(gate: Gate) -> None:
    """What is busy counts when a request ends, also while others run on."""
    traffic = Traffic()
    queue = IOQueue(2, traffic=traffic, deadline=30)
    queue.submit(1, "long", Priority.NOW, gate)
    assert gate.started.wait(30)
    time.sleep(0.05)
    queue.submit(2, "short", Priority.NOW, lambda: None).wait()
    queue.submit(3, "short", Priority.NOW, lambda: None).wait()  # the one before is over for certain
    assert traffic.busy_seconds >= 0.05
    gate.open()
    queue.close()


def test_an_interrupt_at_any_line_of_a_caller_stops_no_request() -> None:
    """A signal whose handler raises, at the n-th line that a caller of the queue runs, for every n, in every shape of use."""

    def use(queue: IOQueue, seen: list[str]) -> None:
        ticket = queue.submit("x", "x", Priority.CHECKPOINT, recorder(seen, "x"))
        behind = queue.submit("x", "behind x", Priority.NOW, recorder(seen, "behind x"), remembered=True)
        behind.on_done(nothing)
        behind.wait()
        ticket.wait()
        queue.drain()

    folder = os.path.dirname(queue_module.__file__)
    whole = executed(folder, lambda: use(IOQueue(2, deadline=30), []))
    fired = 0
    for file, line in sorted(whole):
        for nth in range(1, min(whole[file, line], 3) + 1):
            queue, seen = IOQueue(2, deadline=30), list[str]()
            with (
                interrupted(folder, Spot(file, line, nth), lambda: KeyboardInterrupt("now")) as shot,
                suppress(KeyboardInterrupt),
            ):
                use(queue, seen)
            fired += shot.sent
            for number in range(3):  # more of the same key, and others: what was asked for before comes first
                queue.submit(number or "x", "later", Priority.NEXT, recorder(seen, f"later {number}")).wait()
            queue.drain()
            asked = [name for name in seen if name in ("x", "behind x")]
            assert asked in ([], ["x"], ["x", "behind x"]), (file, line, nth)
            assert sorted(set(seen) - set(asked)) == ["later 0", "later 1", "later 2"]
            queue.close()
    assert fired > 60
