"""A codec where ranks hold copies of each other's shards: sums of replicas cross as the codec writes them, and all ranks then
have the parameters that one process gets by rounding at the same places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from tests.kit.dist import run_ranks
from tests.kit.parity import assert_bitwise

STEPS = 3
Mesh = tuple[int, int]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 7))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 13, generator=torch.Generator().manual_seed(100 * step + rank))


def as_16_bits(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


def trained(rank: int, mesh: Mesh, codec: str, stage: int) -> list[Tensor]:
    model = net()
    comm = lowtide.Comm(bucket_bytes=0, deadline=30, transport="torch", codec=codec)
    options: Any = {"stage": stage, "comm": comm, "group": init_device_mesh("cpu", mesh)}
    model, optimizer = lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    for step in range(STEPS):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def by_hand(mesh: Mesh, *, rounded: bool) -> list[Tensor]:
    """Both dimensions have one or two ranks: what a rank gives is rounded where it goes to another, also the own."""
    copies, shards = mesh
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def sent(values: Tensor, ranks: int) -> Tensor:
        return as_16_bits(values) if rounded and ranks > 1 else values

    for step in range(STEPS):
        rows: list[list[Tensor]] = []
        for copy in range(copies):
            grads: list[list[Tensor]] = []
            for shard in range(shards):
                model.zero_grad()
                model(batch(step, copy * shards + shard)).square().mean().backward()
                scaled = [p.grad * (1 / (copies * shards)) for p in model.parameters() if p.grad is not None]
                grads.append([sent(g, shards) for g in scaled])
            rows.append([sum(column[1:], column[0]) for column in zip(*grads, strict=True)])
        for p, *sums in zip(model.parameters(), *rows, strict=True):
            p.grad = sum((sent(s, copies) for s in sums[1:]), sent(sums[0], copies))
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def compare(rank: int, world: int, mesh: Mesh, stage: int) -> None:
    exact, rounded = (by_hand(mesh, rounded=choice) for choice in (False, True))
    assert not all(map(torch.equal, exact, rounded)), "nothing is rounded"
    for codec, expected in (("exact", exact), ("bf16", rounded)):
        for number, (got, wanted) in enumerate(zip(trained(rank, mesh, codec, stage), expected, strict=True)):
            assert_bitwise(got, wanted, f"{codec}, parameter {number}")


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_sums_of_replicas_are_rounded(mesh: Mesh, stage: int) -> None:
    run_ranks(mesh[0] * mesh[1], compare, mesh, stage)
