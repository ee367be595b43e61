"""States and options of one optimizer for another: refused, or a training step goes on from them.

Every optimizer of a list against every other; and each large state of each of them where small ones belong, in every shape. The
kernels of a fused optimizer write as far as the parameter goes, so these run in processes of their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import lowtide
from lowtide.errors import CheckpointError, CheckpointMismatch
from tests.kit.crashes import forked
from tests.kit.forgery import TABLE, Forger, Small
from tests.kit.optimizers import OPTIMIZERS, Lion

MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    **{
        name: OPTIMIZERS[name] for name in ("adamw_fused", "adamw_amsgrad", "adam", "sgd", "sgd_momentum", "adagrad", "rmsprop")
    },
    **{name: OPTIMIZERS[name] for name in ("rprop", "asgd", "nadam", "adafactor", "custom")},
}
SAME = {("adamw_fused", "adamw_amsgrad"), ("adam", "adamw_fused"), ("adam", "adamw_amsgrad"), ("sgd", "sgd_momentum")}
"""Pairs that have the same options, either way: one goes on from the other's states, as in PyTorch."""


@pytest.fixture(scope="module")
def forgers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Forger]:
    return {name: Forger(tmp_path_factory.mktemp(name), make) for name, make in MAKERS.items()}


def states_of(one: Forger) -> str:
    return repr([sorted((n, str(v)) for n, v in row.items()) for row in one.optimizer.state_dict()["state"].values()])


@pytest.mark.parametrize("source", MAKERS)
def test_from_one_optimizer_to_another(source: str, forgers: dict[str, Forger]) -> None:
    saved = forgers[source]
    for name, other in forgers.items():
        before, numbers = states_of(other), [p.detach().clone() for p in other.model.parameters()]
        state = {"kept": other.kept}
        if name == source or {(source, name), (name, source)} & SAME:
            lowtide.load(saved.path, other.model, other.optimizer, state=state)
        else:
            with pytest.raises(CheckpointMismatch, match=type(saved.optimizer).__name__):
                lowtide.load(saved.path, other.model, other.optimizer, state=state)
            assert states_of(other) == before
            assert all(torch.equal(p, q) for p, q in zip(other.model.parameters(), numbers, strict=True))
            own = {key: type(value) for key, value in other.optimizer.param_groups[0].items()}
            lowtide.load(saved.path, other.model, other.optimizer, state=state, strict=False)
            assert own.keys() == other.optimizer.param_groups[0].keys(), "options of another optimizer"
        other.train()
        other.write(other.files)
        lowtide.load(other.path, other.model, other.optimizer, state=state, strict=False)
        assert not other.poisoned


# -- states of another size -------------------------------------------------------------------------------------------


def small_instead(folder: Path, name: str, disk: bool) -> list[str]:
    """Each large state of an optimizer as a small one, in each shape: what a load says, and a step if it loads."""
    options = {"memory": "900MiB", "disk": str(folder)} if disk else {}
    forger = Forger(folder, MAKERS[name], **options)
    plain = json.loads(forger.files[TABLE])
    kinds = {row[0].removeprefix("optimizer.") for row in plain["kinds"] if row[0].startswith("optimizer.")}
    wrong: list[str] = []
    shapes: list[Any] = [[], [0], [1], [2, 2], [5, 6], [6, 5], [30], [5], None]
    for kind, of, shape in itertools.product(sorted(kinds), ("up.weight", "norm.bias"), shapes):
        table = json.loads(forger.files[TABLE])
        numbers = [i for i, row in enumerate(table["kinds"]) if row[0] == f"optimizer.{kind}"]
        at = table["names"].index(of)
        for block in table["blocks"]:
            block[4] = [part for part in block[4] if not (part[0] in numbers and part[1] == at)]
        value: Any = {"$": "scalar", "dtype": "float32", "value": 0.5}
        if shape is None:
            value = [0.5]
        elif shape:
            count = 1
            for size in shape:
                count *= size
            value = {"$": "tensor", "name": "evil", "dtype": "float32", "shape": shape}
            _add_object(table, "evil", count)
        table["objects"]["small"][of][kind] = value
        forger.write(forger.forged(json.dumps(table).encode()))
        said = forger.load()
        if not said.startswith("refused"):
            wrong.append(f"{kind} of {of} as {shape}: {said}")
            forger.train()
    forger.write(forger.files)
    if forger.load() != "loaded":
        wrong.append("the right one does not load")
    forger.train()
    return wrong


