"""The power is cut while a job saves, again and again: what save() had returned for is there after the restart, bit for bit.

One cycle: a forked job loads the newest checkpoint from an ext4 on a loop device, notes what it has found, trains, saves, and
at a random system call (or between two of them) the filesystem is stopped without a flush and the job is killed. Then it is
mounted again, and every checkpoint on it is verified. Spool and checkpoints share the filesystem, so most have no copy.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import lowtide
from benchkit.chaos_kills import SPECIMEN
from benchkit.chaos_tally import Tally
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.source import verify
from lowtide.errors import CheckpointError, NoCheckpoint
from tests.kit.checkpoints import Setup
from tests.kit.crashes import CHANGING, Board, FaultPoints, forked, kill
from tests.kit.power import LoopDisk, why_not
from tests.kit.recovery import Job, digest

ACKNOWLEDGED, LOADED, CALLS = range(3)
LAST_STEP = 12
SAVES = 3  # in one life, if nothing comes between
JOBS = {
    "in memory": Job(Setup(), SPECIMEN, keep=2),
    "linked": Job(Setup(stage=3, disk=True), SPECIMEN, keep=2),
    "linked, in the background": Job(Setup(disk=True), SPECIMEN, background=True, keep=2),
    "partly on disk": Job(Setup(disk=True, resident="kinds"), SPECIMEN, keep=1),
    "copied from disk": Job(Setup(disk=True), SPECIMEN, link=False, keep=2),
    "the same name again, linked": Job(Setup(disk=True), SPECIMEN, keep=2, same_name=True),
}


def straight(folder: Path) -> dict[int, str]:
    """The digests of an undisturbed run after every step."""
    one = JOBS["in memory"].trained(folder)
    torch.manual_seed(1000)
    out: dict[int, str] = {}
    for step in range(LAST_STEP + 2 * SAVES + 1):
        out[step] = digest(one.numbers())
        one.train(step, 1)
    return out


def session(disk: LoopDisk, job: Job, board: Board, at: int, flush: bool) -> None:
    """Load, note, train and save until the power goes."""
    one = job.trained(disk.path)
    torch.manual_seed(1000)
    try:
        done = lowtide.load(disk.path / "run", one.model, one.optimizer, state=one.state())["step"]
    except NoCheckpoint:
        done = 0
    board[LOADED] = done
    board.write(digest(one.numbers()))

    def cut(_: str) -> None:
        if flush:
            disk.sync()
        disk.cut()
        kill("")

    points = FaultPoints(CHANGING, at, cut)
    with points:
        for step in range(done, done + SAVES):
            one.train(step, 1)
            saving = job.save(one, disk.path, step + 1)
            if job.background:
                one.train(step + 1, 0)
            saving.wait()
            board[ACKNOWLEDGED] = step + 1
    board[CALLS] = len(points.seen)
    one.train(done + SAVES, 1)  # the update that follows writes into the same file as a linked checkpoint
    cut("")


class Cutter:
    """Cycles on one filesystem."""

    def __init__(self, disk: LoopDisk, tally: Tally, known: dict[int, str]) -> None:
        self._disk, self.tally, self._known = disk, tally, known
        self._calls_of: dict[Job, float] = {}
        self._acknowledged = self._loaded = 0
        self._name = ""

    def cycle(self, seed: int) -> None:
        """One life, one cut, one restart. Differences show at the next load, and carry the seed of the cut before it."""
        chosen = random.Random(seed)
        if not self._name or max(self._acknowledged, self._loaded) >= LAST_STEP:
            self._begin(chosen.choice(list(JOBS)))
        job, board = JOBS[self._name], Board()
        at = chosen.randrange(int(1.1 * SAVES * self._calls(job)))
        ended = forked(session, self._disk, job, board, at, chosen.random() < 0.3)
        self._look_back(seed - 1, board)
        if not ended.killed:
            self.tally.differs(seed, f"exit status {ended.status}\n{ended.error}", setup=self._name)
            self._disk.cut()
        self._disk.restore()
        self.tally.done += 1
        self.tally.counts[self._name] += 1
        before, self._acknowledged = self._acknowledged, max(self._acknowledged, board[ACKNOWLEDGED])
        self.tally.counts[f"after {self._acknowledged - before} saves"] += 1
        self._verify(seed)
        if self.tally.difference_count:  # begin anew: what follows from a difference is not another one
            self._name = ""
        self.tally.note()

    def _calls(self, job: Job) -> float:
        """How many calls a save of this job makes, about; learned once."""
        if job not in self._calls_of:
            board = Board()
            forked(session, self._disk, job, board, -1, False)
            self._disk.restore()
            self._disk.clear()
            self._calls_of[job] = board[CALLS] / SAVES
            self._acknowledged = self._loaded = 0
        return self._calls_of[job]

    def last_look(self, seed: int) -> None:
        """What the last cut has left."""
        board = Board()
        if self._name:
            forked(session, self._disk, JOBS[self._name], board, 0, False)
            self._disk.restore()
            self._look_back(seed, board)

    def _begin(self, name: str) -> None:
        self._disk.clear()
        self._name, self._acknowledged, self._loaded = name, 0, 0
        self.tally.counts["jobs"] += 1

    def _look_back(self, seed: int, board: Board) -> None:
        """What this life has loaded is what the lives before it were promised."""
        found, step = board.read(), board[LOADED]
        self._loaded = step
        if not found:
            self.tally.differs(seed, "it could not be loaded", setup=self._name)
        elif step < self._acknowledged:
            self.tally.differs(seed, f"save() had returned for step {self._acknowledged}; {step} was loaded", setup=self._name)
        elif step and found != self._known[step]:
            self.tally.differs(seed, f"other bits in step {step}", setup=self._name)
        else:
            self.tally.counts["loaded" if step else "began"] += 1

    def _verify(self, seed: int) -> None:
        try:
            found, refused = checkpoints(self._disk.path / "run")
            for each in found:
                verify(each.path)
                self.tally.counts["checkpoints verified"] += 1
        except CheckpointError as error:
            self.tally.differs(seed, str(error), setup=self._name)
        else:
            for path, error in refused:
                self.tally.differs(seed, f"{path.name}: {error}", setup=self._name)


@contextmanager
def _disk() -> Iterator[LoopDisk | str]:
    """In memory, if there is room: what survives is decided by ext4, not by what is below it."""
    beside = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="chaos-power-", dir=beside, ignore_cleanup_errors=True) as name:
        if (why := why_not(Path(name))) is not None:
            yield why
            return
        disk = LoopDisk(Path(name) / "disk", mib=96)
        try:
            yield disk
        finally:
            disk.close()


def run(folder: Path, tally: Tally, seed: int, *, once: bool) -> None:
    """Cut until the power was cut often enough; ``once``: a single cycle."""
    folder.mkdir(exist_ok=True)
    with _disk() as disk:
        if isinstance(disk, str):
            tally.facts["skipped"] = disk
            return
        cutter = Cutter(disk, tally, forked(straight, folder).result())
        while tally.goes_on:
            cutter.cycle(seed)
            seed += 1
            if once:
                break
        cutter.last_look(seed - 1)
