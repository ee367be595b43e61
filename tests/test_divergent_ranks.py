"""Ranks that do not do the same: other branches, other numbers of calls, experts that nobody visits, texts of other lengths.

Where bringing a unit whole takes no other rank (stages 0 to 2, and stage 3 in shared memory) all of it gives the bits of
gradients that are averaged by hand. Where it does (stage 3 over torch.distributed) the results are right, or every rank gets a
typed error soon; the deadline here is longer than the tests may take, so an error that had to wait for it would fail them.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import lowtide
from lowtide.api import engine_of
from lowtide.errors import DeadlineExceeded, Error, Mismatch, PeerFailed
from tests.kit.dist import run_ranks
from tests.kit.parity import Recipe, assert_same, oracle, sharded
from tests.kit.specimen import WIDTH, Batch, Block, Specimen, floats

TYPED = ("Mismatch", "PeerFailed", "DeadlineExceeded")


class Ways(nn.Module):
    """A model in which the rank decides which blocks run, and how often."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = Block()
        self.ways = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, 5)
        self.way = way

    def forward(self, x: Tensor, rank: Tensor) -> Tensor:
        x = self.first(x)
        here = int(rank)
        if self.way == "branches":
            x = self.ways[here](x)
        elif self.way == "repeats":
            for _ in range(1 + 2 * here):
                x = self.ways[0](x)
        elif self.way == "experts":  # the last one is visited by no rank
            x = x + self.ways[here](x) + self.ways[(here + 1) % 3](x)
        elif self.way == "order":
            for index in (0, 1, 2, 3) if here == 0 else (2, 0, 3, 1):
                x = self.ways[index](x)
        elif self.way == "in the middle":
            for index in (0, 1, 2, 3) if here == 0 else (0, 3):
                x = self.ways[index](x)
        else:
            for block in self.ways:
                x = block(x)
        return self.last(x)


def _batch(step: int, rank: int) -> Batch:
    return floats(step, rank, 3, WIDTH), torch.tensor(rank)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().mean()


def _after_texts(model: nn.Module, batch: Batch) -> Tensor:
    """Every rank first writes a text of its own length."""
    with torch.no_grad():
        x = batch[0]
        for _ in range(1 + 3 * int(batch[1])):
            x = x + model(x, batch[1]).mean()
    return _loss(model, batch)


def _specimen(way: str) -> Specimen:
    return Specimen(way, lambda: Ways(way), _batch, _after_texts if way == "texts" else _loss, "no")


WAYS = ("branches", "repeats", "experts", "order", "in the middle", "texts")


def comm(transport: str) -> lowtide.Comm:
    return lowtide.Comm(bucket_bytes=0, deadline=300, first_deadline=300, transport=transport)


def outcome(rank: int, world: int, way: str, stage: int, transport: str) -> str:
    specimen, recipe = _specimen(way), Recipe(steps=3, clip=0.5)
    expected = oracle(specimen, recipe, world=world, rank=rank, by_hand=True)
    units = ["first", "ways.*", "last"]
    try:
        got = sharded(specimen, recipe, rank=rank, stage=stage, units=units, comm=comm(transport))
    except Error as error:
        return f"{type(error).__name__}: {error}"
    assert_same(got, expected)
    return "right"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "transport"), [(0, "torch"), (1, "auto"), (2, "torch"), (2, "auto"), (3, "auto")])
def test_results_are_right_where_units_need_no_other_rank(way: str, stage: int, transport: str) -> None:
    assert run_ranks(2, outcome, way, stage, transport) == ["right", "right"]


@pytest.mark.parametrize("way", WAYS)
def test_three_ranks_in_shared_memory(way: str) -> None:
    assert run_ranks(3, outcome, way, 3, "auto") == ["right"] * 3


@pytest.mark.parametrize("way", ["repeats", "texts"])
def test_where_units_are_gathered_results_are_right_or_ranks_are_told(way: str) -> None:
    told = run_ranks(2, outcome, way, 3, "torch", fresh=True, timeout=60)
    if told != ["right", "right"]:
        assert all(text.startswith(TYPED) for text in told), told


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("branches", "Mismatch: ranks differ: rank 0 is at gather of 'ways.0', rank 1 is at gather of 'ways.1'"),
        ("experts", "Mismatch: ranks differ: rank 0 is at gather of 'ways.0', rank 1 is at gather of 'ways.1'"),
        ("order", "Mismatch: ranks differ: rank 0 is at gather of 'ways.0', rank 1 is at gather of 'ways.2'"),
        ("in the middle", "Mismatch: ranks differ: rank 0 is at gather of 'ways.1', rank 1 is at gather of 'ways.3'"),
    ],
)
def test_a_difference_in_gathers_is_named(way: str, text: str) -> None:
    for told in run_ranks(2, outcome, way, 3, "torch", fresh=True, timeout=60):
        assert told.startswith(text), told
        assert "routing that differs by rank must stay inside a unit (units=)" in told


