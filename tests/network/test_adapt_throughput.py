"""``adapt="throughput"`` on a slow network: gradients cross it as bf16 from one step on, the same on all ranks. Without it no
bit changes, however slow the network is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from tests.kit.hosts import run_hosts
from tests.network.conftest import MakeNetwork

STEPS = 8
SLOW = "50mbit"  # a backward pass computes for milliseconds, and its gradients are under way for a quarter of a second


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(320, 640), nn.GELU(), nn.Linear(640, 320)) for _ in range(2)))


def trained(rank: int, world: int, adapts: list[str], stage: int) -> dict[str, dict[str, list[Any]]]:
    """Losses, and the codec that the step after each goes with."""
    found: dict[str, dict[str, list[Any]]] = {}
    for adapt in adapts:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = lowtide.shard(model, optimizer, stage=stage, adapt=adapt)
        losses: list[float] = []
        codecs: list[str | None] = []
        for step in range(STEPS):
            for micro in range(3):  # gradients cross three times as often as new parameters do
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                loss = model(torch.randn(4, 320, generator=generator)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            codecs.append(engine_of(model).group.codec)
        found[adapt] = {"losses": losses, "codecs": codecs}
    return found


@pytest.mark.parametrize(("ranks_per_host", "stage"), [([2, 2], 3), ([1, 1], 2)], ids=["two levels", "one rank per host"])
def test_a_slow_network_changes_the_codec_only_if_asked(
    make_network: MakeNetwork, ranks_per_host: list[int], stage: int
) -> None:
    ranks = run_hosts(make_network(2, SLOW), ranks_per_host, trained, ["placement", "throughput"], stage, timeout=110)
    for found in ranks:
        assert found["placement"]["codecs"] == ["exact"] * STEPS
        assert found["throughput"]["codecs"] == ranks[0]["throughput"]["codecs"], "ranks would not understand each other"
    codecs = ranks[0]["throughput"]["codecs"]
    exact = codecs.index("bf16")
    assert exact >= 3, "the first step has no length, and then it takes three"
    assert codecs == ["exact"] * exact + ["bf16"] * (STEPS - exact), "it stays changed"
    # Step ``exact`` was the last one with gradients as they are, so the loss of the next one still is what it was.
    for found in ranks:
        as_ever, changed = found["placement"]["losses"], found["throughput"]["losses"]
        assert changed[: exact + 2] == as_ever[: exact + 2]
        assert changed[exact + 2 :] != as_ever[exact + 2 :], "nothing was rounded"
        assert changed == pytest.approx(as_ever, rel=1e-2)


def test_ranks_of_one_host_have_nothing_to_switch(make_network: MakeNetwork) -> None:
    found = run_hosts(make_network(2, SLOW), [2, 0], trained, ["throughput"], 3)
    assert [rank["throughput"]["codecs"] for rank in found] == [[None] * STEPS] * 2
