"""Where the tokens of a step come from: random numbers, or windows of a corpus, each once per epoch.

[Note: one order for any number of ranks] The training part of a corpus is cut into windows. In every epoch each of them is used
exactly once, in an order that only the seed and the number of the epoch decide. All ranks together go along this order;
which rank takes which place depends on the places alone. So the state of the data is one number, how many samples all ranks
have used, and it means the same to a job that goes on with more ranks or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.job.corpus import Corpus
from lowtide.job.shuffle import Shuffle

VALIDATION_BATCHES = 4
"""Batches that each rank looks at for one validation loss."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, int64, ``batch × context`` each."""


class Batches(Protocol):
    """Endless training batches, and a fixed set of held-out ones (empty if there is nothing to hold out)."""

    def draw(self) -> Batch: ...

    def held_out(self) -> list[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def remark(self) -> str:
        """What a person should know about the order after a state was loaded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBatches:
    """Uniformly random tokens from torch's global generator, each its own target. Seed that generator with the rank first.

    A checkpoint holds the state of that generator, so there is nothing to add here.
    """

    vocabulary: int
    batch: int
    context: int

    def draw(self) -> Batch:
        tokens = torch.randint(0, self.vocabulary, (self.batch, self.context))
        return tokens, tokens

    def held_out(self) -> list[Batch]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def remark(self) -> str:
        return ""


@dataclass(slots=True, kw_only=True)
class TextBatches:
    """Windows of a corpus, each once per epoch: see [Note: one order for any number of ranks]."""

    corpus: Corpus
    batch: int
    context: int
    rank: int
    ranks: int
    seed: int
    samples: int = 0
    """Windows that all ranks together have used, in all epochs."""
    remark: str = ""

    @property
    def windows(self) -> int:
        """Windows of one epoch. They lie side by side; a target may be the first token of the next."""
        return (len(self.corpus.train) - 1) // self.context

    def draw(self) -> Batch:
        mine = [self.samples + place * self.ranks + self.rank for place in range(self.batch)]
        self.samples += self.batch * self.ranks
        starts = torch.tensor([self.context * number for number in self._windows_at(mine)])
        return self._cut(self.corpus.train, starts)

    def held_out(self) -> list[Batch]:
        """Windows spread evenly over the held-out part, a different share for each rank, the same at every call."""
        tokens = self.corpus.held_out
        wanted = VALIDATION_BATCHES * self.ranks * self.batch
        starts = torch.linspace(0, len(tokens) - self.context - 1, wanted, dtype=torch.float64).to(torch.int64)
        mine = starts[self.rank :: self.ranks]
        return [self._cut(tokens, mine[first : first + self.batch]) for first in range(0, len(mine), self.batch)]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "windows": self.windows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a job of any number of ranks was; other data start at their beginning."""
        if state.get("windows") != self.windows:
            self.remark = f"the data are not those of the checkpoint ({state.get('windows')} windows), so they start anew"
            return
        if state["seed"] != self.seed:
            self.remark = f"the order of the data stays that of --seed {state['seed']}"
        self.samples, self.seed = state["samples"], state["seed"]

    def _windows_at(self, places: list[int]) -> list[int]:
        """The windows at these places of all epochs, laid end to end: a batch may end one epoch and begin the next."""
        epochs = {place // self.windows for place in places}
        orders = {epoch: Shuffle(self.windows, self.seed, epoch) for epoch in epochs}
        return [orders[place // self.windows][place % self.windows] for place in places]

    def _cut(self, tokens: Tensor, starts: Tensor) -> Batch:
        where = starts[:, None] + torch.arange(self.context + 1)
        windows = tokens[where].to(torch.int64)
        return windows[:, :-1], windows[:, 1:]
