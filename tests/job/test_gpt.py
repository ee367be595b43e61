"""The presets have the sizes they are named for, and a seed gives them the numbers of the straightforward GPT."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS, Shape


@pytest.mark.parametrize(("name", "count"), [("gpt-17m", 17_037_312), ("gpt-98m", 97_835_520), ("gpt-705m", 705_518_592)])
def test_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters == count


def _reference_loss(shape: Shape, tokens: Tensor) -> Tensor:
    """The same network without classes: layers are made in reading order and applied at once."""
    width, heads = shape.width, shape.heads
    embed, positions = nn.Embedding(shape.tokens, width), nn.Embedding(shape.context, width)
    blocks: list[list[nn.Module]] = []
    for _ in range(shape.layers):
        attention = [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)]
        perceptron = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
        blocks.append([*attention, *perceptron])
    norm, head = nn.LayerNorm(width), nn.Linear(width, shape.tokens, bias=False)
    batch, length = tokens.shape
    x = embed(tokens) + positions(torch.arange(length))
    for norm1, qkv, proj, norm2, up, down in blocks:
        q, k, v = qkv(norm1(x)).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + proj(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + down(F.gelu(up(norm2(x))))
    return F.cross_entropy(head(norm(x)).flatten(0, 1), tokens.flatten())


def test_a_seed_gives_the_numbers_of_the_straightforward_network() -> None:
    shape = Shape(layers=3, width=48, heads=3, tokens=128, context=32)
    tokens = torch.randint(0, 128, (2, 32))
    torch.manual_seed(5)
    expected = _reference_loss(shape, tokens)
    torch.manual_seed(5)
    assert GPT(shape)(tokens, tokens).item() == expected.item()
