"""Cleaning takes what nobody needs: nothing of a live save, of a live job or of the last good checkpoints."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import lowtide
from lowtide.checkpoint.collect import collect
from lowtide.checkpoint.folder import checkpoints, leftovers, new_name
from lowtide.checkpoint.source import verify
from lowtide.errors import ArgumentError
from tests.checkpoint.exchange import Job, assert_same_bits, dead_job
from tests.kit.checkpoints import Setup

HEX = "0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints that are not linked to anything."""
    job = Job(tmp_path, "one_layer", Setup())
    for _ in range(3):
        job.train()
        job.save()
    return tmp_path / "run"


def left(run: Path) -> Path:
    """What a save leaves that was killed while it wrote."""
    path = run / new_name(run / "step-9")
    path.mkdir(mode=0o700)
    (path / "rank-00000.safetensors").write_bytes(b"half")
    return path


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def there(run: Path) -> list[str]:
    return [found.path.name for found in checkpoints(run)[0]]


# -- leftovers --------------------------------------------------------------------------------------------------------


def test_what_a_dead_save_left_goes(run: Path) -> None:
    path = left(run)
    note = run / f".new-LATEST-{HEX}"
    note.write_text("step-9\n")
    done = collect(run, minutes=0)
    assert sorted(done.leftovers) == sorted([path, note])
    assert leftovers(run) == []
    assert there(run) == ["step-3", "step-2", "step-1"]
    assert done.nbytes > 0


def test_what_was_just_written_stays(run: Path) -> None:
    path = left(run)
    done = collect(run)
    assert done.leftovers == []
    assert path.is_dir()
    (kept,) = done.left
    assert kept.path == path
    assert "0 minutes ago" in kept.reason


def test_what_somebody_holds_stays(run: Path) -> None:
    path = left(run)
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        done = collect(run, minutes=0)
        assert (done.leftovers, [k.reason for k in done.left]) == ([], ["it is being written"])
    finally:
        os.close(fd)
    assert names(collect(run, minutes=0).leftovers) == [path.name]


def test_a_live_save_is_not_touched(run: Path, tmp_path: Path) -> None:
    """Cleaned in the middle of a save, which then ends as if nothing had been."""
    reasons: list[list[str]] = []
    job = Job(tmp_path, "one_layer", Setup())
    path = job.save("step-4", progress=lambda _done, _all: reasons.append([k.reason for k in collect(run, minutes=0).left]))
    assert reasons
    assert {tuple(row) for row in reasons} == {("it is being written",)}
    assert verify(path) > 0


def test_a_checkpoint_that_was_put_aside_comes_back(run: Path) -> None:
    """A crash between the two renames of a save over an old name."""
    (run / "step-3").rename(run / f".old-step-3-{HEX}")
    assert names(collect(run, minutes=0, dry_run=True).restored) == ["step-3"]
    assert not (run / "step-3").exists()
    assert names(collect(run, minutes=0).restored) == ["step-3"]
    assert verify(run / "step-3") > 0


def test_one_that_was_replaced_goes(run: Path) -> None:
    (run / "step-3").rename(run / f".old-step-2-{HEX}")
    done = collect(run, minutes=0)
    assert (names(done.leftovers), done.restored) == ([f".old-step-2-{HEX}"], [])
    assert there(run) == ["step-2", "step-1"]


def test_a_half_removed_one_goes(run: Path) -> None:
    (run / "step-3").rename(run / f".old-step-3-{HEX}")
    (run / f".old-step-3-{HEX}" / "manifest.json").unlink()
    done = collect(run, minutes=0)
    assert (names(done.leftovers), done.restored) == ([f".old-step-3-{HEX}"], [])


