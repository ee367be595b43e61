"""Another memory number in the middle of a run: bytes move, results do not, and the number holds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import DoesNotFit, Refused
from lowtide.planning.options import Tier
from tests.kit import dist

MIB = 1 << 20
WIDTH, DEPTH = 512, 12  # 12.6 M parameters, 48 MiB of them, 192 MiB of states


@pytest.fixture(autouse=True)
def _no_children() -> None:
    """Ranks of other tests are children of this process, and count as its loader workers would."""
    dist.close_pools()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(DEPTH))
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    torch.manual_seed(seed)
    loss = model(torch.randn(16, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def on_disk(model: nn.Module) -> int:
    """Kinds of bytes that are on disk, over all units."""
    rows = engine_of(model).placer.placement.units
    return sum(getattr(r, kind) is Tier.DISK for r in rows for kind in ("parameters", "gradients", "optimizer"))


def base() -> int:
    return engine_of(lowtide.shard(*build(), memory="4GiB")[0]).budget.read()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_less_memory_moves_bytes_out_and_more_brings_them_back(tmp_path: Path, update: str) -> None:
    reference, plain = build()
    expected = [step(reference, plain, i) for i in range(12)]
    model, optimizer = lowtide.shard(*build(), memory=base() + 600 * MIB, disk=tmp_path, update=update)
    losses = [step(model, optimizer, i) for i in range(4)]
    roomy = on_disk(model)
    assert roomy == 0, "all of it fits in the first number"
    lowtide.set_memory(model, engine_of(model).budget.read() - 10 * MIB)
    tight = on_disk(model)
    assert tight > 0, "what does not fit has left memory before the next step"
    limit = engine_of(model).budget.limit
    assert limit is not None
    losses += [step(model, optimizer, i) for i in range(4, 8)]
    assert engine_of(model).budget.peak <= limit
    lowtide.set_memory(model, limit + 600 * MIB)
    losses += [step(model, optimizer, i) for i in range(8, 12)]
    assert on_disk(model) < tight, "and comes back when there is room again"
    assert losses == expected
    with lowtide.gathered(model):
        for mine, plain_parameter in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, plain_parameter)


def test_the_switch_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = lowtide.shard(*build(), memory=base() + 600 * MIB, disk=tmp_path)
    step(model, optimizer, 0)
    with caplog.at_level(logging.INFO, logger="lowtide"):
        lowtide.set_memory(model, engine_of(model).budget.read() - 10 * MIB)
    assert "the caller allows" in caplog.text
    assert "units are placed anew" in caplog.text


def test_too_little_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = lowtide.shard(*build(), memory=base() + 600 * MIB, disk=tmp_path)
    step(model, optimizer, 0)
    before = engine_of(model).budget.limit
    with pytest.raises(DoesNotFit, match="raise memory to at least"):
        lowtide.set_memory(model, "10MiB")
    assert engine_of(model).budget.limit == before
    step(model, optimizer, 1)


def test_a_model_without_a_number_has_none_to_change() -> None:
    model, _ = lowtide.shard(*build())
    with pytest.raises(Refused, match="without a memory number"):
        lowtide.set_memory(model, "1GiB")


def squeezed_rank(rank: int, world_size: int, folder: str) -> tuple[list[float], int, int]:
    model, optimizer = lowtide.shard(*build(), memory="4GiB", disk=folder)
    losses = [step(model, optimizer, i) for i in range(4)]
    before = on_disk(model)
    lowtide.set_memory(model, 2 * (engine_of(model).budget.read() - 10 * MIB))
    after = on_disk(model)
    return losses + [step(model, optimizer, i) for i in range(4, 7)], before, after


def undisturbed_rank(rank: int, world_size: int) -> list[float]:
    model, optimizer = lowtide.shard(*build(), stage=3)
    return [step(model, optimizer, i) for i in range(7)]


def test_two_ranks_move_together(tmp_path: Path) -> None:
    squeezed = dist.run_ranks(2, squeezed_rank, str(tmp_path))
    assert squeezed[0] == squeezed[1]
    losses, before, after = squeezed[0]
    assert after > before
    assert losses == dist.run_ranks(2, undisturbed_rank)[0]


def test_parameters_that_began_in_memory_survive_the_disk(tmp_path: Path) -> None:
    """Their chunks are cut alike wherever they are, and what was only ever written in place goes along."""
    reference, plain = build()
    expected = [step(reference, plain, i) for i in range(6)]
    model, optimizer = lowtide.shard(*build(), memory="8GiB", disk=tmp_path, update=lowtide.Update("step", 1 << 20))
    engine = engine_of(model)
    assert on_disk(model) == 0, "half of the number would hold it: it begins in memory"
    losses = [step(model, optimizer, i) for i in range(3)]
    for unit in engine.units:
        for kind in ("parameters", "gradients", "optimizer"):
            engine.settle()
            engine.shelves.move(unit, kind, engine.store)
    losses += [step(model, optimizer, i) for i in range(3, 6)]
    assert losses == expected
