"""The ranks of one host: bytes pass through memory that all of them map, and nothing goes through a socket.

Every rank has a *window* that it alone fills and all others read, and two counters: how many exchanges it has filled its window
for, and how many it is done with. An exchange is: wait until all are done with my window, fill it, say so, wait until all have
filled theirs, read, say that I am done. The windows grow to the largest exchange, on all ranks at once.

[Note: adding in the windows] In a reduction every rank adds up its own piece of everybody's contribution, in place: nobody else
reads that piece of any window, so no further memory is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lowtide.comm.futex import Counters
from lowtide.comm.reduce import tree_sum
from lowtide.comm.shared import TICKET_BYTES, CannotShare, Segment, pages
from lowtide.comm.transport import LinkBroken, as_bytes, check_counts, check_cuts, check_pieces
from lowtide.errors import InternalError

_MAIL_BYTES = 4096  # per rank, for small messages
_SLICE = 0.05  # seconds a wait sleeps at most before it looks whether it was ended
_BROADCAST_BYTES = 4 << 20  # at once
_FIRST_WINDOW = 1 << 20
# Fewer bytes cost more wake-ups, more leave the cache: with 1, 4 and 32 MiB a step of gpt-98m on two ranks took 2.91, 2.86
# and 2.89 s (medians of three runs each, in turns).
_BUCKET_BYTES = 4 << 20

Share = Callable[[bytes], list[bytes]]
"""Everybody's bytes, of one length on all local ranks, in their order: how ranks that share nothing yet find each other."""


def open_together(rank: int, nbytes: int, share: Share) -> Segment:
    """Collective: memory that local rank 0 makes and all map. Raises on every rank if one of them cannot."""
    segment: Segment | None = None
    trouble = b""
    if rank == 0:
        try:
            segment = Segment.make(nbytes)
        except OSError as error:
            trouble = str(error).encode()
    ticket = share(segment.ticket if segment is not None else b"\0" * TICKET_BYTES)[0]
    if rank != 0 and any(ticket):
        try:
            segment = Segment.open(ticket)
        except (CannotShare, OSError) as error:
            trouble = str(error).encode()
    if segment is None and not trouble:
        trouble = b"local rank 0 could not make any"
    troubles = [text.rstrip(b"\0").decode(errors="replace") for text in share(trouble[:200].ljust(200, b"\0"))]
    first = next((text for text in troubles if text), None)
    if segment is None or first is not None:
        if segment is not None:
            segment.close()
        raise CannotShare(f"the ranks of this host cannot share memory: {first}")
    return segment


