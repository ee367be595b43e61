"""An exception of a signal's handler at any line of a step: Ctrl-C, a time limit, a scheduler's warning that is caught.

Afterwards the process is of use: what the caller does next gives plain PyTorch's bits, as if the step had been taken or had not
been; or the model says that it is poisoned, and ``lowtide.load`` mends it. Nothing hangs, no other number comes out, and no
other error stays.
"""

from __future__ import annotations

import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error, Poisoned
from tests.kit.crashes import apart
from tests.kit.interrupts import Spot, executed, interrupted
from tests.kit.out_of_core import Where, settle
from tests.kit.recovery import digest
from tests.kit.scenarios import adamw, batch, stack

FOLDER = os.path.dirname(lowtide.__file__)
STEPS = 12
"""How many the undisturbed model takes; then the disturbed one goes back to the checkpoint."""
DEADLINE = 5
"""Seconds that a rank waits for another."""
SECONDS = 20
"""After so long without an end a step is taken for hung. Far more than any takes."""


class TimeLimit(Exception):
    """As callers write them."""


KINDS: tuple[Callable[[], BaseException], ...] = (KeyboardInterrupt, TimeLimit)


@dataclass(frozen=True)
class Kept:
    """How a model is kept. ``looks``: whether parameters are looked at in the step, or updates may be put off."""

    options: dict[str, Any]
    where: Where | None = None
    resident: str = "disk"
    clips: bool = True

    def sharded(self, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = built()
        optimizer = adamw(model)
        spool = folder / "spool"
        spool.mkdir(exist_ok=True)
        where = self.where.options(str(spool)) if self.where is not None else {}
        lowtide.shard(model, optimizer, **{"stage": 3, **where, **self.options})
        if self.where is not None:
            settle(model, self.resident)
        return model, optimizer


KEPT = {
    "in memory": Kept({}),
    "in memory, whole": Kept({"stage": 0}),
    "in memory, with a number": Kept({"memory": "8GiB"}),
    "in memory, computed again": Kept({"memory": "8GiB", "activations": "recompute"}),
    "from disk": Kept({}, Where()),
    "from disk, kinds": Kept({}, Where(prefetch=2), resident="kinds"),
    "from disk, backward": Kept({}, Where("backward"), clips=False),
    "from disk, with a number": Kept({"memory": "8GiB", "activations": "disk"}, Where()),
}


def built() -> nn.Module:
    model = stack(count=2)
    model.append(nn.BatchNorm1d(model[0].fc.in_features if hasattr(model[0], "fc") else 8)) if isinstance(
        model, nn.Sequential
    ) else None
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, kept: Kept) -> None:
    """One step as callers write them, and a look at what it came to."""
    loss = model(batch(number, 0)).square().mean()
    loss.backward()
    if kept.clips:
        lowtide.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch(number + 1, 0))


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found: dict[str, Tensor] = {f"parameter {n}": t for n, t in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"state {index} {n}": t for n, t in state.items()}
    return digest(found)


def undisturbed(kept: Kept) -> list[str]:
    """The digests of a plain model after every step."""
    model = built()
    optimizer = adamw(model)
    found = []
    for number in range(STEPS + 2):
        found.append(numbers(model, optimizer))
        train_step(model, optimizer, number, kept)
    return found


@dataclass
class Found:
    """What came of many signals."""

    fired: int = 0
    right: int = 0
    poisoned: int = 0
    mended: int = 0
    unusable: list[str] = field(default_factory=list[str])

    def __add__(self, other: Found) -> Found:
        return Found(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))


