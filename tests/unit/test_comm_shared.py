"""Memory that ranks share: who may open it, what it counts, and counters that processes wait for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import struct
import threading
import time

import pytest
import torch

from lowtide.comm.local import open_together
from lowtide.comm.shared import PAGE, TICKET_BYTES, CannotShare, Segment

_FORK = multiprocessing.get_context("forkserver")


def test_what_one_maps_the_other_sees() -> None:
    made = Segment.make(3 * PAGE)
    opened = Segment.open(made.ticket)
    made.tensor(PAGE, 8).view(torch.float64).fill_(0.5)
    assert opened.tensor(PAGE, 8).view(torch.float64).item() == 0.5
    assert opened.tensor(0, 0).numel() == 0


def test_tensors_have_storages_of_their_own() -> None:
    segment = Segment.make(2 * PAGE)
    first, second = segment.tensor(0, PAGE), segment.tensor(0, PAGE)
    assert first.data_ptr() == second.data_ptr()
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_memory_is_taken_when_it_is_touched_and_can_be_given_back() -> None:
    segment = Segment.make(64 * PAGE)
    before = segment.taken_bytes
    assert before <= PAGE
    segment.tensor(0, 64 * PAGE).fill_(7)
    assert segment.taken_bytes == before + 64 * PAGE
    segment.give_back(PAGE // 2, 10 * PAGE)  # from the middle of a page to the middle of one: nine whole ones
    assert segment.taken_bytes == before + 55 * PAGE
    assert segment.tensor(0, PAGE).eq(7).all()
    assert segment.tensor(PAGE, PAGE).eq(0).all()


@pytest.mark.parametrize("what", ["secret", "bytes", "descriptor", "process"])
def test_a_ticket_that_does_not_fit_opens_nothing(what: str) -> None:
    segment = Segment.make(PAGE)
    fields = dict(zip(("process", "descriptor", "bytes", "secret"), struct.unpack("<qqq32s", segment.ticket), strict=True))
    wrong = {"secret": b"x" * 32, "bytes": 2 * PAGE, "descriptor": 10**6, "process": 2**30}[what]
    with pytest.raises(CannotShare):
        Segment.open(struct.pack("<qqq32s", *{**fields, what: wrong}.values()))


def test_nobody_can_make_it_shorter_under_a_mapping() -> None:
    segment = Segment.make(PAGE)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment._descriptor, PAGE)


def test_memory_that_could_shrink_is_refused() -> None:
    loose = os.memfd_create("loose", os.MFD_CLOEXEC)
    secret = b"s" * 32
    os.pwrite(loose, secret.ljust(2 * PAGE, b"\0"), 0)
    try:
        with pytest.raises(CannotShare, match="not what its maker described"):
            Segment.open(struct.pack("<qqq32s", os.getpid(), loose, PAGE, secret))
    finally:
        os.close(loose)


def test_one_rank_that_cannot_open_it_is_an_error_for_all() -> None:
    ticket: list[bytes] = []

    def share(mine: bytes) -> list[bytes]:
        if len(mine) == TICKET_BYTES:
            ticket.append(mine)
            return [mine, b"\0" * TICKET_BYTES]
        return [mine, b"no permission".ljust(200, b"\0")]

    with pytest.raises(CannotShare, match="no permission"):
        open_together(0, PAGE, share)
    assert ticket


def test_descriptors_are_let_go_with_the_segment() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment.make(PAGE)
    kept = segment.tensor(0, 8)
    segment.close()
    assert segment.taken_bytes == 0
    del segment
    kept.fill_(1)  # memory lives on
    del kept
    assert len(os.listdir("/proc/self/fd")) <= before


def _advance(ticket: bytes, index: int, to: int, after: float) -> None:
    time.sleep(after)
    Segment.open(ticket).counters(0, 4).advance(index, to)


def test_a_wait_ends_when_another_process_advances_the_counter() -> None:
    segment = Segment.make(PAGE)
    counters = segment.counters(0, 4)
    other = _FORK.Process(target=_advance, args=(segment.ticket, 2, 5, 0.2))
    other.start()
    end = time.monotonic() + 60
    while not counters.wait(2, 5, 10.0):
        assert time.monotonic() < end
    assert counters.value(2) == 5
    assert not counters.reached(2, 6)
    other.join()


def test_a_wait_gives_up_after_its_time_and_lets_other_threads_run() -> None:
    counters = Segment.make(PAGE).counters(0, 1)
    ran = threading.Event()
    threading.Timer(0.05, ran.set).start()
    assert not counters.wait(0, 1, 0.5)
    assert ran.is_set()


def test_counters_wrap() -> None:
    counters = Segment.make(PAGE).counters(0, 1)
    counters.advance(0, 2**32 - 1)
    assert counters.reached(0, 2**32 - 1)
    assert not counters.reached(0, 2**32 + 1)
    counters.advance(0, 2**32 + 1)
    assert counters.value(0) == 1
    assert counters.reached(0, 2**32 - 1)
    assert counters.reached(0, 2**32 + 1)


def test_a_forked_child_does_not_have_it() -> None:
    """Loader workers must not count, or keep, what ranks share."""
    segment = Segment.make(PAGE)
    address = segment.tensor(0, 8).data_ptr()
    assert _is_mapped(address)
    child = os.fork()
    if child == 0:
        os._exit(1 if _is_mapped(address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in file]
    return any(first <= address < end for first, end in ranges)
