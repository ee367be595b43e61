"""An exception of a signal's handler at any line of a step: Ctrl-C, a time limit, a scheduler's warning, caught by the caller.

Afterwards the process is of use: what the caller does next gives plain PyTorch's bits, as if the step had been taken or had not
been; or the model says that it is poisoned, and ``lowtide.load`` mends it. Nothing hangs, no other number comes out, and no
other error stays. Among several ranks a job may also end, if only with errors of ours: where one rank goes another way than the
others, nothing can be mended.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lowtide
from lowtide.errors import Error, Poisoned, Refused
from tests.kit.crashes import apart
from tests.kit.dist import run_ranks
from tests.kit.interrupts import Spot, executed, interrupted
from tests.kit.out_of_core import Where, settle
from tests.kit.recovery import digest
from tests.kit.scenarios import adamw, batch, stack

FOLDER = os.path.dirname(lowtide.__file__)
BEGIN = 2
"""The step that the checkpoint is of."""
STEPS = 12
"""How many the undisturbed model takes; then the disturbed one goes back to the checkpoint."""
DEADLINE = 5
"""Seconds that a rank waits for another."""


class TimeLimit(Exception):
    """As callers write them."""


KINDS: tuple[type[BaseException], ...] = (KeyboardInterrupt, TimeLimit)


@dataclass(frozen=True)
class Kept:
    """How a model is kept."""

    options: dict[str, Any]
    where: Where | None = None
    resident: str = "disk"

    @property
    def clips(self) -> bool:
        return self.where is None or self.where.update == "step"

    def sharded(self, folder: Path) -> tuple[nn.Module, Optimizer]:
        model = stack(count=2)
        optimizer = adamw(model)
        options: dict[str, Any] = {"stage": 3, "comm": lowtide.Comm(bucket_bytes=0, deadline=DEADLINE), **self.options}
        if self.where is not None:
            options = {**self.where.options(str(folder)), **options}
        lowtide.shard(model, optimizer, **options)
        if self.where is not None:
            settle(model, self.resident)
        return model, optimizer


ONE = {
    "in memory": Kept({}),
    "in memory, whole": Kept({"stage": 0}),
    "in memory, with a number": Kept({"memory": "8GiB"}),
    "in memory, computed again": Kept({"memory": "8GiB", "activations": "recompute"}),
    "from disk": Kept({}, Where()),
    "from disk, kinds": Kept({}, Where(prefetch=2), resident="kinds"),
    "from disk, backward": Kept({}, Where("backward")),
    "from disk, activations too": Kept({"memory": "8GiB", "activations": "disk"}, Where()),
}
TWO = {
    "in memory, whole": Kept({"stage": 0}),
    "in memory": Kept({}),
    "from disk": Kept({}, Where()),
    "from disk, backward": Kept({}, Where("backward")),
}


@dataclass
class Found:
    """What came of many signals: how often the next call was right, only after a load, or (several ranks) there was none."""

    fired: int = 0
    right: int = 0
    poisoned: int = 0
    ended: int = 0
    unusable: list[str] = field(default_factory=list[str])


def train_step(model: nn.Module, optimizer: Optimizer, number: int, *, rank: int = 0, clips: bool) -> None:
    """One step as callers write them, and a look at what it came to."""
    model(batch(number, rank)).square().mean().backward()
    if clips:
        lowtide.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch(number + 1, rank))


def numbers(model: nn.Module, optimizer: Optimizer) -> str:
    """The digest of all parameters and states; of none on ranks other than 0."""
    found: dict[str, Tensor] = {f"parameter {n}": t for n, t in model.state_dict().items()}
    for index, state in optimizer.state_dict().get("state", {}).items():
        found |= {f"state {index} {n}": t for n, t in state.items()}
    return digest(found)


def spots(counted: Counter[tuple[str, int]], stride: int, seed: int) -> Iterator[Spot]:
    """Every ``stride``-th line: the first time that it runs, and one time later."""
    chance = random.Random(seed)
    for at, ((file, line), count) in enumerate(sorted(counted.items())):
        later = chance.randint(2, count) if count > 1 else 0
        if at % stride == seed % stride:
            yield Spot(file, line, 1)
            if later:
                yield Spot(file, line, later)


# -- one rank ---------------------------------------------------------------------------------------------------------


class Trainee:
    """A model whose steps are disturbed, and the digests of a plain one after every step."""

    def __init__(self, folder: Path, kept: Kept) -> None:
        (folder / "spool").mkdir()
        self.folder, self.kept = folder, kept
        self.known: list[str] = []
        model = stack(count=2)
        optimizer = adamw(model)
        for number in range(STEPS + 2):
            self.known.append(numbers(model, optimizer))
            train_step(model, optimizer, number, clips=kept.clips)
        self._begin()
        lowtide.save(folder / "run" / "begin", self.model, self.optimizer)

    def _begin(self) -> None:
        torch.set_grad_enabled(True)  # whatever is wrong has been noted
        self.model, self.optimizer = self.kept.sharded(self.folder / "spool")
        self.step = 0
        while self.step < BEGIN:
            self.next()
        assert self.is_right()

    def next(self) -> None:
        train_step(self.model, self.optimizer, self.step, clips=self.kept.clips)
        self.step += 1

    def is_right(self) -> bool:
        return numbers(self.model, self.optimizer) == self.known[self.step]

    def load(self) -> None:
        lowtide.load(self.folder / "run", self.model, self.optimizer)
        self.optimizer.zero_grad()
        self.step = BEGIN

    def disturb(self, spot: Spot, kind: type[BaseException], found: Found) -> None:
        """One step with a signal, and what the caller can do afterwards."""
        if self.step >= STEPS:
            self.load()
        where, told = f"{spot} {kind.__name__}", ""
        with interrupted(FOLDER, spot, kind) as shot:
            try:
                self.next()
            except BaseException as error:  # kept no longer than a caller keeps it: its frames hold memory
                told = type(error).__name__
        if not shot.sent:
            return
        found.fired += 1
        where += f" in {shot.where}, raised {told or 'nothing'}"
        outcome = self._attempt(self._go_on)
        if outcome == "right":
            found.right += 1
            return
        after = self._attempt(self._load_and_go_on)
        if (outcome, after) == ("poisoned", "right"):
            found.poisoned += 1
            return
        found.unusable.append(f"{where}: {outcome}; after load {after}")
        self._begin()

    def _attempt(self, run: Callable[[], bool]) -> str:
        try:
            return "right" if run() else "other bits"
        except (Poisoned, Refused):  # also of a second backward, with an update in backward that no step has followed
            return "poisoned"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    def _go_on(self) -> bool:
        self.optimizer.zero_grad()
        now = numbers(self.model, self.optimizer)
        if now not in self.known[self.step : self.step + 2]:
            return False
        self.step = self.known.index(now)
        self.next()
        return self.is_right()

    def _load_and_go_on(self) -> bool:
        self.load()
        self.next()
        self.next()
        return self.is_right()


def disturbed(folder: Path, name: str, stride: int, seed: int) -> Found:
    """Steps of a model, each with a signal at another line."""
    logging.disable()
    trainee, found = Trainee(folder, ONE[name]), Found()
    counted = executed(FOLDER, trainee.next)
    for number, spot in enumerate(spots(counted, stride, seed)):
        trainee.disturb(spot, KINDS[(number + seed) % len(KINDS)], found)
    return found


# -- two ranks --------------------------------------------------------------------------------------------------------


class OneOfTwo:
    """The same on each of two ranks: a signal comes to one of them, or to both at the same line, as Ctrl-C does."""

    def __init__(self, rank: int, folder: Path, kept: Kept) -> None:
        (folder / "spool").mkdir(exist_ok=True)
        self.rank, self.folder, self.kept = rank, folder, kept
        self._begin()
        self.known: list[str] = []
        for self.step in range(STEPS + 2):
            self.known.append(_everybody(self._numbers())[0])
            if self.step == BEGIN:
                lowtide.save(folder / "run" / "begin", self.model, self.optimizer)
            self.next()
        self._begin()

    def _begin(self) -> None:
        self.model, self.optimizer = self.kept.sharded(self.folder / "spool")
        self.step = 0

    def _numbers(self) -> str:
        return numbers(self.model, self.optimizer)

    def next(self) -> None:
        train_step(self.model, self.optimizer, self.step, rank=self.rank, clips=self.kept.clips)
        self.step += 1

    def _attempt(self, run: Callable[[], str]) -> list[str]:
        """What ``run`` comes to on each rank; after an error of ours among several, the job is over."""
        try:
            mine = run()
        except Poisoned:
            mine = "poisoned"
        except Error:
            mine = "over"
        except BaseException as error:
            mine = f"untyped: {error!r}"
        return _everybody(mine)

    def disturb(self, spot: Spot, kind: type[BaseException], mine: bool, found: Found) -> None:
        if self.step >= STEPS:
            self._begin()
        step, told = self.step, ""
        with interrupted(FOLDER, spot if mine else Spot("", 0, 0), kind) as shot:
            try:
                self.next()
            except (kind, Error) as error:
                told = type(error).__name__
            except BaseException as error:
                told = f"untyped: {error!r}"
        now = self._attempt(self._cleared)
        where = _everybody(f"{shot.where} raised {told or 'nothing'}" if shot.sent else told)
        found.fired += any(" raised " in each for each in where)
        outcome, self.step = self._go_on(step, now), step + 1
        if outcome == "right":
            found.right += 1
            self.step = self.known.index(now[0]) + 1
            return
        if outcome == "poisoned":
            found.poisoned += 1
        elif outcome == "over" and not any("untyped" in each for each in where):
            found.ended += 1
        else:
            found.unusable.append(f"{spot} {kind.__name__} {where}: {outcome}")
        self._begin()

    def _cleared(self) -> str:
        self.optimizer.zero_grad()
        return self._numbers()

    def _go_on(self, step: int, now: list[str]) -> str:
        for bad in [each for each in now if each.startswith("untyped")]:
            return bad
        if "over" in now:
            return "over"
        expected = self.known[BEGIN]
        if "poisoned" in now:
            after = self._attempt(self._loaded)
        elif now[0] in self.known[step : step + 2]:
            self.step = self.known.index(now[0])
            expected = self.known[self.step + 1]
            after = self._attempt(self._one_more)
        else:
            return "other bits"
        if after[0] == expected:
            return "poisoned" if "poisoned" in now else "right"
        return "over" if "over" in after else f"then {after}"

    def _loaded(self) -> str:
        lowtide.load(self.folder / "run", self.model, self.optimizer)
        return self._cleared()

    def _one_more(self) -> str:
        self.next()
        return self._numbers()


def _everybody(mine: str) -> list[str]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine)
    return found


def disturbed_of_two(rank: int, _: int, folder: Path, name: str, stride: int, seed: int) -> Found:
    logging.disable()
    trainee, found = OneOfTwo(rank, folder, TWO[name]), Found()
    trainee.next()
    trainee.next()
    todo: list[Any] = [list(spots(executed(FOLDER, trainee.next), stride, seed))]
    dist.broadcast_object_list(todo, 0)
    for number, spot in enumerate(todo[0]):
        alone = (number // 8) % 2 if number % 8 == 7 else None  # who is left alone waits to the deadline
        trainee.disturb(spot, KINDS[(number + seed) % len(KINDS)], alone in (rank, None), found)
    return found


# -- tests ------------------------------------------------------------------------------------------------------------


def check(found: Found, least: int) -> None:
    print(found)
    assert not found.unusable, "\n".join(found.unusable)
    assert found.fired >= least
    assert found.right > found.fired // 3


@pytest.mark.parametrize(
    ("name", "stride"),
    [("in memory", 50), ("in memory, whole", 50), ("in memory, computed again", 90), ("from disk", 110)],
)
def test_next_call_is_right_or_poisoned(name: str, stride: int, quick_path: Path) -> None:
    check(apart(disturbed, quick_path, name, stride, stride // 3), 8)


def test_update_in_backward(quick_path: Path) -> None:
    check(apart(disturbed, quick_path, "from disk, backward", 110, 5), 8)


def test_two_ranks(quick_path: Path) -> None:
    check(run_ranks(2, disturbed_of_two, quick_path, "in memory", 120, 3)[0], 8)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ONE)
def test_every_line(name: str, quick_path: Path) -> None:
    check(apart(disturbed, quick_path, name, 1, 0, seconds=7000), 400)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TWO)
def test_every_line_on_two_ranks(name: str, quick_path: Path) -> None:
    check(run_ranks(2, disturbed_of_two, quick_path, name, 1, 0, timeout=7000)[0], 400)
