"""What a loop may do (accumulate, clip, zero) and how a model may be sharded (partition, buckets, prefetch, units), pairwise.

``make test`` runs a set of cases in which every pair of two choices occurs; ``make soak`` runs the product.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import lowtide
from tests.kit.parity import Case, Recipe, check

AXES: dict[str, list[Any]] = {
    "model": ["gpt", "odd_sizes", "convolutions", "moe", "mixed_dtypes", "shared_module", "checkpoint_around", "unused"],
    "ranks": [1, 2],
    "stage": [0, 1, 2, 3],
    "optimizer": ["adamw_fused", "sgd_momentum", "adamw_groups"],
    "micro": [(1, False), (2, False), (3, False), (2, True)],
    "clip": [None, 0.05, 1e6],
    "partition": ["element", "row", "tensor"],
    "bucket_bytes": [0, 4096, 1 << 20],
    "prefetch": [0, 1, 3],
}
Row = tuple[Any, ...]


def _pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(axes: list[list[Any]]) -> list[Row]:
    """A small set of rows in which every pair of values of two axes occurs. Greedy, and the same every time."""
    numbers = random.Random(0)
    missing = {
        (i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]
    }  # fmt: skip
    rows: list[Row] = []
    while missing:
        tries = [tuple(numbers.choice(axis) for axis in axes) for _ in range(60)]
        # one candidate is built around a pair that is missing, so that every round makes progress
        i, a, j, b = min(missing, key=repr)
        tries = [tuple(a if k == i else b if k == j else value for k, value in enumerate(row)) for row in tries]
        best = max(tries, key=lambda row: len(_pairs(row) & missing))
        rows.append(best)
        missing -= _pairs(best)
    return rows


def case(model: str, stage: int, optimizer: str, micro: tuple[int, bool], clip: float | None, *how: Any) -> Case:
    partition, bucket_bytes, prefetch = how
    recipe = Recipe(optimizer, steps=2, accumulate=micro[0], no_sync=micro[1], clip=clip)
    options = (("partition", partition), ("comm", lowtide.Comm(bucket_bytes=bucket_bytes, prefetch=prefetch)))
    return Case(model, stage, recipe, options)


def _label(row: Row) -> str:
    return "-".join(
        "none" if value is None else "x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in row
    )


PAIRWISE = pairwise(list(AXES.values()))


def test_every_pair_occurs() -> None:
    seen = set[tuple[int, Any, int, Any]]().union(*map(_pairs, PAIRWISE))
    axes = list(AXES.values())
    assert len(seen) == sum(len(a) * len(b) for a, b in itertools.combinations(axes, 2))


@pytest.mark.parametrize("row", PAIRWISE, ids=_label)
def test_pairwise(row: Row) -> None:
    model, ranks, *rest = row
    check(ranks, case(model, *rest))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_more_ranks_with_everything_on(ranks: int, stage: int) -> None:
    recipe = Recipe("adamw_groups", accumulate=2, clip=0.05)
    check(ranks, Case("moe", stage, recipe, (("partition", "row"),), by_hand=True))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_set_to_zero(ranks: int, stage: int) -> None:
    """zero_grad(set_to_none=False): the next backward adds to zeros."""
    check(ranks, Case("gpt", stage, Recipe("sgd_momentum", set_to_none=False)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_set_to_zero_before_no_sync(stage: int) -> None:
    check(2, Case("gpt", stage, Recipe("sgd_momentum", set_to_none=False, accumulate=2, no_sync=True)))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("shares", [(1, 3), (0, 1), (5, 2)], ids=str)
@pytest.mark.parametrize("by", ["element", "row", "tensor"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unequal_shares(stage: int, by: str, shares: tuple[float, float]) -> None:
    check(2, Case("gpt", stage, Recipe(steps=2), (("partition", lowtide.Partition(by, shares)),)))


@pytest.mark.parametrize("units", ["blocks.*", ("blocks.0", "blocks.1.mlp"), "blocks.*.mlp", "head"], ids=str)
def test_chosen_units(units: Any) -> None:
    check(2, Case("gpt", 3, Recipe(steps=2), (("units", units),)))


FULL = [row for row in itertools.product(*AXES.values()) if row[1] == 2 or row[6] == "element"]


@pytest.mark.soak
@pytest.mark.parametrize("model", AXES["model"])
@pytest.mark.parametrize("stage", AXES["stage"])
def test_full_product(model: str, stage: int) -> None:
    failures: list[str] = []
    for row in FULL:
        if row[0] != model or row[2] != stage:
            continue
        try:
            check(row[1], case(model, *row[2:]))
        except AssertionError as error:
            failures.append(f"{_label(row)}: {str(error)[:500]}")
    assert not failures, f"{len(failures)} cases:\n" + "\n".join(failures)
