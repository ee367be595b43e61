"""The first update makes the optimizer's states. They stay, so they are no growth that later updates must find room for."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from tests.kit import dist

MIB = 1 << 20


def test_states_that_the_first_update_made_are_not_expected_again() -> None:
    dist.close_pools()  # ranks of other tests count as this process's workers
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    states = 2 * sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = lowtide.shard(model, optimizer, memory="8GiB")
    for _ in range(2):
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        coming = engine_of(model).budget._coming("update")
        assert coming < states // 4, f"{coming / MIB:.0f} MiB are expected of an update, and the states have {states / MIB:.0f}"
