"""Exceptions of any kind, with and without a text, at any moment of a save: "saved" is true, or an error is raised.

Three generators. *Points*: the k-th system call of a save raises. *Lines*: the k-th line of our code raises, in the caller's
thread or in that which writes. *Alarms*: a real signal, at a random moment, whose handler raises; on one rank or two, again
and again if need be, while the checkpoint is written at once or in the background and training goes on.

After each: if save() and wait() returned, the checkpoint is there, verifies, and holds the numbers that there were when save()
was called. Otherwise something was raised, and the newest checkpoint is the one from before, or this one, whole. Nothing
half-made is left, and the next save works.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import lowtide
from lowtide.api import engine_of
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.save import finish
from lowtide.checkpoint.source import verify
from lowtide.errors import CheckpointError
from tests.kit.checkpoints import Setup
from tests.kit.crashes import CHANGING, FaultPoints, apart, moments
from tests.kit.dist import run_ranks
from tests.kit.recovery import Job, digest


class TimeLimit(Exception):
    """As callers write them: raised bare, it says nothing."""


class Speechless(Exception):
    """Cannot even be asked what it has to say."""

    def __str__(self) -> str:
        raise RuntimeError("no")


KINDS: tuple[Callable[[], BaseException], ...] = (
    *(MemoryError, NotImplementedError, KeyError, TimeoutError, AssertionError, OSError),
    *(TimeLimit, Speechless, KeyboardInterrupt, SystemExit),
    lambda: TimeLimit("the time is over"),
    lambda: MemoryError("no memory\0for that"),
    lambda: RuntimeError("=" + "x" * 100_000),
    lambda: ValueError("\udc80 \x1b[31m\n"),
)
LARGE = 1 << 16
ONE = {
    "in memory": Job(Setup()),
    "linked": Job(Setup(stage=3, disk=True, chunk_bytes=LARGE)),
    "in the background": Job(Setup(), background=True),
    "in the background from disk": Job(Setup(disk=True, resident="kinds", chunk_bytes=LARGE), background=True),
    "the same name again, linked": Job(Setup(disk=True, chunk_bytes=LARGE), same_name=True),
}
TWO = {
    "in memory": Job(Setup(ranks=2, stage=0)),
    "linked": Job(Setup(ranks=2, stage=3, disk=True)),
    "in the background": Job(Setup(ranks=2, stage=3, disk=True, resident="kinds"), background=True),
}


@dataclass
class Found:
    """What came of many saves."""

    saved: int = 0
    raised: int = 0
    fired: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(self.saved + other.saved, self.raised + other.raised, self.fired + other.fired)


# -- what raises ------------------------------------------------------------------------------------------------------


class Watched:
    """An object of the caller's that is saved; it begins ``trouble`` when it is asked for its state."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins

    def state_dict(self) -> dict[str, int]:
        self._begins()
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Alarms:
    """Signals whose handler raises: the first after ``delay`` seconds, ``times`` in all."""

    def __init__(self, delay: float, kind: Callable[[], BaseException], times: int = 1) -> None:
        self.delay, self.kind, self.times, self.fired = delay, kind, times, 0

    def begin(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.delay, 0.003 if self.times > 1 else 0)

    def __enter__(self) -> Alarms:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.times = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, *_: object) -> None:
        if self.fired < self.times:
            self.fired += 1
            raise self.kind()


class Stopwatch:
    """How long a save takes from where alarms begin."""

    def begin(self) -> None:
        self._began = time.monotonic()

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began


class Lines:
    """The ``at``-th line of lowtide/checkpoint that is executed raises, in whatever thread; not where something is undone."""

    _PLACE = os.path.join("lowtide", "checkpoint", "")
    _UNDOING = ("_give_up", "remove", "commit", "_point_to", "_rename_away", "sync_folder", "write_file", "locked", "close")
    _OUTSIDE = ("worker.py", "__init__.py", "load.py", "source.py")

    def __init__(self, at: int = -1, kind: Callable[[], BaseException] = MemoryError) -> None:
        self.at, self.kind, self.seen, self.fired = at, kind, 0, 0

    def __enter__(self) -> Lines:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: Any, event: str, _: object) -> Any:
        code = frame.f_code
        ours = self._PLACE in code.co_filename and not code.co_filename.endswith(self._OUTSIDE)
        if not ours or code.co_name in self._UNDOING or code.co_name in ("_run", "run", "wait", "settle", "begin", "_all"):
            return None
        return self._line

    def _line(self, frame: Any, event: str, _: object) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen - 1 == self.at:
                self.fired += 1
                raise self.kind()
        return self._line


