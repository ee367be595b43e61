"""Channels: order, headers, errors, notes."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from lowtide.comm import Group, Label, Wire
from lowtide.errors import DeadlineExceeded, Mismatch, PeerFailed, Refused
from tests.kit.dist import run_ranks


def label(unit: int, kind: str = "gather") -> Label:
    return Label(kind, unit, f"blocks.{unit}")


def keeps_order(rank: int, world_size: int) -> tuple[list[int], list[int], int]:
    group = Group.join(None, deadline=20)
    channel = group.channel("one")
    done: list[int] = []
    threads: set[int] = set()

    def work(wire: Wire, notes: list[bytes], unit: int) -> int:
        threads.add(threading.get_ident())
        done.append(unit)
        total = wire.world.all_gather_small(torch.tensor([wire.world.rank + unit]))
        return int(total.sum())

    tickets = [channel.submit(label(i), lambda w, n, i=i: work(w, n, i)) for i in range(20)]
    if rank == 0:
        time.sleep(0.1)
    results = [ticket.wait() for ticket in reversed(tickets)][::-1]
    assert all(ticket.done for ticket in tickets)
    assert (threading.get_ident() in threads) == (world_size == 1)
    group.close()
    return done, results, len(threads)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_work_is_done_in_order_on_one_thread(world_size: int) -> None:
    ranks = sum(range(world_size))
    expected = (list(range(20)), [ranks + world_size * i for i in range(20)], 1)
    assert run_ranks(world_size, keeps_order) == [expected] * world_size


def hands_over_notes(rank: int, world_size: int, size: int) -> bool:
    group = Group.join(None, deadline=20)
    channel = group.channel("one")
    notes = [bytes([65 + r]) * size for r in range(world_size)]
    for _ in range(2):
        assert channel.run(label(0), lambda wire, all_notes: all_notes, notes[rank]) == notes
    group.close()
    return True


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 130, 131, 132, 300, 100_000])
def test_notes_of_any_length_reach_all(world_size: int, size: int) -> None:
    run_ranks(world_size, hands_over_notes, size)


def raises_mismatch(rank: int, world_size: int, odd: int, other: Label, note: bytes) -> list[str]:
    group = Group.join(None, deadline=20)
    channel, second = group.channel("one"), group.channel("two")
    channel.run(label(2), lambda wire, notes: None)
    mine = other if rank == odd else label(3)
    ran: list[int] = []
    texts = []
    for _ in range(2):  # the second time the channel is broken, with the same words
        with pytest.raises(Mismatch) as caught:
            channel.run(mine, lambda wire, notes: ran.append(1), note if rank == odd else b"ab")
        texts.append(str(caught.value))
    assert ran == []
    second.run(label(0), lambda wire, notes: None)  # other channels are in order
    assert group.watch.failure is None
    group.close()
    return texts


@pytest.mark.parametrize(
    ("other", "note", "expected"),
    [
        (label(4), b"ab", "rank 0 is at gather of 'blocks.3', rank 1 is at gather of 'blocks.4'"),
        (label(3, "reduce"), b"ab", "rank 0 is at gather of 'blocks.3', rank 1 is at reduce of 'blocks.3'"),
        (label(3), b"abc", "rank 0 is at gather of 'blocks.3' with 2 bytes of note, rank 1 is at gather of 'blocks.3' with 3"),
        (
            label(3),
            b"x" * 999,
            "rank 0 is at gather of 'blocks.3' with 2 bytes of note, rank 1 is at gather of 'blocks.3' with 999",
        ),
    ],
)
def test_ranks_that_do_different_things_all_raise(other: Label, note: bytes, expected: str) -> None:
    for told in run_ranks(3, raises_mismatch, 1, other, note):
        assert [text.partition(". Every rank must run")[0] for text in told] == [f"ranks differ: {expected}"] * 2


def test_a_mismatch_of_rank_0_is_told_the_same_way() -> None:
    text = "ranks differ: rank 0 is at gather of 'blocks.4', rank 1 is at gather of 'blocks.3'"
    for told in run_ranks(2, raises_mismatch, 0, label(4), b"ab"):
        assert [line.partition(". Every rank must run")[0] for line in told] == [text, text]


def fail_in_work(rank: int, world_size: int) -> list[str]:
    group = Group.join(None, deadline=20)
    channel = group.channel("one")

    def work(wire: Wire, notes: list[bytes]) -> None:
        if rank == world_size - 1:
            raise ValueError("bad bytes")
        wire.world.all_gather_small(torch.zeros(1))

    started = time.monotonic()
    first, second = channel.submit(label(1), work), channel.submit(label(2), work)
    texts = []
    for attempt in (first.wait, second.wait, first.wait, lambda: channel.run(label(3), work)):
        with pytest.raises((ValueError, PeerFailed)) as caught:
            attempt()
        texts.append(f"{caught.type.__name__}: {caught.value}")
    assert time.monotonic() - started < 15, "by itself, not by its deadline of 20"
    group.close()
    return texts


def test_an_error_on_the_thread_reaches_all_ranks() -> None:
    results = run_ranks(3, fail_in_work)
    assert results[2] == ["ValueError: bad bytes"] * 4
    for texts in results[:2]:
        assert all(text.startswith("PeerFailed: rank 2 failed: ValueError: bad bytes") for text in texts), texts
        assert "gather of 'blocks.1'" in texts[0]


def test_one_rank_raises_at_wait_too() -> None:
    group = Group.join(None, deadline=5)
    channel = group.channel("one")

    def work(wire: Wire, notes: list[bytes]) -> None:
        raise ValueError("bad bytes")

    ticket = channel.submit(label(0), work)
    assert ticket.done
    with pytest.raises(ValueError, match="bad bytes"):
        ticket.wait()
    assert channel.run(label(1), lambda wire, notes: 3) == 3, "nobody is out of step: the next one runs"
    group.close()


def test_an_error_nobody_waited_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    group = Group.join(None, deadline=5)

    def work(wire: Wire, notes: list[bytes]) -> None:
        raise ValueError("bad bytes")

    group.channel("one").submit(label(0), work)
    with caplog.at_level(logging.ERROR):
        group.close()
    assert "bad bytes" in caplog.text


def late_rank(rank: int, world_size: int) -> str:
    group = Group.join(None, deadline=0.8, first_deadline=60)  # a rank may be slow to begin
    channel = group.channel("one")
    channel.run(label(6), lambda wire, notes: None)
    group.deadlines.settled()
    error = "none"
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            channel.run(label(7), lambda wire, notes: None)
        assert 0.7 < time.monotonic() - started < 20
        error = str(caught.value)
    else:
        end = time.monotonic() + 30
        while group.watch.failure is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(PeerFailed, match="rank 0 failed: DeadlineExceeded"):
            channel.run(label(7), lambda wire, notes: None)
    group.close()
    return error


def test_a_wait_has_a_deadline() -> None:
    assert "no answer for gather of 'blocks.7' within 1 s" in run_ranks(2, late_rank)[0]


def one_leaves(rank: int, world_size: int) -> float:
    group = Group.join(None, deadline=30)
    channel = group.channel("one")
    channel.run(label(0), lambda wire, notes: None)
    started = time.monotonic()
    if rank != 1:
        with pytest.raises(PeerFailed, match=r"rank 1 failed: left in good order.*blocks.1"):
            channel.run(label(1), lambda wire, notes: None)
    group.close()
    group.close()
    with pytest.raises(Refused, match="closed"):
        channel.run(label(2), lambda wire, notes: None)
    return time.monotonic() - started


def test_a_rank_that_closed_its_group_is_named() -> None:
    times = run_ranks(3, one_leaves)
    assert max(times) < 15, f"by itself, not by its deadline of 30: {times}"


def work_is_let_go(rank: int, world_size: int) -> bool:
    import gc
    import weakref

    group = Group.join(None, deadline=20)
    channel = group.channel("one")
    big = torch.zeros(1000)
    gone = weakref.ref(big)
    ticket = channel.submit(label(0), lambda wire, notes, big=big: big.numel())
    assert ticket.wait() == 1000
    del big
    channel.run(label(1), lambda wire, notes: None)
    gc.collect()
    alive = gone() is not None
    group.close()
    return alive


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_finished_ticket_holds_no_tensors(world_size: int) -> None:
    assert run_ranks(world_size, work_is_let_go) == [False] * world_size


def groups_leave_nothing(rank: int, world_size: int) -> tuple[int, int]:
    import os

    def state() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for i in range(4):
        group = Group.join(None, deadline=20)
        group.channel("one").run(label(0), lambda wire, notes: None)
        group.close()
        del group
        if i == 0:
            before = state()
    after = state()
    return after[0] - before[0], after[1] - before[1]


def test_a_closed_group_leaves_no_threads_and_no_files() -> None:
    for threads, files in run_ranks(3, groups_leave_nothing):
        assert threads <= 0
        assert files <= 0
