"""Blocks that are alike are traced a few times, and the facts are those of all of them."""

from __future__ import annotations

import pytest
import torch

from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS, Shape
from lowtide.spec import repetition
from lowtide.spec.repetition import trace_alike
from lowtide.spec.tracing import trace

MIB = 1 << 20


def built(shape: Shape, batch: int) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        tokens = torch.empty(batch, shape.context, dtype=torch.int64)
        return GPT(shape), (tokens, tokens)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", ["gpt-17m", "gpt-98m"])
def test_the_facts_of_a_deep_model_come_out_of_a_shallow_one(preset: str, device: str) -> None:
    model, batch = built(PRESETS[preset], 3)
    modules = list(model.modules())
    facts = trace_alike(model, batch, blocks="blocks", bucket_bytes=MIB, name="x", device=device)
    assert facts == trace(model, batch, bucket_bytes=MIB, name="x", device=device)
    assert list(model.modules()) == modules, "the model is left as it was"
    assert len(model.blocks) == PRESETS[preset].layers


def test_few_of_them_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = built(Shape(layers=12, width=256, heads=4, tokens=64, context=16), 1)
    depths: list[int] = []

    def counted(shallow: GPT, *args: object, **options: object) -> object:
        depths.append(len(shallow.blocks))
        return trace(shallow, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(repetition, "trace", counted)
    trace_alike(model, batch, blocks="blocks", bucket_bytes=0)
    assert depths == [4]


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_blocks_that_are_few_or_small_are_all_traced(layers: int) -> None:
    """Small ones share a unit, which stands for no block."""
    model, batch = built(Shape(layers=layers, width=32, heads=2, tokens=64, context=16), 2)
    for bucket_bytes in (0, MIB):
        facts = trace_alike(model, batch, blocks="blocks", bucket_bytes=bucket_bytes)
        assert facts == trace(model, batch, bucket_bytes=bucket_bytes)


def test_a_block_that_is_another_one_is_traced() -> None:
    model, batch = built(Shape(layers=6, width=64, heads=2, tokens=64, context=16), 2)
    model.blocks[3].requires_grad_(False)
    facts = trace_alike(model, batch, blocks="blocks", bucket_bytes=0)
    assert facts == trace(model, batch, bucket_bytes=0)
    assert [u.trained_numel == 0 for u in facts.units if u.name.startswith("blocks.")] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
