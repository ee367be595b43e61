"""Training that is killed again and again, at a random moment or at a random system call of a save, and goes on by itself.

A job is a small model with dropout, a scheduler and AdamW on one or two ranks. Every life of it is a fork of this process: it
loads the newest checkpoint, trains and saves until it is killed. Every loss that any life computes and the numbers at the end
have to be bit for bit those of a run that nobody disturbed, which kept everything in memory and saved nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchkit.chaos_tally import Tally
from lowtide.errors import NoCheckpoint
from tests.kit.checkpoints import Setup
from tests.kit.crashes import CHANGING, Board, Child, Ended, FaultPoints, kill
from tests.kit.recovery import Job, digest, ranks

SPECIMEN = "dropout"
STEPS = 8
ACKNOWLEDGED, LOADED, PHASE, CALLS = range(4)  # places on a board; one board for all ranks of a life
PHASES = ("starting", "loading", "training", "saving", "saving in the background", "ended")
SAVES_PER_LIFE = 2.5  # about; the call before which a life ends is drawn from those of so many saves
SURVIVOR_SECONDS = 10.0
LIFE_SECONDS = 60.0
_LOSS = struct.Struct("<qd")
_TRAINING = PHASES.index("training")


@dataclass(frozen=True)
class Course:
    """How one job is kept and saved."""

    job: Job
    every: int

    def __str__(self) -> str:
        how = "background" if self.job.background else "foreground"
        copied = "" if self.job.link or not self.job.setup.disk else ", copied"
        return f"{self.job.setup}, every {self.every}, {how}{copied}"


def draw(chosen: random.Random) -> Course:
    where = chosen.choice(("memory", "disk", "both"))
    setup = Setup(
        ranks=chosen.choice((1, 2)),
        stage=chosen.choice((0, 3)),
        disk=where != "memory",
        resident={"memory": "disk", "disk": "disk", "both": chosen.choice(("mixed", "kinds"))}[where],
    )
    job = Job(
        setup,
        SPECIMEN,
        background=chosen.random() < 0.5,
        link=chosen.random() < 0.8,
        keep=chosen.choice((1, 2, 3)),
        same_name=chosen.random() < 0.1,
    )
    return Course(job, every=chosen.choice((1, 1, 2)))


# -- one rank of one life ---------------------------------------------------------------------------------------------


def live(folder: Path, course: Course, board: Board, kill_at: tuple[int, int], rank: int) -> str:
    """From the newest checkpoint to the end; the digest of everything then, on rank 0. ``kill_at``: a rank and its call."""

    def phase(name: str) -> None:
        if rank == 0:
            board[PHASE] = PHASES.index(name)

    one = course.job.trained(folder, rank)
    torch.manual_seed(1000 + rank)
    points = FaultPoints(CHANGING, kill_at[1] if rank == kill_at[0] else -1, kill)
    with points:
        phase("loading")
        done = _resume(folder, one, board, rank)
        losses = os.open(folder / f"losses-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        saving, saved = None, done
        for step in range(done, STEPS):
            if saving is None or saving.done:
                phase("training")
            os.write(losses, _LOSS.pack(step, one.train(step, 1)[0].item()))
            if (step + 1) % course.every and step + 1 < STEPS:
                continue
            if saving is not None:
                saving.wait()
                _acknowledge(board, rank, saved)
            phase("saving in the background" if course.job.background else "saving")
            saving, saved = course.job.save(one, folder, step + 1), step + 1
            if not course.job.background:
                saving.wait()
                _acknowledge(board, rank, saved)
        if saving is not None:
            saving.wait()
            _acknowledge(board, rank, saved)
    phase("ended")
    board[CALLS] = len(points.seen)
    return digest(one.numbers())


def _resume(folder: Path, one: Any, board: Board, rank: int) -> int:
    try:
        done = lowtide.load(folder / "run", one.model, one.optimizer, state=one.state())["step"]
    except NoCheckpoint:
        done = 0
    if rank == 0:
        board[LOADED] = done
    return done


def _acknowledge(board: Board, rank: int, step: int) -> None:
    if rank == 0:
        board[ACKNOWLEDGED] = max(board[ACKNOWLEDGED], step)


def undisturbed(folder: Path, world: int) -> tuple[dict[tuple[int, int], float], str]:
    """Every rank's loss of every step, and the digest at the end: in memory, without a save."""
    course = Course(Job(Setup(ranks=world), SPECIMEN), every=1)
    folder.mkdir()
    ended = [child.wait() for child in ranks(folder, world, _straight, folder, course)]
    return _losses(folder, world)[0], ended[0].result()


