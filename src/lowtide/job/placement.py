"""Which part of a model's states a rank keeps, for the story's table; and bytes as a person reads them."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.formulas import from_precision, states_bytes_per_rank
from lowtide.stages import Stage


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of bytes, and what one rank keeps of it between two uses."""

    kind: str
    rank_bytes: int


def place(*, parameters: int, stage: Stage, ranks: int) -> tuple[Kept, ...]:
    """What a rank keeps of parameters, gradients and optimizer states, for Adam in fp32."""
    kinds = from_precision("fp32")
    here = states_bytes_per_rank(parameters, stage, ranks, kinds)
    return (
        Kept("parameters", int(here.parameters)),
        Kept("gradients", int(here.gradients)),
        Kept("optimizer", int(here.optimizer)),
    )


def mebibytes(size: int) -> str:
    """``1048576`` → ``1.0 MiB``."""
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