def routed_inside_a_unit(rank: int, world: int, way: str) -> str:
    """The way out that the error names: all ways are one unit."""
    specimen, recipe = _specimen(way), Recipe(steps=2)
    expected = oracle(specimen, recipe, world=world, rank=rank, by_hand=True)
    got = sharded(specimen, recipe, rank=rank, stage=3, units=["first", "ways", "last"], comm=comm("torch"))
    assert_same(got, expected)
    return "right"


@pytest.mark.parametrize("way", ["branches", "repeats", "experts"])
def test_routing_inside_a_unit_is_right_over_any_transport(way: str) -> None:
    assert run_ranks(2, routed_inside_a_unit, way) == ["right", "right"]


# -- ranks of which one is done with what the other still does --------------------------------------------------------


def _sharded(stage: int, transport: str, deadline: float = 300) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Ways("all")
    options = lowtide.Comm(bucket_bytes=0, deadline=deadline, first_deadline=max(deadline, 60), transport=transport)
    return lowtide.shard(model, SGD(model.parameters(), lr=0.1), stage=stage, units=["first", "ways.*", "last"], comm=options)


def leave(model: nn.Module) -> None:
    """What the end of the process does."""
    engine_of(model).group.close()


def generates(rank: int, world: int, stage: int, transport: str, then: str) -> str:
    """Texts of other lengths under no_grad, and after them nothing together."""
    model, optimizer = _sharded(stage, transport, deadline=3 if then == "sleep" else 300)
    x = torch.ones(1, WIDTH)
    made = 0
    try:
        with torch.no_grad():
            for _ in range(2 + 3 * rank):
                x = x + model(x, torch.tensor(rank)).mean()
                made += 1
                engine_of(model).group.deadlines.settled()
        if then == "sleep" and rank == 0:
            time.sleep(6)
        if then == "leave":
            leave(model)
        if then == "step":
            model(x, torch.tensor(rank)).square().mean().backward()
            optimizer.step()
    except (Mismatch, PeerFailed, DeadlineExceeded) as error:
        return type(error).__name__
    return f"{made} words"


@pytest.mark.parametrize(("stage", "transport"), [(2, "torch"), (3, "auto")])
@pytest.mark.parametrize("then", ["leave", "step"])
def test_texts_of_different_lengths(stage: int, transport: str, then: str) -> None:
    assert run_ranks(2, generates, stage, transport, then, timeout=60) == ["2 words", "5 words"]


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("leave", ({"2 words"}, {"PeerFailed"})),  # the shorter one is gone
        ("sleep", ({"2 words"}, {"DeadlineExceeded", "PeerFailed"})),  # it is there, and does not come
        ("step", (set(TYPED), set(TYPED))),  # it comes with something else
    ],
)
def test_texts_of_different_lengths_where_units_are_gathered(then: str, expected: tuple[set[str], set[str]]) -> None:
    shorter, longer = run_ranks(2, generates, 3, "torch", then, fresh=True, timeout=60)
    assert shorter in expected[0]
    assert longer in expected[1]


def misses_the_parameters(rank: int, world: int, stage: int, transport: str) -> str:
    """On one rank no gradient reaches any parameter, so nothing is reduced there."""
    model, optimizer = _sharded(stage, transport)
    leaf = torch.ones(1, requires_grad=True)
    try:
        out = model(torch.ones(1, WIDTH), torch.tensor(rank)).square().mean()
        (out if rank == 0 else leaf.sum()).backward()
        optimizer.step()
    except (Mismatch, PeerFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "nobody objected"


@pytest.mark.parametrize(("stage", "transport"), [(0, "torch"), (2, "auto"), (3, "auto")])
def test_a_loss_that_reaches_no_parameter_on_one_rank(stage: int, transport: str) -> None:
    for told in run_ranks(2, misses_the_parameters, stage, transport, fresh=True, timeout=60):
        assert told.startswith("Mismatch: ranks differ: rank 0 is at reduce of"), told
        assert "rank 1 is at ask of 'finite gradients'" in told


def steps_more_often(rank: int, world: int, stage: int, transport: str) -> str:
    """Without join(), a rank with more batches than another."""
    model, optimizer = _sharded(stage, transport)
    try:
        for number in range(2 + rank):
            model(floats(number, rank, 2, WIDTH), torch.tensor(rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()
        leave(model)
    except (Mismatch, PeerFailed) as error:
        return type(error).__name__
    return "nobody objected"


@pytest.mark.parametrize(("stage", "transport"), [(1, "torch"), (3, "torch"), (1, "auto"), (3, "auto")])
def test_more_batches_on_one_rank_without_join(stage: int, transport: str) -> None:
    """The shorter rank saves its model and ends, and the longer one hears of it."""
    shorter, longer = run_ranks(2, steps_more_often, stage, transport, fresh=True, timeout=60)
    assert longer in TYPED
    assert shorter in {"nobody objected", *TYPED}
