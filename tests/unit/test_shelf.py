"""A shelf gives back what was put there, in memory or in a store, and no buffer is lost whatever goes wrong."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.errors import DiskError, InternalError
from lowtide.tiers.arena import Arena, ArenaFull
from lowtide.tiers.shelf import Shelf, borrowed
from lowtide.tiers.spool import Folder
from lowtide.tiers.store import Key, Priority
from tests.kit.stores import FailingDisk, Fault

CPU = torch.device("cpu")
CUTS = (0, 4096, 12288, 16384)
KEY = Key("blocks.0", "exp_avg")
FOREVER = 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FailingDisk]:
    with closing(FailingDisk([Folder(str(tmp_path))], rank=0)) as store:
        yield store


@pytest.fixture
def memory() -> Arena:
    return Arena(CPU, forked=True)


@pytest.fixture
def buffers() -> Arena:
    arena = Arena(CPU, forked=False)
    arena.poison = True
    return arena


def make(memory: Arena, store: FailingDisk | None) -> Shelf:
    return Shelf(KEY, CUTS, memory=memory, store=store)


def numbers(chunk: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * chunk + seed)
    return torch.randint(0, 256, (CUTS[chunk + 1] - CUTS[chunk],), dtype=torch.uint8, generator=generator)


def put(shelf: Shelf, buffers: Arena, seed: int = 0) -> None:
    for chunk in range(len(CUTS) - 1):
        with borrowed(shelf.open(chunk, buffers, Priority.NOW, fresh=True), changed=True) as tensor:
            tensor.copy_(numbers(chunk, seed))


def assert_holds(shelf: Shelf, buffers: Arena, seed: int = 0) -> None:
    for chunk in range(len(CUTS) - 1):
        with borrowed(shelf.open(chunk, buffers, Priority.NOW), changed=False) as tensor:
            assert torch.equal(tensor, numbers(chunk, seed)), f"chunk {chunk}"


def assert_idle(store: FailingDisk, buffers: Arena) -> None:
    store.arm(None)
    try:
        store.drain()
    except DiskError:
        store.drain()
    gc.collect()  # errors hold the frames they came through
    buffers.trim()
    assert (buffers.taken_bytes, buffers.limbo_bytes, buffers.reserved_bytes) == (0, 0, 0)


@pytest.mark.parametrize("where", ["memory", "store"])
def test_what_is_put_comes_back(where: str, memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store if where == "store" else None)
    assert shelf.in_memory == (where == "memory")
    assert [shelf.has(i) for i in range(3)] == [False] * 3
    put(shelf, buffers)
    assert [shelf.has(i) for i in range(3)] == [True] * 3
    assert_holds(shelf, buffers)
    assert_idle(store, buffers)
    assert memory.taken_bytes == (CUTS[-1] if where == "memory" else 0)


def test_many_leases_on_one_chunk_are_in_order(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    """A read that is asked for after a write was started gives what was written."""
    shelf = make(memory, store)
    for round_ in range(50):
        put(shelf, buffers, round_)
    assert_holds(shelf, buffers, 49)
    assert_idle(store, buffers)


def test_unchanged_bytes_are_not_kept(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    store.drain()
    written = store.traffic.written_bytes
    with borrowed(shelf.open(1, buffers, Priority.NOW), changed=False) as tensor:
        tensor.zero_()
    assert_holds(shelf, buffers)
    assert store.traffic.written_bytes == written


def test_an_error_inside_keeps_the_old_bytes(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    with pytest.raises(ZeroDivisionError), borrowed(shelf.open(1, buffers, Priority.NOW), changed=True) as tensor:
        tensor.zero_().fill_(1 // 0)
    del tensor
    assert_holds(shelf, buffers)
    assert_idle(store, buffers)


def test_a_lease_may_be_closed_before_its_bytes_are_there(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    for _ in range(20):
        shelf.open(1, buffers, Priority.MOMENTS).close(changed=False)
    assert_holds(shelf, buffers)
    assert_idle(store, buffers)


def test_moving_keeps_the_bytes(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    for _ in range(3):
        shelf.bring()
        assert shelf.in_memory
        assert memory.taken_bytes == CUTS[-1]
        assert_holds(shelf, buffers)
        shelf.send(store)
        assert not shelf.in_memory
        assert memory.taken_bytes == 0
        assert_holds(shelf, buffers)
    assert_idle(store, buffers)


def test_moving_what_was_never_written_moves_nothing(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    with borrowed(shelf.open(1, buffers, Priority.NOW, fresh=True), changed=True) as tensor:
        tensor.copy_(numbers(1))
    shelf.bring()
    assert [shelf.has(i) for i in range(3)] == [False, True, False]
    assert store.traffic.read_bytes == 8192
    shelf.send(store)
    with borrowed(shelf.open(1, buffers, Priority.NOW), changed=False) as tensor:
        assert torch.equal(tensor, numbers(1))
    del tensor
    with pytest.raises(InternalError, match="never written"):
        shelf.open(0, buffers, Priority.NOW)
    assert_idle(store, buffers)


def test_room_on_disk_is_given_back(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    used = store.used_bytes
    for _ in range(3):
        shelf.bring()
        store.drain()
        assert store.used_bytes == 0
        shelf.send(store)
        assert store.used_bytes == used


def test_a_shelf_without_bytes_is_in_memory(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = Shelf(KEY, (0, 0), memory=memory, store=store)
    assert shelf.in_memory
    with borrowed(shelf.open(0, buffers, Priority.NOW, fresh=True), changed=True) as tensor:
        assert tensor.numel() == 0


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_read_gives_the_buffer_back(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    store.drain()
    store.arm(Fault(errno.EIO, calls="read", times=FOREVER))
    lease = shelf.open(1, buffers, Priority.NOW)
    with pytest.raises(DiskError, match=r"exp_avg of unit 'blocks\.0'"), borrowed(lease, changed=True):
        raise AssertionError("unreachable")
    del lease
    assert_idle(store, buffers)
    assert_holds(shelf, buffers)


def test_a_failed_write_is_told_and_loses_the_chunk_only(memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    store.drain()
    store.arm(Fault(errno.EIO, calls="write", times=FOREVER))
    with borrowed(shelf.open(1, buffers, Priority.NOW), changed=True) as tensor:
        tensor.zero_()
    del tensor
    with pytest.raises(DiskError):
        store.drain()
    assert_idle(store, buffers)
    with pytest.raises(DiskError), borrowed(shelf.open(1, buffers, Priority.NOW), changed=False):
        raise AssertionError("unreachable")
    for chunk in (0, 2):
        with borrowed(shelf.open(chunk, buffers, Priority.NOW), changed=False) as tensor:
            assert torch.equal(tensor, numbers(chunk))
    del tensor
    assert_idle(store, buffers)


@pytest.mark.parametrize("at", range(3))
def test_a_failed_bring_leaves_the_shelf_where_it_was(at: int, memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, store)
    put(shelf, buffers)
    store.drain()
    store.arm(Fault(errno.EIO, at=at, calls="read", times=FOREVER))
    with pytest.raises(DiskError):
        shelf.bring()
    store.arm(None)
    assert not shelf.in_memory
    assert memory.taken_bytes == 0
    assert_holds(shelf, buffers)


@pytest.mark.parametrize("at", range(3))
def test_a_failed_send_leaves_the_shelf_where_it_was(at: int, memory: Arena, buffers: Arena, store: FailingDisk) -> None:
    shelf = make(memory, None)
    put(shelf, buffers)
    store.arm(Fault(errno.ENOSPC, at=at, calls="write", times=FOREVER))
    with pytest.raises(DiskError):
        shelf.send(store)
    store.arm(None)
    assert shelf.in_memory
    assert_holds(shelf, buffers)
    assert store.used_bytes == 0
    shelf.send(store)
    assert_holds(shelf, buffers)


def test_reading_ahead_does_not_wait_for_buffers(memory: Arena, store: FailingDisk) -> None:
    """Whoever holds all buffers and asks for one more would wait for ever."""
    buffers = Arena(CPU, forked=False, capacity=8192)
    shelf = make(memory, None)
    put(shelf, buffers)
    shelf.send(store)
    held = shelf.open(1, buffers, Priority.NOW)
    with pytest.raises(ArenaFull):
        shelf.open(0, buffers, Priority.NEXT, wait=False)
    held.close(changed=False)
    del held
    shelf.open(0, buffers, Priority.NEXT).close(changed=False)
    assert_idle(store, buffers)
