"""Small models that ``lowtide train --model tests.job.specimens:<function>`` trains, each for one case."""

from __future__ import annotations

import os
import signal
import time

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


# -- models that a test kills or watches ----------------------------------------------------------------------------------

KILL = "LOWTIDE_TEST_KILL"
"""``<phase> <rank> <count> <file>``: kill this rank at the ``count``-th event of a phase, once: then the file exists."""
RECORD = "LOWTIDE_TEST_RECORD"
"""A folder for the samples that every rank was trained on."""
PAUSE = "LOWTIDE_TEST_PAUSE"
"""Seconds that every step takes longer, so that a test comes in time."""


def _die_if_told(phase: str, count: int) -> None:
    asked, rank, when, file = os.environ.get(KILL, "- - - -").split(" ", 3)
    if (asked, rank, when) == (phase, os.environ.get("RANK", "0"), str(count)) and not os.path.exists(file):
        open(file, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def _is_real(tokens: Tensor) -> bool:
    """Not the planner's, who looks at the model with tensors that hold nothing."""
    return type(tokens) is Tensor and tokens.device.type == "cpu"


class Fragile(nn.Module):
    """A GPT with dropout that is killed where the environment says."""

    vocab_size, context = TINY.tokens, TINY.context

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(TINY)
        self.calls = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training and _is_real(tokens):
            self.calls += 1
            time.sleep(float(os.environ.get(PAUSE, "0")))
            _die_if_told("step", self.calls)
        loss: Tensor = self.gpt(tokens, targets)
        # Random numbers of every step beside the data's: they, too, must go on where they were.
        return loss * F.dropout(torch.ones(64), 0.5, training=self.training).mean().clamp(min=0.1)


def _watch_saves() -> None:
    """Saves make what they have written durable in several steps; a rank may be killed at each of them."""
    count, fsync = 0, os.fsync

    def counted(fd: int) -> None:
        nonlocal count
        count += 1
        _die_if_told("save", count)
        fsync(fd)

    os.fsync = counted


def fragile() -> nn.Module:
    _die_if_told("build", 1)
    _watch_saves()
    return Fragile()


class Recorder(nn.Module):
    """Writes down every sample that it is trained on, as its first seven characters; killed where the environment says."""

    vocab_size, context = 256, 8

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256)
        self.calls = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training and _is_real(tokens):
            self.calls += 1
            time.sleep(float(os.environ.get(PAUSE, "0")))
            attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
            with open(os.path.join(os.environ[RECORD], f"{attempt}-{rank}"), "a") as file:
                file.write(" ".join(bytes(row[:7].tolist()).decode() for row in tokens) + "\n")
            _die_if_told("step", self.calls)
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())


def recorder() -> nn.Module:
    _watch_saves()
    return Recorder()


# -- models that a newcomer writes first ----------------------------------------------------------------------------------


class LooksUp(nn.Module):
    """``rows`` tokens in texts of ``places``; says neither."""

    def __init__(self, rows: int, places: int) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(rows, 8), nn.Embedding(places, 8), nn.Linear(8, rows)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def knows_few_tokens() -> nn.Module:
    return LooksUp(100, 256)


def looks_at_few_places() -> nn.Module:
    return LooksUp(8192, 64)


def without_targets() -> nn.Module:
    model = LooksUp(8192, 256)
    model.forward = lambda tokens: model.logits(tokens)  # type: ignore[method-assign]
    return model


def returns_logits() -> nn.Module:
    model = LooksUp(8192, 256)
    model.forward = lambda tokens, targets: model.logits(tokens)  # type: ignore[method-assign]
    return model
