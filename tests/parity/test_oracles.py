"""The oracles themselves: they agree with each other where they must, and a difference is found and named."""

from __future__ import annotations

import pytest
import torch

from tests.kit.dist import run_ranks
from tests.kit.models import MENAGERIE
from tests.kit.parity import Recipe, Trace, assert_bitwise, assert_same, known_oracle


def _ddp_and_by_hand(rank: int, world: int, model: str, recipe: Recipe) -> None:
    assert_same(known_oracle(model, recipe, world, rank, by_hand=True), known_oracle(model, recipe, world, rank))


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(accumulate=2), Recipe(accumulate=2, no_sync=True)], ids=str)
@pytest.mark.parametrize("model", ["gpt", "moe", "buffers", "convolutions", "unused"])
def test_averaging_by_hand_equals_ddp(model: str, recipe: Recipe) -> None:
    run_ranks(2, _ddp_and_by_hand, model, recipe)


def _experts_with_gradients(rank: int, world: int) -> list[str]:
    model = MENAGERIE["moe"].build()
    MENAGERIE["moe"].loss(model, MENAGERIE["moe"].batch(0, rank)).backward()
    return [name for name, p in model.named_parameters() if p.grad is not None]


def test_routing_differs_between_ranks() -> None:
    first, second = run_ranks(2, _experts_with_gradients)
    assert first != second


@pytest.mark.parametrize("name", MENAGERIE)
def test_models_learn(name: str) -> None:
    """Every trainable model's numbers change from step to step, so that a parity test compares something."""
    trace = known_oracle(name, Recipe(), 1, 0)
    losses = [tensor for entry, tensor in trace.entries if "loss" in entry]
    assert len({loss.item() for loss in losses}) == len(losses)
    grads = [g for entry, g in trace.entries if ", gradient" in entry and g is not None and g.numel()]
    assert sum(bool(g.abs().max() > 1e-6) for g in grads) > len(grads) / 3


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]), "at [1]: 2.0 against 2.000000238418579"),
        (torch.tensor(0.0), torch.tensor(-0.0), "at []: 0.0 against -0.0"),
        (torch.ones(2, 2), torch.ones(4), "(2, 2) torch.float32 against (4,) torch.float32"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "torch.float32 against (2,) torch.float64"),
        (torch.ones(2), None, "a tensor against None"),
    ],
)
def test_a_difference_is_named(a: torch.Tensor, b: torch.Tensor | None, text: str) -> None:
    with pytest.raises(AssertionError, match="weight") as caught:
        assert_bitwise(a, b, "weight")
    assert text in str(caught.value)


def test_same_bits_are_the_same() -> None:
    assert_bitwise(torch.tensor([float("nan"), -0.0]), torch.tensor([float("nan"), -0.0]), "x")
    assert_bitwise(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), "x")


def test_traces_are_compared_in_order() -> None:
    one, two = Trace(), Trace()
    for trace, value in ((one, 1.0), (two, 2.0)):
        trace.add("first", torch.tensor(0.0))
        trace.add("second", torch.tensor(value))
        trace.add("third", torch.tensor(value))
    with pytest.raises(AssertionError, match=r"^second: at"):
        assert_same(one, two)
