"""Every k-th system call of a save or a load fails: a typed error, or no effect; and the job goes on.

After every failure the newest checkpoint that can be loaded is the one from before or the new one, with all its bits; nothing
half-made is left; no descriptor and no room on disk is lost; and the next save works. Interrupted and short calls have no
effect at all.
"""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.api import engine_of
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.source import verify
from lowtide.errors import CheckpointError, Error
from lowtide.tiers.disk import DiskStore
from tests.kit.checkpoints import Setup, Trained
from tests.kit.crashes import CHANGING, READING, Board, FaultPoints, apart, fails, moments, start
from tests.kit.recovery import Job, digest

FOREVER = 10**9
LARGE = 1 << 16
SAVES = {
    "in memory": Job(Setup(), keep=2),
    "linked": Job(Setup(stage=3, disk=True, chunk_bytes=LARGE), keep=2),
    "copied from disk": Job(Setup(disk=True, resident="mixed", chunk_bytes=LARGE), link=False, keep=2),
    "in the background": Job(Setup(disk=True, resident="kinds", chunk_bytes=LARGE), background=True, keep=2),
    "the same name again": Job(Setup(disk=True, chunk_bytes=LARGE), same_name=True, keep=2),
}
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR}


@pytest.fixture(autouse=True)
def _one_thread_and_no_log() -> Iterator[None]:
    """Tensors are tiny here: a second thread only waits for the first. And pytest keeps all that is logged, with the errors in
    it and the descriptors that they hold on to."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(before)


class Victim:
    """A job that saves again and again, and a model that loads what it saved."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.one, self.two = job.trained(folder), Job(Setup(), job.specimen).trained(folder, seed=1)
        self.step = self.last = 0
        self.known: dict[int, str] = {}
        for _ in range(3):
            self.save(FaultPoints(()))
        self.last = self.step

    def save(self, points: FaultPoints) -> str | None:
        """Take a step and save it; what save() raised, as text, because the error itself holds on to everything."""
        self.one.train(self.step, 1)
        self.step += 1
        self.known[self.step] = digest(self.one.numbers())
        try:
            with points:
                self.job.save(self.one, self.folder, self.step).wait()
        except Error as error:  # of the checkpoint, or of the spool if that has no room to keep it
            return str(error)
        return None

    def check(self, where: str, *, saved: bool) -> None:
        """What is loaded now is the last one or this one, with all its bits."""
        found = load(self.folder, self.two)
        assert found in ({self.step} if saved else {self.last, self.step}), where
        assert digest(self.two.numbers()) == self.known[found], where
        self.last = found

    def held(self) -> tuple[int, int]:
        """Descriptors that are open, and bytes that the disk tier has taken."""
        store = engine_of(self.one.model).store
        return len(os.listdir("/proc/self/fd")), store.used_bytes if isinstance(store, DiskStore) else 0

    def holds_more_than(self, before: tuple[int, int]) -> str | None:
        """What was not given back, if anything."""
        if self.held() > before:
            gc.collect()
        fds, nbytes = self.held()
        if fds > before[0]:
            return "a descriptor stays open"
        return f"room on disk is not given back: {nbytes} bytes, not {before[1]}" if nbytes > before[1] else None


def load(folder: Path, two: Trained) -> int:
    return lowtide.load(folder / "run", two.model, two.optimizer, state=two.state())["step"]


def fail_everywhere(folder: Path, job: Job, what: int, times: int, *, all_of_them: bool) -> list[str]:
    victim = Victim(folder, job)
    undisturbed = FaultPoints(CHANGING)
    assert victim.save(undisturbed) is None
    victim.check("undisturbed", saved=True)
    held = victim.held()
    out: list[str] = []
    for at in moments(undisturbed.seen, all_of_them=all_of_them):
        points = FaultPoints(CHANGING, at, fails(what), times)
        error = victim.save(points)
        where = f"call {at} ({points.seen[at] if points.hit else 'none'}) fails: {error}"
        victim.check(where, saved=error is None)
        if times == 1:
            assert not list((folder / "run").glob(".new-*")), f"{where}: something is left"
        assert error is None or str(folder) in error
        out.append("refused" if error is not None else "no effect")
        for path in (folder / "run").glob(".*"):  # what could not be removed is kept, with its room, until somebody does
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert victim.save(FaultPoints(())) is None, where
        victim.check(f"after {where}", saved=True)
        assert victim.holds_more_than(held) is None, where
    return out


@pytest.mark.parametrize(
    ("name", "error"),
    [("in memory", "EIO"), ("linked", "ENOSPC"), ("in the background", "EINTR"), ("the same name again", "EIO")],
)
def test_a_call_of_a_save(name: str, error: str, quick_path: Path) -> None:
    found = fail_everywhere(quick_path, SAVES[name], ERRORS[error], 1, all_of_them=False)
    assert len(found) > 15
    assert found.count("refused") > 10


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", SAVES)
def test_every_call_of_a_save(name: str, error: str, quick_path: Path) -> None:
    assert "refused" in fail_everywhere(quick_path, SAVES[name], ERRORS[error], 1, all_of_them=True)


@pytest.mark.parametrize("name", ["in memory", pytest.param("linked", marks=pytest.mark.soak)])
def test_every_call_from_one_on(name: str, quick_path: Path) -> None:
    """A disk that is gone: not even what is left can be removed."""
    assert "refused" in fail_everywhere(quick_path, SAVES[name], errno.EIO, FOREVER, all_of_them=False)


