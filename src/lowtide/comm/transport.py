"""How bytes pass between the ranks of one axis. A transport moves bytes, and adds numbers along the one fixed tree
(comm/reduce.py); it never decides and never retries. So which transport is used never changes a bit.

Every call is collective: all ranks of the axis make it, in the same order, with sizes that fit together. gloo ends the
whole process when sizes differ, so callers agree on sizes first (the header of a channel does that).
"""

from __future__ import annotations

import sys
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
from lowtide.comm.halving import can_halve, halved_sum
from lowtide.comm.reduce import tree_sum
from lowtide.comm.tuning import ALL_GATHER, BROADCASTS, EXCHANGE, HALVING, Choice, Tuning
from lowtide.errors import Error, InternalError

# Never sent by anybody: a receive with this tag can only time out.
_NOBODY_SENDS_THIS_TAG = 0x10771DE
_SWAP_TAG = 0x10771DF


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

    def gather_numbers(self, values: Tensor, counts: Sequence[int]) -> None:
        """As ``gather``, of numbers: rank ``r`` owns ``counts[r]`` elements of ``values``, one piece after another. What
        crosses a network goes through the codec, and then so does what stays: afterwards all ranks hold the same bits."""
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

    @property
    def bucket_bytes(self) -> int:
        """How many bytes one reduction should handle at once, so that little of its time is a fixed cost. The same on all ranks
        of the axis."""
        ...

    def abort(self) -> None:
        """End every pending exchange with an error, from any thread. Nothing can be exchanged afterwards."""
        ...


class HostTransport(Transport, Protocol):
    """A transport whose local ranks map the same memory."""

    @property
    def local(self) -> Transport:
        """The ranks of this host."""
        ...

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
    bucket_bytes = sys.maxsize

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, 1)

    def gather_numbers(self, values: Tensor, counts: Sequence[int]) -> None:
        check_counts("gathered", values, counts, 1)

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
        self.codec = codec
        """How numbers travel."""
        self._device = device if device is not None else torch.device("cpu")
        self._scratch: dict[str, Tensor] = {}  # grown to the largest reduction and reused
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.crossing_seconds = 0.0
        """How long numbers have been under way to be added up so far. Written by the thread that reduces."""
        self._gloo = process_group.name() == "gloo"
        self.tuning = Tuning(Choice.always(self.candidates["gather"][0]), Choice.always(EXCHANGE))
        """Which algorithms are used. The usual ones, until somebody has measured."""

    @property
    def candidates(self) -> dict[str, tuple[str, ...]]:
        """What can be chosen among for each verb, the usual one first."""
        # gloo's own all-gather copies every part twice; broadcasts under way together move each byte once. For two ranks both
        # ways to reduce send the same messages. Backends other than gloo may want pairs of messages announced together.
        halving = (HALVING,) if self._gloo and self.size > 2 and can_halve(self.size) else ()
        gather = (BROADCASTS, ALL_GATHER) if self._gloo else (ALL_GATHER, BROADCASTS)
        return {"gather": gather, "reduce": (EXCHANGE, *halving)}

    def tune(self, tuning: Tuning) -> None:
        """From the next exchange on; all ranks do this at the same place."""
        possible = {EXCHANGE, HALVING} if can_halve(self.size) else {EXCHANGE}
        if not tuning.reduce.names <= possible or not tuning.gather.names <= {BROADCASTS, ALL_GATHER}:
            raise InternalError(f"{self.size} ranks cannot gather by {tuning.gather} and reduce by {tuning.reduce}")
        self.tuning = tuning

    @property
    def bucket_bytes(self) -> int:
        return self.tuning.bucket_bytes

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, self.size)
        parts = [whole[start:end] for start, end in pairwise(cuts)]
        equal = len({part.numel() for part in parts}) == 1
        if equal and whole.numel() and self.tuning.gather.at(whole.numel()) == ALL_GATHER:
            self._finish(lambda: [self._pg._allgather_base(whole, parts[self.rank])])
        else:
            self.share_parts(parts)

    def share_parts(self, parts: Sequence[Tensor]) -> None:
        """``parts[r]`` are bytes that rank ``r`` has and all others get."""
        self._finish(lambda: [self._start_broadcast(part, root) for root, part in enumerate(parts) if part.numel()])

    def gather_numbers(self, values: Tensor, counts: Sequence[int]) -> None:
        check_counts("gathered", values, counts, self.size)
        with self._under_way():
            if self.codec is EXACT:
                self.gather(as_bytes(values), [end * values.itemsize for end in accumulate(counts, initial=0)])
            else:
                share_encoded(self, self.codec, values.split(list(counts)))

    @contextmanager
    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> Generator[Tensor]:
        check_pieces(counts, self.size)
        send = self.scratch("send", sum(counts) * dtype.itemsize).view(dtype)
        fill(send)
        # A codec rounds what is sent. Halving sends sums of sums: it would round at every hop, and other numbers.
        if self.codec is EXACT and self.tuning.reduce.at(send.nbytes) == HALVING:
            total = halved_sum(self, send, counts)
        else:
            total = self._exchanged_sum(send, counts)
        if not whole:
            yield total
            return
        ends = list(accumulate(counts, initial=0))
        send[ends[self.rank] : ends[self.rank + 1]].copy_(total)
        self.gather(send.view(torch.uint8), [end * dtype.itemsize for end in ends])
        yield send

    def _exchanged_sum(self, send: Tensor, counts: Sequence[int]) -> Tensor:
        mine = counts[self.rank]
        recv = self.scratch("recv", mine * self.size * send.itemsize).view(send.dtype)
        with self._under_way():
            exchange_encoded(self, self.codec, send, counts, recv, [mine] * self.size)
        return tree_sum([recv[k * mine : (k + 1) * mine] for k in range(self.size)])

    def swap(self, peer: int, give: Tensor, get: Tensor) -> None:
        """Send ``give`` to ``peer``, which gives ``get``: both know both sizes."""
        if peer == self.rank or not 0 <= peer < self.size:
            raise InternalError(f"rank {self.rank} of {self.size} swaps with rank {peer}")
        works: list[Callable[[], Any]] = []
        if get.numel():
            works.append(lambda: self._pg.recv([as_bytes(get)], peer, _SWAP_TAG))
        if give.numel():
            works.append(lambda: self._pg.send([as_bytes(give)], peer, _SWAP_TAG))
        with self._under_way():
            self._finish(lambda: [start() for start in works])

    @contextmanager
    def _under_way(self) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.crossing_seconds += time.perf_counter() - began

    def use_codec(self, codec: Codec) -> None:
        """From the next reduction on; none may be under way on any rank."""
        self.codec = codec

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

    def forget(self) -> None:
        """As if nothing had been exchanged yet: what was only a trial holds no memory and counts for nothing."""
        self._scratch.clear()
        self.crossing_seconds = 0.0

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


def share_encoded(over: TorchTransport, codec: Codec, pieces: Sequence[Tensor]) -> None:
    """``pieces[r]`` are numbers that rank ``r`` has and all others get, as ``codec`` writes them. The own piece is read back as
    well, because the others have what the codec left of it."""
    sizes = [codec.wire_bytes(piece.numel(), piece.dtype) for piece in pieces]
    wires = over.scratch("encoded", sum(sizes)).split(sizes)
    codec.encode(pieces[over.rank], wires[over.rank])
    over.share_parts(wires)
    for piece, wire in zip(pieces, wires, strict=True):
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