# -- who saves --------------------------------------------------------------------------------------------------------


class Saver:
    """One rank of a job that saves again and again, and a model that loads what is there."""

    def __init__(self, folder: Path, job: Job, rank: int = 0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.job, self.rank = folder, job, rank
        self.one = job.trained(folder, rank)
        self.two = Job(Setup(ranks=job.setup.ranks), job.specimen).trained(folder, rank, seed=1)
        self.step = self.now = self.last = 0
        self.known: dict[int, str] = {}
        self.found = Found()
        self.seconds = 10.0
        logging.disable()
        for _ in range(4):
            watch = Stopwatch()
            assert self.save(watch, watched=Watched(watch.begin)) is None
            self.seconds = min(self.seconds, watch.seconds)
            self.check("undisturbed")

    def save(self, trouble: Any, progress: Any = None, **state: Any) -> BaseException | None:
        """Take a step and save it while ``trouble`` is entered; what was raised on this rank."""
        self._step()
        self.now = self.step
        self.known[self.now] = digest(self.one.numbers())
        self.error: BaseException | None = None
        try:
            with trouble:
                where = self.folder / "run" / self.job.name(self.now)
                options: dict[str, Any] = {"background": self.job.background, "keep": self.job.keep, "link": self.job.link}
                state, extra = {**self.one.state(), **state}, {"step": self.now}
                saving = lowtide.save(
                    where, self.one.model, self.one.optimizer, state=state, extra=extra, progress=progress, **options
                )
                if self.job.background and not state.get("watched"):
                    self._step()  # what is saved must not change with it
                saving.wait()
        except BaseException as error:
            self.error = error.with_traceback(None)
        self.found += Found(self.error is None, self.error is not None, getattr(trouble, "fired", 0))
        return self.error

    def _step(self) -> None:
        self.one.train(self.step, 1)
        self.step += 1

    def check(self, where: str) -> None:
        """What is loaded now is the last one or this one, with all its bits. Collective."""
        try:
            finish(engine_of(self.one.model))  # who was interrupted while waiting has not waited to the end
        except CheckpointError as error:  # nor heard that it failed, on another rank perhaps
            self.error = self.error or error.with_traceback(None)
        errors: list[str | None] = [repr(type(self.error)) if self.error is not None else None]
        if self.job.setup.ranks > 1:
            errors = [None] * self.job.setup.ranks
            dist.all_gather_object(errors, repr(self.error) if self.error is not None else None)
        left = [path.name for path in (self.folder / "run").iterdir() if path.name.startswith((".new-", ".old-"))]
        if self.rank == 0:
            for each in checkpoints(self.folder / "run")[0]:
                verify(each.path)
        step = lowtide.load(self.folder / "run", self.two.model, self.two.optimizer, state=self.two.state())["step"]
        bits = digest(self.two.numbers())
        where = f"{where}: step {step} of {self.now} is there, {errors} were raised"
        assert not left, f"{where}; left: {left}"
        assert step == self.now or (step == self.last and any(errors)), where
        assert self.rank != 0 or bits == self.known[step], f"{where}; other bits"
        self.last = step
        self.known = {step: self.known[step]}


def some(kinds: random.Random) -> Callable[[], BaseException]:
    return kinds.choice(KINDS)


# -- the generators ---------------------------------------------------------------------------------------------------


def points(folder: Path, job: Job, stride: int, seed: int) -> Found:
    """Every ``stride``-th system call of a save raises something."""
    saver, kinds = Saver(folder, job), random.Random(seed)
    counted = FaultPoints(CHANGING)
    assert saver.save(counted) is None
    saver.check("counted")
    saver.found = Found()
    for at in moments(counted.seen, all_of_them=True)[seed % stride :: stride]:
        kind = some(kinds)

        def do(_: str, kind: Callable[[], BaseException] = kind) -> None:
            raise kind()

        where = FaultPoints(CHANGING, at, do)
        saver.save(where)
        saver.found.fired += where.hit
        for path in (saver.folder / "run").glob(".old-*"):  # one that could not be removed waits for `ckpt gc`
            shutil.rmtree(path)
        saver.check(f"call {at} ({where.seen[at] if where.hit else 'none'}) raises {kind().__class__.__name__}")
    return saver.found


def lines(folder: Path, job: Job, count: int, seed: int) -> Found:
    """Some lines of our code raise something."""
    saver, chance = Saver(folder, job), random.Random(seed)
    counted = Lines()
    assert saver.save(counted) is None
    saver.check("counted")
    saver.found = Found()
    for _ in range(count):
        trouble = Lines(chance.randrange(counted.seen), some(chance))
        saver.save(trouble)
        saver.check(f"line {trouble.at} of {counted.seen} raises {trouble.kind}")
    return saver.found


def callbacks(folder: Path, job: Job, seed: int) -> Found:
    """The caller's own functions raise something."""
    saver, chance = Saver(folder, job), random.Random(seed)
    saver.found = Found()
    for kind in KINDS:
        wanted = type(kind())

        def fail(*_: object, kind: Callable[[], BaseException] = kind) -> None:
            raise kind()

        for options in ({"progress": fail}, {"watched": Watched(fail)}):
            error = saver.save(contextlib.nullcontext(), **options)
            saver.check(f"{[*options]} raises {wanted}")
            assert isinstance(error, wanted), (wanted, error)
            saver.found.fired += 1
    del chance
    return saver.found


def alarms(folder: Path, job: Job, count: int, seed: int) -> Found:
    """Real signals at random moments."""
    saver, chance = Saver(folder, job), random.Random(seed)
    saver.found = Found()
    for number in range(count):
        delay = chance.uniform(1e-4, saver.seconds)
        trouble = Alarms(delay, some(chance), chance.choice((1, 1, 1, 3)))
        saver.save(trouble, watched=Watched(trouble.begin))
        saver.check(f"alarm {number} after {delay:.4f} s raises {trouble.kind}")
    return saver.found


def of_two(rank: int, _: int, folder: Path, job: Job, count: int, seed: int) -> tuple[int, int, int]:
    """Signals on one rank or both, callbacks that raise."""
    saver, both, mine = Saver(folder, job, rank), random.Random(seed), random.Random(seed + 1 + rank)
    saver.found = Found()
    for number in range(count):
        who = both.choice((0, 1, 2))
        delay = mine.uniform(1e-4, saver.seconds)
        trouble = Alarms(delay, some(mine), mine.choice((1, 1, 3)))
        begin = trouble.begin if who in (rank, 2) else lambda: None
        error = saver.save(trouble, watched=Watched(begin))
        if who == 1 - rank and error is not None:
            assert isinstance(error, CheckpointError), error
        saver.check(f"save {number}: alarm on rank {who if who < 2 else 'each'}, {delay:.4f} s, {trouble.kind}")
    return saver.found.saved, saver.found.raised, saver.found.fired


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["in memory", "in the background from disk"])
def test_callers_functions_raise(name: str, quick_path: Path) -> None:
    found = apart(callbacks, quick_path, ONE[name], 0)
    assert found.raised == found.fired


