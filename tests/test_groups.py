"""Which ranks share a model: meshes, subgroups, several models on different groups, and what goes away with a model."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.api import engine_of
from lowtide.errors import ArgumentError
from tests.kit.dist import run_ranks
from tests.kit.lifetime import collected
from tests.kit.models import Block, Stack
from tests.kit.parity import assert_bitwise

COMM = lowtide.Comm(bucket_bytes=0, deadline=30)


def train(rank: int, seed: int = 0, steps: int = 3, **options: Any) -> tuple[list[Tensor], Stack]:
    """Losses, norms and parameters; different batches and different initial numbers on every rank."""
    torch.manual_seed(seed + rank)
    model = Stack([Block() for _ in range(3)])
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), comm=COMM, **options)
    out: list[Tensor] = []
    for number in range(steps):
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(100 * number + rank))
        loss = model(x).square().mean()
        loss.backward()
        out += [loss.detach(), lowtide.clip_grad_norm_(model, 0.1)]
        optimizer.step()
        optimizer.zero_grad()
        with lowtide.gathered(model):
            out += [p.detach().clone() for p in model.parameters()]
    return out, model


def same(a: list[Tensor], b: list[Tensor], what: str) -> None:
    assert len(a) == len(b)
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_bitwise(x, y, f"{what}, number {index}")


def replicated(rank: int, world: int) -> list[tuple[int, int]]:
    """Two copies, each shared by two ranks, against four ranks that share one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sizes = []
    for stage in (1, 2, 3):
        flat, _ = train(rank, stage=stage)
        square, model = train(rank, stage=stage, group=mesh)
        same(square, flat, f"stage {stage}")
        engine = engine_of(model)
        assert (engine.group.replicate.size, engine.group.shard.size, engine.group.size) == (2, 2, 4)
        sizes.append((engine.ledger.live["parameters"], engine.ledger.live["optimizer"]))
    return sizes


def test_replicated_and_sharded_equals_sharded() -> None:
    """Half of the model on each rank, not a quarter; the same numbers."""
    numel = sum(p.numel() for p in Stack([Block() for _ in range(3)]).parameters())
    for sizes in run_ranks(4, replicated, timeout=60):
        assert sizes[2][0] == pytest.approx(4 * numel / 2, rel=0.1)
        assert sizes[2][1] == pytest.approx(8 * numel / 2, rel=0.15)
        assert sizes[0][0] == pytest.approx(4 * numel, rel=0.1)


def other_meshes(rank: int, world: int) -> None:
    flat, _ = train(rank, stage=3)
    line, _ = train(rank, stage=3, group=init_device_mesh("cpu", (4,)))
    same(line, flat, "a mesh of one dimension")
    for shape in ((4, 1), (1, 4)):
        other, model = train(rank, stage=3, group=init_device_mesh("cpu", shape))
        same(other, flat, f"a mesh of {shape}")
        assert engine_of(model).group.shard.size == shape[1]
    with pytest.raises(ArgumentError, match="3 dimensions"):
        lowtide.shard(Stack([Block()]), group=init_device_mesh("cpu", (1, 2, 2)), comm=COMM)


def test_meshes_of_other_shapes() -> None:
    run_ranks(4, other_meshes, timeout=60)


def halves(rank: int, world: int) -> list[list[float]]:
    """Ranks 0 and 1 share one model, 2 and 3 another; neither waits for the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = groups[rank // 2], groups[1 - rank // 2]
    with pytest.raises(ArgumentError, match="not in the given group"):
        lowtide.shard(Stack([Block()]), group=other, comm=COMM)
    out, model = train(rank % 2, stage=3, group=mine)
    assert engine_of(model).group.size == 2
    return [t.double().flatten().tolist() for t in out]


def pair(rank: int, world: int) -> list[list[float]]:
    return [t.double().flatten().tolist() for t in train(rank, stage=3)[0]]


def test_a_subgroup_is_a_world_of_its_own() -> None:
    expected = run_ranks(2, pair)
    got = run_ranks(4, halves, timeout=60)
    assert got[0] == got[2] == expected[0]
    assert got[1] == got[3] == expected[1]


def crossed(rank: int, world: int) -> None:
    """Two models in one process: one shared by all four ranks, one by two. Their steps interleave."""
    everybody, _ = train(rank, seed=1, stage=3)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone, _ = train(rank // 2, seed=2, stage=2, group=groups[rank % 2])

    torch.manual_seed(1 + rank)
    first = Stack([Block() for _ in range(3)])
    torch.manual_seed(2 + rank // 2)
    second = Stack([Block() for _ in range(3)])
    first, one = lowtide.shard(first, torch.optim.AdamW(first.parameters(), lr=1e-2), stage=3, comm=COMM)
    second, two = lowtide.shard(
        second, torch.optim.AdamW(second.parameters(), lr=1e-2), stage=2, group=groups[rank % 2], comm=COMM
    )
    results: list[list[Tensor]] = [[], []]
    for number in range(3):
        losses = []
        for model, where in ((first, rank), (second, rank // 2)):
            x = torch.randn(3, 24, generator=torch.Generator().manual_seed(100 * number + where))
            losses.append(model(x).square().mean())
        sum(losses, torch.zeros(())).backward()  # one graph through both
        for model, optimizer, loss, out in ((first, one, losses[0], results[0]), (second, two, losses[1], results[1])):
            out += [loss.detach(), lowtide.clip_grad_norm_(model, 0.1)]
            optimizer.step()
            optimizer.zero_grad()
            with lowtide.gathered(model):
                out += [p.detach().clone() for p in model.parameters()]
    same(results[0], everybody, "the model of all")
    same(results[1], alone, "the model of two")


def test_two_models_on_different_groups() -> None:
    run_ranks(4, crossed, timeout=60)


def dropped(rank: int, world: int) -> tuple[list[str], list[str]]:
    def threads() -> list[str]:
        gc.collect()
        return sorted(t.name for t in threading.enumerate())

    before = threads()
    out, model = train(rank, stage=3, steps=1)
    engine = weakref.ref(engine_of(model))
    while_alive = threads()
    assert len(while_alive) > len(before)
    del model, out
    collected(engine)
    return before, threads()


@pytest.mark.parametrize("ranks", [2, 4])
def test_engine_and_threads_go_away_with_the_model(ranks: int) -> None:
    for before, after in run_ranks(ranks, dropped):
        assert not Counter(after) - Counter(before), "threads"


def threads_of_one_rank(rank: int, world: int) -> list[str]:
    before = threading.enumerate()
    _, model = train(rank, stage=3, steps=1)
    assert model.training, "it is still there"
    return [thread.name for thread in threading.enumerate() if thread not in before]


def test_one_rank_needs_no_threads() -> None:
    assert run_ranks(1, threads_of_one_rank) == [[]]
