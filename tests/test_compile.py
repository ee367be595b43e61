"""torch.compile inside units, in both forms: the same bits as compiled without lowtide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_same
from tests.kit.scenarios import adamw, step


def in_place(model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def wrapped(model: Stack) -> None:
    model.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in model.blocks)


HOW: dict[str, Callable[[Stack], None]] = {"block.compile()": in_place, "torch.compile(block)": wrapped}


def build(how: str) -> Stack:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Stack([Block() for _ in range(3)])
    HOW[how](model)
    return model


def compare(rank: int, world: int, how: str) -> int:
    expected, model = Trace(), build(how)
    plain = Plain(model, adamw(model)) if world == 1 else Hand(model, adamw(model))
    for number in range(3):
        step(plain, expected, number, rank)
    for stage in (3, 2):
        got, model = Trace(), build(how)
        system = Sharded(model, adamw(model), stage=stage, comm=lowtide.Comm(bucket_bytes=0))
        engine_of(model).arena.poison = True
        torch._dynamo.utils.counters.clear()
        for number in range(3):
            step(system, got, number, rank)
        assert_same(got, expected)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs > 0, "nothing was compiled"
    return graphs


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_compiled_blocks(how: str, ranks: int) -> None:
    run_ranks(ranks, compare, how, timeout=100)
