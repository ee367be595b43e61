"""Where the tokens of a step come from: random numbers, or windows of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lowtide.job.corpus import Corpus

VALIDATION_BATCHES = 4
"""Batches that each rank looks at for one validation loss."""

_RANK_STRIDE = 1 << 20
"""Keeps the random streams of two ranks, and of two seeds, apart."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64, ``batch × context`` each."""


class Batches(Protocol):
    """Endless training batches, and a fixed set of held-out ones (empty if there is nothing to hold out)."""

    def draw(self) -> Batch: ...

    def held_out(self) -> list[Batch]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBatches:
    """Uniformly random tokens from torch's global generator, each its own target. Seed that generator with the rank first."""

    vocabulary: int
    batch: int
    context: int

    def draw(self) -> Batch:
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.context))
        return tokens, tokens

    def held_out(self) -> list[Batch]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatches:
    """Windows at random places of a corpus, from a generator of this rank's own."""

    corpus: Corpus
    batch: int
    context: int
    rank: int
    ranks: int
    generator: torch.Generator

    @classmethod
    def seeded(cls, corpus: Corpus, *, batch: int, context: int, rank: int, ranks: int, seed: int) -> TextBatches:
        generator = torch.Generator().manual_seed((seed * _RANK_STRIDE + rank + 1) % (1 << 63))
        return cls(corpus=corpus, batch=batch, context=context, rank=rank, ranks=ranks, generator=generator)

    def draw(self) -> Batch:
        train = self.corpus.train
        starts = torch.randint(0, len(train) - self.context, (self.batch,), generator=self.generator)
        return self._windows(train, starts)

    def held_out(self) -> list[Batch]:
        """Windows spread evenly over the held-out part, a different share for each rank, the same at every call."""
        tokens = self.corpus.held_out
        wanted = VALIDATION_BATCHES * self.ranks * self.batch
        starts = torch.linspace(0, len(tokens) - self.context - 1, wanted, dtype=torch.float64).to(torch.int64)
        mine = starts[self.rank :: self.ranks]
        return [self._windows(tokens, mine[first : first + self.batch]) for first in range(0, len(mine), self.batch)]

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        where = starts[:, None] + torch.arange(self.context + 1)
        windows = tokens[where].to(torch.int64)
        return windows[:, :-1], windows[:, 1:]
