"""Ranks on several hosts: the same bits as on one, every byte over the network once, and an end when the network is gone.

Every test is one job that does as much as it can: starting ranks takes seconds.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
import tests.kit.models  # noqa: F401 - fills the menagerie
from lowtide.comm import Group, Label
from tests.conformance.test_transport import conform
from tests.kit.dist import run_ranks
from tests.kit.hosts import Ranks, leave, run_hosts
from tests.kit.netns import Network, listening_addresses, sent_from_here
from tests.kit.parity import Recipe, Trace, assert_near, assert_same, oracle, sharded
from tests.kit.specimen import MENAGERIE
from tests.network.conftest import MakeNetwork

STAGES = (0, 1, 2, 3)
RECIPE = Recipe(steps=2, accumulate=2, clip=1.0)
MODELS = ("gpt", "odd_sizes")
Prints = list[tuple[str, str]]


def prints(trace: Trace) -> Prints:
    """Every number of a run, in order, as name and hash: small enough to carry between jobs."""
    found: Prints = []
    for name, tensor in trace.entries:
        raw = b"none" if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.append((name, hashlib.sha256(raw).hexdigest()[:16]))
    return found


def runs(rank: int, model: str, transports: Sequence[str]) -> dict[str, Prints]:
    made: dict[str, Prints] = {}
    for transport in transports:
        for stage in STAGES:
            comm = lowtide.Comm(bucket_bytes=0, transport=transport, deadline=30)
            made[f"{transport}, stage {stage}"] = prints(sharded(MENAGERIE[model], RECIPE, rank=rank, stage=stage, comm=comm))
    return made


def on_one_host(rank: int, world: int, models: Sequence[str]) -> dict[str, dict[str, Prints]]:
    return {model: runs(rank, model, ["shared"]) for model in models}


def on_several_hosts(rank: int, world: int, models: Sequence[str]) -> dict[str, Any]:
    """Everything that is to be known about one layout of hosts."""
    carrier, listening, bucket = carried_by()
    found: dict[str, dict[str, Prints]] = {}
    for model in models:
        by_hand = oracle(MENAGERIE[model], RECIPE, world=world, rank=rank, by_hand=True)
        ddp = oracle(MENAGERIE[model], RECIPE, world=world, rank=rank)
        assert_same(losses_of(by_hand), losses_of(ddp), assert_near)
        found[model] = {"by hand": prints(by_hand), "ddp": prints(ddp), **runs(rank, model, ["auto", "torch"])}
    listens = sorted(listening | listening_addresses())
    return {"carrier": carrier, "bucket": bucket, "listening": listens, "runs": found}


def losses_of(trace: Trace) -> Trace:
    """Above two ranks DDP adds in another order: next to nothing in a loss, but Adam makes much of a gradient near zero."""
    return Trace([(name, tensor) for name, tensor in trace.entries if "loss" in name])


def carried_by() -> tuple[str, set[str], int]:
    """Which transport is chosen here, which does what every transport does; where this rank listens meanwhile; and how much a
    reduction should handle, by what was measured."""
    group = Group.join(None, deadline=30)
    over = group.channel("conformance").run(Label("open", -1, "a transport"), lambda wire, notes: wire.world)
    conform(over)
    listening = listening_addresses()
    dist.barrier()
    group.close()
    return type(over).__name__, listening, over.bucket_bytes


def compare(network: Network, ranks_per_host: list[int], models: Sequence[str], carrier: str, timeout: float = 110) -> None:
    world = sum(ranks_per_host)
    several = run_hosts(network, ranks_per_host, on_several_hosts, models, timeout=timeout)
    single = run_ranks(world, on_one_host, models, timeout=timeout)
    hosts = [host for host, count in enumerate(ranks_per_host) for _ in range(count)]
    for rank, (answer, one) in enumerate(zip(several, single, strict=True)):
        assert answer["carrier"] == carrier
        own = network.hosts[hosts[rank]].address
        assert own in answer["listening"], "nothing listens: the check sees nothing"
        assert set(answer["listening"]) <= {own, "127.0.0.1", "::1"}, "a socket is open to more than this network"
        for model in models:
            made = {**answer["runs"][model], **{f"one host, {name}": trace for name, trace in one[model].items()}}
            expected = made.pop("by hand")
            ddp = made.pop("ddp")
            for name, trace in made.items():
                differs = first_difference(trace, expected)
                assert differs is None, f"{model}, rank {rank}, {name}: {differs}"
            if world == 2:
                assert first_difference(ddp, expected) is None
    assert len({answer["bucket"] for answer in several}) == 1, "ranks would cut reductions at different places"
    for model in models:
        finals = {tuple(p for p in answer["runs"][model]["by hand"] if "parameter" in p[0]) for answer in several}
        assert len(finals) == 1, "ranks have different parameters"


def first_difference(got: Prints, expected: Prints) -> str | None:
    if [name for name, _ in got] != [name for name, _ in expected]:
        return "the loops made different numbers"
    return next((name for (name, a), (_, b) in zip(got, expected, strict=True) if a != b), None)


def test_two_hosts_of_two_ranks(two_hosts: Network) -> None:
    compare(two_hosts, [2, 2], MODELS, "TwoLevel")


def test_two_hosts_of_one_rank(two_hosts: Network) -> None:
    compare(two_hosts, [1, 1], MODELS[:1], "TorchTransport")


def test_hosts_with_different_numbers_of_ranks(two_hosts: Network) -> None:
    compare(two_hosts, [1, 2], MODELS[:1], "TorchTransport")


@pytest.mark.soak
@pytest.mark.parametrize("model", ["gpt", "odd_sizes", "tied_head", "moe", "buffers", "mixed_dtypes"])
def test_two_hosts_of_three_ranks(two_hosts: Network, model: str) -> None:
    compare(two_hosts, [3, 3], [model], "TwoLevel", timeout=300)


# -- bytes on the wire -------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(320, 640), nn.GELU(), nn.Linear(640, 320)) for _ in range(4)))


def bytes_per_step(rank: int, world: int, settings: Sequence[tuple[str, str]]) -> dict[str, tuple[float, list[float]]]:
    """What this rank's host sends in one step, and the losses, by transport and codec."""
    found: dict[str, tuple[float, list[float]]] = {}
    for transport, codec in settings:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        comm = lowtide.Comm(transport=transport, codec=codec)
        model, optimizer = lowtide.shard(model, optimizer, stage=3, comm=comm)
        losses: list[float] = []
        for step in range(6):
            if step == 2:
                before = quiet_bytes()
            batch = torch.randn(4, 320, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[f"{transport} {codec}"] = ((quiet_bytes() - before) / 4, losses)
    return found


def quiet_bytes() -> int:
    """The counter, once nothing is under way any more."""
    dist.barrier()
    seen = -1
    while seen != (now := sent_from_here()):
        seen = now
        time.sleep(0.2)
    dist.barrier()
    return now


def test_every_byte_crosses_the_network_once(two_hosts: Network) -> None:
    settings = [("auto", "exact"), ("auto", "bf16"), ("torch", "exact"), ("auto", "bf16")]
    found = run_hosts(two_hosts, [2, 2], bytes_per_step, settings)
    whole = sum(p.numel() for p in layers().parameters()) * 4
    for rank in (0, 2):  # one per host
        sent = {name: count for name, (count, _) in found[rank].items()}
        # A host sends its half of the new parameters, and its sum of the other half of the gradients.
        assert 0.98 * whole < sent["auto exact"] < 1.15 * whole
        assert 0.7 * whole < sent["auto bf16"] < 0.9 * whole, "gradients in 16 bits, parameters as they are"
        assert sent["torch exact"] > 1.5 * sent["auto exact"]
    for rank in range(4):
        losses = {name: values for name, (_, values) in found[rank].items()}
        assert losses["auto exact"] == losses["torch exact"]
        assert losses["auto bf16"] != losses["auto exact"], "nothing was rounded"
        assert losses["auto bf16"] == pytest.approx(losses["auto exact"], rel=1e-3)


# -- a network that goes away -----------------------------------------------------------------------------------------------

DEADLINE = 4.0
GRACE = 25.0  # seconds: ranks ask each other where they stand, and tear down


def train_until_cut(rank: int, world: int, transport: str, stage: int) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    comm = lowtide.Comm(transport=transport, deadline=DEADLINE)
    model, optimizer = lowtide.shard(model, optimizer, stage=stage, comm=comm)
    for step in range(100_000):
        if step == 3:
            leave("training")
        try:
            model(torch.ones(2, 320)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except lowtide.Error as error:
            leave("ended", f"{time.clock_gettime(time.CLOCK_MONOTONIC)} {type(error).__name__}")
            raise


@pytest.mark.parametrize(("transport", "stage"), [("auto", 3), pytest.param("torch", 0, marks=pytest.mark.soak)])
def test_a_cut_cable_ends_all_ranks(make_network: MakeNetwork, transport: str, stage: int) -> None:
    network = make_network()
    with Ranks(network, [2, 2], train_until_cut, transport, stage) as ranks:
        ranks.wait_for("training")
        network.cut(1)
        cut = time.clock_gettime(time.CLOCK_MONOTONIC)
        found = ranks.outcomes(DEADLINE + 3 * GRACE)
        for rank, outcome in enumerate(found):
            told = f"rank {rank}: {outcome}\n{ranks.log(rank)}"
            assert outcome.code == 1, told
            when, kind = (ranks.folder / f"ended-{rank}").read_text().split()
            assert kind in ("DeadlineExceeded", "PeerFailed"), told
            assert float(when) - cut < DEADLINE + GRACE, told
            assert "has waited" in ranks.log(rank), f"no report on {told}"
