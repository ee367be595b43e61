"""Models of the transformers and peft packages, unchanged, at every stage."""

from __future__ import annotations

import pytest

from tests.kit.models_hf import HUGGING_FACE
from tests.kit.parity import Case, Recipe, check

CASES = [(name, stage) for name in HUGGING_FACE for stage in (0, 1, 2, 3)]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_two_ranks_equal_ddp(name: str, stage: int) -> None:
    check(2, Case(f"hf_{name}", stage, Recipe(steps=2, clip=1.0)), timeout=110)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "peft_lora"])
def test_default_units(name: str) -> None:
    """As a caller would have it: small units travel together."""
    check(2, Case(f"hf_{name}", 3, Recipe(steps=2, clip=1.0), (("comm", None),)))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stage"), CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_long(name: str, stage: int, ranks: int) -> None:
    check(ranks, Case(f"hf_{name}", stage, Recipe(steps=10, accumulate=2, clip=1.0)), timeout=110)
