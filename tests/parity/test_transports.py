"""Shared memory or torch.distributed between ranks: the same bits, and one copy of the parameters instead of one per rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.api import engine_of
from lowtide.comm import channel
from lowtide.comm.local import LocalTransport
from lowtide.comm.transport import TorchTransport
from lowtide.runtime.pace import Pace
from tests.kit.dist import run_ranks
from tests.kit.parity import Case, Recipe, assert_bitwise, check, difference

COMM = {name: lowtide.Comm(bucket_bytes=0, deadline=30, transport=name) for name in ("shared", "torch")}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("transport", ["shared", "torch"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt", "odd_sizes", "moe", "mixed_dtypes"])
def test_every_stage_over_every_transport(model: str, stage: int, ranks: int, transport: str) -> None:
    recipe = Recipe(steps=2, accumulate=2, clip=0.05)
    check(ranks, Case(model, stage, recipe, (("comm", COMM[transport]),), by_hand=ranks == 3))


def all_but_gradients(got: Tensor | None, expected: Tensor | None, what: str) -> None:
    """An update in backward leaves none."""
    if ", gradient " not in what:
        assert_bitwise(got, expected, what)


@pytest.mark.parametrize("transport", ["shared", "torch"])
@pytest.mark.parametrize("model", ["gpt", "tied_head", "unused"])
def test_updates_inside_backward(model: str, transport: str) -> None:
    for ranks in (2, 3):
        options = (("comm", COMM[transport]), ("update", "backward"))
        check(ranks, Case(model, 3, Recipe(steps=3), options, by_hand=ranks == 3), all_but_gradients)


def reduced_at_once(rank: int, world: int, case: Case) -> str | None:
    """Every unit is reduced before backward goes on, so that it is updated while the graph still needs what is frozen in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "hold", lambda _, sent: [ticket.done_within(10) for ticket in sent])
        return difference(rank, world, case, all_but_gradients)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_beside_frozen_parameters(stage: int) -> None:
    options = (("comm", COMM["shared"]), ("update", "backward"))
    found = run_ranks(2, reduced_at_once, Case("lora", stage, Recipe(steps=3), options))
    assert found == [None, None]


def on_a_mesh(rank: int, world: int, buckets: list[int] | None) -> list[float]:
    """``buckets``: what the ranks of each row have measured."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.MonkeyPatch.context() as patch:
        if buckets is not None:
            patch.setattr(TorchTransport, "bucket_bytes", buckets[rank // 2])
            patch.setattr(channel, "_MESH_BUCKET_BYTES", 3000)
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        lowtide.shard(model, optimizer, stage=2, units=nn.Linear, comm=COMM["torch"], group=mesh)
        losses: list[float] = []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            loss = model(torch.randn(2, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine_of(model).group.close()
    return losses


def test_rows_of_a_mesh_cut_alike_whatever_they_have_measured() -> None:
    assert run_ranks(4, on_a_mesh, [1000, 8000]) == run_ranks(4, on_a_mesh, None)


class Layers(nn.Sequential):
    """Runs the layers in the order that it is told."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in order:
            x = self[index](x)
        return x


ORDERS = ((0, 1, 2, 3), (3, 1, 1, 0))


