"""What is loaded is what was saved, bit for bit, whatever the ranks, stages, tiers and chunks; and training goes on as if it
had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from tests.kit.checkpoints import Setup, Trained, assert_equal
from tests.kit.dist import run_ranks

SETUPS = [
    Setup(),
    Setup(stage=0, disk=True),
    Setup(stage=3, disk=True, resident="mixed", update="backward"),
    Setup(stage=3, disk=True, resident="kinds", chunk_bytes=8192),
    Setup(ranks=2, stage=0),
    Setup(ranks=2, stage=1),
    Setup(ranks=2, stage=2),
    Setup(ranks=2, stage=3),
    Setup(ranks=2, stage=3, disk=True),
    Setup(ranks=3, stage=3, disk=True, resident="states"),
]
MODELS = ["gpt", "tied", "lora", "batch_norm", "channels_last"]


def resume(rank: int, world: int, folder: str, specimen: str, optimizer: str, setup: Setup, link: bool) -> None:
    """Three steps, a save, three more; then a model with other numbers that loads, and takes the same three."""
    where = Path(folder)
    one = Trained(specimen, optimizer, setup, where, rank)
    one.train(0, 3)
    torch.manual_seed(rank)
    lowtide.save(where / "run" / "step-3", one.model, one.optimizer, state=one.state(), extra={"epoch": 1}, link=link)
    drawn = torch.rand(3)
    losses = one.train(3, 3)
    two = Trained(specimen, optimizer, setup, where, rank, seed=1)
    two.train(9, 1)
    extra = lowtide.load(where / "run", two.model, two.optimizer, state=two.state())
    assert extra == {"epoch": 1}
    assert torch.equal(torch.rand(3), drawn)
    assert [x.item() for x in two.train(3, 3)] == [x.item() for x in losses]
    assert_equal(two.numbers(), one.numbers())


def run(setup: Setup, fn: Any, *args: Any) -> list[Any]:
    return run_ranks(setup.ranks, fn, *args) if setup.ranks > 1 else [fn(0, 1, *args)]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, setup: Setup) -> None:
    run(setup, resume, str(tmp_path), "gpt", "adamw_fused", setup, True)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw_groups", "adamw_amsgrad", "nadam", "custom"])
@pytest.mark.parametrize("setup", [Setup(), Setup(stage=3, disk=True), Setup(ranks=2, stage=3)], ids=str)
def test_states_of_any_optimizer_come_back(tmp_path: Path, setup: Setup, optimizer: str) -> None:
    run(setup, resume, str(tmp_path), "mlp", optimizer, setup, True)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("setup", [Setup(), Setup(stage=3, disk=True, resident="mixed"), Setup(ranks=2, stage=3)], ids=str)
@pytest.mark.parametrize("model", ["tied_head", "lora", "convolutions", "buffers", "mixed_dtypes", "odd_sizes", "frozen_block"])
def test_any_model_comes_back(tmp_path: Path, setup: Setup, model: str) -> None:
    run(setup, resume, str(tmp_path), model, "adamw_fused", setup, True)


def save_after_training(rank: int, world: int, folder: str, model: str, setup: Setup, link: bool) -> dict[str, torch.Tensor]:
    one = Trained(model, "adamw_fused", setup, Path(folder), rank)
    one.train(0, 2)
    lowtide.save(Path(folder, "run", "two"), one.model, one.optimizer, state=one.state(), link=link)
    return one.numbers()


def load_elsewhere(rank: int, world: int, folder: str, model: str, setup: Setup) -> dict[str, torch.Tensor]:
    two = Trained(model, "adamw_fused", setup, Path(folder), rank, seed=5)
    lowtide.load(Path(folder, "run"), two.model, two.optimizer, state=two.state())
    return two.numbers()


FROM = [Setup(), Setup(stage=3, disk=True), Setup(ranks=2, stage=3, disk=True, resident="mixed"), Setup(ranks=3, stage=1)]
TO = [Setup(), Setup(stage=3, disk=True, resident="mixed", chunk_bytes=8192, update="backward"), Setup(ranks=2, stage=3)]
TO += [Setup(ranks=2, stage=2), Setup(ranks=3, stage=3, disk=True), Setup(ranks=3, stage=0)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("to", TO, ids=lambda s: f"to-{s}")
@pytest.mark.parametrize("of", FROM, ids=lambda s: f"from-{s}")
def test_any_setup_loads_what_any_other_saved(tmp_path: Path, of: Setup, to: Setup) -> None:
    saved = run(of, save_after_training, str(tmp_path), "gpt", of, True)[0]
    assert_equal(run(to, load_elsewhere, str(tmp_path), "gpt", to)[0], saved)


@pytest.mark.parametrize("model", ["tied_head", "convolutions", "odd_sizes", "lora"])
def test_awkward_models_load_on_another_number_of_ranks(tmp_path: Path, model: str) -> None:
    of, to = Setup(ranks=3, stage=3), Setup(ranks=2, stage=3, disk=True)
    saved = run(of, save_after_training, str(tmp_path), model, of, True)[0]
    assert_equal(run(to, load_elsewhere, str(tmp_path), model, to)[0], saved)
    alone = Setup(stage=3, disk=True)
    assert_equal(run(alone, load_elsewhere, str(tmp_path), model, alone)[0], saved)


def test_masters_survive_a_round_trip_in_low_precision(tmp_path: Path) -> None:
    low = Setup(stage=3, disk=True, precision="bf16")
    one = Trained("mlp", "adamw_fused", low, tmp_path, 0)
    one.train(0, 3)
    lowtide.save(tmp_path / "run" / "low", one.model, one.optimizer, state=one.state())
    two = Trained("mlp", "adamw_fused", low, tmp_path, 0, seed=3)
    lowtide.load(tmp_path / "run", two.model, two.optimizer, state=two.state())
    assert [x.item() for x in two.train(3, 4)] == [x.item() for x in one.train(3, 4)]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("setup", [Setup(), Setup(stage=3, disk=True), Setup(stage=3, disk=True, resident="mixed")], ids=str)
@pytest.mark.parametrize("link", [False, True])
def test_a_snapshot_is_of_the_moment_it_was_asked_for(tmp_path: Path, setup: Setup, background: bool, link: bool) -> None:
    one = Trained("gpt", "adamw_fused", setup, tmp_path, 0)
    one.train(0, 2)
    expected = one.numbers()
    saving = lowtide.save(tmp_path / "run" / "a", one.model, one.optimizer, background=background, link=link, state=one.state())
    one.train(2, 3)
    assert saving.wait() == tmp_path / "run" / "a"
    assert_equal(load_elsewhere(0, 1, str(tmp_path), "gpt", Setup()), expected)


def test_checkpoints_that_share_a_spool_file_are_each_whole(tmp_path: Path) -> None:
    setup = Setup(stage=3, disk=True)
    one = Trained("gpt", "adamw_fused", setup, tmp_path, 0)
    expected = []
    for step in range(4):
        one.train(step, 1)
        expected.append(one.numbers())
        lowtide.save(tmp_path / "run" / f"step-{step}", one.model, one.optimizer)
    one.train(4, 2)
    for step in range(4):
        two = Trained("gpt", "adamw_fused", Setup(), tmp_path, 0, seed=2)
        lowtide.load(tmp_path / "run" / f"step-{step}", two.model, two.optimizer)
        assert_equal(two.numbers(), expected[step])


def test_space_of_removed_checkpoints_is_used_again(tmp_path: Path) -> None:
    setup = Setup(stage=3, disk=True)
    one = Trained("gpt", "adamw_fused", setup, tmp_path, 0)
    sizes = []
    for step in range(6):
        one.train(step, 1)
        lowtide.save(tmp_path / "run" / f"step-{step}", one.model, one.optimizer, keep=1)
        sizes.append((tmp_path / "run" / f"step-{step}" / "rank-00000-spool-0").stat().st_size)
    assert [p.name for p in sorted((tmp_path / "run").glob("step-*"))] == ["step-5"]
    assert sizes[2:] == [sizes[2]] * 4  # current, kept, and the one that is written


def test_frozen_parameters_are_not_written_again(tmp_path: Path) -> None:
    one = Trained("lora", "adamw_fused", Setup(), tmp_path, 0)
    for step in range(2):
        one.train(step, 1)
        lowtide.save(tmp_path / "run" / f"step-{step}", one.model, one.optimizer)
    name = "rank-00000-frozen.safetensors"
    assert (tmp_path / "run" / "step-0" / name).samefile(tmp_path / "run" / "step-1" / name)


def _find_nothing(rank: int, world: int, folder: str) -> str:
    one = Trained("mlp", "adamw_fused", Setup(ranks=2, stage=3), Path(folder), rank)
    try:
        lowtide.load(Path(folder, "nowhere"), one.model, one.optimizer)
    except lowtide.Error as error:
        return type(error).__name__
    return "loaded"


def test_all_ranks_raise_what_rank_0_found(tmp_path: Path) -> None:
    assert run_ranks(2, _find_nothing, str(tmp_path)) == ["NoCheckpoint", "NoCheckpoint"]