def _straight(folder: Path, course: Course, rank: int) -> str:
    one = course.job.trained(folder, rank)
    torch.manual_seed(1000 + rank)
    losses = os.open(folder / f"losses-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    for step in range(STEPS):
        os.write(losses, _LOSS.pack(step, one.train(step, 1)[0].item()))
    return digest(one.numbers())


def _losses(folder: Path, world: int) -> tuple[dict[tuple[int, int], float], list[str]]:
    """By rank and step, of all lives; and what two lives did not agree on."""
    found: dict[tuple[int, int], float] = {}
    torn: list[str] = []
    for rank in range(world):
        path = folder / f"losses-{rank}"
        data = path.read_bytes() if path.exists() else b""
        for step, loss in _LOSS.iter_unpack(data[: len(data) // _LOSS.size * _LOSS.size]):
            if struct.pack("<d", found.setdefault((rank, step), loss)) != struct.pack("<d", loss):
                torn.append(f"rank {rank}, step {step}: {found[rank, step]!r} in one life and {loss!r} in another")
    return found, torn


# -- one job, from its first life to its last -------------------------------------------------------------------------


class Killer:
    """Runs jobs until enough have been killed."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self._folder, self.tally = folder, tally
        self._known: dict[int, tuple[dict[tuple[int, int], float], str]] = {}
        self._typical: dict[tuple[int, bool], tuple[float, float]] = {}  # seconds of a life, calls of a save
        self._slowest = 0.0

    def run(self, seed: int) -> None:
        """Job after job, the first with this seed."""
        while self.tally.goes_on:
            self.job(seed)
            seed += 1
        self.tally.facts["slowest_survivor_seconds"] = round(self._slowest, 2)

    def job(self, seed: int) -> None:
        """One job; all its differences carry its seed."""
        chosen = random.Random(seed)
        course = draw(chosen)
        self._learn(course.job.setup)
        folder = self._folder / f"job-{seed}"
        folder.mkdir()
        acknowledged = 0
        try:
            while True:
                board = Board()
                ended = self._life(folder, course, board, chosen, acknowledged)
                if board[PHASE] >= _TRAINING and board[LOADED] < acknowledged:
                    self.tally.differs(
                        seed, f"step {acknowledged} was saved, and {board[LOADED]} was loaded", setup=str(course)
                    )
                acknowledged = max(acknowledged, board[ACKNOWLEDGED])
                if not self._was_killed(seed, course, board, ended):
                    break
                if time.monotonic() > self.tally.deadline:
                    break
            self._compare(seed, course, folder, ended)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.tally.note()

    def _learn(self, setup: Setup) -> None:
        """What an undisturbed run computes, and how long a life takes that nobody ends."""
        world = setup.ranks
        if world not in self._known:
            self._known[world] = undisturbed(self._folder / f"undisturbed-{world}", world)
        if (world, setup.disk) not in self._typical:
            folder = self._folder / f"whole-{world}-{setup.disk}"
            folder.mkdir()
            began = time.monotonic()
            course, board = Course(Job(setup, SPECIMEN), every=1), Board()
            ended = [child.wait() for child in ranks(folder, world, live, folder, course, board, (0, -1))]
            self._typical[world, setup.disk] = time.monotonic() - began, max(board[CALLS] / STEPS, 10.0)
            self._compare(-1, course, folder, ended)
            shutil.rmtree(folder)

    def _life(self, folder: Path, course: Course, board: Board, chosen: random.Random, acknowledged: int) -> list[Ended]:
        world = course.job.setup.ranks
        victim = chosen.randrange(world)
        seconds, calls = self._typical[world, course.job.setup.disk]
        by_call = chosen.random() < 0.5
        call = chosen.randrange(int(SAVES_PER_LIFE * calls)) if by_call else -1
        whole = seconds * (0.4 + 0.6 * (STEPS - acknowledged) / STEPS)
        delay, everybody = chosen.uniform(0.01, 1.1) * whole, chosen.random() < 0.5
        enough = self.tally.done >= self.tally.planned
        children = ranks(folder, world, live, folder, course, board, (victim, -1 if enough else call))
        if not by_call and not enough:
            self._wait(children, delay)
            for child in children if everybody else [children[victim]]:
                _kill(child)
        ended = self._ends(children)
        if any(e.killed for e in ended):
            self.tally.counts["at a system call" if by_call else "at a moment"] += 1
        return ended

    @staticmethod
    def _wait(children: list[Child], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(_alive(child) for child in children):
            time.sleep(0.002)

    def _ends(self, children: list[Child]) -> list[Ended]:
        """All of them; a rank that survives another is timed, because it has to end by itself."""
        died, began = None, time.monotonic()
        while any(_alive(child) for child in children):
            now = time.monotonic()
            if died is None and not all(_alive(child) for child in children):
                died = now
            if (died is not None and now - died > SURVIVOR_SECONDS) or now - began > LIFE_SECONDS:
                break
            time.sleep(0.002)
        for child in children:
            if _alive(child):
                self.tally.counts["survivors that had to be killed"] += 1
                _kill(child)
        if died is not None:
            self._slowest = max(self._slowest, time.monotonic() - died)
        return [child.wait() for child in children]

    def _was_killed(self, seed: int, course: Course, board: Board, ended: list[Ended]) -> bool:
        if not any(e.killed for e in ended):
            for e in ended:
                if e.status:
                    self.tally.differs(seed, f"exit status {e.status} though nobody was killed\n{e.error}", setup=str(course))
            return False
        for e in ended:
            if e.status not in (0, -9) and "PeerFailed" not in e.error:
                self.tally.differs(seed, f"exit status {e.status} beside a rank that was killed\n{e.error}", setup=str(course))
        self.tally.done += 1
        self.tally.counts[f"while {PHASES[board[PHASE]]}"] += 1
        self.tally.counts[f"{course.job.setup.ranks} ranks"] += 1
        self.tally.counts[f"stage {course.job.setup.stage}"] += 1
        tier = (
            ("on disk" if course.job.setup.resident == "disk" else "partly on disk") if course.job.setup.disk else "in memory"
        )
        self.tally.counts[tier] += 1
        self.tally.counts["resumed from a checkpoint" if board[LOADED] else "from the start"] += 1
        return True

    def _compare(self, seed: int, course: Course, folder: Path, ended: list[Ended]) -> None:
        known, numbers = self._known[course.job.setup.ranks]
        losses, torn = _losses(folder, course.job.setup.ranks)
        wrong = [f"rank {r}, step {s}: loss {x!r}, not {known[r, s]!r}" for (r, s), x in losses.items() if x != known[r, s]]
        if all(e.status == 0 for e in ended):
            self.tally.counts["jobs done"] += 1
            if ended[0].value != numbers:
                wrong.append("other bits at the end")
            if losses.keys() != known.keys():
                wrong.append("steps are missing")
        self.tally.counts["losses compared"] += len(losses)
        if torn or wrong:
            self.tally.differs(seed, "; ".join([*torn, *wrong]), setup=str(course))


def _alive(child: Child) -> bool:
    """Whether it runs; one that has ended stays to be waited for."""
    try:
        with open(f"/proc/{child.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(child: Child) -> None:
    try:
        child.kill()
    except ProcessLookupError:
        return


def run(folder: Path, tally: Tally, seed: int, *, once: bool) -> None:
    """Kill until enough were killed; ``once``: one job, as the seed says."""
    killer = Killer(folder, tally)
    action: Callable[[int], None] = killer.job if once else killer.run
    action(seed)