class LocalTransport:
    """See the module's docstring. ``timeout``: seconds after which a wait for another rank is given up."""

    def __init__(self, rank: int, size: int, *, share: Share, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._aborted = threading.Event()
        self._control = open_together(rank, 4096 + size * _MAIL_BYTES, share)
        self._filled = self._control.counters(0, size)
        self._done = self._control.counters(4 * size, size)
        self._mail = [self._control.tensor(4096 + r * _MAIL_BYTES, _MAIL_BYTES) for r in range(size)]
        self._exchange = 0  # how many exchanges have begun
        self._windows: list[Tensor] = []
        self._used = 0  # bytes of each window that have ever been touched
        self._window_segment: Segment | None = None

    # -- what a transport can do --------------------------------------------------------------------------------------

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, self.size)
        self.share_parts([[whole[a:b]] for a, b in pairwise(cuts)])

    def gather_numbers(self, values: Tensor, counts: Sequence[int]) -> None:
        check_counts("gathered", values, counts, self.size)
        self.share_parts([[as_bytes(piece)] for piece in values.split(list(counts))])

    def share_parts(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """``parts[r]`` are bytes that rank ``r`` has and all others get."""
        self._provide(max(sum(p.numel() for p in row) for row in parts))
        with self._turn():
            _pack(parts[self.rank], self._windows[self.rank])
            self._say_filled()
            for rank, row in enumerate(parts):
                if rank != self.rank:
                    self._wait_filled(rank)
                    _unpack(self._windows[rank], row)

    @contextmanager
    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> Generator[Tensor]:
        check_pieces(counts, self.size)
        with self.contributions(counts, dtype, fill) as pieces:
            if not whole:
                yield tree_sum(pieces(self.rank), mine=self.rank)
                return
            tree_sum(pieces(self.rank))
            self._exchange += 1  # everybody's sum is in the window of rank 0 as soon as everybody says so
            self._say_filled()
            for rank in range(self.size):
                self._wait_filled(rank)
            yield self._windows[0][: sum(counts) * dtype.itemsize].view(dtype)

    @contextmanager
    def contributions(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None]
    ) -> Generator[Callable[[int], list[Tensor]]]:
        """Everybody fills a window with ``counts`` elements, one piece after the other; gives piece ``k`` of every rank."""
        total, ends = sum(counts), list(accumulate(counts, initial=0))
        self._provide(total * dtype.itemsize)
        rows = [w[: total * dtype.itemsize].view(dtype) for w in self._windows]
        with self._turn():
            fill(rows[self.rank])
            self._say_filled()
            for rank in range(self.size):
                self._wait_filled(rank)
            yield lambda piece: [row[ends[piece] : ends[piece + 1]] for row in rows]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise InternalError(f"broadcast from rank {root} on an axis of {self.size} ranks")
        raw = as_bytes(tensor)
        for start in range(0, raw.numel(), _BROADCAST_BYTES):
            part = raw[start : start + _BROADCAST_BYTES]
            self.share_parts([[part] if rank == root else [] for rank in range(self.size)])

    def all_gather_small(self, mine: Tensor) -> Tensor:
        gathered = mine.new_empty((self.size, *mine.shape))
        if not mine.numel():
            return gathered
        rows = as_bytes(gathered).view(self.size, -1)
        rows[self.rank].copy_(as_bytes(mine))
        if rows.shape[1] > _MAIL_BYTES:
            self.share_parts([[row] for row in rows])
        else:
            width = rows.shape[1]
            with self._turn():
                self._mail[self.rank][:width].copy_(rows[self.rank])
                self._say_filled()
                for rank in range(self.size):
                    if rank != self.rank:
                        self._wait_filled(rank)
                        rows[rank].copy_(self._mail[rank][:width])
        return gathered

    def gather_between_hosts(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, self.size)

    def abort(self) -> None:
        self._aborted.set()

    @property
    def local(self) -> LocalTransport:
        """The ranks of this host: all."""
        return self

    # -- turns --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self) -> Generator[None]:
        """One exchange: nobody reads my window of the last one any more; at the end I read nobody's of this one."""
        for rank in range(self.size):
            self._wait(self._done, rank, self._exchange)
        self._exchange += 1
        try:
            yield
        except BaseException:
            self._aborted.set()  # the others wait for what will not come: their watch ends them
            raise
        self._done.advance(self.rank, self._exchange)

    def _say_filled(self) -> None:
        self._filled.advance(self.rank, self._exchange)

    def _wait_filled(self, rank: int) -> None:
        self._wait(self._filled, rank, self._exchange)

    def _wait(self, counters: Counters, rank: int, target: int) -> None:
        end: float | None = None
        while not counters.wait(rank, target, _SLICE):  # what is there is taken, whatever has happened since
            if self._aborted.is_set():
                raise LinkBroken("the exchange was ended")
            now = time.monotonic()
            end = now + self._timeout if end is None else end
            if now > end:
                raise LinkBroken(f"timed out waiting for rank {rank} of this host")

    # -- windows ------------------------------------------------------------------------------------------------------

    @property
    def window_bytes(self) -> int:
        """The length of each window."""
        return self._windows[0].numel() if self._windows else 0

    @property
    def buffer_bytes(self) -> int:
        return self._used

    @property
    def bucket_bytes(self) -> int:
        return _BUCKET_BYTES

    @property
    def segments(self) -> list[Segment]:
        """The memory that is shared, for those who count it."""
        return [s for s in (self._control, self._window_segment) if s is not None]

    def _provide(self, nbytes: int) -> None:
        """Windows of at least ``nbytes``, which is the same number on all ranks."""
        self._used = max(self._used, nbytes)
        if self._windows and nbytes <= self.window_bytes:
            return
        size = pages(max(nbytes, _FIRST_WINDOW))
        self._windows = []
        if self._window_segment is not None:
            self._window_segment.close()
        self._window_segment = segment = open_together(self.rank, size * self.size, self._share)
        self._windows = [segment.tensor(rank * size, size) for rank in range(self.size)]

    def _share(self, mine: bytes) -> list[bytes]:
        rows = self.all_gather_small(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]


def _pack(parts: Sequence[Tensor], window: Tensor) -> None:
    at = 0
    for part in parts:
        window[at : at + part.numel()].copy_(part)
        at += part.numel()


def _unpack(window: Tensor, parts: Sequence[Tensor]) -> None:
    at = 0
    for part in parts:
        part.copy_(window[at : at + part.numel()])
        at += part.numel()
