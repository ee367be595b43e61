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
