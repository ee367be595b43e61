"""The report on a hang: whom it names, what it shows, and how it passes between ranks."""

from __future__ import annotations

import threading
import time

from lowtide.comm.deadlines import Deadlines
from lowtide.comm.hang import COMES, DONE, MOVES, Finding, Hang, Place, Status, find, stacks_here
from lowtide.comm.inquiry import Inquiry, Pieces, cut

GATHER = "channel 'gather'"
HANG = Hang(0, "gather of 'blocks.1'", GATHER, 3.04)


def status(rank: int, exchange: int, state: str = COMES, stacks: str = "") -> Status:
    return Status(rank, "forward", (Place(GATHER, f"gather of 'blocks.{exchange}'", state, 2.5, exchange),), stacks, f"p{rank}")


def test_a_rank_that_does_not_answer_is_named() -> None:
    found = find(HANG, {0: status(0, 1), 2: status(2, 1)}, asked=[0, 1, 2], left=[], size=3)
    assert found.because == "rank 1 does not answer"
    assert found.silent == (1,)
    head, waits, *rest = found.report.splitlines()
    assert head == "lowtide: rank 0 has waited 3.0 s for gather of 'blocks.1' (channel 'gather'): rank 1 does not answer."
    assert waits == "  ranks 0, 2 wait for rank 1"
    assert rest == [
        "  rank 0: p0, forward",
        "    channel 'gather': at gather of 'blocks.1' (exchange 1) for 2.5 s, waits for the others to come",
        "  rank 1: does not answer (stopped, or stuck in native code that holds Python's lock)",
        "  rank 2: p2, forward",
        "    channel 'gather': at gather of 'blocks.1' (exchange 1) for 2.5 s, waits for the others to come",
    ]


def test_a_rank_that_is_elsewhere_is_named_with_what_it_did_last() -> None:
    answers = {0: status(0, 4), 1: status(1, 3, DONE), 2: status(2, 4)}
    found = find(HANG, answers, asked=[0, 1, 2], left=[], size=3)
    assert found.because == "rank 1 is not there (rank 1 last did gather of 'blocks.3' there, 2.5 s ago)"
    assert "ranks 0, 2 wait for rank 1" in found.report
    assert found.silent == ()
    never = find(HANG, {0: status(0, 4), 1: Status(1, "", (), "")}, asked=[0, 1], left=[], size=2)
    assert never.because == "rank 1 is not there (rank 1 has not been there yet)"
    known = Hang(0, "its turn", "memory", 3.0, awaited=2)
    assert "rank 2 has not done its part" in find(known, answers, asked=[0, 1, 2], left=[], size=3).because


def test_nobody_is_blamed_if_all_are_there() -> None:
    answers = {rank: status(rank, 4, MOVES) for rank in range(3)}
    found = find(HANG, answers, asked=[0, 1, 2], left=[], size=3)
    assert found.because.startswith("all ranks take part")
    assert " wait for rank" not in found.report


def test_ranks_that_left_or_could_not_be_asked_are_told_apart() -> None:
    found = find(HANG, {2: status(2, 1)}, asked=[0, 1, 2], left=[1], size=4)
    assert found.silent == (0,)
    assert "rank 1: left in good order" in found.report
    assert "rank 3: could not be asked" in found.report


def test_stacks_that_are_alike_are_shown_once() -> None:
    answers = {rank: status(rank, 1, stacks="    Main" if rank else "    Other") for rank in range(3)}
    report = find(HANG, answers, asked=[0, 1, 2], left=[], size=3).report
    assert "stacks of rank 0:\n    Other" in report
    assert report.count("    Main") == 1
    assert "stacks of ranks 1, 2:" in report


def test_all_of_it_passes_between_ranks() -> None:
    one = status(3, 7, stacks="ümlaut " * 900)
    assert Status.from_bytes(one.to_bytes()) == one
    assert Hang.from_bytes(HANG.to_bytes()) == HANG
    found = Finding("because", "report", (1, 2))
    assert Finding.from_bytes(found.to_bytes()) == found
    pieces = Pieces()
    for text in (one.to_bytes(), b"", b"x", b"y" * 1016, b"z" * 1017):
        parts = cut(text, 1017)
        assert all(len(part) <= 1017 for part in parts)
        assert [pieces.add(part) for part in parts] == [None] * (len(parts) - 1) + [text]


def test_a_long_label_still_fits_into_a_message() -> None:
    long = Hang(0, "gather of " + "x" * 2000, "channel " + "y" * 2000, 1.0)
    assert len(long.to_bytes()) < 1000


def wait_here(event: threading.Event) -> None:
    event.wait()


def stacks_once_all_wait() -> str:
    """A thread that was just started may not have come to its wait yet: ask until all of them are there."""
    until = time.monotonic() + 20
    while True:
        stacks = stacks_here()
        if ("asking.join()" in stacks and "wait_here: event.wait()" in stacks) or time.monotonic() > until:
            return stacks
        time.sleep(0.01)


def test_stacks_show_other_threads_in_full_and_ours_in_one_line() -> None:
    event = threading.Event()
    threads = [threading.Thread(target=wait_here, args=(event,), name=name) for name in ("theirs", "lowtide-gather")]
    for thread in threads:
        thread.start()
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(stacks_once_all_wait()), name="lowtide-hang")
    asking.start()
    asking.join()
    event.set()
    for thread in threads:
        thread.join()
    lines = found[0].splitlines()
    assert lines[0].strip() == "MainThread"
    assert any("test_hang.py" in line and "asking.join()" in line for line in lines)
    assert "    theirs" in lines
    assert any("wait_here: event.wait()" in line for line in lines)
    ours = [line for line in lines if "lowtide-gather" in line]
    assert len(ours) == 1
    assert "wait_here: event.wait()" not in ours[0]
    assert "lowtide-hang" not in found[0]


def test_the_first_finding_counts() -> None:
    inquiry = Inquiry(HANG, asked={0, 1})
    assert inquiry.wait_for_finding(0.0) is None
    first, second = Finding("a", "A", ()), Finding("b", "B", ())
    assert inquiry.offer(first) is first
    assert inquiry.offer(second) is first
    assert inquiry.wait_for_answers(10.0, gone=set()) is first


def test_answers_are_waited_for_until_all_are_there() -> None:
    inquiry = Inquiry(HANG, asked={0, 1, 2})
    inquiry.add(status(0, 1))
    threading.Timer(0.05, lambda: inquiry.add(status(1, 1))).start()
    started = time.monotonic()
    assert inquiry.wait_for_answers(20.0, gone={2}) is None
    assert time.monotonic() - started < 15
    assert set(inquiry.statuses()) == {0, 1}


def test_deadlines_are_long_until_the_first_step_and_where_patience_is_asked_for() -> None:
    deadlines = Deadlines(3.0, first=30.0)
    assert deadlines.seconds == deadlines.longest == 30.0
    deadlines.settled()
    deadlines.settled()
    assert deadlines.seconds == 3.0
    with deadlines.relaxed(), deadlines.relaxed():
        assert deadlines.seconds == 30.0
    assert deadlines.seconds == 3.0
    assert Deadlines(3.0, first=1.0).seconds == 3.0, "never shorter than later"
    assert Deadlines.fixed(3.0).seconds == 3.0
