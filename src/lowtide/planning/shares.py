"""Unequal parts for ranks that have unequal memory or unequal disks, as a linear programme.

A step at stage 3 is as slow as its slowest rank. Of its part of the states a rank keeps in memory what fits, and moves the rest
from and to its disk every step. The parts that make the longest of these as short as possible are a linear programme; where all
of it fits everywhere, parts follow the memory only as far as they must, and equal parts win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.errors import ArgumentError, DoesNotFit


def best_shares(states_bytes: int, memories: Sequence[int], seconds_per_byte: Sequence[float]) -> tuple[float, ...]:
    """The part of each rank, adding up to 1. ``memories``: room for states; ``seconds_per_byte``: to read and write one that
    is on disk, infinity for a rank that has none. Give them to ``Partition(shares=...)``."""
    import highspy  # pyright: ignore[reportMissingTypeStubs]

    if not memories or len(memories) != len(seconds_per_byte):
        raise ArgumentError(f"{len(memories)} memories and {len(seconds_per_byte)} speeds; give one of each per rank.")
    highs: Any = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    infinity, ranks = highspy.kHighsInf, len(memories)
    total = max(states_bytes, 1)
    # Columns: the parts, then the parts on disk, then the longest time and the largest part, of which a little is charged:
    # it makes parts equal where time does not decide.
    for _ in range(ranks):
        highs.addCol(0.0, 0.0, 1.0, 0, [], [])
    for slow in seconds_per_byte:
        highs.addCol(0.0, 0.0, 1.0 if slow != float("inf") else 0.0, 0, [], [])
    longest, largest = 2 * ranks, 2 * ranks + 1
    highs.addCol(1.0, 0.0, infinity, 0, [], [])
    highs.addCol(1e-3, 0.0, infinity, 0, [], [])
    highs.addRow(1.0, 1.0, ranks, list(range(ranks)), [1.0] * ranks)
    for rank, (room, slow) in enumerate(zip(memories, seconds_per_byte, strict=True)):
        highs.addRow(-infinity, room / total, 2, [rank, ranks + rank], [1.0, -1.0])
        if slow != float("inf"):
            highs.addRow(0.0, infinity, 2, [longest, ranks + rank], [1.0, -slow * total])
        highs.addRow(0.0, infinity, 2, [largest, rank], [1.0, -1.0])
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise DoesNotFit("host", states_bytes, sum(memories), "Give a disk to at least one rank, or use more ranks")
    return tuple(max(0.0, value) for value in highs.getSolution().col_value[:ranks])
