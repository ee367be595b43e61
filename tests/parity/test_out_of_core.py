"""Everything, or a part, on disk: the same bits as plain torch, DDP or the tree, whatever lives where and whenever it moves.

``make test`` runs a set of cases in which every pair of two choices occurs, every model and every optimizer once or twice;
``make soak`` runs the products. Released and fresh memory is NaN in all of them (tests/kit/out_of_core.py).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import lowtide
from tests.kit.models import MENAGERIE
from tests.kit.optimizers import ELEMENTWISE
from tests.kit.out_of_core import RESIDENCIES, Where, check
from tests.kit.parity import Case, Recipe
from tests.parity.test_loops import pairwise

SLOW = 0.002  # seconds: many times what a request takes
LARGE = 8 << 20

AXES: dict[str, list[Any]] = {
    "model": ["gpt", "odd_sizes", "mixed_dtypes", "moe", "checkpoint_inside", "lora", "unused"],
    "ranks": [1, 2, 3],
    "stage": [0, 1, 2, 3],
    "optimizer": ["adamw_fused", "sgd_momentum", "adamw_groups"],
    "micro": [(1, False), (2, False), (2, True)],
    "clip": [None, 0.05],
    "update": ["step", "backward"],
    "chunk_bytes": [4096, LARGE],
    "prefetch": [0, 1, 3],
    "resident": list(RESIDENCIES),
    "slow": [0.0, SLOW],
    "partition": ["element", "row"],
    "looks": [True, False],
}
Row = tuple[Any, ...]
PAIRWISE = pairwise(list(AXES.values()))


def label(row: Row) -> str:
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row)


def check_row(row: Row, folder: Path) -> None:
    model, ranks, stage, optimizer, micro, clip, update, chunk_bytes, prefetch, resident, slow, partition, looks = row
    if update == "backward":  # one backward per step, and nothing between it and the step
        micro, clip = (1, False), None
    recipe = Recipe(optimizer, steps=2 if looks else 4, accumulate=micro[0], no_sync=micro[1], clip=clip)
    case = Case(model, stage, recipe, (("partition", partition),), by_hand=ranks == 3)
    check(ranks, case, Where(update, chunk_bytes, prefetch, resident, slow, looks), folder)


@pytest.mark.parametrize("row", PAIRWISE, ids=label)
def test_pairwise(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("model", AXES["model"])
@pytest.mark.parametrize("ranks", AXES["ranks"])
@pytest.mark.parametrize("update", AXES["update"])
def test_full_product(model: str, ranks: int, update: str, tmp_path: Path) -> None:
    fixed = {"model": [model], "ranks": [ranks], "update": [update]}
    if update == "backward":
        fixed |= {"micro": [(1, False)], "clip": [None]}
    failures: list[str] = []
    for row in itertools.product(*({**AXES, **fixed}).values()):
        try:
            check_row(row, tmp_path)
        except AssertionError as error:
            failures.append(f"{label(row)}: {str(error)[:500]}")
    assert not failures, f"{len(failures)} cases:\n" + "\n".join(failures)


# -- every model, every optimizer -------------------------------------------------------------------------------------

# residency and chunk size take turns, so that all of them meet all models over the table
_TURNS = list(itertools.product(RESIDENCIES, (4096, LARGE)))


def _turn(table: Any, name: str, update: str) -> Where:
    resident, chunk_bytes = _TURNS[(list(table).index(name) * 5 + 7 * (update == "step")) % len(_TURNS)]
    return Where(update, chunk_bytes, resident=resident)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("model", MENAGERIE)
def test_every_model_on_one_rank(model: str, update: str, tmp_path: Path) -> None:
    check(1, Case(model, 3, Recipe(steps=2)), Where(update), tmp_path)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("model", MENAGERIE)
def test_every_model_on_two_ranks(model: str, tmp_path: Path) -> None:
    turn = list(MENAGERIE).index(model)
    stage, update = turn % 4, ("step", "backward")[turn // 4 % 2]
    check(2, Case(model, stage, Recipe(steps=2)), _turn(MENAGERIE, model, update), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("where", [Where(*w) for w in itertools.product(("step", "backward"), (4096, LARGE), (0, 3))], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("model", MENAGERIE)
def test_every_model_everywhere(model: str, ranks: int, stage: int, where: Where, tmp_path: Path) -> None:
    check(ranks, Case(model, stage, by_hand=ranks == 3), where, tmp_path)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    turn = list(ELEMENTWISE).index(optimizer)
    model, ranks = ("odd_sizes", "gpt", "unused")[turn % 3], turn % 2 + 1
    for update in ("step", "backward"):
        check(ranks, Case(model, 3, Recipe(optimizer)), _turn(ELEMENTWISE, optimizer, update), tmp_path)
    check(1, Case(model, 3, Recipe(optimizer, steps=4)), Where(looks=False), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["gpt", "odd_sizes", "unused", "mixed_dtypes", "convolutions"])
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_every_optimizer_everywhere(optimizer: str, model: str, ranks: int, update: str, tmp_path: Path) -> None:
    for stage, resident in itertools.product((1, 2, 3), RESIDENCIES):
        check(ranks, Case(model, stage, Recipe(optimizer, steps=4)), Where(update, resident=resident), tmp_path)


# -- precision --------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "bf16": lowtide.Precision(param="bf16"),
    "bf16 moments": lowtide.Precision(moments="bf16"),
    "bf16 gradients": lowtide.Precision(param="bf16", gradient="bf16"),
    "fp32 in fp64": lowtide.Precision(master="fp64", reduce="fp64"),
    "scaled": lowtide.Precision(param="bf16", loss_scale=1024.0),
}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("stage", "ranks"), [(3, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision(precision: str, stage: int, ranks: int, update: str, tmp_path: Path) -> None:
    """The same bits as with the same precision in memory, which has tests of its own."""
    resident = RESIDENCIES[list(PRECISIONS).index(precision) % len(RESIDENCIES)]
    case = Case("gpt", stage, Recipe(), (("precision", PRECISIONS[precision]),))
    check(ranks, case, Where(update, resident=resident), tmp_path)


# -- chunks and units of all dtypes and shares ------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("shares", [(1, 3), (3, 1), (0, 1)], ids=str)
def test_two_dtypes_in_one_chunk(shares: tuple[float, float], update: str, tmp_path: Path) -> None:
    """Gradients are reduced dtype by dtype; what one dtype has stored in a chunk must not be lost with the next."""
    options = (("partition", lowtide.Partition("element", shares)),)
    for micro in (1, 2) if update == "step" else (1,):
        case = Case("mixed_dtypes", 3, Recipe(steps=2, accumulate=micro), options)
        check(2, case, Where(update, LARGE), tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_many_units_in_one(update: str, ranks: int, tmp_path: Path) -> None:
    """Small units travel together; a chunk then holds parameters of several modules."""
    comm = (("comm", lowtide.Comm(bucket_bytes=1 << 20)),)
    check(ranks, Case("gpt", 3, Recipe(clip=0.05 if update == "step" else None), comm), Where(update, 16384), tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_set_to_zero(ranks: int, tmp_path: Path) -> None:
    """zero_grad(set_to_none=False): the next backward adds to zeros, which were noted and never written."""
    for resident in ("disk", "gradients"):
        recipe = Recipe("sgd_momentum", clip=0.05, set_to_none=False)
        check(ranks, Case("gpt", 3, recipe), Where(resident=resident), tmp_path)
    recipe = Recipe("sgd_momentum", set_to_none=False, accumulate=2, no_sync=True)
    check(ranks, Case("gpt", 3, recipe), Where(), tmp_path)
