"""Small models that ``lowtide train --model tests.job.specimens:<function>`` trains, each for one case."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.job.gpt import GPT
from lowtide.job.presets import Shape

TINY = Shape(layers=2, width=64, heads=2, tokens=320, context=32)


def tiny_gpt() -> nn.Module:
    return GPT(TINY)


def fails_on_rank_1() -> nn.Module:
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("a mistake on rank 1")
    return GPT(TINY)


def returns_no_module() -> str:
    return "not a model"


class HuggingFaceLike(nn.Module):
    """Takes ``input_ids`` and ``labels``, shifts the labels itself and returns a mapping, as transformers' models do."""

    vocab_size = 256
    context = 16

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def hugging_face_like() -> nn.Module:
    return HuggingFaceLike()


class SometimesInfinite(HuggingFaceLike):
    """The gradients of the first ``bad_calls`` training steps from the second on are not finite."""

    def __init__(self, bad_calls: int) -> None:
        super().__init__()
        self.bad_calls = bad_calls
        self.calls = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        result = super().forward(input_ids, labels)
        if self.training:
            self.calls += 1
            if 2 <= self.calls < 2 + self.bad_calls:
                result["loss"] = result["loss"] * torch.tensor(float("inf"))
        return result


def infinite_once() -> nn.Module:
    return SometimesInfinite(1)


def infinite_for_good() -> nn.Module:
    return SometimesInfinite(1000)
