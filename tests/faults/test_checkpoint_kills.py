"""kill -9 at every system call of a save and of a load: what is left is the checkpoint from before, or the new one, whole.

A save is a list of calls that change a filesystem. An undisturbed one is recorded; then, for every number k (without the middle
of long stretches of the same call, except in `make soak`), a process of its own is killed right before its k-th call. The
named phases (before the folder is made, after the payload, between the rename and LATEST, while the old one is removed ...)
are the places between two calls of that list.
"""

from __future__ import annotations

import itertools
import shutil
import signal
from pathlib import Path

import pytest

import lowtide
from lowtide.checkpoint.folder import checkpoints, leftovers
from lowtide.checkpoint.source import verify
from tests.kit.checkpoints import Setup, Trained
from tests.kit.crashes import CHANGING, READING, Board, FaultPoints, apart, forked, kill, moments
from tests.kit.recovery import ACKNOWLEDGED, Job, digest, life, lives_of_ranks, look, reader, undisturbed

LARGE = 1 << 16
JOBS = {
    "in memory": Job(Setup()),
    "linked": Job(Setup(stage=3, disk=True, chunk_bytes=LARGE)),
    "copied from disk": Job(Setup(disk=True, resident="mixed", chunk_bytes=LARGE), link=False),
    "in the background": Job(Setup(disk=True, resident="kinds", chunk_bytes=LARGE), background=True),
    "the same name again": Job(Setup(), same_name=True),
    "the same name again, linked": Job(Setup(disk=True, chunk_bytes=LARGE), same_name=True),
}
RANKS = {
    "in memory": Job(Setup(ranks=2, stage=0)),
    "linked": Job(Setup(ranks=2, stage=3, disk=True)),
    "in the background": Job(Setup(ranks=2, stage=3, disk=True, resident="kinds"), background=True),
}


def check_what_is_left(folder: Path, two: Trained, board: Board, known: dict[int, str], where: str) -> int:
    """Everything that shows as a checkpoint verifies, and the newest is loaded: one of the two, with all its bits."""
    found, refused = checkpoints(folder / "run")
    assert not refused, where
    for each in found:
        verify(each.path)
    step, bits = forked(look, folder, two).result()
    assert bits == known.get(step), f"{where}: other bits in step {step}"
    assert step >= board[ACKNOWLEDGED], f"{where}: save() had returned for step {board[ACKNOWLEDGED]}"
    return step


def kill_everywhere(folder: Path, job: Job, all_of_them: bool) -> set[int]:
    """Run in a process of its own. Returns the steps that were found."""
    known, two = forked(undisturbed, folder, job).result(), reader(folder, job)
    seen = calls_of_a_save(folder, job)
    steps: set[int] = set()
    for at in moments(seen, all_of_them=all_of_them):
        shutil.rmtree(folder / "run")
        board = Board()
        ended = forked(life, folder, job, board, FaultPoints(CHANGING, at, kill))
        where = f"killed before call {at}"
        assert ended.killed or ended.status == 0, ended.error
        steps.add(check_what_is_left(folder, two, board, known, where))
        if left := leftovers(folder / "run"):
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            check_what_is_left(folder, two, board, known, f"{where}, then cleaned")
    assert ended.status == 0  # the last one was behind all calls
    return steps


def calls_of_a_save(folder: Path, job: Job) -> list[str]:
    return forked(life, folder, job, Board(), FaultPoints(CHANGING)).result()


@pytest.mark.parametrize("name", ["linked", "in the background", "the same name again, linked"])
def test_between_any_two_calls_of_a_save(name: str, quick_path: Path) -> None:
    assert apart(kill_everywhere, quick_path, JOBS[name], False) == {1, 2}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", JOBS)
def test_at_every_call_of_a_save(name: str, tmp_path: Path) -> None:
    """Also between two writes of one file; and on a disk."""
    assert apart(kill_everywhere, tmp_path, JOBS[name], True) == {1, 2}


BEGINNING = {
    "in memory": ["mkdir .new-step-2-", "link rank-00000-frozen.safetensors", "fsync rank-00000.safetensors"],
    "linked": ["mkdir .new-step-2-", "link ", "fdatasync ", "fsync rank-00000.safetensors"],
}
END = [
    *("fsync rank-00000.json", "fsync .new-step-2-", "open manifest.json", "fsync manifest.json", "fsync .new-step-2-"),
    *("rename .new-step-2-", "fsync run", "fsync .new-LATEST-", "rename .new-LATEST-", "fsync run"),
    *("rename step-1", "fsync run", "unlink manifest.json"),
]


