"""What every model of the menagerie shares: how it is entered into a table, its batches, its loss, and the plainest block.

Everything is deterministic: building takes a seed, a batch takes a step and a rank. Widths are chosen so that most
matrices are cut between ranks (more than 64 elements) and some are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Specimen:
    """One model. ``ddp`` says which oracle can train it on several ranks: "plain" DDP, DDP that must look for "unused"
    parameters, or "no": DDP hangs or refuses, so gradients are averaged by hand."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    ddp: str

    def build(self, seed: int = 0) -> nn.Module:
        """The model with the numbers of ``seed``; the caller's random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


MENAGERIE: dict[str, Specimen] = {}
REFUSED: dict[str, Specimen] = {}
"""Models that lowtide may refuse; they are not part of the parity table."""


def generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * rank + step)


def floats(step: int, rank: int, *shape: int) -> Tensor:
    # the offset makes ranks differ in more than noise, so that a reduction that loses a rank is far off
    return torch.randn(*shape, generator=generator(step, rank)) + 0.25 * rank


def rows(step: int, rank: int) -> Batch:
    return (floats(step, rank, 3, WIDTH),)


def sequences(step: int, rank: int) -> Batch:
    return (floats(step, rank, 2, 5, WIDTH),)


def tokens(step: int, rank: int) -> Batch:
    return (torch.randint(0, 31, (2, 6), generator=generator(step, rank)),)


def images(step: int, rank: int) -> Batch:
    return (floats(step, rank, 2, 3, 8, 8).contiguous(memory_format=torch.channels_last),)


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch).square().mean()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(*batch)[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def specimen(
    batch: Callable[[int, int], Batch] = rows,
    loss: Callable[[nn.Module, Batch], Tensor] = squared,
    ddp: str = "plain",
    table: dict[str, Specimen] = MENAGERIE,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put what the decorated function builds into the table, under the function's name."""

    def enter(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        table[make.__name__] = Specimen(make.__name__, make, batch, loss, ddp)
        return make

    return enter


class Block(nn.Module):
    """Residual MLP with a norm: the plainest repeated unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks and a head. ``run`` says how a block is called; the other specimens vary it."""

    def __init__(
        self, blocks: list[nn.Module], run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x), out: int = 5
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, out)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def blocks(count: int = 3) -> list[nn.Module]:
    return [Block() for _ in range(count)]
