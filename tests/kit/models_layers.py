"""Models made of layers that are awkward in what they keep: buffers, flattened weights, parametrizations, strides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.kit.specimen import (
    REFUSED,
    WIDTH,
    Block,
    Stack,
    blocks,
    images,
    rows,
    sequences,
    specimen,
    squared,
    tokens,
)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


@specimen(images)
def convolutions() -> nn.Module:
    """channels_last weights, and BatchNorm statistics as buffers."""
    layers = [nn.Conv2d(3, 12, 3), *(ConvBlock(12) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    """An RNN keeps a list of its weights besides its parameters."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@specimen(sequences)
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


@specimen(sequences)
def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention never calls its out_proj: it reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


@specimen(sequences)
def multihead_attention() -> nn.Module:
    return Stack([SelfAttention() for _ in range(2)])


@specimen(sequences)
def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=48, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, num_layers=2), nn.Linear(WIDTH, 3))


@specimen()
def weight_norm() -> nn.Module:
    return Stack([nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)])


@specimen()
def spectral_norm() -> nn.Module:
    """A parametrization that changes its buffers in every forward pass."""
    return Stack([nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(2)])


class Counting(nn.Module):
    """Buffers of several dtypes, changed in place and by assignment, persistent and not; one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.block = Block()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)
        self.register_buffer("mask", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
                self.last = x[0].double()
                self.mask = x[0] > 0
        return self.block(self.norm(x - self.mean))


@specimen()
def buffers() -> nn.Module:
    return Stack([Counting(), Counting()])


@specimen()
def dropout() -> nn.Module:
    return Stack([nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(3)])


@specimen(tokens)
def embeddings() -> nn.Module:
    """padding_idx, an EmbeddingBag, and rows that get no gradient in most steps."""
    bag = nn.EmbeddingBag(31, WIDTH, mode="mean")
    return nn.Sequential(bag, Block(), Block(), nn.Linear(WIDTH, 4))


def _row_major(step: int, rank: int) -> tuple[Tensor, ...]:
    return (rows(step, rank)[0].double(),)


@specimen(_row_major)
def double() -> nn.Module:
    return Stack(blocks(2)).double()


class LowPrecision(nn.Module):
    """bf16 weights, as a model loaded from a checkpoint has them; fp32 around them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.bfloat16()).float()


@specimen()
def bfloat16() -> nn.Module:
    return Stack([LowPrecision() for _ in range(2)])


@specimen(tokens, squared, table=REFUSED)
def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(31, WIDTH, sparse=True), Block(), nn.Linear(WIDTH, 4))
