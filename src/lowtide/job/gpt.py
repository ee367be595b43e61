"""A small GPT, as ``lowtide train`` builds it. The order in which layers are made fixes which random numbers they get."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.job.presets import Shape


class Block(nn.Module):
    """Attention, then a perceptron; both read a normalised copy of the stream and add to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.proj(self._attend(self.norm1(stream)))
        return stream + self.down(F.gelu(self.up(self.norm2(stream))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads: Tensor = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """A decoder with learned positions. ``model(tokens, targets)`` is the mean cross entropy, in nats per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vocab_size = shape.tokens
        self.context = shape.context
        self.tokens = nn.Embedding(shape.tokens, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.tokens, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            stream = block(stream)
        return F.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), targets.flatten())
