"""What every store can do: hold bytes under a key, and read and write them in blocks, later.

A store is the bytes of one tier outside the memory that compute reads. It is asked for an *extent* per (unit, kind) and is
read and written in the extent's *blocks*, the pieces between its cuts. Every request returns a ticket at once. Requests for
one block are carried out in the order in which they were made; otherwise the more urgent ones go first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lowtide.spec.layout import ALIGNMENT as ALIGNMENT


class Priority(enum.IntEnum):
    """How urgent a request is; the smallest goes first."""

    NOW = 0
    NEXT = 1
    MOMENTS = 2
    WRITE_BACK = 3
    CHECKPOINT = 4


@dataclass(frozen=True, slots=True)
class Key:
    """What an extent holds: the name of a unit and the kind of bytes, for people and errors."""

    unit: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.unit!r}"


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Room in a store. Block ``i`` holds the bytes ``cuts[i]:cuts[i + 1]``."""

    key: Key
    cuts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.cuts[-1]

    def block_bytes(self, block: int) -> int:
        return self.cuts[block + 1] - self.cuts[block]


class IOTicket(Protocol):
    """A request under way."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns, or raises, at once."""
        ...

    def wait(self) -> None:
        """Block until the request is done; raises what went wrong."""
        ...

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the request no longer touches the memory it was given, failed or not; from any thread."""
        ...


Observer = Callable[[str, str, Hashable, float], None]
"""Hears of requests: ``work`` or ``wait``, the request's label and key, and when it began (``time.monotonic``). Called when it
is over, by the thread that did it."""


@dataclass(slots=True)
class Traffic:
    """What a store has moved so far, and how long callers waited for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    """In which at least one request was being carried out: bytes over this is the speed of the tier."""
    observer: Observer | None = field(default=None, repr=False, compare=False)
    """Threads refer to it for as long as the store lives: it must not refer to what owns the store."""


class Store(Protocol):
    """See the module's docstring. Safe to call from several threads."""

    @property
    def traffic(self) -> Traffic: ...

    @property
    def used_bytes(self) -> int:
        """Room taken by extents."""
        ...

    def reserve(self, key: Key, cuts: Sequence[int]) -> Extent:
        """Take room, for good until ``free``: a write into it cannot run out of space later."""
        ...

    def free(self, extent: Extent) -> None:
        """Give the room back, once its pending requests are done."""
        ...

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        """Fill ``into`` (1-D bytes, as long as the block) with what was written last. Reading what never was is an error."""
        ...

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        """Keep ``data`` (1-D bytes, as long as the block). It must not change until the ticket is done."""
        ...

    def drain(self) -> None:
        """Wait for every pending request; raises if a write failed that nobody waited for."""
        ...

    def close(self) -> None:
        """Drop everything. Idempotent."""
        ...
