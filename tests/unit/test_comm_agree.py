"""Agreement: the first difference, in the same words on every rank."""

from __future__ import annotations

import pytest

from lowtide.comm import Group, agree
from lowtide.errors import Mismatch
from tests.kit.dist import run_ranks

Facts = list[tuple[str, str]]

MODEL: Facts = [
    ("lowtide", "0.1.0"),
    ("parameter 0", "h.0.weight float32 (4, 4)"),
    ("parameter 1", "h.1.weight float32 (4, 4)"),
    ("stage", "3"),
]


def changed(index: int, fact: tuple[str, str]) -> Facts:
    return [*MODEL[:index], fact, *MODEL[index + 1 :]]


def compare(rank: int, world_size: int, odd: int, other: Facts) -> str:
    group = Group.join(None, deadline=20)
    channel = group.channel("agree")
    agree(channel, MODEL)
    try:
        agree(channel, other if rank == odd else MODEL)
    except Mismatch as error:
        text = error.difference
    else:
        text = "agreed"
    agree(channel, MODEL)  # a difference leaves the channel in order
    group.close()
    return text


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (changed(0, ("lowtide", "0.2.0")), "lowtide: rank 0 has '0.1.0', rank 2 has '0.2.0'"),
        (
            changed(2, ("parameter 1", "h.1.weight float32 (5, 4)")),
            "parameter 1: rank 0 has 'h.1.weight float32 (4, 4)', rank 2 has 'h.1.weight float32 (5, 4)'",
        ),
        (
            changed(1, ("parameter 0", "h.0.weight bfloat16 (4, 4)")),
            "parameter 0: rank 0 has 'h.0.weight float32 (4, 4)', rank 2 has 'h.0.weight bfloat16 (4, 4)'",
        ),
        (
            [MODEL[0], ("parameter 0", MODEL[2][1]), ("parameter 1", MODEL[1][1]), MODEL[3]],
            "parameter 0: rank 0 has 'h.0.weight float32 (4, 4)', rank 2 has 'h.1.weight float32 (4, 4)'",
        ),
        (
            [*MODEL[:3], ("parameter 2", "h.2.weight float32 (4, 4)"), MODEL[3]],
            "rank 0 has stage: '3', rank 2 has parameter 2: 'h.2.weight float32 (4, 4)'",
        ),
        (MODEL[:3], "rank 0 has stage: '3', rank 2 has no further entry"),
        ([], "rank 0 has lowtide: '0.1.0', rank 2 has no further entry"),
        ([*MODEL, ("ü", "ß" * 5000)], f"rank 0 has no further entry, rank 2 has ü: {'ß' * 5000!r}"),
        (list(MODEL), "agreed"),
    ],
)
def test_every_rank_hears_the_first_difference(other: Facts, expected: str) -> None:
    assert run_ranks(3, compare, 2, other) == [expected] * 3


def test_one_rank_agrees_with_itself() -> None:
    group = Group.join(None, deadline=5)
    agree(group.channel("agree"), MODEL)
    group.close()
