"""How bytes pass between the ranks of one axis. A transport moves bytes, and adds numbers along the one fixed tree
(comm/reduce.py); it never decides and never retries. So which transport is used never changes a bit.

Every call is collective: all ranks of the axis make it, in the same order, with sizes that fit together. gloo ends the
whole process when sizes differ, so callers agree on sizes first (the header of a channel does that).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.comm.codec import EXACT, Codec
from lowtide.comm.reduce import tree_sum
from lowtide.errors import Error, InternalError

# Never sent by anybody: a receive with this tag can only time out.
_NOBODY_SENDS_THIS_TAG = 0x10771DE


class LinkBroken(Error, RuntimeError):
    """An exchange ended because a connection closed or timed out. A channel turns it into an error that names the rank."""

    @property
    def timed_out(self) -> bool:
        """Whether the backend gave up waiting, rather than losing the connection."""
        return any(words in str(self).lower() for words in ("timed out", "timeout"))


class Transport(Protocol):
    """The ranks of one axis, ``0 .. size - 1``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        """Rank ``r`` owns the bytes ``whole[cuts[r]:cuts[r + 1]]`` (maybe none) and filled them; afterwards all are filled."""
        ...

    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> AbstractContextManager[Tensor]:
        """The sum over all ranks of this rank's piece, or of all pieces if ``whole``, valid inside. ``fill`` puts this rank's
        numbers into the buffer that it is given: ``counts[r]`` elements for each rank ``r``, one piece after another."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Everybody's ``tensor`` becomes that of rank ``root`` of this axis."""
        ...

    def all_gather_small(self, mine: Tensor) -> Tensor:
        """``(n,)`` of the same size on every rank -> ``(size, n)``."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Memory that it holds on this rank between exchanges."""
        ...

    def abort(self) -> None:
        """End every pending exchange with an error, from any thread. Nothing can be exchanged afterwards."""
        ...


class HostTransport(Transport, Protocol):
    """A transport whose local ranks map the same memory."""

    def gather_between_hosts(self, whole: Tensor, cuts: Sequence[int]) -> None:
        """As ``gather``, where ``whole`` is mapped by all ranks of a host: each of them brings a part from the other hosts.
        Whether the parts of the others are there is not known at the end."""
        ...


def check_cuts(whole: Tensor, cuts: Sequence[int], size: int) -> None:
    if whole.dtype != torch.uint8 or whole.dim() != 1 or not whole.is_contiguous():
        raise InternalError(f"gather needs contiguous 1-D bytes, got {whole.dtype} of shape {tuple(whole.shape)}")
    if len(cuts) != size + 1 or cuts[0] != 0 or cuts[-1] != whole.numel() or any(b < a for a, b in pairwise(cuts)):
        raise InternalError(f"cuts {list(cuts)} do not divide {whole.numel()} bytes among {size} ranks")


def check_pieces(counts: Sequence[int], size: int) -> None:
    if len(counts) != size or min(counts) < 0:
        raise InternalError(f"a reduction over {size} ranks in pieces of {list(counts)} elements")


