"""Every model of the menagerie at every stage: one rank equals plain torch, two equal DDP, bit for bit, at every step."""

from __future__ import annotations

import pytest

from tests.kit.models import MENAGERIE
from tests.kit.parity import Case, Recipe, assert_near, check

STAGES = (0, 1, 2, 3)
AWKWARD = ("odd_sizes", "moe", "convolutions", "unused", "mixed_dtypes")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MENAGERIE)
def test_one_rank_equals_plain_torch(model: str, stage: int) -> None:
    check(1, Case(model, stage))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MENAGERIE)
def test_two_ranks_equal_ddp(model: str, stage: int) -> None:
    check(2, Case(model, stage))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", AWKWARD)
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_equal_the_tree(model: str, ranks: int, stage: int) -> None:
    """Gradients times 1/W, added along the fixed tree: the same bits at every stage."""
    check(ranks, Case(model, stage, by_hand=True))


@pytest.mark.parametrize("model", ["gpt", "convolutions"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_are_near_ddp(model: str, ranks: int) -> None:
    """DDP adds in another order. SGD, because Adam turns a rounding error of a zero gradient into a whole step."""
    check(ranks, Case(model, 3, Recipe("sgd_momentum")), assert_near)
