"""Ranks that do not agree, and ranks that fail, through lowtide.shard and a training loop: every rank hears of it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import lowtide
from lowtide import api
from lowtide.errors import Error, Mismatch, PeerFailed
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack

LIMIT = 9.0  # seconds from the failure of one rank to the error on another
COMM = lowtide.Comm(bucket_bytes=0, deadline=20)


def stack(count: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack([Block() for _ in range(count)])


class Renamed(Stack):
    pass


def _half(model: Stack) -> None:
    model.head.to(torch.float64)


def _swapped(model: Stack) -> None:
    model.blocks[1].up, model.blocks[1].down = model.blocks[1].down, model.blocks[1].up


def _frozen(model: Stack) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def _buffer(model: Stack) -> None:
    model.register_buffer("mean", torch.zeros(3))


def _renamed(model: Stack) -> None:
    model.__class__ = Renamed


def _wider(model: Stack) -> None:
    model.head = nn.Linear(24, 6)


def _transposed(model: Stack) -> None:
    """The same shape, the elements in another order in memory."""
    model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().t().contiguous().t())


def _version(model: Stack) -> None:
    api.__version__ = "9.9.9"


# what one rank does differently → (to its model, to the arguments, what every rank is told)
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shape": (_wider, {}, r"parameter 12: rank 0 has 'head\.weight float32 \(5, 24\).*', rank 1 has 'head\.weight .*\(6, 24\)"),
    "dtype": (_half, {}, r"parameter 12: rank 0 has 'head\.weight float32 \(5, 24\).*', rank 1 has 'head\.weight float64 "),
    "order": (_swapped, {}, r"parameter 8: rank 0 has 'blocks\.1\.up\.weight float32 \(48, 24\).*', rank 1 has .*\(24, 48\)"),
    "frozen": (_frozen, {}, r"parameter 2: rank 0 has '.*\(48, 24\).*', rank 1 has 'blocks\.0\.up\.weight .* frozen"),
    "class": (_renamed, {}, r"model: rank 0 has 'Stack', rank 1 has 'Renamed'"),
    "buffer": (_buffer, {}, r"rank 0 has .*, rank 1 has buffer 0: 'mean torch\.float32 \(3,\)'"),
    "memory order": (_transposed, {}, r"parameter 2: rank 0 has 'blocks\.0\.up\.weight"),
    "stage": (None, {"stage": 2}, r"configuration: rank 0 has .*number=3.*, rank 1 has .*number=2"),
    "partition": (None, {"partition": "row"}, r"configuration: rank 0 has .*by='element'.*, rank 1 has .*by='row'"),
    "precision": (None, {"precision": "bf16"}, r"configuration: rank 0 has .*param=None.*, rank 1 has .*param='bf16'"),
    "units": (None, {"units": "blocks.*.up"}, r"unit 0: rank 0 has 'blocks\.0: 6 .*', rank 1 has 'blocks\.0\.norm: 2 "),
    "optimizer": (None, {"optimizer": SGD}, r"optimizer: rank 0 has 'AdamW.*', rank 1 has 'SGD"),
    "no optimizer": (None, {"optimizer": None}, r"rank 0 has optimizer: 'AdamW.*', rank 1 has no further entry"),
    "version": (_version, {}, r"lowtide version: rank 0 has '0\..*', rank 1 has '9\.9\.9'"),
}  # fmt: skip


def disagree(rank: int, world: int, name: str) -> str:
    change, arguments, _ = CASES[name]
    known = api.__version__
    options: dict[str, Any] = {"stage": 3, "comm": COMM, "optimizer": AdamW}
    model = stack()
    if rank == 1:
        if change is not None:
            change(model)
        options |= arguments
    make = options.pop("optimizer")
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    try:
        lowtide.shard(model, make(model.parameters(), lr=0.1) if make else None, **options)
    except Mismatch as error:
        text = str(error)
    else:
        text = "nobody objected"
    finally:
        api.__version__ = known
    if text != "nobody objected":
        assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
        # the refused call left everything in order: the ranks agree on something else right away
        model, optimizer = lowtide.shard(again := stack(), SGD(again.parameters(), lr=0.1), stage=3, comm=COMM)
        model(torch.ones(1, 24)).sum().backward()
        optimizer.step()
    return text


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_the_first_difference(name: str) -> None:
    texts = run_ranks(3, disagree, name)
    assert len(set(texts)) == 1, texts
    assert re.search(f"^ranks differ: .*{CASES[name][2]}", texts[0]), texts[0]


def wrong_argument(rank: int, world: int) -> str:
    model = stack()
    try:
        lowtide.shard(model, stage=7 if rank == 1 else 3, comm=COMM)
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "nobody objected"


def test_an_argument_that_is_wrong_on_one_rank() -> None:
    texts = run_ranks(3, wrong_argument, fresh=True)
    assert texts[1].startswith("ArgumentError: stage is 7")
    for rank in (0, 2):
        assert texts[rank].startswith("PeerFailed: rank 1 failed: ArgumentError: stage is 7"), texts


# -- ranks that fail while they train ---------------------------------------------------------------------------------


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # one clock for all processes


def fail(folder: str, how: str) -> None:
    Path(folder, "when").write_text(repr(now()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the disk is on fire")


def failing_loop(rank: int, world: int, stage: int, where: str, how: str, folder: str) -> tuple[float, str]:
    model = stack(3)
    victim = rank == 1
    armed = [False]

    def trigger(*_: Any) -> None:
        if armed[0] and victim:
            fail(folder, how)

    optimizer: Any = SGD(model.parameters(), lr=0.1)
    if where == "forward":
        model.blocks[1].register_forward_hook(trigger)
    if where == "backward":
        model.blocks[1].up.weight.register_hook(trigger)
    if where == "step":
        optimizer.register_step_pre_hook(trigger)
    model, optimizer = lowtide.shard(model, optimizer, stage=stage, comm=COMM)
    try:
        for number in range(8):
            armed[0] = number == 2
            model(torch.full((1, 24), 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if victim and armed[0] and where == "loop":
                fail(folder, how)
    except PeerFailed as error:
        assert not victim
        return now(), str(error)
    raise RuntimeError("nothing was heard")


@pytest.mark.parametrize(
    ("stage", "where", "how"),
    [
        (3, "forward", "kill"),
        (3, "backward", "kill"),
        (1, "step", "kill"),
        (3, "loop", "raise"),
        (2, "backward", "raise"),
        (3, "forward", "raise"),
    ],
)
def test_a_rank_that_fails_ends_the_others(stage: int, where: str, how: str, tmp_path: Path) -> None:
    codes = [0, 1 if how == "raise" else -9, 0]
    results = run_ranks(3, failing_loop, stage, where, how, str(tmp_path), fresh=True, exit_codes=codes)
    when = float((tmp_path / "when").read_text())
    cause = "ValueError: the disk is on fire" if how == "raise" else "ended without a word: killed, or crashed"
    for rank in (0, 2):
        heard, text = results[rank]
        assert text.startswith(f"rank 1 failed: {cause} (this rank was at "), text
        assert heard - when < LIMIT, f"{heard - when} s"
