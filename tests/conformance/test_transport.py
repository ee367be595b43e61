"""What every transport does, at one to six ranks, whatever carries the bytes: torch.distributed, shared memory, or both.

The hosts of a two-level transport are made up here: they are all this machine. Real ones are in tests/network.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lowtide.comm import Alone, Group, Label, TorchTransport, Transport, Wire
from lowtide.comm.codec import BF16, EXACT, Codec
from lowtide.comm.local import LocalTransport
from lowtide.comm.reduce import tree_sum
from lowtide.comm.transport import LinkBroken
from lowtide.comm.tuning import ALL_GATHER, BROADCASTS, EXCHANGE, HALVING, Choice, Tuning
from lowtide.comm.two_level import TwoLevel
from lowtide.errors import InternalError
from tests.kit.dist import run_ranks

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
ADDED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.complex64]
SHARED_WINDOW = 1 << 20  # bytes that shared memory begins with: reductions below and above it

Hosts = tuple[tuple[int, ...], ...]
TORCH, LOCAL = "torch", "local"
BY_HALVING, BY_ALL_GATHER = "torch by halving", "torch by all-gather"
TUNINGS = {
    TORCH: Tuning(Choice.always(BROADCASTS), Choice.always(EXCHANGE)),
    BY_HALVING: Tuning(Choice.always(BROADCASTS), Choice.always(HALVING)),
    BY_ALL_GATHER: Tuning(Choice.always(ALL_GATHER), Choice.always(EXCHANGE)),
}
# Which ranks are on which host. Dealt in turns, no host has a whole pair of the tree; by threes, each has a pair and a single.
KINDS: list[tuple[int, str | Hosts]] = [
    *((size, TORCH) for size in (1, 2, 3, 4)),
    *((size, BY_HALVING) for size in (1, 2, 4)),
    *((size, BY_ALL_GATHER) for size in (2, 3, 4)),
    *((size, LOCAL) for size in (1, 2, 3, 4)),
    (2, ((0,), (1,))),
    (4, ((0, 1), (2, 3))),
    (4, ((0,), (1,), (2,), (3,))),
    (4, ((0, 2), (1, 3))),
    (6, ((0, 1, 2), (3, 4, 5))),
]
SEVERAL: list[tuple[int, str | Hosts]] = [
    (2, TORCH),
    (2, BY_ALL_GATHER),
    (4, BY_HALVING),
    (3, LOCAL),
    (4, ((0, 1), (2, 3))),
]

_names = itertools.count()  # all ranks make the same transports in the same order


def gloo(ranks: Sequence[int], name: str, timeout: float) -> Any:
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(name, world.get_group_store())
    return dist.ProcessGroupGloo(store, list(ranks).index(dist.get_rank()), len(ranks), timedelta(seconds=timeout))


@contextmanager
def transport(kind: Any, *, timeout: float = 20, codec: Codec = EXACT) -> Iterator[Transport]:
    """A transport over all ranks, used from the test's own thread."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), f"conformance/{next(_names)}"
    world = TorchTransport(gloo(range(size), f"{name}/world", 60))

    def share_in(over: TorchTransport) -> Callable[[bytes], list[bytes]]:
        def share(mine: bytes) -> list[bytes]:
            rows = over.all_gather_small(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            return [row.numpy().tobytes() for row in rows]

        return share

    if kind in TUNINGS:
        over = TorchTransport(gloo(range(size), f"{name}/torch", timeout), codec=codec)
        over.tune(TUNINGS[kind])
        made: Transport = over
    elif kind == LOCAL:
        made = LocalTransport(rank, size, share=share_in(world), timeout=timeout)
    else:
        here = next(h for h, ranks in enumerate(kind) if rank in ranks)
        place = kind[here].index(rank)
        inside = TorchTransport(gloo(kind[here], f"{name}/host{here}", 60))
        local = LocalTransport(place, len(kind[here]), share=share_in(inside), timeout=timeout)
        rail = TorchTransport(gloo([ranks[place] for ranks in kind], f"{name}/rail{place}", timeout))
        made = TwoLevel(rank, kind, local=local, rail=rail, codec=codec)
    yield made
    # Whoever is done first must not close connections that others still use. After an abort nobody is.
    world.all_gather_small(torch.zeros(1))


# -- what is asked of each ------------------------------------------------------------------------------------------------


def gather_parts(over: Transport, parts: list[int]) -> None:
    cuts = [0, *accumulate(parts)]
    expected = torch.arange(cuts[-1], dtype=torch.int64).to(torch.uint8)
    whole = torch.full((cuts[-1],), 255, dtype=torch.uint8)
    mine = slice(cuts[over.rank], cuts[over.rank + 1])
    whole[mine] = expected[mine]
    over.gather(whole, cuts)
    assert torch.equal(whole, expected)


def numbers(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What ``rank`` adds. Magnitudes differ so much that every other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-1000, 1000, (count,), generator=generator).to(dtype)
    exponents = torch.randint(-4, 5, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 8.0**exponents).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def reduce_pieces(over: Transport, counts: list[int], dtype: torch.dtype, seed: int = 0) -> None:
    total, ends = sum(counts), [0, *accumulate(counts)]
    mine = slice(ends[over.rank], ends[over.rank + 1])
    filled: list[tuple[int, torch.dtype]] = []

    def fill(buffer: torch.Tensor) -> None:
        filled.append((buffer.numel(), buffer.dtype))
        buffer.copy_(numbers(over.rank, total, dtype, seed))

    with over.reduced(counts, dtype, fill) as got:
        expected = tree_sum([numbers(rank, total, dtype, seed)[mine].clone() for rank in range(over.size)])
        assert filled == [(total, dtype)]
        assert got.shape == expected.shape
        assert got.dtype == dtype
        assert torch.equal(bits(got), bits(expected)), f"{counts} of {dtype}: another sum"
        got.mul_(2)  # a caller may: it is nobody else's
    with over.reduced(counts, dtype, fill, whole=True) as got:
        expected = tree_sum([numbers(rank, total, dtype, seed) for rank in range(over.size)])
        assert torch.equal(bits(got), bits(expected)), f"{counts} of {dtype}: another sum of all pieces"


def gather_exactly(over: Transport, counts: list[int], dtype: torch.dtype) -> None:
    """Numbers that no codec is asked to change."""
    expected = torch.cat([numbers(rank, count, dtype, 7) for rank, count in enumerate(counts)])
    values = torch.zeros_like(expected)
    values.split(counts)[over.rank].copy_(expected.split(counts)[over.rank])
    over.gather_numbers(values, counts)
    assert torch.equal(bits(values), bits(expected))


def conform(over: Transport) -> None:
    size = over.size
    assert over.bucket_bytes >= 1 << 20
    for dtype in ADDED:
        gather_exactly(over, [40] * size, dtype)
        gather_exactly(over, [3 * r for r in range(size)], dtype)
    gather_parts(over, [0] * size)
    reduce_pieces(over, [0] * size, torch.float32)
    gather_parts(over, [64] * size)
    gather_parts(over, [17 * r + 1 for r in range(size)])
    gather_parts(over, [0 if r % 2 == 0 else 9 for r in range(size)])
    gather_parts(over, [5] + [0] * (size - 1))
    gather_parts(over, [200_000 + r for r in range(size)])
    for dtype in DTYPES:
        for root in range(size):
            tensor = torch.full((2, 3), over.rank + 1).to(dtype)
            over.broadcast(tensor, root)
            assert torch.equal(bits(tensor), bits(torch.full((2, 3), root + 1).to(dtype)))
        gathered = over.all_gather_small(torch.tensor([over.rank, 1]).to(dtype))
        expected = torch.tensor([[r, 1] for r in range(size)]).to(dtype)
        assert gathered.shape == (size, 2)
        assert torch.equal(bits(gathered), bits(expected))
    large = over.all_gather_small(torch.full((3000,), over.rank))
    assert torch.equal(large, torch.arange(size).repeat_interleave(3000).view(size, 3000))
    scalar = torch.tensor(float(over.rank))
    over.broadcast(scalar, size - 1)
    assert scalar.item() == size - 1
    over.broadcast(torch.empty(0))
    assert over.all_gather_small(torch.empty(0)).shape == (size, 0)
    conform_in_sums(over)
    misuse_is_refused(over)
    gather_parts(over, [8] * size)  # and nothing of that broke it
    reduce_pieces(over, [8] * size, torch.float32)


def conform_in_sums(over: Transport) -> None:
    size = over.size
    for seed, dtype in enumerate(ADDED):
        reduce_pieces(over, [64] * size, dtype, seed)
        reduce_pieces(over, [3 * r + 1 for r in range(size)], dtype, seed)
        reduce_pieces(over, [0 if r % 2 == 0 else 7 for r in range(size)], dtype, seed)
        reduce_pieces(over, [0] * (size - 1) + [5], dtype, seed)
    above = SHARED_WINDOW // 4 + 1234
    for count in (above // size + 1, 5, 2 * above // size, 1000):  # grows, and is used again for less
        reduce_pieces(over, [count + 3 * r for r in range(size)], torch.float32, count)
    reduce_pieces(over, [0] * (size - 1) + [above], torch.float32, 3)


def misuse_is_refused(over: Transport) -> None:
    """Before anything is sent: gloo would end the process."""
    size = over.size
    whole = torch.zeros(8, dtype=torch.uint8)
    for cuts in ([0, 8, 8] + [8] * size, [0] * (size + 1), [1] + [8] * size):
        with pytest.raises(InternalError):
            over.gather(whole, cuts)
    with pytest.raises(InternalError):
        over.gather(torch.zeros(8), [0] + [8] * size)
    for counts in ([1] * (size + 1), [-1] + [2] * (size - 1)):
        with pytest.raises(InternalError), over.reduced(counts, torch.float32, lambda buffer: None):
            pass
    with pytest.raises(InternalError):
        over.broadcast(torch.zeros(2), size)
    for counts in ([3] * (size + 1), [7, *[0] * (size - 1)], [-1, *[9] * (size - 1)]):
        with pytest.raises(InternalError):
            over.gather_numbers(torch.zeros(8), counts)
    with pytest.raises(InternalError):
        over.gather_numbers(torch.zeros(16)[::2], [8, *[0] * (size - 1)])
    if not isinstance(over, Alone):  # which has nothing to send
        with pytest.raises(InternalError, match="contiguous"):
            over.broadcast(torch.zeros(4, 4).t())


def conform_on_ranks(rank: int, world_size: int, kind: str | Hosts) -> tuple[int, int]:
    with transport(kind) as over:
        conform(over)
        return over.rank, over.size


def test_alone_conforms() -> None:
    conform(Alone())


@pytest.mark.parametrize(("world_size", "kind"), KINDS, ids=str)
def test_conforms(world_size: int, kind: str | Hosts) -> None:
    assert run_ranks(world_size, conform_on_ranks, kind) == [(rank, world_size) for rank in range(world_size)]


def test_the_sums_tell_orders_apart() -> None:
    """Or the checks above would pass with any order."""
    given = [numbers(rank, 64, torch.float32, 0) for rank in range(4)]
    tree = tree_sum([g.clone() for g in given])
    for order in ((3, 2, 1, 0), (0, 2, 1, 3), (1, 2, 3, 0)):
        chain = given[order[0]].clone()
        for rank in order[1:]:
            chain += given[rank]
        assert not torch.equal(chain, tree)


# -- every algorithm adds along the same tree ----------------------------------------------------------------------------------

STRANGE = torch.tensor(
    [0x7FC00001, 0x7FC12345, -0x3FEDCC, 0x7F800000, -0x800000, 0, -0x80000000, 1, 0x3F800000], dtype=torch.int32
)
"""NaNs with payloads, infinities, zeros, the smallest number and one, as bits."""


def strange_numbers(rank: int, count: int) -> torch.Tensor:
    made = numbers(rank, count, torch.float32, 5)
    every = STRANGE.view(torch.float32)
    chosen = torch.randint(0, 3 * len(every), (count,), generator=torch.Generator().manual_seed(rank))
    return torch.where(chosen < len(every), every[chosen % len(every)], made)


def sums_by_every_algorithm(rank: int, size: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for kind in TUNINGS:
        if kind == BY_HALVING and size == 3:
            with pytest.raises(InternalError, match="3 ranks cannot"), transport(kind):
                pass
            continue
        with transport(kind) as over:
            found[kind] = []
            for counts in ([50] * size, [0, *[7] * (size - 1)], [11 * r + 1 for r in range(size)], [*[0] * (size - 1), 65]):
                values = strange_numbers(rank, sum(counts))
                with over.reduced(counts, torch.float32, lambda buffer, given=values: buffer.copy_(given)) as got:
                    found[kind].append(bits(got).numpy().tobytes())
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_algorithms_give_the_same_bits(size: int) -> None:
    for found in run_ranks(size, sums_by_every_algorithm):
        assert set(found) == set(TUNINGS) - ({BY_HALVING} if size == 3 else set())
        assert all(sums == found[TORCH] for sums in found.values())


def messages_of_halving(rank: int, size: int) -> list[tuple[int, int, int]]:
    """Whom it swaps with, and how many numbers go each way."""
    seen: list[tuple[int, int, int]] = []
    with transport(BY_HALVING) as over:
        assert isinstance(over, TorchTransport)
        swap = over.swap

        def spy(peer: int, give: torch.Tensor, get: torch.Tensor) -> None:
            seen.append((peer, give.numel(), get.numel()))
            swap(peer, give, get)

        over.swap = spy  # type: ignore[method-assign]
        reduce_pieces(over, [1, 2, 4, 8], torch.float32)
        over.use_codec(BF16())
        with over.reduced([2] * 4, torch.float32, torch.Tensor.zero_):  # type: ignore[arg-type]
            pass  # a codec rounds once: by an exchange
    return seen[: len(seen) // 2]  # the same again for the sum of all pieces


def test_halving_swaps_halves() -> None:
    assert run_ranks(4, messages_of_halving) == [
        [(1, 2 + 8, 1 + 4), (2, 4, 1)],
        [(0, 1 + 4, 2 + 8), (3, 8, 2)],
        [(3, 2 + 8, 1 + 4), (0, 1, 4)],
        [(2, 1 + 4, 2 + 8), (1, 2, 8)],
    ]


# -- many exchanges, and two transports at a time ---------------------------------------------------------------------------


def anything_often(over: Transport, seed: int, rounds: int) -> None:
    """The same exchanges on all ranks, which sometimes come late."""
    common, own = random.Random(seed), random.Random(f"{seed}/{over.rank}")
    for number in range(rounds):
        what, scale = common.randrange(4), common.choice([3, 300, 20_000])
        sizes = [common.randrange(scale) for _ in range(over.size)]
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        if what == 0:
            gather_parts(over, sizes)
        elif what == 1:
            reduce_pieces(over, sizes, common.choice(ADDED), number)
        elif what == 2:
            root = common.randrange(over.size)
            tensor = torch.full((sizes[0],), over.rank + number)
            over.broadcast(tensor, root)
            assert (tensor == root + number).all()
        else:
            rows = over.all_gather_small(torch.full((sizes[0] % 50,), over.rank + number))
            assert (rows == number + torch.arange(over.size).unsqueeze(1)).all()


def often_on_two(rank: int, world_size: int, kind: str | Hosts) -> None:
    failures: list[BaseException] = []

    def run(over: Transport, seed: int) -> None:
        try:
            anything_often(over, seed, 60)
        except BaseException as error:
            failures.append(error)

    with transport(kind) as one, transport(kind) as two:
        threads = [threading.Thread(target=run, args=(over, seed)) for seed, over in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


@pytest.mark.parametrize(("world_size", "kind"), SEVERAL, ids=str)
def test_two_transports_at_a_time(world_size: int, kind: str | Hosts) -> None:
    run_ranks(world_size, often_on_two, kind)


# -- how a wait ends ----------------------------------------------------------------------------------------------------------

WAITS: dict[str, Callable[[Transport], Any]] = {
    "gather": lambda over: over.gather(torch.zeros(8 * over.size, dtype=torch.uint8), range(0, 8 * over.size + 1, 8)),
    "reduced": lambda over: reduce_pieces(over, [4] * over.size, torch.float32),
    "broadcast": lambda over: over.broadcast(torch.zeros(3), 0),
    "all_gather_small": lambda over: over.all_gather_small(torch.zeros(3)),
}


def shorten(over: Transport, seconds: float) -> None:
    """Only now: what comes before must not end by its deadline on a busy machine."""
    if isinstance(over, TwoLevel):
        shorten(over.local, seconds)
        shorten(over._rail, seconds)
    elif isinstance(over, TorchTransport):
        over._pg.set_timeout(timedelta(seconds=seconds))
    else:
        over._timeout = seconds


def waits_end(rank: int, world_size: int, kind: str | Hosts, by: str) -> dict[str, bool]:
    """Rank 0 stays away. The others are ended by another thread, or by their deadline. Returns whose time had run out."""
    ended: dict[str, bool] = {}
    for name, wait in WAITS.items():
        with transport(kind) as over:
            wait(over)
            gather_parts(over, [8] * over.size)
            if rank == 0:
                continue
            if by == "deadline":
                shorten(over, 0.5)
            if by == "abort":
                threading.Timer(0.2, over.abort).start()
            with pytest.raises(LinkBroken) as caught:
                wait(over)
            ended[name] = caught.value.timed_out
            over.abort()  # as a channel does
            with pytest.raises(LinkBroken):  # nothing goes through afterwards
                over.gather(torch.zeros(over.size, dtype=torch.uint8), range(over.size + 1))
    return ended


@pytest.mark.parametrize("by", ["abort", "deadline"])
@pytest.mark.parametrize(("world_size", "kind"), SEVERAL, ids=str)
def test_a_wait_ends(world_size: int, kind: str | Hosts, by: str) -> None:
    first, *others = run_ranks(world_size, waits_end, kind, by)
    assert first == {}
    assert all(list(ended) == list(WAITS) for ended in others)
    if by == "deadline":  # whoever is first closes the connections of the others
        assert all(any(ended[name] for ended in others) for name in WAITS)


# -- what only some can ----------------------------------------------------------------------------------------------------


def exchange_pieces(over: TorchTransport, counts: list[list[int]], dtype: torch.dtype) -> None:
    """``counts[a][b]``: elements from rank a to rank b. The value says who sent it to whom."""

    def piece(sender: int, receiver: int) -> torch.Tensor:
        return torch.full((counts[sender][receiver],), sender * 5 + receiver + 1).to(dtype)

    send = torch.cat([piece(over.rank, to) for to in range(over.size)])
    expected = torch.cat([piece(sender, over.rank) for sender in range(over.size)])
    recv = torch.zeros_like(expected)
    over.exchange(send, counts[over.rank], recv, [row[over.rank] for row in counts])
    assert torch.equal(bits(recv), bits(expected))


def exchanges(rank: int, size: int) -> None:
    with transport(TORCH) as over:
        assert isinstance(over, TorchTransport)
        for dtype in DTYPES:
            exchange_pieces(over, [[3] * size] * size, dtype)
            exchange_pieces(over, [[a + 2 * b for b in range(size)] for a in range(size)], dtype)
        exchange_pieces(over, [[0] * size] * size, torch.float32)
        exchange_pieces(over, [[4 if a == 0 else 0 for b in range(size)] for a in range(size)], torch.float32)
        with pytest.raises(InternalError):
            over.exchange(torch.zeros(4), [5] + [0] * (size - 1), torch.zeros(4), [4] + [0] * (size - 1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pieces_are_exchanged_over_torch(world_size: int) -> None:
    run_ranks(world_size, exchanges)


def with_codec(rank: int, size: int, kind: str | Hosts) -> list[float]:
    """The sum through a 16-bit wire; a rounding per contribution at most, and the same on a second run."""
    counts = [1000 + r for r in range(size)]
    ends = [0, *accumulate(counts)]
    mine = slice(ends[rank], ends[rank + 1])
    given = [numbers(r, sum(counts), torch.float32, 1) for r in range(size)]
    exact = tree_sum([g[mine].double() for g in given])
    allowed = sum(BF16().bound(1.0) * g[mine].double().abs() for g in given) * 2 + 1e-30
    runs: list[torch.Tensor] = []
    for _ in range(2):
        with transport(kind, codec=BF16()) as over:
            with over.reduced(counts, torch.float32, lambda buffer: buffer.copy_(given[rank])) as got:
                runs.append(got.clone())
            whole = [1 << 20, 3] if over.size == 2 else [1, 2, 3, 4]
            reduce_whole_numbers(over, whole)
    assert torch.equal(runs[0], runs[1])
    assert ((runs[0].double() - exact).abs() <= allowed).all()
    return (runs[0].double() - exact).abs().tolist()


def reduce_whole_numbers(over: Transport, counts: list[int]) -> None:
    """Numbers that a codec does not round are added exactly."""

    def fill(buffer: torch.Tensor) -> None:
        buffer.fill_(over.rank + 1)

    for dtype in (torch.int64, torch.float32):
        with over.reduced(counts, dtype, fill) as got:
            assert (got == over.size * (over.size + 1) // 2).all()


@pytest.mark.parametrize(("world_size", "kind"), [(2, TORCH), (4, ((0, 1), (2, 3)))], ids=str)
def test_sums_through_a_codec(world_size: int, kind: str | Hosts) -> None:
    errors = run_ranks(world_size, with_codec, kind)
    assert max(map(max, errors)) > 0, "nothing was rounded: the codec is not used"


def parts_from_other_hosts(rank: int, size: int, hosts: Hosts) -> None:
    """Local ranks map the same memory: each brings a part of what the other hosts have."""
    with transport(hosts) as over:
        assert isinstance(over, TwoLevel)
        cuts = [0, *accumulate([100 + 7 * r for r in range(size)])]
        segment = shared_memory(over, cuts[-1])
        mine = slice(cuts[rank], cuts[rank + 1])
        segment[mine] = rank + 1
        over.all_gather_small(torch.zeros(1))
        over.gather_between_hosts(segment, cuts)
        over.all_gather_small(torch.zeros(1))
        for owner, (start, end) in enumerate(pairwise(cuts)):
            assert (segment[start:end] == owner + 1).all()


def shared_memory(over: TwoLevel, nbytes: int) -> torch.Tensor:
    from lowtide.comm.local import open_together

    def share(mine: bytes) -> list[bytes]:
        rows = over.local.all_gather_small(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    return open_together(over.local.rank, nbytes, share).tensor(0, nbytes)


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=str)
def test_parts_come_from_other_hosts(hosts: Hosts) -> None:
    run_ranks(4, parts_from_other_hosts, hosts)


# -- channels -----------------------------------------------------------------------------------------------------------------


def work_is_not_recorded(rank: int, world_size: int) -> list[bool]:
    group = Group.join(None, deadline=20)
    channel = group.channel("grad")

    def look(wire: Wire, notes: list[bytes]) -> bool:
        return torch.is_grad_enabled() or torch.is_inference_mode_enabled()

    with torch.inference_mode():
        seen = [channel.run(Label("look", -1, "modes"), look)]
    seen.append(channel.run(Label("look", -1, "modes"), look))
    group.close()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_work_runs_without_autograd(world_size: int) -> None:
    assert run_ranks(world_size, work_is_not_recorded) == [[False, False]] * world_size
