"""What a model's states need and which part of them a rank keeps: the ZeRO formulas for Adam with one dtype of 4 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.stages import Stage

_BYTES = 4
"""fp32, which the job trains in."""

_MOMENTS = 2
"""Adam's two averages."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of bytes: what the model has, and what one rank keeps between two uses of it."""

    kind: str
    whole_bytes: int
    rank_bytes: int
    where: str


def place(*, parameters: int, trainable: int, stage: Stage, ranks: int) -> tuple[Kept, ...]:
    """Where parameters, gradients and optimizer states will live."""

    def kept(kind: str, size: int, *, sharded: bool) -> Kept:
        cut = sharded and ranks > 1
        where = f"1/{ranks} on each rank" if cut else "whole on each rank" if ranks > 1 else "on the one rank"
        return Kept(kind, size, -(-size // ranks) if cut else size, where)

    return (
        kept("parameters", parameters * _BYTES, sharded=stage.parameters),
        kept("gradients", trainable * _BYTES, sharded=stage.gradients),
        kept("optimizer", trainable * _BYTES * _MOMENTS, sharded=stage.optimizer),
    )


def place_text(kinds: tuple[Kept, ...], *, name: str, stage: Stage, ranks: int, tier: str) -> str:
    """The placement as a small table for a file. ``tier``: where it may be kept, in words."""
    lines = [f"{name}, stage {stage.number}, {ranks} rank{'s' if ranks > 1 else ''}", ""]
    lines += [f"{'kind':<12}{'whole model':>16}{'each rank':>16}   where"]
    lines += [f"{k.kind:<12}{mebibytes(k.whole_bytes):>16}{mebibytes(k.rank_bytes):>16}   {tier}, {k.where}" for k in kinds]
    whole, rank = sum(k.whole_bytes for k in kinds), sum(k.rank_bytes for k in kinds)
    lines += [f"{'together':<12}{mebibytes(whole):>16}{mebibytes(rank):>16}", ""]
    lines += ["On top of this, on each rank: the units in use (whole), activations, Python and torch."]
    return "\n".join(lines) + "\n"


def mebibytes(size: int) -> str:
    """``1048576`` → ``1.0 MiB``."""
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"
