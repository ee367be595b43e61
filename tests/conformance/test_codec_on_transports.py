"""Every codec on every transport, for gather and for reduce: within its error, the same bits on all ranks, and a number that is
not one stays that."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.comm import Alone
from lowtide.comm.codec import BF16, EXACT, Codec
from lowtide.comm.reduce import tree_sum
from tests.conformance.test_codec import CODECS, WIDE, there_and_back
from tests.conformance.test_transport import BY_ALL_GATHER, BY_HALVING, LOCAL, TORCH, Hosts, bits, numbers, transport
from tests.kit.dist import run_ranks

EVERY: list[Codec] = [EXACT, *CODECS]  # the one that is left out, and the same one where it is carried out
KINDS: list[tuple[int, str | Hosts]] = [
    (2, TORCH),
    (3, TORCH),
    (4, BY_HALVING),
    (3, BY_ALL_GATHER),
    (3, LOCAL),
    (2, ((0,), (1,))),
    (4, ((0, 1), (2, 3))),
    (4, ((0, 2), (1, 3))),
]
every_kind = pytest.mark.parametrize(("size", "kind"), KINDS, ids=str)


def lengths(size: int) -> list[list[int]]:
    return [[70] * size, [0, *[5] * (size - 1)], [67 * r + 1 for r in range(size)], [0] * size]


def hosts_of(kind: str | Hosts, size: int) -> Hosts:
    """Between which of them numbers are coded."""
    if isinstance(kind, tuple):
        return kind
    return (tuple(range(size)),) if kind == LOCAL else tuple((rank,) for rank in range(size))


def contract(codec: Codec, before: Tensor, after: Tensor) -> None:
    """One piece that has been through the codec."""
    if before.dtype not in WIDE:
        assert torch.equal(bits(before), bits(after))
        return
    finite = before.isfinite()
    assert not after[~finite].isfinite().any()
    if finite.all() and before.numel():
        assert ((after.double() - before.double()).abs() <= codec.bound(before.abs().max().item())).all()


# -- gather -----------------------------------------------------------------------------------------------------------------


def with_a_nan(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    made = numbers(rank, count, dtype, 3)
    if rank == 1 and dtype.is_floating_point and count:
        made[count // 2] = math.nan
    return made


def gathered(rank: int, size: int, kind: str | Hosts) -> list[bytes]:
    found: list[bytes] = []
    for codec in EVERY:
        with transport(kind, codec=codec) as over:
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
                for counts in lengths(size):
                    given = [with_a_nan(count, r, dtype) for r, count in enumerate(counts)]
                    values = torch.full((sum(counts),), 77).to(dtype)
                    values.split(counts)[rank].copy_(given[rank])
                    over.gather_numbers(values, counts)
                    coded = len(hosts_of(kind, size)) > 1
                    for before, after in zip(given, values.split(counts), strict=True):
                        contract(codec if coded else EXACT, before, after)
                        # Whole pieces go through it, the own one as well.
                        assert torch.equal(bits(after), bits(there_and_back(codec, before) if coded else before))
                    found.append(bits(values).numpy().tobytes())
    return found


@every_kind
def test_gathered_through_a_codec(size: int, kind: str | Hosts) -> None:
    first, *others = run_ranks(size, gathered, kind)
    assert all(other == first for other in others), "ranks hold different bits"


def test_one_rank_sends_nothing() -> None:
    values = numbers(0, 9, torch.float32, 0)
    before = values.clone()
    Alone().gather_numbers(values, [9])
    assert torch.equal(values, before)


# -- reduce -----------------------------------------------------------------------------------------------------------------


def allowed(codec: Codec, kind: str | Hosts, given: list[Tensor], counts: list[int]) -> Tensor:
    """How far each sum may be off: one rounding per number that is sent, or for which others are sent as well, and the
    rounding of the additions. What a host sends is a sum of its ranks, and no larger than the sum of their magnitudes."""
    hosts = hosts_of(kind, len(given))
    pieces = [[g.double().abs() for g in numbers_.split(counts)] for numbers_ in given]
    found: list[Tensor] = []
    for owner, count in enumerate(counts):
        room = torch.zeros(count, dtype=torch.float64)
        for ranks in hosts if count and len(hosts) > 1 else ():
            largest = sum(pieces[r][owner].max().item() for r in ranks)
            room += len(ranks) * codec.bound(largest)  # up to one sum per rank, where the ranks are not neighbours
        magnitude = torch.stack([pieces[r][owner] for r in range(len(given))]).sum(dim=0)
        found.append(room + 1e-6 * magnitude)
    return torch.cat(found)


def added(rank: int, size: int, kind: str | Hosts) -> tuple[list[bytes], list[float]]:
    sums: list[bytes] = []
    errors: list[float] = []
    for codec in EVERY:
        worst = 0.0
        with transport(kind, codec=codec) as over:
            for counts in lengths(size):
                given = [numbers(r, sum(counts), torch.float32, 4) for r in range(size)]
                ends = list(accumulate(counts, initial=0))
                exact = tree_sum([g.double() for g in given])
                with over.reduced(counts, torch.float32, lambda buffer, g=given[rank]: buffer.copy_(g), whole=True) as got:
                    off = (got.double() - exact).abs()
                    assert (off <= allowed(codec, kind, given, counts)).all(), f"{codec.name}: an error above its bound"
                    worst = max(worst, *off.tolist(), 0.0)
                    sums.append(bits(got).numpy().tobytes())
                    whole = got.clone()
                with over.reduced(counts, torch.float32, lambda buffer, g=given[rank]: buffer.copy_(g)) as got:
                    assert torch.equal(bits(got), bits(whole[ends[rank] : ends[rank + 1]]))
                if sum(counts):
                    given[1][sum(counts) - 1] = math.nan
                    with over.reduced(counts, torch.float32, lambda buffer, g=given[rank]: buffer.copy_(g), whole=True) as got:
                        assert not got[-1].isfinite()
        errors.append(worst)
    return sums, errors


@every_kind
def test_added_through_a_codec(size: int, kind: str | Hosts) -> None:
    found = run_ranks(size, added, kind)
    assert all(sums == found[0][0] for sums, _ in found), "ranks hold different bits"
    left_out, exact, bf16, int8 = found[0][1]
    assert left_out == exact
    if len(hosts_of(kind, size)) > 1:
        assert bf16 > 100 * exact, "nothing was rounded"
        assert int8 > 100 * exact
    else:
        assert bf16 == int8 == exact, "inside a host nothing is coded"


def sums_with_a_codec(rank: int, size: int, kind: Any) -> list[bytes]:
    counts = [31 * r + 2 for r in range(size)]
    with transport(kind, codec=BF16()) as over:
        given = numbers(rank, sum(counts), torch.float32, 8)
        with over.reduced(counts, torch.float32, lambda buffer: buffer.copy_(given)) as got:
            return [bits(got).numpy().tobytes()]


def test_with_a_codec_every_tuning_rounds_alike() -> None:
    """Halving sends sums, and would round those."""
    assert run_ranks(4, sums_with_a_codec, BY_HALVING) == run_ranks(4, sums_with_a_codec, TORCH)
