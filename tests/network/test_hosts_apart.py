"""Two hosts whose ranks are not alike: loops that end at different times, experts that a rank never visits, units on disk,
updates in backward, and a rank that freezes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn

import lowtide
import tests.kit.models  # noqa: F401 - fills the menagerie
from tests.kit.hosts import Ranks, leave, run_hosts
from tests.kit.netns import Network
from tests.kit.parity import Recipe, assert_same, oracle, sharded
from tests.kit.specimen import MENAGERIE
from tests.kit.uneven import Loop, difference
from tests.network.conftest import MakeNetwork

COUNTS = (1, 3, 2, 0)  # batches of the ranks, two on each host
COMM = lowtide.Comm(bucket_bytes=0, deadline=30)
CHUNKS = 4096


def uneven_loops(rank: int, world: int, folder: str) -> dict[str, str | None]:
    """What differs from the loop by hand, for every way to train."""
    disk = {"disk": folder, "update": lowtide.Update("step", chunk_bytes=CHUNKS)}
    ways: dict[str, tuple[Loop, dict[str, Any]]] = {
        "stage 0": (Loop(COUNTS), {"stage": 0}),
        "stage 2, clipped": (Loop(COUNTS, clip=1.0), {"stage": 2}),
        "stage 3, accumulated": (Loop(COUNTS, accumulate=2), {"stage": 3}),
        "stage 3, update in backward": (Loop(COUNTS), {"stage": 3, "update": "backward"}),
        "stage 3, on disk": (Loop(COUNTS), {"stage": 3, **disk}),
    }
    return {name: difference(rank, world, loop, {"comm": COMM, **options}) for name, (loop, options) in ways.items()}


def test_loops_of_different_lengths(two_hosts: Network, tmp_path: Any) -> None:
    for rank, found in enumerate(run_hosts(two_hosts, [2, 2], uneven_loops, str(tmp_path))):
        assert not any(found.values()), f"rank {rank}: {found}"


def apart(rank: int, world: int, folder: str) -> None:
    """Experts that some ranks never visit, and a model whose bytes are on the disks of two hosts."""
    recipe = Recipe(steps=2, clip=1.0)
    for model in ("moe", "gpt"):
        expected = oracle(MENAGERIE[model], recipe, world=world, rank=rank, by_hand=True)
        assert_same(sharded(MENAGERIE[model], recipe, rank=rank, stage=3, comm=COMM), expected)
        update = lowtide.Update("step", chunk_bytes=CHUNKS)
        on_disk = sharded(MENAGERIE[model], recipe, rank=rank, stage=3, comm=COMM, disk=folder, update=update)
        assert_same(on_disk, expected)


def test_experts_and_disks(two_hosts: Network, tmp_path: Any) -> None:
    run_hosts(two_hosts, [2, 2], apart, str(tmp_path))


# -- a rank that freezes -----------------------------------------------------------------------------------------------

DEADLINE = 3.0
LIMIT = 30.0  # generous: a busy machine is not what this is about
VICTIM = 3


def train_until_frozen(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = lowtide.shard(model, optimizer, stage=3, comm=lowtide.Comm(deadline=DEADLINE))
    for step in range(100_000):
        if step == 3:
            leave("training", str(os.getpid()))
        try:
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except lowtide.Error as error:
            leave("ended", f"{time.clock_gettime(time.CLOCK_MONOTONIC)} {type(error).__name__}")
            raise


def test_a_frozen_rank_is_named_on_both_hosts(make_network: MakeNetwork) -> None:
    with Ranks(make_network(), [2, 2], train_until_frozen) as ranks:
        ranks.wait_for("training")
        os.kill(int((ranks.folder / f"training-{VICTIM}").read_text()), signal.SIGSTOP)
        frozen = time.clock_gettime(time.CLOCK_MONOTONIC)
        others = [rank for rank in range(4) if rank != VICTIM]
        while not all((ranks.folder / f"ended-{rank}").exists() for rank in others):
            assert time.clock_gettime(time.CLOCK_MONOTONIC) - frozen < LIMIT, "\n".join(map(ranks.log, others))
            time.sleep(0.05)
        for rank in others:
            when, kind = (ranks.folder / f"ended-{rank}").read_text().split()
            print(f"rank {rank}: {float(when) - frozen:.2f} s to {kind}, deadline {DEADLINE:.0f} s")
            assert kind in ("DeadlineExceeded", "PeerFailed")
            assert f"rank {VICTIM} does not answer" in ranks.log(rank)