def check_counts(what: str, tensor: Tensor, counts: Sequence[int], size: int) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InternalError(f"exchange needs a contiguous 1-D {what} tensor, got shape {tuple(tensor.shape)}")
    if len(counts) != size or min(counts) < 0 or sum(counts) != tensor.numel():
        raise InternalError(f"{what} counts {list(counts)} do not divide {tensor.numel()} elements among {size} ranks")


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as 1-D bytes, because backends refuse some dtypes and all of them carry bytes."""
    if not tensor.is_contiguous():
        raise InternalError(f"only contiguous tensors travel, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().view(-1).view(torch.uint8)


class Alone:
    """An axis of one rank: everything is where it should be already."""

    rank = 0
    size = 1
    buffer_bytes = 0

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, 1)

    @contextmanager
    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> Generator[Tensor]:
        check_pieces(counts, 1)
        buffer = torch.empty(sum(counts), dtype=dtype)
        fill(buffer)
        yield buffer

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if root != 0:
            raise InternalError(f"broadcast from rank {root} on an axis of one rank")

    def all_gather_small(self, mine: Tensor) -> Tensor:
        return mine.detach().clone().unsqueeze(0)

    def abort(self) -> None:
        return None


class TorchTransport:
    """The ranks of one torch.distributed process group, which must not be used by anybody else."""

    def __init__(self, process_group: Any, *, codec: Codec = EXACT, device: torch.device | None = None) -> None:
        # ``Any``: a ProcessGroup and a bare backend such as ProcessGroupGloo have these calls in common but no base class.
        self._pg = process_group
        self._codec = codec
        self._device = device if device is not None else torch.device("cpu")
        self._scratch: dict[str, Tensor] = {}  # grown to the largest reduction and reused
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.crossing_seconds = 0.0
        """How long numbers have been under way to be added up so far. Written by the thread that reduces."""
        self._gloo = process_group.name() == "gloo"

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, self.size)
        parts = [whole[start:end] for start, end in pairwise(cuts)]
        equal = len({part.numel() for part in parts}) == 1
        if equal and not self._gloo:
            self._finish(lambda: [self._pg._allgather_base(whole, parts[self.rank])])
        else:
            self.share_parts(parts)

    def share_parts(self, parts: Sequence[Tensor]) -> None:
        """``parts[r]`` are bytes that rank ``r`` has and all others get."""
        # gloo's own all-gather copies every part twice; broadcasts under way together move each byte once.
        self._finish(lambda: [self._start_broadcast(part, root) for root, part in enumerate(parts) if part.numel()])

    @contextmanager
    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> Generator[Tensor]:
        check_pieces(counts, self.size)
        send = self.scratch("send", sum(counts) * dtype.itemsize).view(dtype)
        fill(send)
        mine = counts[self.rank]
        recv = self.scratch("recv", mine * self.size * dtype.itemsize).view(dtype)
        began = time.perf_counter()
        exchange_encoded(self, self._codec, send, counts, recv, [mine] * self.size)
        self.crossing_seconds += time.perf_counter() - began
        total = tree_sum([recv[k * mine : (k + 1) * mine] for k in range(self.size)])
        if not whole:
            yield total
            return
        ends = list(accumulate(counts, initial=0))
        send[ends[self.rank] : ends[self.rank + 1]].copy_(total)
        self.gather(send.view(torch.uint8), [end * dtype.itemsize for end in ends])
        yield send

    def use_codec(self, codec: Codec) -> None:
        """From the next reduction on; none may be under way on any rank."""
        self._codec = codec

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._scratch.values())

    def scratch(self, name: str, nbytes: int) -> Tensor:
        """A buffer that is kept until a larger one of that name is asked for."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < nbytes:
            self._scratch.pop(name, None)
            buffer = self._scratch[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buffer[:nbytes]

    def exchange(self, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int]) -> None:
        """Rank ``r`` gets the ``r``-th piece of everybody's ``send``; pieces are counted in elements and lie in rank order."""
        check_counts("send", send, send_counts, self.size)
        check_counts("recv", recv, recv_counts, self.size)
        if send.dtype != recv.dtype or send_counts[self.rank] != recv_counts[self.rank]:
            raise InternalError(
                f"exchange of {send.dtype} into {recv.dtype}, own piece {send_counts[self.rank]} into {recv_counts[self.rank]}"
            )
        item = send.element_size()
        to_send, to_recv = [n * item for n in send_counts], [n * item for n in recv_counts]
        self._finish(lambda: [self._pg.alltoall_base(as_bytes(recv), as_bytes(send), to_recv, to_send)])

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise InternalError(f"broadcast from rank {root} on an axis of {self.size} ranks")
        if tensor.numel():
            self._finish(lambda: [self._start_broadcast(as_bytes(tensor), root)])

    def all_gather_small(self, mine: Tensor) -> Tensor:
        gathered = mine.new_empty((self.size, *mine.shape))
        if mine.numel():
            self._finish(lambda: [self._pg._allgather_base(as_bytes(gathered), as_bytes(mine))])
        return gathered

    def abort(self) -> None:
        if not self._gloo:
            self._pg.abort()
        elif self.size > 1:
            abort_gloo(self._pg)

    def _start_broadcast(self, part: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        return self._pg.broadcast([part], options)

    def _finish(self, start: Callable[[], list[Any]]) -> None:
        """Start works and wait for all. After a failure none stays under way: it could write into memory that has a new use."""
        try:
            for work in start():
                work.wait()
        except RuntimeError as error:
            self.abort()
            raise LinkBroken(str(error)) from error


def exchange_encoded(
    over: TorchTransport, codec: Codec, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int]
) -> None:
    """``exchange``, with every piece as ``codec`` writes it; what a rank sends to itself goes the same way."""
    if codec is EXACT:
        over.exchange(send, send_counts, recv, recv_counts)
        return
    to_send = [codec.wire_bytes(n, send.dtype) for n in send_counts]
    to_recv = [codec.wire_bytes(n, send.dtype) for n in recv_counts]
    sent, received = over.scratch("encoded", sum(to_send)), over.scratch("received", sum(to_recv))
    for piece, wire in zip(send.split(list(send_counts)), sent.split(to_send), strict=True):
        codec.encode(piece, wire)
    over.exchange(sent, to_send, received, to_recv)
    for piece, wire in zip(recv.split(list(recv_counts)), received.split(to_recv), strict=True):
        codec.decode(wire, piece)


def abort_gloo(process_group: Any) -> None:
    """Close all connections of a gloo group, which ends every wait on it, in every thread.

    ``abort()`` of a gloo group leaves waits blocked. But when a receive times out, gloo closes all connections
    of the group; so a receive that nobody answers is made to time out at once.
    """
    peer = (process_group.rank() + 1) % process_group.size()
    try:
        process_group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODY_SENDS_THIS_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return  # The time-out is the purpose; closed already is as good.
