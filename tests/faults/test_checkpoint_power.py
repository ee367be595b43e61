"""The power is cut at every system call of a save: what save() had returned for is there, whole, after the restart.

A real cut: ext4 on a loop device is stopped without a flush of its journal (tests/kit/power.py), so whatever was not synced is
gone. Spool and checkpoints are on the same filesystem, so checkpoints without a copy are cut, too. Then the disk is full, or
read-only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.source import verify
from lowtide.errors import CheckpointError, DiskFull
from tests.kit.checkpoints import Setup, Trained
from tests.kit.crashes import CHANGING, Board, FaultPoints, apart, forked, kill, moments
from tests.kit.power import LoopDisk, why_not
from tests.kit.recovery import ACKNOWLEDGED, Job, digest, life, look, reader, undisturbed

LARGE = 1 << 16
IS_CUT = 1  # a place on a board
JOBS = {
    "in memory": Job(Setup()),
    "linked": Job(Setup(stage=3, disk=True, chunk_bytes=LARGE)),
    "copied from disk": Job(Setup(disk=True, resident="mixed", chunk_bytes=LARGE), link=False),
    "in the background, linked": Job(Setup(disk=True, resident="kinds", chunk_bytes=LARGE), background=True),
    "the same name again, linked": Job(Setup(disk=True, chunk_bytes=LARGE), same_name=True),
}


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder in which there can be loop devices."""
    beside = "/dev/shm" if os.path.isdir("/dev/shm") else None  # ext4 decides what survives, not what is below it
    folder = Path(tempfile.mkdtemp(prefix="lowtide-power-", dir=beside))
    try:
        if (why := why_not(folder)) is not None:
            pytest.skip(f"no power cuts here: {why}")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loop_disk(room: Path, mib: int = 64) -> Iterator[LoopDisk]:
    folder = Path(tempfile.mkdtemp(dir=room))
    disk = LoopDisk(folder, mib)
    try:
        yield disk
    finally:
        disk.close()


# -- cuts -------------------------------------------------------------------------------------------------------------


def cut_everywhere(room: Path, job: Job, all_of_them: bool, flush: bool) -> tuple[int, set[int]]:
    """Run in a process of its own: how many cuts, and which steps were found after them.

    ``flush``: everything written so far reaches the disk right before the cut, as by chance: only order is lost then.
    """
    cuts, steps = 0, set[int]()
    with loop_disk(room) as disk:
        known, two = forked(undisturbed, room, job).result(), reader(room, job)
        seen = forked(life, disk.path, job, Board(), FaultPoints(CHANGING)).result()
        disk.clear()

        def cut(name: str) -> None:
            board[IS_CUT] = 1
            if flush:
                disk.sync()
            disk.cut()
            kill(name)

        for at in moments(seen, all_of_them=all_of_them):
            board = Board()
            ended = forked(life, disk.path, job, board, FaultPoints(CHANGING, at, cut))
            # in the background, training may see the dead disk before the kill
            assert ended.killed or ended.status == 0 or board[IS_CUT], ended.error
            if not board[IS_CUT]:  # the last cut: right after save() has returned
                disk.cut()
            disk.restore()
            cuts += 1
            steps.add(check_after_a_cut(disk.path, two, board[ACKNOWLEDGED], known, f"cut before call {at}"))
            disk.clear()
    return cuts, steps


def check_after_a_cut(folder: Path, two: Trained, acknowledged: int, known: dict[int, str], where: str) -> int:
    found, refused = checkpoints(folder / "run")
    assert not refused, where
    for each in found:
        verify(each.path)
    step, bits = forked(look, folder, two).result()
    assert step >= acknowledged, f"{where}: save() had returned for step {acknowledged}, and {step} is there"
    assert bits == known.get(step), f"{where}: other bits in step {step}"
    return step


@pytest.mark.parametrize("name", ["in memory", "linked"])
def test_between_any_two_calls_of_a_save(name: str, room: Path) -> None:
    cuts, steps = apart(cut_everywhere, room, JOBS[name], False, False)
    assert cuts > 8
    assert steps == {1, 2}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", JOBS)
def test_at_every_call_of_a_save(name: str, flush: bool, room: Path) -> None:
    assert apart(cut_everywhere, room, JOBS[name], True, flush)[1] == {1, 2}


def cut_before_anything_is_synced(room: Path) -> list[str]:
    """Run in a process of its own: the tool itself. What is not synced is lost, what is synced stays."""
    with loop_disk(room) as disk:
        (disk.path / "kept").write_bytes(b"1")
        disk.sync()
        (disk.path / "kept").rename(disk.path / "renamed")
        (disk.path / "lost").write_bytes(b"1")
        disk.cut()
        disk.restore()
        return sorted(path.name for path in disk.path.iterdir())


def test_the_cut_is_a_real_one(room: Path) -> None:
    assert apart(cut_before_anything_is_synced, room) == ["kept", "lost+found"]


def cut_after_training_went_on(room: Path, job: Job) -> None:
    """Run in a process of its own: the steps after a linked checkpoint write into the same file; then the power goes."""
    with loop_disk(room) as disk:
        known, two = forked(undisturbed, room, job).result(), reader(room, job)
        board = Board()

        def train_on() -> None:
            one = job.trained(disk.path)
            for step in (1, 2):
                one.train(step - 1, 1)
                job.save(one, disk.path, step).wait()
            board[ACKNOWLEDGED] = 2
            one.train(2, 4)
            disk.cut()
            kill("")

        assert forked(train_on).killed
        disk.restore()
        assert check_after_a_cut(disk.path, two, 2, known, "cut while training") == 2


