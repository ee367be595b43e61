"""A rank that is ahead in backward waits for the others, but not for ever."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.comm.channel import Ticket
from lowtide.runtime import pace
from lowtide.runtime.pace import UNDER_WAY, Pace
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack

COUNT = 8


def counted(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """How many units were under way before and after each look, from now on."""
    before: list[int] = []
    after: list[int] = []
    hold = Pace.hold

    def counting(self: Pace, sent: Iterable[Ticket[Any]]) -> None:
        sent = list(sent)
        before.append(sum(not ticket.done for ticket in sent))
        hold(self, sent)
        after.append(sum(not ticket.done for ticket in sent))

    patch.setattr(Pace, "hold", counting)
    return before, after


def runs_ahead(rank: int, world: int, stage: int) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    model = Stack([Block() for _ in range(COUNT)])
    if rank == 1:
        for block in model.blocks:
            block.register_full_backward_hook(lambda *_: time.sleep(0.05))
    model, optimizer = lowtide.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, comm=lowtide.Comm(bucket_bytes=1)
    )
    with pytest.MonkeyPatch.context() as patch:
        counts = counted(patch)
        patch.setattr(pace, "_PATIENCE", 60.0)  # a rank may stand still for as long as the machine wants
        for _ in range(2):
            model(torch.full((2, 24), 0.1 * (rank + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_is_ahead_holds_few_units(stage: int) -> None:
    (before, after), _ = run_ranks(2, runs_ahead, stage)
    assert max(before) > UNDER_WAY, "rank 0 was never ahead: this test shows nothing"
    assert max(after) <= UNDER_WAY


class Meets(torch.autograd.Function):
    """In backward, all ranks meet here: a collective of the caller's own, as a synchronised batch norm has one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.barrier()
        return grad


class Unlike(nn.Module):
    """The last layer has a part that rank 1 does not use: there, all reductions wait for the end of backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(COUNT))
        self.head = nn.ModuleDict({"used": nn.Linear(16, 16), "sometimes": nn.Linear(16, 16)})

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(Meets.apply(x) if number == 1 else x).relu()
        x = self.head["used"](x)
        return x if self.rank else self.head["sometimes"](x)


def differs(rank: int, world: int) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    model = Unlike(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = lowtide.shard(model, optimizer, stage=2, units=["blocks.*", "head"], comm=lowtide.Comm(bucket_bytes=1))
    losses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "_PATIENCE", 0.2)
        _, after = counted(patch)
        for _ in range(3):
            loss = model(torch.full((2, 16), 0.3)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, max(after) > UNDER_WAY


def test_patience_has_an_end_where_ranks_need_each_other() -> None:
    (losses, gave_up), (_, _) = run_ranks(2, differs)
    assert gave_up, "rank 0 never waited in vain: this test shows nothing"
    assert losses[2] < losses[0]


class Late:
    """Work that is never done, and how often it was waited for."""

    label = "reduce of a unit"
    done = False

    def __init__(self) -> None:
        self.waits = 0

    def done_within(self, seconds: float) -> bool:
        self.waits += 1
        return False


def test_one_bad_backward_is_forgiven_and_three_are_not() -> None:
    held = Pace()

    def waits_in_a_backward() -> int:
        late = Late()
        for _ in range(3):
            held.hold([late] * (UNDER_WAY + 1))  # type: ignore[list-item]
        held.end_pass()
        return late.waits

    assert waits_in_a_backward() == 1, "once in vain is enough for one backward"
    held.end_pass()  # one that had nothing to wait for
    assert [waits_in_a_backward() for _ in range(5)] == [1, 1, 1, 0, 0]
