"""Everything else that a training script does, with and without lowtide: the same numbers (tests/kit/scenarios.py)."""

from __future__ import annotations

import warnings

import pytest
import torch

import lowtide
from tests.kit.dist import run_ranks
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_bitwise, assert_near, assert_same
from tests.kit.scenarios import SCENARIOS, adamw, back, loss_of, stack, update


def _without(world: int) -> type[Plain]:
    return Plain if world == 1 else Hand


def _difference(rank: int, world: int, name: str, stage: int) -> str | None:
    expected, got = Trace(), Trace()
    SCENARIOS[name](_without(world), rank, expected)
    options = {"stage": stage, "comm": lowtide.Comm(bucket_bytes=0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SCENARIOS[name](lambda model, optimizer: Sharded(model, optimizer, **options), rank, got)
    try:
        assert_same(got, expected)
    except AssertionError as error:
        return str(error)
    return None


# on one rank stages 1 and 2 differ from their neighbours in little: the full product is for `make soak`
_ONE_RANK_LATER = [pytest.param(stage, 1, marks=pytest.mark.soak) for stage in (1, 2)]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2), *_ONE_RANK_LATER])
@pytest.mark.parametrize("name", SCENARIOS)
def test_same_numbers(name: str, stage: int, ranks: int) -> None:
    found = run_ranks(ranks, _difference, name, stage)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


def _clipped_by_torch(rank: int, world: int, stage: int) -> None:
    """On one rank torch's own clipping gives its usual bits; on several the parts of a norm are added in an order of ours,
    so it is near, not equal."""
    traces = Trace(), Trace()
    for trace, make in zip(traces, (_without(world), lambda m, o: Sharded(m, o, stage=stage)), strict=True):
        model = stack()
        system = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            back(system, loss_of(system, number, rank))
            system.before_step()
            norm = torch.nn.utils.clip_grad_norm_(system.model.parameters(), 0.05, foreach=[None, True, False][number])
            trace.add(f"norm {number}", norm)
            update(system, trace, number)
    assert_same(traces[1], traces[0], assert_bitwise if world == 1 else assert_near)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_with_torch(stage: int, ranks: int) -> None:
    run_ranks(ranks, _clipped_by_torch, stage)


def _norms(rank: int, world: int, stage: int) -> list[float]:
    """Every rank has the same batch, so that the gradients, and with them the norms, do not depend on the number of ranks."""
    model = stack()
    model, _ = lowtide.shard(model, adamw(model), stage=stage)
    model(torch.linspace(-1, 1, 72).view(3, 24)).square().mean().backward()
    return [float(lowtide.clip_grad_norm_(model, 1e-3, order)) for order in (2.0, 1.0, 3.0, float("inf"))]


def test_the_norm_is_the_same_everywhere() -> None:
    """Stage and number of ranks, if there are several, change no bit of it (a mean of equal numbers is exact)."""
    seen = {tuple(norms) for ranks in (2, 4) for stage in (0, 1, 2, 3) for norms in run_ranks(ranks, _norms, stage)}
    assert len(seen) == 1


def _double_backward(rank: int, world: int, stage: int) -> str:
    """A gradient penalty: right, or an error of ours that says so."""
    traces = Trace(), Trace()
    for trace, make in zip(traces, (_without(world), lambda m, o: Sharded(m, o, stage=stage)), strict=True):
        model = stack()
        system = make(model, adamw(model))
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        try:
            (gradient,) = torch.autograd.grad(system.forward(x).square().mean(), x, create_graph=True)
            back(system, gradient.square().sum())
        except lowtide.Error as error:
            assert isinstance(system, Sharded)
            return type(error).__name__
        update(system, trace, 0)
    assert_same(traces[1], traces[0])
    return "right"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_double_backward_is_right_or_refused(stage: int, ranks: int) -> None:
    answers = set(run_ranks(ranks, _double_backward, stage))
    assert answers in ({"right"}, {"Refused"})
    if stage < 3:
        assert answers == {"right"}


def _stale(rank: int, world: int, stage: int) -> None:
    model = stack()
    model, optimizer = lowtide.shard(model, adamw(model), stage=stage)
    x = torch.randn(3, 24)
    model(x).square().mean().backward()
    old = model(x).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError):
        old.backward()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_through_replaced_values_raises(stage: int, ranks: int) -> None:
    run_ranks(ranks, _stale, stage)
