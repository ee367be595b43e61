"""Blocks on disk that must stay as they are while training goes on: those that a checkpoint refers to.

A pinned place is never written again. The next write of its block goes to a spare place, which was reserved when the block was
pinned, so that the write cannot find the disk full; from then on the old place belongs to its pins alone. So a checkpoint of
bytes that are on disk already costs no copy: the spool file gets a name in the checkpoint's folder, and the places keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lowtide.tiers.spool import Spool
from lowtide.tiers.store import Extent, IOTicket


@dataclass(slots=True, eq=False)
class Place:
    """Room in a spool file. It is given back when it is nobody's block and nobody's pin."""

    spool: Spool
    offset: int
    room: int
    pins: int = 0
    is_block: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBlock:
    """One block as it was when it was pinned."""

    place: Place
    nbytes: int
    digest: int


class PinOwner(Protocol):
    """The store that a pin is of."""

    def unpin(self, pin: Pin) -> None: ...

    def read_pinned(self, block: PinnedBlock, into: Tensor, label: str) -> IOTicket: ...


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks of some extents, held until ``release``; None for one that was never written."""

    owner: PinOwner
    blocks: Mapping[Extent, Sequence[PinnedBlock | None]]
    released: bool = field(default=False)

    def places(self) -> list[Place]:
        return [block.place for row in self.blocks.values() for block in row if block is not None]

    def spools(self) -> list[Spool]:
        """The files that hold these blocks."""
        return list(dict.fromkeys(place.spool for place in self.places()))

    def keep(self) -> None:
        """A checkpoint refers to these places for good: they outlive the job."""
        for place in self.places():
            place.spool.keep(place.offset, place.room)

    def release(self) -> None:
        """Let go. Idempotent."""
        if not self.released:
            self.released = True
            self.owner.unpin(self)
