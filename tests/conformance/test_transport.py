"""What every transport does, at one to four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch

from lowtide.comm import Alone, Group, Label, TorchTransport, Transport, Wire
from lowtide.errors import InternalError
from tests.kit.dist import run_ranks

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
SIZES = [1, 2, 3, 4]


@contextmanager
def transport(world_size: int) -> Iterator[Transport]:
    """The world's transport, used from the test's own thread."""
    group = Group.join(None, deadline=20)
    try:
        if world_size == 1:
            import torch.distributed as dist

            yield TorchTransport(dist.group.WORLD)
        else:
            channel = group.channel("conformance")
            yield channel.run(Label("open", -1, "a transport"), lambda wire, notes: wire.world)
    finally:
        group.close()


def gather_parts(over: Transport, parts: list[int]) -> None:
    cuts = [0, *accumulate(parts)]
    expected = torch.arange(cuts[-1], dtype=torch.int64).to(torch.uint8)
    whole = torch.full((cuts[-1],), 255, dtype=torch.uint8)
    mine = slice(cuts[over.rank], cuts[over.rank + 1])
    whole[mine] = expected[mine]
    over.gather(whole, cuts)
    assert torch.equal(whole, expected)


def exchange_pieces(over: Transport, counts: list[list[int]], dtype: torch.dtype) -> None:
    """``counts[a][b]``: elements from rank a to rank b. The value says who sent it to whom."""

    def piece(sender: int, receiver: int) -> torch.Tensor:
        return torch.full((counts[sender][receiver],), sender * 5 + receiver + 1).to(dtype)

    send = torch.cat([piece(over.rank, to) for to in range(over.size)])
    expected = torch.cat([piece(sender, over.rank) for sender in range(over.size)])
    recv = torch.zeros_like(expected)
    over.exchange(send, counts[over.rank], recv, [row[over.rank] for row in counts])
    assert torch.equal(recv.view(torch.uint8), expected.view(torch.uint8))


def conform(over: Transport) -> None:
    size = over.size
    gather_parts(over, [64] * size)
    gather_parts(over, [17 * r + 1 for r in range(size)])
    gather_parts(over, [0 if r % 2 == 0 else 9 for r in range(size)])
    gather_parts(over, [5] + [0] * (size - 1))
    gather_parts(over, [0] * size)
    gather_parts(over, [200_000 + r for r in range(size)])
    for dtype in DTYPES:
        exchange_pieces(over, [[3] * size] * size, dtype)
        exchange_pieces(over, [[a + 2 * b for b in range(size)] for a in range(size)], dtype)
        for root in range(size):
            tensor = torch.full((2, 3), over.rank + 1).to(dtype)
            over.broadcast(tensor, root)
            assert torch.equal(tensor.view(torch.uint8), torch.full((2, 3), root + 1).to(dtype).view(torch.uint8))
        gathered = over.all_gather_small(torch.tensor([over.rank, 1]).to(dtype))
        expected = torch.tensor([[r, 1] for r in range(size)]).to(dtype)
        assert gathered.shape == (size, 2)
        assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8))
    exchange_pieces(over, [[0] * size] * size, torch.float32)
    exchange_pieces(over, [[4 if a == 0 else 0 for b in range(size)] for a in range(size)], torch.float32)
    scalar = torch.tensor(float(over.rank))
    over.broadcast(scalar, size - 1)
    assert scalar.item() == size - 1
    over.broadcast(torch.empty(0))
    assert over.all_gather_small(torch.empty(0)).shape == (size, 0)
    misuse_is_refused(over)
    gather_parts(over, [8] * size)  # and nothing of that broke it


def misuse_is_refused(over: Transport) -> None:
    """Before anything is sent: gloo would end the process."""
    size = over.size
    whole = torch.zeros(8, dtype=torch.uint8)
    for cuts in ([0, 8, 8] + [8] * size, [0] * (size + 1), [1] + [8] * size):
        with pytest.raises(InternalError):
            over.gather(whole, cuts)
    with pytest.raises(InternalError):
        over.gather(torch.zeros(8), [0] + [8] * size)
    with pytest.raises(InternalError):
        over.exchange(torch.zeros(4), [5] + [0] * (size - 1), torch.zeros(4), [4] + [0] * (size - 1))
    with pytest.raises(InternalError):
        over.broadcast(torch.zeros(2), size)


def conform_on_ranks(rank: int, world_size: int) -> tuple[int, int]:
    with transport(world_size) as over:
        conform(over)
        return over.rank, over.size


def test_alone_conforms() -> None:
    conform(Alone())


@pytest.mark.parametrize("world_size", SIZES)
def test_torch_transport_conforms(world_size: int) -> None:
    assert run_ranks(world_size, conform_on_ranks) == [(rank, world_size) for rank in range(world_size)]


def strided_tensors_are_refused(rank: int, world_size: int) -> None:
    with transport(world_size) as over, pytest.raises(InternalError, match="contiguous"):
        over.broadcast(torch.zeros(4, 4).t())


def test_only_contiguous_memory_travels() -> None:
    run_ranks(2, strided_tensors_are_refused)


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
