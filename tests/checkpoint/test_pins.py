"""Pinned blocks of the disk tier: what was pinned stays, whatever is written later, and room comes back when it is let go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.errors import DiskFull
from lowtide.tiers.disk import DiskStore, Folder
from lowtide.tiers.store import Extent, Key, Priority

BLOCK = 8192
CUTS = (0, BLOCK, 2 * BLOCK, 2 * BLOCK + 4096)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = DiskStore([Folder(str(tmp_path))], rank=0)
    yield made
    made.close()


def fill(store: DiskStore, extent: Extent, value: int) -> None:
    for block in range(len(CUTS) - 1):
        store.write(extent, block, torch.full((extent.block_bytes(block),), value, dtype=torch.uint8), Priority.WRITE_BACK)
    store.drain()


def read(store: DiskStore, extent: Extent, block: int) -> Tensor:
    into = torch.empty(extent.block_bytes(block), dtype=torch.uint8)
    store.read(extent, block, into, Priority.NOW).wait()
    return into


def test_what_was_pinned_stays_while_others_write(store: DiskStore) -> None:
    extent = store.reserve(Key("unit", "kind"), CUTS)
    fill(store, extent, 1)
    pin = store.pin([extent])
    for value in (2, 3):
        fill(store, extent, value)
    for block, pinned in enumerate(pin.blocks[extent]):
        assert pinned is not None
        into = torch.empty(pinned.nbytes, dtype=torch.uint8)
        store.read_pinned(pinned, into, "unit/kind").wait()
        assert into.eq(1).all()
        assert read(store, extent, block).eq(3).all()


def test_room_comes_back_when_a_pin_is_released(store: DiskStore) -> None:
    extent = store.reserve(Key("unit", "kind"), CUTS)
    fill(store, extent, 1)
    before = store.used_bytes
    pin = store.pin([extent])
    assert store.used_bytes == 2 * before  # with the spare places
    fill(store, extent, 2)
    assert store.used_bytes == 2 * before
    pin.release()
    pin.release()
    assert store.used_bytes == before
    unwritten = store.pin([extent])
    unwritten.release()
    assert store.used_bytes == before


def test_two_pins_of_one_block_hold_it_until_both_are_gone(store: DiskStore) -> None:
    extent = store.reserve(Key("unit", "kind"), CUTS)
    fill(store, extent, 1)
    first, second = store.pin([extent]), store.pin([extent])
    fill(store, extent, 2)
    first.release()
    pinned = second.blocks[extent][0]
    assert pinned is not None
    into = torch.empty(pinned.nbytes, dtype=torch.uint8)
    store.read_pinned(pinned, into, "unit/kind").wait()
    assert into.eq(1).all()
    second.release()


def test_an_extent_may_be_freed_while_it_is_pinned(store: DiskStore) -> None:
    extent = store.reserve(Key("unit", "kind"), CUTS)
    fill(store, extent, 1)
    pin = store.pin([extent])
    store.free(extent)
    other = store.reserve(Key("other", "kind"), CUTS)
    fill(store, other, 9)
    pinned = pin.blocks[extent][1]
    assert pinned is not None
    into = torch.empty(pinned.nbytes, dtype=torch.uint8)
    store.read_pinned(pinned, into, "unit/kind").wait()
    assert into.eq(1).all()
    pin.release()
    assert store.used_bytes == other.nbytes


def test_without_room_for_spare_places_nothing_is_pinned(tmp_path: Path) -> None:
    store = DiskStore([Folder(str(tmp_path), limit=CUTS[-1] + BLOCK)], rank=0)
    extent = store.reserve(Key("unit", "kind"), CUTS)
    fill(store, extent, 1)
    before = store.used_bytes
    with pytest.raises(DiskFull):
        store.pin([extent])
    assert store.used_bytes == before
    fill(store, extent, 2)  # in place, as without a pin
    assert store.used_bytes == before
    store.close()


def test_a_file_with_kept_places_outlives_the_store_and_gives_back_the_rest(tmp_path: Path) -> None:
    store = DiskStore([Folder(str(tmp_path))], rank=0)
    big = tuple(range(0, (1 << 20) + 1, BLOCK))
    extent = store.reserve(Key("unit", "kind"), CUTS)
    other = store.reserve(Key("other", "kind"), big)
    fill(store, extent, 7)
    for block in range(len(big) - 1):
        store.write(other, block, torch.ones(BLOCK, dtype=torch.uint8), Priority.WRITE_BACK)
    store.drain()
    pin = store.pin([extent])
    (spool,) = pin.spools()
    folder = os.open(tmp_path, os.O_RDONLY)
    assert spool.can_link_to(folder)
    spool.link(folder, "kept")
    os.close(folder)
    pin.keep()
    pinned = pin.blocks[extent][0]
    assert pinned is not None
    fill(store, extent, 8)
    held = (tmp_path / "kept").stat().st_blocks
    store.close()
    left = (tmp_path / "kept").stat().st_blocks
    assert left * 512 <= 2 * CUTS[-1] < held * 512
    with open(tmp_path / "kept", "rb") as file:
        file.seek(pinned.place.offset)
        assert file.read(pinned.nbytes) == b"\7" * pinned.nbytes
