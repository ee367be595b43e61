"""Ranks on several hosts, as many on each: shared memory inside a host, and between hosts every byte crosses the network once.

Local rank ``j`` of every host is on *rail* ``j``, a torch.distributed group of its own. What a rank has reaches another host on
its rail, is put into memory there once, and is read by all ranks of that host. Gradients are first added inside the host, as
far as the one tree over all ranks allows (comm/reduce.py); a host whose ranks make up whole nodes of the tree sends one sum
instead of one per rank. Rails are used at the same time, so that no single process is the neck of a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from lowtide.comm.codec import EXACT, Codec
from lowtide.comm.local import LocalTransport
from lowtide.comm.reduce import Node, nodes_within, sum_of_nodes, tree_sum
from lowtide.comm.transport import (
    TorchTransport,
    as_bytes,
    check_counts,
    check_cuts,
    check_pieces,
    exchange_encoded,
    share_encoded,
)
from lowtide.errors import InternalError


class TwoLevel:
    """``hosts[h]``: the ranks of host ``h``; ``local`` connects those of this one, ``rail`` those at the same place of all."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        *,
        local: LocalTransport,
        rail: TorchTransport,
        codec: Codec = EXACT,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, hosts))
        self._local, self._rail, self._codec = local, rail, codec
        self._host = next(h for h, ranks in enumerate(hosts) if rank in ranks)
        self._rails = [[ranks[j] for ranks in hosts] for j in range(len(hosts[0]))]
        self._mine = self._rails[local.rank]  # the ranks of my rail, host by host
        self._hosts = hosts
        self._nodes = [nodes_within(ranks, self.size) for ranks in hosts]
        self.crossing_seconds = 0.0
        """How long sums have been under way between hosts so far. Written by the thread that reduces."""

    @property
    def local(self) -> LocalTransport:
        """The ranks of this host."""
        return self._local

    def use_codec(self, codec: Codec) -> None:
        """From the next reduction on; none may be under way on any rank."""
        self._codec = codec

    @property
    def buffer_bytes(self) -> int:
        return self._local.buffer_bytes + self._rail.buffer_bytes

    @property
    def bucket_bytes(self) -> int:
        return self._rail.bucket_bytes

    def gather(self, whole: Tensor, cuts: Sequence[int]) -> None:
        self.gather_between_hosts(whole, cuts)
        self._local.share_parts([[whole[cuts[r] : cuts[r + 1]] for r in rail] for rail in self._rails])

    def gather_between_hosts(self, whole: Tensor, cuts: Sequence[int]) -> None:
        check_cuts(whole, cuts, self.size)
        self._rail.share_parts([whole[cuts[r] : cuts[r + 1]] for r in self._mine])

    def gather_numbers(self, values: Tensor, counts: Sequence[int]) -> None:
        check_counts("gathered", values, counts, self.size)
        began = time.perf_counter()
        pieces = values.split(list(counts))
        if self._codec is EXACT:
            self._rail.share_parts([as_bytes(pieces[r]) for r in self._mine])
        else:
            share_encoded(self._rail, self._codec, [pieces[r] for r in self._mine])
        self.crossing_seconds += time.perf_counter() - began
        # Inside the host they pass as they came out of the codec, the own ones, too.
        self._local.share_parts([[as_bytes(pieces[r]) for r in rail] for rail in self._rails])

    @contextmanager
    def reduced(
        self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None], *, whole: bool = False
    ) -> Generator[Tensor]:
        check_pieces(counts, self.size)
        with self._sum(counts, dtype, fill) as total:
            if not whole:
                yield total
                return
            ends = list(accumulate(counts, initial=0))
            every = self._rail.scratch("everybody's sums", ends[-1] * dtype.itemsize).view(dtype)
            every[ends[self.rank] : ends[self.rank + 1]].copy_(total)
        self.gather(every.view(torch.uint8), [end * dtype.itemsize for end in ends])
        yield every

    @contextmanager
    def _sum(self, counts: Sequence[int], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Generator[Tensor]:
        with self._local.contributions(counts, dtype, fill) as pieces:
            place = {rank: at for at, rank in enumerate(self._hosts[self._host])}

            def sums(owner: int) -> list[Tensor]:
                """My host's nodes of the piece that belongs to ``owner``, which nobody else of my host adds up."""
                rows = pieces(owner)
                nodes = [range(*node) for node in self._nodes[self._host]]
                mine = [node.index(self.rank) if self.rank in node else None for node in nodes]
                return [tree_sum([rows[place[r]] for r in node], mine=at) for node, at in zip(nodes, mine, strict=True)]

            received = self._exchange([sums(owner) for owner in self._mine], counts[self.rank], dtype)
            yield sum_of_nodes(received, self.size)

    def _exchange(self, sums: list[list[Tensor]], mine: int, dtype: torch.dtype) -> dict[Node, Tensor]:
        """Send the other hosts my host's sums of their pieces; returns the sums of all hosts' nodes of my piece."""
        here = self._host
        nodes = [len(n) for n in self._nodes]
        send_counts = [0 if h == here else sum(s.numel() for s in row) for h, row in enumerate(sums)]
        recv_counts = [0 if h == here else mine * n for h, n in enumerate(nodes)]
        send = self._rail.scratch("sums to send", sum(send_counts) * dtype.itemsize).view(dtype)
        recv = self._rail.scratch("sums received", sum(recv_counts) * dtype.itemsize).view(dtype)
        at = 0
        for h, row in enumerate(sums):
            for values in row if h != here else ():
                send[at : at + values.numel()].copy_(values)
                at += values.numel()
        began = time.perf_counter()
        exchange_encoded(self._rail, self._codec, send, send_counts, recv, recv_counts)
        self.crossing_seconds += time.perf_counter() - began
        found: dict[Node, Tensor] = dict(zip(self._nodes[here], sums[here], strict=True))
        at = 0
        for h, its_nodes in enumerate(self._nodes):
            for node in its_nodes if h != here else ():
                found[node] = recv[at : at + mine]
                at += mine
        return found

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if not 0 <= root < self.size:
            raise InternalError(f"broadcast from rank {root} on an axis of {self.size} ranks")
        j = next(j for j, rail in enumerate(self._rails) if root in rail)
        if self._local.rank == j:
            self._rail.broadcast(tensor, self._rails[j].index(root))
        self._local.broadcast(tensor, j)

    def all_gather_small(self, mine: Tensor) -> Tensor:
        by_host = self._rail.all_gather_small(self._local.all_gather_small(mine).contiguous())
        gathered = mine.new_empty((self.size, *mine.shape))
        for ranks, rows in zip(self._hosts, by_host, strict=True):
            for rank, row in zip(ranks, rows, strict=True):
                as_bytes(gathered[rank]).copy_(as_bytes(row))
        return gathered

    def abort(self) -> None:
        self._local.abort()
        self._rail.abort()