def _add_object(table: Any, name: str, count: int) -> None:
    """A tensor of rank 0 whose bytes are those of some block that holds enough."""
    block = max(table["blocks"], key=lambda b: b[2])
    table["names"].append(name)
    table["kinds"].append(["object", "float32"])
    block[4].append([len(table["kinds"]) - 1, len(table["names"]) - 1, 0, count, 0])


@pytest.mark.parametrize("name", ["adamw_fused", "adamw_amsgrad", "sgd_momentum", "adagrad", "custom"])
@pytest.mark.parametrize("disk", [False, True], ids=["in core", "on disk"])
def test_a_large_state_among_the_small_ones(name: str, disk: bool, tmp_path: Path) -> None:
    ended = forked(small_instead, tmp_path, name, disk, seconds=300)
    assert ended.result() == []


# -- options ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "lr": [[], {}, "fast", True, {"$": "tuple", "items": [1, 2]}],
    "betas": [0.9, [0.9], [], "x", [[], []], {"$": "tuple", "items": [0.9, "x"]}],
    "eps": ["x", [1e-8]],
    "weight_decay": ["x", [0.1]],
    "amsgrad": ["yes", 1.5],
}
HARMLESS: dict[str, Any] = {"capturable": [True], "foreach": [True, []], "fused": [False], "maximize": [True], "lr": [1, 1e30]}
"""What is another option, or is not looked at: a step goes on from there."""


def options_of(forger: Forger) -> str:
    return repr({name: value for name, value in forger.optimizer.param_groups[0].items() if name != "params"})


@pytest.mark.parametrize("name", HARMLESS)
def test_options_that_a_step_can_be_taken_with(name: str, forgers: dict[str, Forger]) -> None:
    forger = forgers["adamw_fused"]
    for value in HARMLESS[name]:
        table = json.loads(forger.files[TABLE])
        table["objects"]["model"]["groups"][0]["options"][name] = value
        forger.write(forger.forged(json.dumps(table).encode()))
        if forger.load() == "loaded":
            forger.train()
        forger.write(forger.files)
        assert forger.load() == "loaded"


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_another_kind(name: str, forgers: dict[str, Forger]) -> None:
    """Not found by the next step, but before anything is loaded; an older checkpoint is taken instead."""
    forger = forgers["adamw_fused"]
    for value in OPTIONS[name]:
        table = json.loads(forger.files[TABLE])
        table["objects"]["model"]["groups"][0]["options"][name] = value
        forger.write(forger.forged(json.dumps(table).encode()))
        before = options_of(forger)
        with pytest.raises(CheckpointError) as caught:
            lowtide.load(forger.path, forger.model, forger.optimizer, state={"kept": forger.kept})
        assert not isinstance(caught.value, CheckpointMismatch)
        assert options_of(forger) == before
        forger.write(forger.files)
        assert forger.load() == "loaded"
        forger.train()


def test_options_that_need_more_room_than_there_is(tmp_path: Path) -> None:
    """Where states have room on the disk, it was taken before training began."""
    plain = Forger(tmp_path, partial(optim.AdamW, lr=1e-2, amsgrad=True))
    model = Small()
    (tmp_path / "spool").mkdir()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    lowtide.shard(model, optimizer, memory="4GiB", disk=str(tmp_path / "spool"))
    with pytest.raises(CheckpointMismatch, match="max_exp_avg_sq"):
        lowtide.load(plain.path, model, optimizer, state={"kept": plain.kept})


def test_a_state_that_comes_late(tmp_path: Path) -> None:
    """An optimizer may make one later than in any trial: it is as good as the others."""

    class Late(Lion):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            out = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p in self.state and self.state[p]["count"] >= 30:
                        self.state[p].setdefault("late", torch.ones_like(p))
            return out

    forger = Forger(tmp_path, Late)
    for _ in range(30):
        forger.train()
    lowtide.save(tmp_path / "late", forger.model, forger.optimizer, state={"kept": forger.kept}).wait()
    expected = states_of(forger)
    forger.train()
    lowtide.load(tmp_path / "late", forger.model, forger.optimizer, state={"kept": forger.kept})
    assert states_of(forger) == expected
    assert "late" in expected