def test_other_names_are_nobodys_business(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in (".new-mine", "notes", f".old-{HEX}"):
        (run / name).mkdir()
    (run / f".new-link-{HEX}").symlink_to(tmp_path / "elsewhere")
    collect(run, minutes=0, keep=1)
    assert {".new-mine", "notes", f".old-{HEX}", f".new-link-{HEX}"} <= {p.name for p in run.iterdir()}
    assert (tmp_path / "elsewhere").is_dir()


# -- old checkpoints --------------------------------------------------------------------------------------------------


def test_only_the_newest_stay(run: Path) -> None:
    dry = collect(run, keep=1, dry_run=True)
    assert names(dry.checkpoints) == ["step-2", "step-1"]
    assert there(run) == ["step-3", "step-2", "step-1"]
    done = collect(run, keep=1)
    assert names(done.checkpoints) == ["step-2", "step-1"]
    assert done.nbytes == dry.nbytes > 0
    assert there(run) == ["step-3"]
    assert collect(run).checkpoints == []


def test_a_damaged_one_does_not_count(run: Path) -> None:
    payload = run / "step-3" / "rank-00000.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    done = collect(run, keep=1)
    assert names(done.checkpoints) == ["step-1"]
    assert there(run) == ["step-3", "step-2"]
    assert "damaged" in next(k.reason for k in done.left if k.path.name == "step-3")


def test_one_without_a_usable_manifest_is_left_alone(run: Path) -> None:
    (run / "step-1" / "manifest.json").write_text("{}")
    done = collect(run, keep=1)
    assert names(done.checkpoints) == ["step-2"]
    assert (run / "step-1").is_dir()
    assert "step-1" in [k.path.name for k in done.left]


def test_mistakes(run: Path) -> None:
    for arguments, message in (((run / "step-1",), "folder around"), ((run / "nothing",), "not a folder")):
        with pytest.raises(ArgumentError, match=message):
            collect(*arguments)
    with pytest.raises(ArgumentError, match="at least 1"):
        collect(run, keep=0)
    with pytest.raises(ArgumentError, match="minutes"):
        collect(run, minutes=-1)


# -- spool files ------------------------------------------------------------------------------------------------------


SLACK = 32 << 10
"""A filesystem joins extents when it likes, and then needs a block less; what could be given back is twice this at least."""


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def is_whole(path: Path, before: int) -> bool:
    """Whether no holes were made."""
    return abs(allocated(path) - before) <= SLACK


def test_a_dead_jobs_file_keeps_only_what_checkpoints_refer_to(tmp_path: Path) -> None:
    run = dead_job(tmp_path, saves=3)
    spool = run / "step-3" / "rank-00000-spool-0"
    assert spool.stat().st_nlink == 3
    before = allocated(spool)
    dry = collect(run, keep=1, dry_run=True)
    assert names(dry.checkpoints) == ["step-2", "step-1"]
    assert [(s.path, s.nbytes > 0) for s in dry.spools] == [(spool, True)]
    assert is_whole(spool, before)
    done = collect(run, keep=1)
    assert [s.path for s in done.spools] == [spool]
    assert abs(done.spools[0].nbytes - (before - allocated(spool))) <= SLACK
    assert not is_whole(spool, before)
    assert verify(run / "step-3") > 0
    assert collect(run, keep=1).spools == []
    job = Job(tmp_path, "gpt", Setup())
    lowtide.load(run, job.model, job.optimizer)
    expected = Job(tmp_path, "gpt", Setup())
    expected.train(3)
    assert_same_bits(job.tensors(), expected.tensors())


def test_what_two_checkpoints_refer_to_stays_for_both(tmp_path: Path) -> None:
    run = dead_job(tmp_path, saves=2)
    assert collect(run).spools
    assert verify(run / "step-1") > 0
    assert verify(run / "step-2") > 0


def test_a_live_jobs_file_is_not_touched(tmp_path: Path) -> None:
    job = Job(tmp_path, "gpt")
    for _ in range(2):
        job.train()
        job.save()
    run = tmp_path / "run"
    spool = run / "step-2" / "rank-00000-spool-0"
    job.train()
    expected = job.tensors()
    before = allocated(spool)
    done = collect(run, keep=1)
    assert done.spools == []
    assert [(k.path, k.reason) for k in done.left] == [(spool, "a job still uses it")]
    assert is_whole(spool, before)
    assert_same_bits(job.tensors(), expected)
    job.train()
    job.save()
    assert verify(run / "step-2") > 0
    assert verify(run / "step-4") > 0


def test_whoever_has_the_file_open_keeps_it(tmp_path: Path) -> None:
    """Also a program that knows nothing of our locks: the kernel knows of it."""
    run = dead_job(tmp_path)
    spool = run / "step-2" / "rank-00000-spool-0"
    with spool.open("r+b"):
        assert [k.reason for k in collect(run).left] == ["a job still uses it"]
    with spool.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_SH)
        assert [k.reason for k in collect(run).left] == ["a job still uses it"]
    assert collect(run).spools


def test_a_file_with_names_elsewhere_is_not_touched(tmp_path: Path) -> None:
    run = dead_job(tmp_path)
    spool = run / "step-2" / "rank-00000-spool-0"
    os.link(spool, tmp_path / "another name")
    before = allocated(spool)
    done = collect(run)
    assert done.spools == []
    assert ["others may refer to it" in k.reason for k in done.left] == [True]
    assert is_whole(spool, before)


def test_a_damaged_checkpoint_keeps_its_part_of_the_file(tmp_path: Path) -> None:
    """Nobody knows what it refers to; somebody may know how to mend it."""
    run = dead_job(tmp_path)
    (run / "step-1" / "manifest.json").write_text("{}")
    done = collect(run)
    assert done.spools == []
    assert any("others may refer to it" in k.reason for k in done.left)
