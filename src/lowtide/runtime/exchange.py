"""Small facts and cut tensors between ranks: what the engine asks all ranks at once."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.comm.group import Group
from lowtide.spec.layout import UnitLayout

_LONGEST = 2000
"""Characters of an error's text that other ranks are told."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one rank's part: its answer, or why there is none. An error need not have a text."""

    text: str = ""
    failed: bool = False

    @classmethod
    def of_failure(cls, error: BaseException) -> Outcome:
        return cls(said_by(error), failed=True)


def said_by(error: BaseException) -> str:
    """The text of an exception, never empty: its class, if it says nothing or cannot."""
    try:
        text = str(error).strip()
    except Exception:  # a caller's exception may raise here, too
        text = ""
    return text[:_LONGEST].encode(errors="backslashreplace").decode() or type(error).__name__


class Exchange:
    """Questions that every rank must ask in the same order."""

    def __init__(self, group: Group, channel: Channel) -> None:
        self._group, self._channel = group, channel

    def notes(self, what: str, mine: bytes) -> list[bytes]:
        """Everybody's bytes, of one length on all ranks, in rank order."""
        return self._channel.run(Label("ask", -1, what), lambda _, notes: notes, mine)

    def numbers(self, what: str, mine: int) -> list[int]:
        """Everybody's number."""
        return [struct.unpack("<q", note)[0] for note in self.notes(what, struct.pack("<q", mine))]

    def texts(self, what: str, mine: str) -> list[str]:
        """Everybody's text; the lengths go first, because notes have one length."""
        raw = mine.encode()
        longest = max(self.numbers(f"the length of {what}", len(raw)))
        return [note.rstrip(b"\0").decode() for note in self.notes(what, raw.ljust(longest, b"\0"))]

    def outcomes(self, what: str, mine: Outcome) -> list[Outcome]:
        """What became of everybody's part. The flag stands apart from the text."""
        told = self.texts(what, f"{'!' if mine.failed else '='}{mine.text}")
        return [Outcome(text[1:], failed=text[:1] != "=") for text in told]

    def vectors(self, mine: Tensor) -> list[Tensor]:
        """The fp64 vectors of the ranks that hold one copy of the model; they may differ in length."""
        lengths = self.numbers("the length of a vector", mine.numel())
        shard = self._group.shard
        first = self._group.replicate.rank * shard.size  # copies hold the same pieces: one copy speaks for all
        cuts = [8 * sum(lengths[first : first + k]) for k in range(shard.size + 1)]
        whole = torch.empty(cuts[-1], dtype=torch.uint8)
        whole[cuts[shard.rank] : cuts[shard.rank + 1]].copy_(mine.view(torch.uint8))
        self._gather("a vector", whole, cuts)
        return [whole[a:b].view(torch.float64) for a, b in itertools.pairwise(cuts)]

    def whole(self, what: str, layout: UnitLayout, index: int, piece: Tensor) -> Tensor:
        """A tensor that is cut like parameter ``index``, from everybody's pieces: flat, in memory order."""
        width = piece.element_size()
        ends = [layout.piece(index, rank)[1] * width for rank in range(layout.ranks)]
        cuts = [0, *itertools.accumulate(ends, max)]
        whole = torch.empty(layout.params[index].numel, dtype=piece.dtype, device=piece.device)
        here = self._group.shard.rank
        raw = whole.view(torch.uint8)
        raw[cuts[here] : cuts[here + 1]].copy_(piece.contiguous().view(torch.uint8))
        self._gather(what, raw, cuts)
        return whole

    def _gather(self, what: str, raw: Tensor, cuts: list[int]) -> None:
        def work(wire: Wire, _: list[bytes]) -> None:
            wire.shard.gather(raw, cuts)

        self._channel.run(Label("gather", -1, f"{what}, {raw.numel()} bytes"), work)
