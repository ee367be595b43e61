"""Optimizers: elementwise ones give the same bits on shards; ones that look at whole parameters are refused or kept whole."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.errors import Refused
from tests.kit.dist import run_ranks
from tests.kit.models import REFUSED
from tests.kit.optimizers import ELEMENTWISE, OPTIMIZERS, WHOLE
from tests.kit.parity import Case, Recipe, assert_bitwise, check

# a stage and a model for each, so that all optimizers meet all stages over the table
_TURNS = [(3, "odd_sizes"), (1, "gpt"), (2, "odd_sizes"), (3, "unused"), (1, "mixed_dtypes"), (2, "gpt"), (0, "gpt")]


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_two_ranks(optimizer: str) -> None:
    stage, model = _TURNS[list(ELEMENTWISE).index(optimizer) % len(_TURNS)]
    check(2, Case(model, stage, Recipe(optimizer)))
    check(2, Case("gpt", 3, Recipe(optimizer)))


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_one_rank(optimizer: str) -> None:
    stage, model = _TURNS[list(ELEMENTWISE).index(optimizer) % len(_TURNS)]
    check(1, Case(model, stage, Recipe(optimizer)))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt", "odd_sizes", "unused", "mixed_dtypes", "convolutions", "moe"])
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_full_product(optimizer: str, model: str, stage: int, ranks: int) -> None:
    check(ranks, Case(model, stage, Recipe(optimizer, steps=5, clip=1.0)))


def _matrices(seed: int) -> torch.nn.Module:
    """Only matrices: Muon takes nothing else. An odd number of them, so that one is cut between two ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(24, 24, bias=False) for _ in range(3)))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    model(torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * number + rank))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _refused(rank: int, world: int, name: str, stage: int) -> str:
    """The refusal, and that nothing was lost by it: the model still trains as a plain one, and can be sharded again."""
    model, twin = _matrices(0), _matrices(0)
    with pytest.raises(Refused) as caught:
        lowtide.shard(model, OPTIMIZERS[name](model.parameters()), stage=stage)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)
        _step(m, optimizer, 0, 0)
    for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_bitwise(a, b, key)
    lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), stage=stage)
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", WHOLE)
def test_refused_where_parameters_are_cut(optimizer: str, stage: int) -> None:
    for text in run_ranks(2, _refused, optimizer, stage):
        assert {"lbfgs": "LBFGS", "adafactor": "Adafactor", "muon": "Muon", "row_scaled": "RowScaled"}[optimizer] in text
        assert "partition='tensor'" in text or "closure" in text


def _refused_everywhere(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8, bias=False)  # 128 elements: ranks 0 and 1 have one half each, rank 2 nothing
    with pytest.raises(Refused) as caught:
        lowtide.shard(model, OPTIMIZERS["muon"](model.parameters()), stage=1)
    return str(caught.value)


def test_refused_on_every_rank_alike() -> None:
    texts = run_ranks(3, _refused_everywhere)
    assert len(set(texts)) == 1


def _whole_tensors(rank: int, world: int, name: str, stage: int) -> None:
    model, twin = _matrices(rank), _matrices(0)
    model, optimizer = lowtide.shard(model, OPTIMIZERS[name](model.parameters()), stage=stage, partition="tensor")
    reference = OPTIMIZERS[name](twin.parameters())
    ddp = torch.nn.parallel.DistributedDataParallel(twin)
    for number in range(3):
        _step(model, optimizer, rank, number)
        _step(ddp, reference, rank, number)
        with lowtide.gathered(model):
            for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert_bitwise(a, b, f"step {number} {key}")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "row_scaled"])
def test_whole_tensors_are_updated_whole(optimizer: str, stage: int) -> None:
    run_ranks(2, _whole_tensors, optimizer, stage)


def _sparse(rank: int, world: int, stage: int) -> str:
    specimen = REFUSED["sparse_embedding"]
    model = specimen.build()
    model, _ = lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    loss = specimen.loss(model, specimen.batch(0, rank))
    with pytest.raises(Refused) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_gradients_are_refused(stage: int) -> None:
    for text in run_ranks(2, _sparse, stage):
        assert "sparse=False" in text