class Trainee:
    """A model whose steps are disturbed, and what it should be."""

    def __init__(self, folder: Path, kept: Kept) -> None:
        self.folder, self.kept = folder, kept
        self.known = undisturbed(kept)
        self._begin()

    def _begin(self) -> None:
        self.model, self.optimizer = self.kept.sharded(self.folder)
        for self.step in range(2):
            train_step(self.model, self.optimizer, self.step, self.kept)
        self.step = 2
        assert numbers(self.model, self.optimizer) == self.known[2]
        if not (self.folder / "run").exists():
            lowtide.save(self.folder / "run" / "begin", self.model, self.optimizer)

    def next(self) -> None:
        """An undisturbed step, with the right bits."""
        train_step(self.model, self.optimizer, self.step, self.kept)
        self.step += 1

    def is_right(self) -> bool:
        return numbers(self.model, self.optimizer) == self.known[self.step]

    def load(self) -> None:
        lowtide.load(self.folder / "run", self.model, self.optimizer)
        self.optimizer.zero_grad()
        self.step = 2

    def disturb(self, spot: Spot, kind: Callable[[], BaseException], found: Found) -> None:
        if self.step >= STEPS:
            self.load()
        where = f"{spot} {kind.__name__}"
        error: BaseException | None = None
        try:
            with interrupted(FOLDER, spot, kind) as shot:
                self.next()
        except BaseException as raised:
            error = raised.with_traceback(None)
        if not shot.sent:
            return
        found.fired += 1
        where += f" at {shot.where}"
        told = error
        del error
        if told is None:
            where += " (nothing raised)"
        elif not isinstance(told, kind):
            where += f" (raised {told!r})"
        try:
            how = self._look()
        except BaseException as after:
            how = f"{type(after).__name__}: {after}"
            if os.environ.get("TRACEBACKS"):
                import traceback
                traceback.print_exc()
        if how == "right":
            found.right += 1
            return
        first = how
        try:
            self.load()
            for _ in range(2):
                self.next()
                how = "load gives other bits" if not self.is_right() else "mended"
        except BaseException as after:
            how = f"after load {type(after).__name__}: {after}"
            if os.environ.get("TRACEBACKS"):
                import traceback
                traceback.print_exc()
        if how == "mended" and first == "poisoned":
            found.poisoned += 1
        elif how == "mended" and "bits" not in first:
            found.mended += 1
            found.unusable.append(f"(mended) {where}: {first}")
        else:
            found.unusable.append(f"{where}: {first}; {how}")
            self._begin()

    def _look(self) -> str:
        """Go on as a caller would."""
        try:
            self.optimizer.zero_grad()
            now = numbers(self.model, self.optimizer)
            if now not in self.known[self.step : self.step + 2]:
                return "other bits"
            self.step = self.known.index(now)
            self.next()
            return "right" if self.is_right() else "other bits after one step"
        except Poisoned:
            return "poisoned"


def spots(counted: Counter[tuple[str, int]], stride: int, seed: int) -> Iterator[Spot]:
    """Every ``stride``-th line: the first time that it runs, and one time later."""
    chance = random.Random(seed)
    for at, ((file, line), count) in enumerate(sorted(counted.items())):
        later = chance.randint(2, count) if count > 1 else 0
        if at % stride == seed % stride:
            yield Spot(file, line, 1)
            if later:
                yield Spot(file, line, later)


def disturbed(folder: Path, name: str, stride: int, seed: int) -> Found:
    """Runs in a process of its own."""
    logging.disable()
    signal.signal(signal.SIGALRM, _hung)
    signal.alarm(SECONDS)
    trainee, found = Trainee(folder, KEPT[name]), Found()
    counted = executed(FOLDER, trainee.next)
    for number, spot in enumerate(spots(counted, stride, seed)):
        signal.alarm(SECONDS)
        trainee.disturb(spot, KINDS[(number + seed) % len(KINDS)], found)
    signal.alarm(0)
    return found


def _hung(*_: object) -> None:
    import faulthandler

    faulthandler.dump_traceback(all_threads=True)
    os._exit(3)


# -- two ranks --------------------------------------------------------------------------------------------------------


