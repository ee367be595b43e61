"""The arena, step by step; tests/property/test_arena.py plays any game with it."""

from __future__ import annotations

import mmap

import pytest
import torch

from lowtide.tiers.arena import Arena


@pytest.fixture
def arena() -> Arena:
    return Arena(torch.device("cpu"), forked=False)


@pytest.mark.parametrize("nbytes", [0, 1, 100, mmap.PAGESIZE, mmap.PAGESIZE + 1, (4 << 20) + 64])
def test_a_block_is_writable_and_long_enough(arena: Arena, nbytes: int) -> None:
    block = arena.take(nbytes)
    assert block.nbytes >= nbytes
    assert block.tensor.dtype is torch.uint8
    block.tensor.fill_(7)
    assert int(block.tensor[:nbytes].sum()) == 7 * nbytes
    assert block.tensor.data_ptr() % 64 == 0 or nbytes == 0


def test_memory_is_reused(arena: Arena) -> None:
    first = arena.take(10_000)
    address = first.tensor.data_ptr()
    arena.give(first)
    assert arena.take(8_000).tensor.data_ptr() == address
    assert arena.reserved_bytes == 10_000


def test_a_block_far_too_large_is_left_for_others(arena: Arena) -> None:
    large = arena.take(100_000)
    arena.give(large)
    small = arena.take(10_000)
    assert small is not large
    assert small.nbytes == 10_000


def test_the_smallest_that_fits_is_taken(arena: Arena) -> None:
    blocks = [arena.take(n) for n in (14_000, 11_000, 12_000)]
    for block in blocks:
        arena.give(block)
    assert arena.take(10_000) is blocks[1]


def test_counts(arena: Arena) -> None:
    a, b = arena.take(5_000), arena.take(7_000)
    assert (arena.taken_bytes, arena.reserved_bytes) == (12_000, 12_000)
    arena.give(a)
    assert (arena.taken_bytes, arena.reserved_bytes, arena.limbo_bytes) == (7_000, 12_000, 0)
    arena.trim()
    assert (arena.taken_bytes, arena.reserved_bytes) == (7_000, 7_000)
    arena.give(b)
    arena.trim()
    assert (arena.taken_bytes, arena.reserved_bytes) == (0, 0)


def test_a_block_with_a_view_outside_waits(arena: Arena) -> None:
    """What autograd or a caller still looks at is neither handed out nor overwritten."""
    arena.poison = True
    block = arena.take(4_096)
    block.tensor.fill_(3)
    view = block.tensor[64:128].view(torch.float32)
    kept = view.clone()
    arena.give(block)
    assert arena.limbo_bytes == 4_096
    other = arena.take(4_096)
    other.tensor.fill_(9)
    assert other is not block
    assert torch.equal(view, kept)
    del view
    arena.give(other)
    assert arena.limbo_bytes == 0
    assert {id(arena.take(4_096)) for _ in range(2)} == {id(block), id(other)}


@pytest.mark.parametrize("view", [lambda t: t.numpy(), lambda t: t.data, lambda t: t[:0], lambda t: t.view(4, 1024).t()])
def test_every_kind_of_view_counts(arena: Arena, view: object) -> None:
    block = arena.take(4_096)
    kept = view(block.tensor)  # type: ignore[operator]
    assert block.held
    arena.give(block)
    assert arena.limbo_bytes == 4_096
    del kept
    arena.give(arena.take(1))
    assert arena.limbo_bytes == 0


def test_poison_shows_in_released_memory(arena: Arena) -> None:
    arena.poison = True
    block = arena.take(4_096)
    block.tensor.zero_()
    arena.give(block)
    assert arena.take(4_096).tensor.view(torch.float32).isnan().any()
