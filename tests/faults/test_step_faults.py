"""The n-th I/O of a training step fails, for every n: a typed error that names the place, or no effect, and never a wrong number.

After every failure the model is looked at. It raises; or it has exactly the values from before the step, or from after it. And
from a state_dict it goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.config import Config
from lowtide.errors import DiskCorrupted, DiskError, DiskFull, Error, PeerFailed, Poisoned
from lowtide.tiers.spool import Folder
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, opened_by, tensors, undefined_memory
from tests.kit.parity import Plain, Sharded, first_difference
from tests.kit.scenarios import adamw, loss_of, stack
from tests.kit.stores import Effect, FailingDisk, Fault

FOREVER = 10**9
BLOCKS = 2


def train_step(system: Plain, number: int, rank: int = 0) -> None:
    loss_of(system, number, rank).backward()
    system.optimizer.step()
    system.optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def known(steps: int) -> list[list[Tensor]]:
    """The parameters of a plain model after so many steps."""
    model = stack(count=BLOCKS)
    system = Plain(model, adamw(model))
    found = [values(model)]
    for number in range(steps):
        train_step(system, number)
        found.append(values(model))
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return not any(first_difference(x, y) for x, y in zip(a, b, strict=True))


class Trainee:
    """A model on a disk that fails when told, after one step."""

    def __init__(self, folder: Path, where: Where, rank: int = 0) -> None:
        self.disks: list[FailingDisk] = []

        def open_disk(config: Config, rank: int) -> FailingDisk:
            self.disks.append(FailingDisk([Folder(f.path, f.limit) for f in config.disk], rank=rank))
            return self.disks[-1]

        self.model = stack(count=BLOCKS)
        with opened_by(open_disk):
            self.system = Sharded(self.model, adamw(self.model), stage=3, **where.options(str(folder)))
        self.disk = self.disks[0]
        train_step(self.system, 0, rank)
        self.states = self.model.state_dict(), self.system.optimizer.state_dict()
        self.disk.drain()

    def step(self, number: int, rank: int = 0) -> None:
        """One step, as far as it goes: everything that was put off, and every write."""
        train_step(self.system, number, rank)
        engine_of(self.model).settle()
        self.disk.drain()

    def reload(self) -> None:
        self.model.load_state_dict(self.states[0])
        self.system.optimizer.load_state_dict(self.states[1])


def tells_the_place(error: BaseException, folder: Path) -> bool:
    """Whether it is an error of ours that names folder, unit and rank; a poisoned model quotes the cause."""
    if isinstance(error, DiskError):
        return error.file == str(folder) and error.unit != "" and error.offset is not None and f"rank {error.rank}" in str(error)
    return isinstance(error, Poisoned) and str(folder) in str(error) and "rank 0" in str(error) and "offset" in str(error)


def drained(disk: FailingDisk) -> None:
    disk.arm(None)
    while True:  # every failed write that nobody waited for is told once
        try:
            disk.drain()
        except DiskError:
            continue
        return


def attempt(folder: Path, where: Where, fault: Fault, expected: list[list[Tensor]]) -> str:
    """What a fault in the second step comes to; "missed" if that step has fewer requests."""
    trainee = Trainee(folder, where)
    trainee.disk.arm(fault)
    failure = caught(lambda: trainee.step(1))
    hit = trainee.disk.failed_calls
    drained(trainee.disk)
    if failure is None:  # what was written wrong shows when it is read
        failure = caught(lambda: go_on(trainee, expected))
    if failure is None:
        return "no effect" if hit else "missed"
    assert tells_the_place(failure, folder), repr(failure)
    outcome = look(trainee, folder, expected)
    failure = None
    trainee.reload()
    trainee.step(1)
    go_on(trainee, expected)
    assert_idle(trainee)
    return outcome


def caught(run: Callable[[], None]) -> Error | None:
    try:
        run()
    except Error as error:
        return error
    return None


def go_on(trainee: Trainee, expected: list[list[Tensor]]) -> None:
    """The second step was taken: look at the result, and take the third."""
    assert same(values(trainee.model), expected[2]), "wrong after the second step"
    trainee.step(2)
    assert same(values(trainee.model), expected[3]), "wrong after the third step"


def assert_idle(trainee: Trainee) -> None:
    engine = engine_of(trainee.model)
    engine.residency.forget()
    trainee.disk.drain()
    gc.collect()
    engine.buffers_arena.trim()
    assert engine.buffers_arena.taken_bytes == engine.buffers_arena.limbo_bytes == engine.arena.taken_bytes == 0


def look(trainee: Trainee, folder: Path, expected: list[list[Tensor]]) -> str:
    """What a model shows after a failure."""
    try:
        found = values(trainee.model)
    except (Poisoned, DiskError) as error:
        assert isinstance(error, Poisoned) or tells_the_place(error, folder), repr(error)
        with pytest.raises(Error):
            trainee.model.state_dict()
        return "poisoned" if isinstance(error, Poisoned) else "lost"
    for steps, label in ((1, "before"), (2, "after"), (3, "later")):
        if same(found, expected[steps]):
            return label
    raise AssertionError("half-updated, and nobody was told")


KINDS = {
    "a read that fails": Fault(errno.EIO, calls="read", times=FOREVER),
    "a read that fails once": Fault(errno.EIO, calls="read"),
    "a read with a flipped bit": Fault(Effect.FLIP, calls="read", times=FOREVER),
    "a write that fails": Fault(errno.EIO, calls="write", times=FOREVER),
    "a write that fails once": Fault(errno.EIO, calls="write"),
    "a write without room": Fault(errno.ENOSPC, calls="write"),
    "a write with a flipped bit": Fault(Effect.FLIP, calls="write"),
    "a torn write": Fault(Effect.TORN, calls="write"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_io_of_a_step(kind: str, update: str, tmp_path: Path) -> None:
    fault, expected, outcomes = KINDS[kind], known(3), []
    with undefined_memory():
        for at in range(1000):
            this = Fault(fault.what, at, fault.calls, fault.times)
            outcomes.append(attempt(tmp_path, Where(update, 8 << 20), this, expected))
            if outcomes[-1] == "missed":
                break
    print(kind, update, outcomes)
    assert outcomes.count("missed") == 1