@pytest.mark.parametrize("name", BEGINNING)
def test_what_a_save_does_in_which_order(name: str, quick_path: Path) -> None:
    """Durable before it has its name; the old one is there until the new one is; names that begin with a dot are nobody's.

    Filesystems differ in what they make durable unasked (ext4 commits everything with any sync, so that a power cut there does
    not show a sync that is missing): what counts is that every file and folder is synced, in this order."""
    seen = apart(calls_of_a_save, quick_path, JOBS[name])
    rest = iter(seen)
    for wanted in [*BEGINNING[name], *END]:
        assert any(call.startswith(wanted) for call in rest), f"{wanted!r} is not where it should be in {seen}"


# -- several ranks ----------------------------------------------------------------------------------------------------


def kill_one_rank(folder: Path, job: Job, stride: int) -> int:
    """Run in a process of its own: each rank in turn, at every ``stride``-th call."""
    known, two = undisturbed(folder, job), reader(folder, job)
    kills = 0
    for victim in range(job.setup.ranks):
        for at in itertools.count(victim, stride):
            shutil.rmtree(folder / "run", ignore_errors=True)
            board = Board()
            ended = [child.wait() for child in lives_of_ranks(folder, job, board, victim, at)]
            where = f"rank {victim} killed before call {at}"
            check_what_is_left(folder, two, board, known, where)
            if not ended[victim].killed:
                assert all(e.status == 0 for e in ended), [e.error for e in ended]
                break
            kills += 1
            for other in ended[:victim] + ended[victim + 1 :]:  # told by the others' watch, or done before
                assert other.status == 0 or (other.status == 1 and "PeerFailed" in other.error), (where, other)
    return kills


@pytest.mark.parametrize("name", RANKS)
def test_one_of_two_ranks(name: str, quick_path: Path) -> None:
    assert apart(kill_one_rank, quick_path, RANKS[name], 24) >= 2


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RANKS)
def test_one_of_two_ranks_at_every_call(name: str, quick_path: Path) -> None:
    apart(kill_one_rank, quick_path, RANKS[name], 1)


# -- while it is loaded -----------------------------------------------------------------------------------------------


def load_and_die(folder: Path, job: Job, at: int) -> list[str]:
    two = job.trained(folder, seed=1)
    two.train(9, 1)
    points = FaultPoints(READING, at, kill)
    with points:
        lowtide.load(folder / "run", two.model, two.optimizer, state=two.state())
    return points.seen


def kill_every_load(folder: Path, job: Job) -> int:
    """Run in a process of its own: a load changes nothing, so the next one is as good."""
    known, two = forked(undisturbed, folder, job).result(), reader(folder, job)
    calls_of_a_save(folder, job)
    before = contents(folder / "run")
    tried = moments(forked(load_and_die, folder, job, -1).result(), all_of_them=False)
    for at in tried:
        ended = forked(load_and_die, folder, job, at)
        assert ended.killed == (at < tried[-1]), ended.error
        assert contents(folder / "run") == before
        assert forked(look, folder, two).result() == (2, known[2])
    return len(tried)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["linked", pytest.param("in memory", marks=pytest.mark.soak)])
def test_at_every_call_of_a_load(name: str, quick_path: Path) -> None:
    assert apart(kill_every_load, quick_path, JOBS[name]) > 5


# -- the phases of a background save by the clock ---------------------------------------------------------------------


def go_on_after_kills(folder: Path, job: Job, kills: int) -> str:
    """Run in a process of its own: a job that is killed again and again at some call and goes on from what it finds."""
    for number in range(kills):
        ended = forked(four_steps, folder, job, 11 * number)
        assert ended.killed or ended.status == 0, ended.error
    return forked(four_steps, folder, job, -1).result()


def four_steps(folder: Path, job: Job, at: int) -> str:
    one = job.trained(folder, seed=1)
    done = 0
    if checkpoints(folder / "run")[0]:
        done = lowtide.load(folder / "run", one.model, one.optimizer, state=one.state())["step"]
    else:
        one = job.trained(folder)
    with FaultPoints(CHANGING, at, kill):
        for step in range(done, 4):
            one.train(step, 1)
            job.save(one, folder, step + 1).wait()
    return digest(one.numbers())


def straight(folder: Path, job: Job) -> str:
    one = job.trained(folder)
    one.train(0, 4)
    return digest(one.numbers())


@pytest.mark.parametrize("name", ["in memory", "linked", "in the background"])
def test_it_ends_with_the_same_bits(name: str, quick_path: Path) -> None:
    job = JOBS[name]
    assert apart(go_on_after_kills, quick_path, job, 8) == apart(in_child, straight, quick_path, job)


def in_child(fn: object, *args: object) -> object:
    return forked(fn, *args).result()  # type: ignore[arg-type]


def test_a_killed_child_is_told_from_one_that_failed() -> None:
    """The harness itself."""
    assert apart(_statuses) == [-signal.SIGKILL, 1, 0]


def _statuses() -> list[int]:
    return [forked(kill, "").status, forked(int, "x").status, forked(int, "3").status]
