"""The sum of a unit's gradients over all ranks: multiplied by 1/W, exchanged, added along one fixed tree, and cut again."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lowtide.comm.channel import Wire
from lowtide.comm.reduce import tree_sum
from lowtide.runtime.buckets import Bucket, Piece, chunk_buckets, even_buckets, numel
from lowtide.runtime.grad_store import Segment
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.unit import Unit, flat_view


class _Scratch:
    """Buffers of the reduce thread, grown to the largest bucket and reused."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Reduction:
    """``cut``: whether a rank keeps only its part of the sum. Runs on the reduce channel's thread."""

    def __init__(self, ranks: int, *, cut: bool, ledger: Ledger) -> None:
        self.ranks = ranks
        """By which sums are divided."""
        self._cut = cut
        self._scratch, self._ledger = _Scratch(), ledger
        self.scale = 1.0
        """By which gradients were multiplied on their way, and are divided here."""

    def segments(
        self, wire: Wire, unit: Unit, union: list[bool], locals_: list[Tensor | None], *, by_chunks: bool
    ) -> Iterator[list[Segment]]:
        """The reduced gradients that this rank keeps, in lists of which each is valid until the next is asked for. Every
        parameter is in one of them, also where this rank keeps none of its elements. ``by_chunks``: a list is one chunk."""
        if wire.world.size == 1 and self.scale == 1.0:
            yield self._as_they_are(unit, locals_)
            return
        for dtype in dict.fromkeys(d.reduce for d, here in zip(unit.dtypes, union, strict=True) if here):
            chosen = [i for i, here in enumerate(union) if here and unit.dtypes[i].reduce is dtype]
            if by_chunks:
                buckets = chunk_buckets(unit.chunks_by_rank, chosen)
            else:
                buckets = even_buckets(unit.layout, chosen, most=wire.bucket_bytes // dtype.itemsize)
            flats = {i: None if (g := locals_[i]) is None else flat_view(g, unit.layout.params[i].stride) for i in chosen}
            for i in chosen:
                locals_[i] = None  # the memory goes as soon as the last of it is packed
            kept = set[int]()
            for number, bucket in enumerate(buckets):
                last = number == len(buckets) - 1
                for segments in self._of_bucket(wire, bucket, dtype, flats, last=last):
                    kept |= {segment.index for segment in segments}
                    nothing = torch.empty(0, dtype=dtype, device=unit.params[0].device)
                    yield segments + [Segment(i, 0, 0, nothing) for i in chosen if last and i not in kept]

    def _of_bucket(
        self, wire: Wire, bucket: Bucket, dtype: torch.dtype, flats: dict[int, Tensor | None], *, last: bool
    ) -> Iterator[list[Segment]]:
        """One list: the sums of a bucket's pieces that this rank keeps."""
        with self._sum(wire, bucket, dtype, flats, last=last) as total:
            # Only where replicas have to be added up in between are the sums of a row gathered afterwards.
            if self._cut or wire.replicate.size == 1:
                yield _split([bucket[wire.shard.rank]] if self._cut else bucket, total)
                return
            parts = [numel(row) for row in bucket]
            every = self._scratch.get("every", sum(parts), dtype, total.device)
            cuts = list(itertools.accumulate(parts, initial=0))
            every[cuts[wire.shard.rank] : cuts[wire.shard.rank + 1]].copy_(total)
        wire.shard.gather(every.view(torch.uint8), [c * dtype.itemsize for c in cuts])
        yield _split(bucket, every)

    def _as_they_are(self, unit: Unit, locals_: list[Tensor | None]) -> list[Segment]:
        """On one rank without a scale there is nothing to add or multiply: gradients are used where autograd put them."""
        found: list[Segment] = []
        for index, local in enumerate(locals_):
            if local is not None:
                param = unit.layout.params[index]
                flat = flat_view(local, param.stride)
                # The narrower of the two types decides: reduction in a wide type widens and changes nothing else.
                narrow = unit.dtypes[index].reduce
                found.append(Segment(index, 0, param.numel, flat if flat.dtype is narrow else flat.to(narrow)))
                locals_[index] = None
        return found

    @contextmanager
    def _sum(
        self, wire: Wire, bucket: Bucket, dtype: torch.dtype, flats: dict[int, Tensor | None], *, last: bool
    ) -> Generator[Tensor]:
        """The sum over all ranks of this rank's pieces of ``bucket``, one after another; of all pieces, where they are not cut
        and there are no replicas."""
        factor = 1.0 / (self.ranks * self.scale)

        def fill(send: Tensor) -> None:
            at = 0
            for piece in itertools.chain(*bucket):
                end = at + piece.hi - piece.lo
                _scaled(flats[piece.index], piece.lo, piece.hi, factor, send[at:end])
                at = end
            if last:
                flats.clear()

        parts = [numel(row) for row in bucket]
        mine, copies = parts[wire.shard.rank], wire.replicate.size
        with wire.shard.reduced(parts, dtype, fill, whole=not self._cut and copies == 1) as total:
            if copies > 1:
                everyone = self._scratch.get("replicate", mine * copies, dtype, total.device)
                everyone[wire.replicate.rank * mine :][:mine].copy_(total)
                wire.replicate.gather_numbers(everyone, [mine] * copies)
                total = tree_sum([everyone[k * mine : (k + 1) * mine] for k in range(copies)])
            self._ledger.set("buffers in flight", self._scratch.nbytes + wire.shard.buffer_bytes)
            yield total


def _split(rows: Iterable[list[Piece]], total: Tensor) -> list[Segment]:
    """``total``, the sums of the pieces of ``rows``, as segments."""
    at, found = 0, list[Segment]()
    for piece in itertools.chain(*rows):
        end = at + piece.hi - piece.lo
        found.append(Segment(piece.index, piece.lo, piece.hi, total[at:end]))
        at = end
    return found


def _scaled(source: Tensor | None, lo: int, hi: int, factor: float, out: Tensor) -> None:
    if source is None:
        out.zero_()
    elif source.dtype is out.dtype and source.device == out.device:
        torch.mul(source[lo:hi], factor, out=out)
    else:  # widen first: a product in the narrow type would round twice
        out.copy_(source[lo:hi]).mul_(factor)