@pytest.mark.parametrize("name", ["linked", "in the background, linked", "the same name again, linked"])
def test_training_goes_on_in_the_same_file_before_the_cut(name: str, room: Path) -> None:
    apart(cut_after_training_went_on, room, JOBS[name])


# -- a full disk ------------------------------------------------------------------------------------------------------


def full_everywhere(room: Path, job: Job, stride: int) -> list[str]:
    """Run in a process of its own: the disk fills up right before the k-th call of a save. Each time: what came of it."""
    out: list[str] = []
    with loop_disk(room, 48) as disk:
        known, two = forked(undisturbed, room, job).result(), reader(room, job)
        for at in itertools.count(0, stride):
            board = Board()
            ended = forked(life_on_a_full_disk, disk, job, board, at)
            outcome = ended.result()
            out.append(outcome.split(":")[0])
            for path in disk.path.glob("filler-*"):
                path.unlink()
            check_after_a_cut(disk.path, two, board[ACKNOWLEDGED], known, f"full before call {at}: {outcome}")
            disk.clear()
            if outcome.endswith("not reached"):
                break
    return out


def life_on_a_full_disk(disk: LoopDisk, job: Job, board: Board, at: int) -> str:
    one = job.trained(disk.path)
    one.train(0, 1)
    job.save(one, disk.path, 1).wait()
    board[ACKNOWLEDGED] = 1
    one.train(1, 1)
    points = FaultPoints(CHANGING, at, lambda _: disk.fill())
    try:
        with points:
            job.save(one, disk.path, 2).wait()
    except CheckpointError as error:
        assert not list((disk.path / "run").glob(".new-*")), "something is left"
        for path in disk.path.glob("filler-*"):
            path.unlink()
        job.save(one, disk.path, 2).wait()  # with room again, the same job goes on
        board[ACKNOWLEDGED] = 2
        return f"refused: {error}"
    board[ACKNOWLEDGED] = 2
    return "saved" if points.hit else "saved: not reached"


@pytest.mark.parametrize("name", ["in memory", "linked"])
def test_a_disk_that_fills_up_at_any_moment(name: str, room: Path) -> None:
    outcomes = apart(full_everywhere, room, JOBS[name], 9)
    assert {"refused", "saved"} == set(outcomes)


def too_little_room(room: Path) -> None:
    """Run in a process of its own: known before anything is written, on a memory filesystem of a given size, too."""
    job = JOBS["in memory"]
    with loop_disk(room, 32) as disk:
        one = job.trained(disk.path)
        one.train(0, 1)
        disk.fill(leave=1 << 20)
        before = sorted(disk.path.rglob("*"))
        with pytest.raises(CheckpointError, match=r"are needed and .* are free"):
            job.save(one, disk.path, 1)
        assert [path for path in sorted(disk.path.rglob("*")) if path.name != "run"] == before


def test_too_little_room_is_told_before(room: Path) -> None:
    apart(too_little_room, room)


def spool_without_room_to_keep(room: Path) -> str:
    """Run in a process of its own: where the pinned blocks would not leave room for the next step, save copies or refuses,
    and training goes on in either case."""
    job = JOBS["linked"]
    with loop_disk(room, 32) as disk:

        def run() -> str:
            one = job.trained(disk.path)
            one.train(0, 1)
            disk.fill(leave=64 << 10)
            said = "saved"
            try:
                job.save(one, disk.path, 1).wait()
            except (CheckpointError, DiskFull) as error:
                said = f"refused: {error}"
            one.train(1, 1)
            assert digest(one.numbers()) == undisturbed(room, job)[2]
            return said

        return forked(run).result()


def test_no_room_for_the_next_step_beside_a_linked_checkpoint(room: Path) -> None:
    assert apart(spool_without_room_to_keep, room).startswith("refused: checkpoint")


# -- a disk that cannot be written ------------------------------------------------------------------------------------


def read_only_disk(room: Path) -> None:
    """Run in a process of its own."""
    job = JOBS["in memory"]
    known = forked(undisturbed, room, job).result()
    with loop_disk(room) as disk:
        one = job.trained(disk.path)
        one.train(0, 1)
        job.save(one, disk.path, 1).wait()
        disk.read_only(on=True)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            job.save(one, disk.path, 2)
        assert look(disk.path, reader(room, job)) == (1, known[1])  # reading needs no writing
        verify(disk.path / "run" / "step-1")
        disk.read_only(on=False)
        one.train(1, 1)
        job.save(one, disk.path, 2).wait()
        assert look(disk.path, reader(room, job)) == (2, known[2])


def test_a_read_only_disk(room: Path) -> None:
    apart(read_only_disk, room)


def folder_of_somebody_else(folder: Path) -> None:
    """Run in a process of its own, as a user who may read the folder, and later not even that."""
    job = JOBS["in memory"]
    one = job.trained(folder)
    one.train(0, 1)
    job.save(one, folder, 1).wait()
    (folder / "run").chmod(0o755)
    os.seteuid(65534)
    with pytest.raises(CheckpointError, match="Permission denied"):
        job.save(one, folder, 2)
    with pytest.raises(CheckpointError):  # the checkpoint itself is its owner's alone
        lowtide.load(folder / "run", one.model, one.optimizer, state=one.state())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_folder_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory(prefix="lowtide-else-") as name:
        os.chmod(name, 0o755)
        apart(in_child, folder_of_somebody_else, Path(name))


def in_child(fn: object, *args: object) -> object:
    torch.set_num_threads(1)
    return forked(fn, *args).result()  # type: ignore[arg-type]