@pytest.mark.parametrize(("name", "error"), [("in memory", "EIO"), ("linked", "EINTR")])
def test_every_call_of_a_load(name: str, error: str, quick_path: Path) -> None:
    """The newest one, the one before it, or a typed error; and the next load finds everything again."""
    victim = Victim(quick_path, SAVES[name])
    held, outcomes = victim.held(), set[str]()
    undisturbed = FaultPoints(READING)
    with undisturbed:
        load(quick_path, victim.two)
    for at in moments(undisturbed.seen, all_of_them=False):
        points = FaultPoints(READING, at, fails(ERRORS[error]), 1)
        try:
            with points:
                found = load(quick_path, victim.two)
        except CheckpointError:
            outcomes.add("refused")
        else:
            outcomes.add("newest" if found == victim.step else "older")
            assert digest(victim.two.numbers()) == victim.known[found], points.seen[at]
        assert victim.holds_more_than(held) is None, at
        victim.check(f"after call {at} of a load had failed", saved=True)
    assert {"newest", "older"} <= outcomes


# -- calls that do a part, or are interrupted -------------------------------------------------------------------------


def test_short_calls_have_no_effect(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = Victim(quick_path, SAVES["in memory"])
    write, pwrite, preadv = os.write, os.pwrite, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[: max(1, len(data) // 3)]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][: max(1, len(into[0]) // 3)]], at))
    assert victim.save(FaultPoints(())) is None
    victim.check("short calls", saved=True)
    verify(quick_path / "run" / victim.job.name(victim.step))


@pytest.mark.parametrize("name", ["in memory", "linked", "in the background"])
def test_signals_have_no_effect(name: str, quick_path: Path) -> None:
    """Real interruptions, thousands a second, whichever call they fall into."""
    apart(save_under_signals, quick_path, SAVES[name])


def save_under_signals(folder: Path, job: Job) -> None:
    arrived: list[int] = []
    victim = Victim(folder, job)
    signal.signal(signal.SIGALRM, lambda *_: arrived.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        for _ in range(5):
            error = victim.save(FaultPoints(()))
            assert error is None, error
            victim.check("signals", saved=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(arrived) > 50


# -- on two ranks: the other one hears of it --------------------------------------------------------------------------


RANKS = Job(Setup(ranks=2, stage=3, disk=True, resident="kinds", chunk_bytes=LARGE), keep=2)


def fail_on_one_rank(folder: Path, stride: int) -> int:
    """Run in a process of its own: both ranks raise the same, or neither; then both go on."""
    from tests.kit.recovery import ranks

    board = Board()
    ended = [child.wait() for child in ranks(folder, 2, _fail_on_one_rank, folder, stride, board)]
    return min(e.result() for e in ended)


def _fail_on_one_rank(folder: Path, stride: int, board: Board, rank: int) -> int:
    one = RANKS.trained(folder, rank)
    refused = 0
    for victim in range(2):
        for at in itertools.count(victim, stride):
            one.train(0, 1)
            points = FaultPoints(CHANGING, at if rank == victim else -1, fails(errno.EIO), 1)
            said = ""
            try:
                with points:
                    RANKS.save(one, folder, at).wait()
            except Error as error:
                said = str(error)
            board[2 + rank] = bool(said)
            if rank == victim:
                board[1] = points.hit
            torch.distributed.barrier()
            assert board[2] == board[3], f"rank {victim}, call {at}: {said or 'no error here'}"
            refused += bool(said)
            hit = board[1]
            torch.distributed.barrier()
            if not hit:
                break
    return refused


def test_a_failure_on_one_rank_is_raised_on_both(quick_path: Path) -> None:
    assert apart(fail_on_one_rank, quick_path, 7) > 3


@pytest.mark.soak
def test_every_failure_on_one_rank_is_raised_on_both(quick_path: Path) -> None:
    assert apart(fail_on_one_rank, quick_path, 1) > 20


# -- two jobs that save into one folder -------------------------------------------------------------------------------


def two_jobs(folder: Path, same_name: bool, count: int) -> list[Any]:
    """Run in a process of its own: both save and load as fast as they can; each of both must always find something whole."""
    jobs = [Job(Setup(disk=bool(n), stage=0), keep=3, same_name=same_name) for n in range(2)]
    children = [start(_one_of_two_jobs, folder, job, number, count) for number, job in enumerate(jobs)]
    results = [child.wait().result() for child in children]
    found, refused = checkpoints(folder / "run")
    assert not refused
    assert len(found) <= 2 * 3
    for each in found:
        verify(each.path)
    assert not list((folder / "run").glob(".new-*"))
    two = jobs[0].trained(folder, seed=1)
    step = load(folder, two)
    assert digest(two.numbers()) == results[0][step % 1000], "the newest has the bits of none of both"
    return results


def _one_of_two_jobs(folder: Path, job: Job, number: int, count: int) -> dict[int, str]:
    own = folder / f"job-{number}"
    own.mkdir()
    one, known = job.trained(own), dict[int, str]()
    for step in range(1, count + 1):
        one.train(step - 1, 1)
        known[step] = digest(one.numbers())
        try:
            job.save(one, folder, 1000 * number + step).wait()
        except Error as error:
            raise AssertionError(f"job {number}, step {step}") from error
    return known


@pytest.mark.parametrize("same_name", [False, True], ids=["other names", "the same name"])
def test_two_jobs_in_one_folder(same_name: bool, quick_path: Path) -> None:
    apart(two_jobs, quick_path, same_name, 12)