@pytest.mark.parametrize("name", ["in memory", "the same name again, linked"])
def test_calls_raise(name: str, quick_path: Path) -> None:
    assert apart(points, quick_path, ONE[name], 5, 1).fired > 5


@pytest.mark.parametrize("name", ["linked", "in the background"])
def test_lines_raise(name: str, quick_path: Path) -> None:
    assert apart(lines, quick_path, ONE[name], 30, 2).fired > 20


@pytest.mark.parametrize("name", ["linked", "in the background"])
def test_signals_raise(name: str, quick_path: Path) -> None:
    assert apart(alarms, quick_path, ONE[name], 40, 3).fired > 10


@pytest.mark.parametrize("name", ["linked", "in the background"])
def test_signals_raise_on_two_ranks(name: str, quick_path: Path) -> None:
    assert sum(fired for *_, fired in run_ranks(2, of_two, quick_path, TWO[name], 12, 4)) > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ONE)
def test_many(name: str, quick_path: Path) -> None:
    """With the next test: more than 2,000 that fired, none lost, none mixed."""
    found = apart(points, quick_path / "a", ONE[name], 1, 5, seconds=3000)
    for seed, (what, count) in itertools.product(range(2), ((lines, 120), (alarms, 200))):
        found += apart(what, quick_path / f"{what.__name__}{seed}", ONE[name], count, 6 + seed, seconds=3000)
    print(f"{name}: {found}")
    assert found.fired > 300


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TWO)
def test_many_on_two_ranks(name: str, quick_path: Path) -> None:
    rows = run_ranks(2, of_two, quick_path, TWO[name], 300, 7, timeout=3000)
    print(f"{name}: saved, raised, fired by rank: {rows}")
    assert sum(fired for *_, fired in rows) > 150
