"""Unequal parts: against cases that can be worked by hand."""

from __future__ import annotations

import pytest

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.planning.shares import best_shares

GB = 10**9
NONE = float("inf")


def test_equal_ranks_get_equal_parts() -> None:
    assert best_shares(12 * GB, [4 * GB] * 4, [1e-9] * 4) == pytest.approx([0.25] * 4)


def test_what_fits_everywhere_is_cut_equally_whatever_the_memories() -> None:
    assert best_shares(4 * GB, [8 * GB, 16 * GB], [1e-9, 1e-9]) == pytest.approx([0.5, 0.5])


def test_without_disks_parts_follow_the_memory() -> None:
    assert best_shares(12 * GB, [4 * GB, 8 * GB], [NONE, NONE]) == pytest.approx([1 / 3, 2 / 3])


def test_a_disk_twice_as_fast_takes_twice_as_much() -> None:
    """No memory at all: 6 GB and 3 GB take the same time."""
    assert best_shares(9 * GB, [0, 0], [1e-9, 2e-9]) == pytest.approx([2 / 3, 1 / 3])


def test_memory_and_speed_together() -> None:
    """10 GB: rank 0 keeps 4 GB; x GB of its disk at 1 s and y of the other's at 2 s, x + y = 6, x = 2 y."""
    assert best_shares(10 * GB, [4 * GB, 0], [1e-9, 2e-9]) == pytest.approx([0.8, 0.2])


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(DoesNotFit):
        best_shares(12 * GB, [4 * GB, 4 * GB], [NONE, NONE])
    with pytest.raises(ArgumentError, match="one of each per rank"):
        best_shares(12 * GB, [4 * GB], [])
