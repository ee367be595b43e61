"""Saved by four ranks at stage 3, all on disk: continued there, and loaded by one, two and three ranks at every stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowtide
from tests.checkpoint.test_round_trip import load_elsewhere, run
from tests.kit.checkpoints import Setup, Trained, assert_equal
from tests.kit.dist import run_ranks

FOUR = Setup(ranks=4, stage=3, disk=True)


def train_on(rank: int, world: int, folder: str, *, stopped: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps and ten more, with a save between them, or from a load of that; the ten losses and what was saved."""
    where = Path(folder)
    one = Trained("gpt", "adamw_fused", FOUR, where, rank, seed=int(stopped))
    if stopped:
        lowtide.load(where / "run", one.model, one.optimizer, state=one.state())
    else:
        one.train(0, 5)
        lowtide.save(where / "run" / "step-5", one.model, one.optimizer, state=one.state())
    numbers = one.numbers()
    return [loss.item() for loss in one.train(5, 10)], numbers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("four")
    rows = run_ranks(4, _undisturbed, str(folder))
    return folder, [losses for losses, _ in rows], rows[0][1]


def _undisturbed(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_on(rank, world, folder, stopped=False)


def _stopped(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_on(rank, world, folder, stopped=True)


Saved = tuple[Path, list[list[float]], dict[str, torch.Tensor]]


def test_ten_losses_after_a_load_are_those_of_the_run_that_never_stopped(saved: Saved) -> None:
    folder, losses, numbers = saved
    rows = run_ranks(4, _stopped, str(folder))
    assert [row[0] for row in rows] == losses
    assert_equal(rows[0][1], numbers)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_tensor_is_the_saved_one_on_fewer_ranks(saved: Saved, ranks: int, stage: int) -> None:
    folder, _, numbers = saved
    to = Setup(ranks=ranks, stage=stage, disk=stage == 3)
    assert_equal(run(to, load_elsewhere, str(folder), "gpt", to)[0], numbers)
