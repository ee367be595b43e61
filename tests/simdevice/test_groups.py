"""Process groups that take tensors of the simulated device only, as NCCL does: plain PyTorch's DDP on them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.kit.parity import assert_bitwise
from tests.kit.simdevice import LATE, SCHEDULES, configure, needs_compiler, on_sim_ranks, report, scheduled

pytestmark = needs_compiler


def _collectives(rank: int, world: int, backend: str) -> int:
    group = dist.new_group(backend=backend)
    for schedule in SCHEDULES:
        with scheduled(schedule):
            mine = torch.full((4,), rank + 1.0, device="sim") * 2
            total = mine.clone()
            dist.all_reduce(total, group=group)
            gathered = torch.empty(4 * world, device="sim")
            work = dist.all_gather_single(gathered, mine, group=group, async_op=True)
            assert work is not None
            work.wait()
            parts = [torch.empty(4, device="sim") for _ in range(world)]
            dist.all_gather(parts, gathered[rank * 4 : rank * 4 + 4], group=group)
            piece = torch.empty(4, device="sim")
            dist.reduce_scatter_single(piece, gathered, group=group)
            swapped = torch.empty(2 * world, device="sim")
            dist.all_to_all_single(swapped, mine[: 2 * world], group=group)
            first = mine.clone()
            dist.broadcast(first, 0, group=group)
            dist.barrier(group=group)
            expected = torch.arange(1.0, world + 1) * 2
            assert total.cpu().tolist() == [expected.sum()] * 4
            assert gathered.cpu().tolist() == expected.repeat_interleave(4).tolist() == torch.cat(parts).cpu().tolist()
            assert piece.cpu().tolist() == [expected[rank] * world] * 4
            assert swapped.cpu().tolist() == expected.repeat_interleave(2).tolist()
            assert first.cpu().tolist() == [2.0] * 4
    return len(SCHEDULES)


@pytest.mark.parametrize("backend", ["simccl", "simccl_late"])
def test_collectives(backend: str) -> None:
    assert on_sim_ranks(2, _collectives, backend) == [5, 5]


def _refused(rank: int, world: int) -> str:
    group = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(3), group=group)
    return str(error.value)


def test_tensors_of_the_host_are_refused() -> None:
    assert all("No backend type associated with device type cpu" in text for text in on_sim_ranks(2, _refused))


def _ddp(rank: int, device: str, backend: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    group = dist.new_group(backend=backend)
    copies = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        copies(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


def _ddp_on_both(rank: int, world: int, backend: str) -> int:
    expected = _ddp(rank, "cpu", "gloo")
    for schedule in SCHEDULES:
        with scheduled(schedule):
            got = _ddp(rank, "sim", backend)
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_bitwise(a, b, f"parameter {number} under {schedule}")
    return len(SCHEDULES)


@pytest.mark.parametrize("backend", ["simccl", "simccl_late"])
def test_ddp_gives_the_bits_of_gloo_on_cpus(backend: str) -> None:
    assert on_sim_ranks(2, _ddp_on_both, backend) == [5, 5]


def _not_waited(rank: int, world: int) -> list[str]:
    group = dist.new_group(backend="simccl_late")
    configure(LATE)
    total = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    work = dist.all_reduce(total, group=group, async_op=True)
    total * 2
    races = report().races
    assert work is not None
    work.wait()
    return races


def test_a_collective_that_nobody_waits_for_is_a_race() -> None:
    for races in on_sim_ranks(2, _not_waited):
        assert any("aten::mul" in race and "a collective's result" in race for race in races), races