class LookedAtTwice(nn.Module):
    """Backward needs ``body`` once more after its gradient is there; ``wait`` stands still just before that."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.first, self.body = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor, wait: float) -> Tensor:
        x = self.front(x)
        x.register_hook(lambda _: time.sleep(0.1))  # until the reduction of ``body`` is done, where nobody waits
        early = torch.nn.functional.linear(self.first(x), self.body.weight.detach())
        early.register_hook(lambda _: time.sleep(wait))
        return self.body(early)


def slow_reader(rank: int, world: int, transport: str) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = LookedAtTwice()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: Any = {"stage": 3, "units": nn.Linear, "comm": COMM[transport], "update": "backward"}
    model, optimizer = lowtide.shard(model, optimizer, **options)
    losses: list[float] = []
    for _ in range(3):
        loss = model(torch.ones(2, 64), 0.5 * rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_update_in_backward_waits_for_readers_on_other_ranks() -> None:
    assert run_ranks(2, slow_reader, "shared") == run_ranks(2, slow_reader, "torch")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return Layers(*(nn.Linear(64, 64) for _ in range(4)))


def _sharded(transport: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return lowtide.shard(model, optimizer, stage=3, units=nn.Linear, comm=COMM[transport], **options)


def what_connects(rank: int, world: int, transport: str) -> tuple[str, bool]:
    model, _ = _sharded(transport)
    engine = engine_of(model)
    return type(engine.gathers._wire.shard).__name__, engine.residency.gathers


def test_who_is_connected_by_what() -> None:
    assert run_ranks(2, what_connects, "shared") == [(LocalTransport.__name__, False)] * 2
    assert run_ranks(2, what_connects, "torch") == [(TorchTransport.__name__, True)] * 2


def different_units(rank: int, world: int) -> list[float]:
    """Rank 1 runs the layers in another order and one of them twice."""
    model, optimizer = _sharded("shared")
    losses: list[float] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(2, 64), ORDERS[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand(world: int = 2) -> list[list[float]]:
    """The same on one process: gradients of both orders, halved and added."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank, order in enumerate(ORDERS):
            torch.manual_seed(step)
            loss = model(torch.randn(2, 64), order).square().mean()
            loss.backward()
            losses[rank].append(loss.item())
            for p in model.parameters():
                if p.grad is not None:
                    half = p.grad * 0.5
                    sums[p] = sums[p] + half if p in sums else half
                    p.grad = None
        for p, total in sums.items():
            p.grad = total
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_ranks_that_run_different_units_need_not_agree() -> None:
    assert run_ranks(2, different_units) == by_hand()


def written_everywhere(rank: int, world: int) -> list[Any]:
    model, _ = _sharded("shared")
    seen: list[Any] = []
    with torch.no_grad(), lowtide.gathered(model[0], write=True):  # type: ignore[index]
        model[0].weight.fill_(float(10 + rank))  # type: ignore[index, union-attr, operator]
    with lowtide.gathered(model[0]):  # type: ignore[index]
        seen.append(model[0].weight.unique().tolist())  # type: ignore[index, union-attr, operator]
        seen.append(model[0].weight.data_ptr())  # type: ignore[index, union-attr, operator]
    seen.append(model(torch.zeros(1, 64)).sum().item())
    try:
        with torch.no_grad(), lowtide.gathered(model[1]):  # type: ignore[index]
            model[1].weight.fill_(1.0)  # type: ignore[index, union-attr, operator]
    except lowtide.Error as error:
        seen.append(str(error)[:60])
    seen.append(model(torch.zeros(1, 64)).sum().item())
    return seen


def test_rank_0_writes_for_all_and_nobody_writes_by_mistake() -> None:
    first, second = run_ranks(2, written_everywhere)
    assert first[0] == second[0] == [10.0]
    assert first[2] == second[2] == first[4] == second[4]
    assert "was changed inside gathered()" in first[3]


class Meddler(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(input)


def meddling(rank: int, world: int) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), Meddler(8, 8))
    values = {k: v.clone() for k, v in model.state_dict().items()}
    model, _ = lowtide.shard(model, stage=3, units=nn.Linear, comm=COMM["shared"])
    told: list[str] = []
    for _ in range(2):
        try:
            model(torch.ones(1, 8))
        except lowtide.Error as error:
            told.append(f"{type(error).__name__}: {error}")
    model.load_state_dict(values)
    with lowtide.gathered(model):
        told.append(str(all(torch.equal(p, values[n]) for n, p in model.named_parameters())))
    return told


def test_a_module_that_changes_shared_parameters_is_told_and_the_model_is_poisoned_until_it_is_loaded() -> None:
    for told in run_ranks(2, meddling):
        assert told[0].startswith("Refused: parameter '1.weight' was changed")
        assert told[1].startswith("Poisoned")
        assert told[2] == "True"


def shared_bytes(rank: int, world: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    whole = sum(p.nbytes for p in model.parameters())
    model, _ = lowtide.shard(model, stage=3, units=nn.Linear, comm=COMM["shared"])
    engine = engine_of(model)
    model(torch.zeros(1, 1024))
    taken, _ = engine.group.shared_memory()
    return whole, taken, engine.ledger.live["slots"]


def test_parameters_lie_in_memory_once() -> None:
    for whole, taken, slots in run_ranks(2, shared_bytes):
        assert slots == 0
        assert whole <= taken < 1.6 * whole
