"""How bytes pass between the ranks of one axis. A transport only moves bytes: it never adds, never decides, never retries.

Every call is collective: all ranks of the axis make it, in the same order, with sizes that fit together. gloo ends the
whole process when sizes differ, so callers agree on sizes first (the header of a channel does that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.errors import Error, InternalError

# Never sent by anybody: a receive with this tag can only time out.
_NOBODY_SENDS_THIS_TAG = 0x10771DE


class LinkBroken(Error, RuntimeError):
    """An exchange ended because a connection closed or timed out. A channel turns it into an error that names the rank."""

    @property
    def timed_out(self) -> bool:
        """Whether the backend gave up waiting, rather than losing the connection."""
        return "timed out" in str(self).lower()


class Transport(Protocol):
    """The ranks of one axis, ``0 .. size - 1``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        """Rank ``r`` owns the bytes ``whole[cuts[r]:cuts[r + 1]]`` (maybe none) and filled them; afterwards all are filled."""
        ...

    def exchange(self, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int]) -> None:
        """Rank ``r`` gets the ``r``-th piece of everybody's ``send``; pieces are counted in elements and lie in rank order."""
        ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Everybody's ``tensor`` becomes that of rank ``root`` of this axis."""
        ...

    def all_gather_small(self, mine: Tensor) -> Tensor:
        """``(n,)`` of the same size on every rank -> ``(size, n)``."""
        ...

    def abort(self) -> None:
        """End every pending exchange with an error, from any thread. Nothing can be exchanged afterwards."""
        ...


def _check_cuts(whole: Tensor, cuts: Sequence[int], size: int) -> None:
    if whole.dtype != torch.uint8 or whole.dim() != 1 or not whole.is_contiguous():
        raise InternalError(f"gather needs contiguous 1-D bytes, got {whole.dtype} of shape {tuple(whole.shape)}")
    if len(cuts) != size + 1 or cuts[0] != 0 or cuts[-1] != whole.numel() or any(b < a for a, b in pairwise(cuts)):
        raise InternalError(f"cuts {list(cuts)} do not divide {whole.numel()} bytes among {size} ranks")


def _check_counts(what: str, tensor: Tensor, counts: Sequence[int], size: int) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InternalError(f"exchange needs a contiguous 1-D {what} tensor, got shape {tuple(tensor.shape)}")
    if len(counts) != size or min(counts) < 0 or sum(counts) != tensor.numel():
        raise InternalError(f"{what} counts {list(counts)} do not divide {tensor.numel()} elements among {size} ranks")


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as 1-D bytes, because backends refuse some dtypes and all of them carry bytes."""
    if not tensor.is_contiguous():
        raise InternalError(f"only contiguous tensors travel, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().view(-1).view(torch.uint8)


class Alone:
    """An axis of one rank: everything is where it should be already."""

    rank = 0
    size = 1

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        _check_cuts(whole, cuts, 1)

    def exchange(self, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int]) -> None:
        _check_counts("send", send, send_counts, 1)
        _check_counts("recv", recv, recv_counts, 1)
        recv.copy_(send)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if root != 0:
            raise InternalError(f"broadcast from rank {root} on an axis of one rank")

    def all_gather_small(self, mine: Tensor) -> Tensor:
        return mine.detach().clone().unsqueeze(0)

    def abort(self) -> None:
        return None


class TorchTransport:
    """The ranks of one torch.distributed process group, which must not be used by anybody else."""

    def __init__(self, process_group: Any) -> None:
        # ``Any``: a ProcessGroup and a bare backend such as ProcessGroupGloo have these calls in common but no base class.
        self._pg = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._gloo = process_group.name() == "gloo"

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        _check_cuts(whole, cuts, self.size)
        parts = [whole[start:end] for start, end in pairwise(cuts)]
        equal = len({part.numel() for part in parts}) == 1
        if equal and not self._gloo:
            self._finish(lambda: [self._pg._allgather_base(whole, parts[self.rank])])
        else:
            # gloo's own all-gather copies every part twice; broadcasts under way together move each byte once.
            self._finish(lambda: [self._start_broadcast(part, root) for root, part in enumerate(parts) if part.numel()])

    def exchange(self, send: Tensor, send_counts: Sequence[int], recv: Tensor, recv_counts: Sequence[int]) -> None:
        _check_counts("send", send, send_counts, self.size)
        _check_counts("recv", recv, recv_counts, self.size)
        if send.dtype != recv.dtype or send_counts[self.rank] != recv_counts[self.rank]:
            raise InternalError(
                f"exchange of {send.dtype} into {recv.dtype}, own piece {send_counts[self.rank]} into {recv_counts[self.rank]}"
            )
        item = send.element_size()
        to_send, to_recv = [n * item for n in send_counts], [n * item for n in recv_counts]
        self._finish(lambda: [self._pg.alltoall_base(_as_bytes(recv), _as_bytes(send), to_recv, to_send)])

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise InternalError(f"broadcast from rank {root} on an axis of {self.size} ranks")
        if tensor.numel():
            self._finish(lambda: [self._start_broadcast(_as_bytes(tensor), root)])

    def all_gather_small(self, mine: Tensor) -> Tensor:
        gathered = mine.new_empty((self.size, *mine.shape))
        if mine.numel():
            self._finish(lambda: [self._pg._allgather_base(_as_bytes(gathered), _as_bytes(mine))])
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