class TraineeOfTwo:
    """The same on each of two ranks. A rank that goes on without the other is told so: then the job is over."""

    def __init__(self, rank: int, folder: Path, options: dict[str, Any]) -> None:
        self.rank, self.folder, self.options = rank, folder, options
        self._begin()
        self.known: list[str] = []
        for self.step in range(STEPS + 2):
            self.known.append(self._told(self._numbers())[0])
            self.next()
        self.end = self._numbers()
        lowtide.save(folder / "run" / "begin", self.model, self.optimizer)
        self._begin()

    def _begin(self) -> None:
        self.model = self.optimizer = None  # type: ignore[assignment]
        self.step = 0
        self.model = stack(count=2)
        self.optimizer = adamw(self.model)
        options = dict(self.options)
        if options.pop("disk", False):
            options |= Where().options(str(self.folder / "spool"))
        lowtide.shard(self.model, self.optimizer, **options, comm=lowtide.Comm(bucket_bytes=0, deadline=DEADLINE))

    def next(self) -> None:
        self.model(batch(self.step, self.rank)).square().mean().backward()
        if self.options.get("update") != "backward":
            lowtide.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _numbers(self) -> str:
        found: dict[str, Tensor] = {f"parameter {n}": t for n, t in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict().get("state", {}).items():
            found |= {f"state {index} {n}": t for n, t in state.items()}
        return digest(found)

    def _told(self, mine: str) -> list[str]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, mine)
        return found

    def _attempt(self, run: Callable[[], str]) -> list[str]:
        """What ``run`` comes to on each rank."""
        try:
            mine = run()
        except Poisoned:
            mine = "poisoned"
        except Error as error:
            mine = f"told: {type(error).__name__}"
        except BaseException as error:
            mine = f"UNTYPED {error!r}"
        return self._told(mine)

    def disturb(self, spot: Spot, kind: Callable[[], BaseException], who: int, found: Found) -> None:
        if self.step >= STEPS:
            self._begin()
        sent, raised = "", ""
        if who in (self.rank, 2):
            try:
                with interrupted(FOLDER, spot, kind) as shot:
                    self.next()
            except BaseException as error:
                raised = f"{type(error).__name__}" if isinstance(error, (Error, kind)) else f"UNTYPED {error!r}"
            sent = shot.where if shot.sent else ""
            self.step = self.step if raised == "" else self.step  # found out below
        else:
            try:
                self.next()
            except BaseException as error:
                raised = f"{type(error).__name__}" if isinstance(error, Error) else f"UNTYPED {error!r}"
        first = self._attempt(lambda: (self.optimizer.zero_grad(), self._numbers())[1])
        self._judge(f"{spot} {kind.__name__} on {who}", sent, raised, first, found)

    def _judge(self, where: str, sent: str, raised: str, first: list[str], found: Found) -> None:
        fired = self._told(f"{sent}|{raised}")
        where = f"{where} {fired}"
        found.fired += any(each.partition("|")[0] for each in fired)
        told = [each for each in (*first, *fired) if "UNTYPED" in each]
        if told:
            found.unusable.append(f"{where}: {first}")
            self._begin()
            return
        if any(each.startswith("told") for each in first):
            found.mended += 1
            self._begin()
            return
        if "poisoned" in first:
            after = self._attempt(self._loaded)
            if after[0] == self.known[2] or any(each.startswith("told") for each in after):
                found.poisoned += 1
            else:
                found.unusable.append(f"{where}: poisoned, {after}")
            self._begin()
            return
        step = self.known.index(first[0]) if first[0] in self.known else -1
        if step < 0:
            found.unusable.append(f"{where}: other bits")
            self._begin()
            return
        self.step = step
        after = self._attempt(lambda: (self.next(), self._numbers())[1])
        if after[0] == self.known[step + 1]:
            found.right += 1
        elif all(each.startswith("told") for each in after):
            found.mended += 1
            self._begin()
        else:
            found.unusable.append(f"{where}: then {after} after {step}")
            self._begin()

    def _loaded(self) -> str:
        lowtide.load(self.folder / "run", self.model, self.optimizer)
        self.optimizer.zero_grad()
        self.step = STEPS + 2
        self.known_after_load = self._numbers()
        return self.known[2] if self.known_after_load == self.end or self.rank else "load gives other bits"


def disturbed_of_two(rank: int, _: int, folder: Path, options: dict[str, Any], stride: int, seed: int) -> list[Any]:
    logging.disable()
    trainee, found = TraineeOfTwo(rank, folder, options), Found()
    counted = executed(FOLDER, trainee.next)
    todo: list[Any] = [list(spots(counted, stride, seed))]
    dist.broadcast_object_list(todo, 0)
    for number, spot in enumerate(todo[0]):
        who = 2 if number % 8 else (number // 8) % 2
        trainee.disturb(spot, KINDS[(number + seed) % len(KINDS)], who, found)
    return [found.fired, found.right, found.poisoned, found.mended, found.unusable]
