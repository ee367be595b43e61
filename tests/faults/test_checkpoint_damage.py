"""Bits flip, files are cut, lost, exchanged, doubled and replaced: noticed, or without effect, and an older one loads.

``tests/kit/damage.py`` says what counts as noticed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import lowtide
from lowtide.checkpoint.folder import checkpoints
from lowtide.checkpoint.source import verify
from lowtide.errors import CheckpointError, NoCheckpoint
from tests.kit.checkpoints import Setup, Trained
from tests.kit.damage import flip, judged, numbers_of, regions
from tests.kit.dist import run_ranks
from tests.kit.recovery import Job, digest

JOBS = {
    "in memory": Job(Setup(), keep=None),
    "linked": Job(Setup(disk=True), keep=None),
    "partly on disk": Job(Setup(disk=True, resident="kinds"), keep=None),
    "two ranks, linked": Job(Setup(ranks=2, stage=3, disk=True), keep=None),
}


def two_checkpoints(rank: int, world: int, folder: str, job: Job) -> dict[int, str]:
    one, known = job.trained(Path(folder), rank), dict[int, str]()
    for step in (1, 2):
        one.train(step - 1, 1)
        job.save(one, Path(folder), step).wait()
        known[step] = digest(one.numbers())
    return known


class Specimen:
    """A run with two checkpoints and what is in them; ``copy`` makes one to be damaged."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.run = folder, folder / "run"
        args = (str(folder), job)
        self.known = (
            run_ranks(job.setup.ranks, two_checkpoints, *args)[0] if job.setup.ranks > 1 else two_checkpoints(0, 1, *args)
        )
        self.newest = self.run / "step-2"
        self.numbers = numbers_of(self.newest)
        self.regions = regions(self.newest)
        self.reader = Job(Setup(), job.specimen).trained(folder, seed=1)
        self._copies = itertools.count()

    def copy(self) -> Path:
        """Of the whole run; two names of one file stay two names of one file in it."""
        to = self.folder / f"copy-{next(self._copies)}"
        to.mkdir()
        subprocess.run(["cp", "-a", str(self.run), str(to / "run")], check=True)
        return to / "run"

    def load(self, run: Path) -> int:
        """The step that is loaded from a run; its bits are right."""
        step = lowtide.load(run, self.reader.model, self.reader.optimizer, state=self.reader.state())["step"]
        assert digest(self.reader.numbers()) == self.known[step]
        return step


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=[pytest.mark.soak] if n == "partly on disk" else []) for n in JOBS]
)
def specimen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    return Specimen(tmp_path_factory.mktemp("damage"), JOBS[request.param])


# -- bits -------------------------------------------------------------------------------------------------------------


def test_one_flipped_bit_anywhere(specimen: Specimen) -> None:
    """Some bits of every region of every file, its first and last byte among them."""
    run = specimen.copy()
    chosen, found = random.Random(5), dict[str, set[str]]()
    for region in specimen.regions:
        places = {region.start, region.stop - 1, *(chosen.randrange(region.start, region.stop) for _ in range(6))}
        for offset in places:
            bit = chosen.randrange(8)
            path = run / "step-2" / region.file
            flip(path, offset, bit)
            found.setdefault(region.what, set()).add(judged(run / "step-2", region, specimen.numbers))
            flip(path, offset, bit)
    assert found.pop("free room", {"harmless"}) == {"harmless"}
    assert all(outcome == {"detected"} for outcome in found.values()), found
    assert {"manifest", "table", "payload header", "payload"} <= found.keys()
    verify(run / "step-2")
    assert specimen.load(run) == 2


def test_every_bit_of_a_manifest(specimen: Specimen) -> None:
    """And whatever becomes of it, the older checkpoint is found."""
    run = specimen.copy()
    manifest = run / "step-2" / "manifest.json"
    size = manifest.stat().st_size
    wrong: list[tuple[int, int]] = []
    for offset, bit in itertools.product(range(size), range(8)):
        if (offset * 8 + bit) % 7 and offset > 60:
            continue
        flip(manifest, offset, bit)
        found, refused = checkpoints(run)
        if [f.path.name for f in found] != ["step-1"] or [path.name for path, _ in refused] != ["step-2"]:
            wrong.append((offset, bit))
        flip(manifest, offset, bit)
    assert not wrong
    assert [f.path.name for f in checkpoints(run)[0]] == ["step-2", "step-1"]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_version_does_not_hide_older_checkpoints(bit: int, specimen: Specimen) -> None:
    run = specimen.copy()
    manifest = run / "step-2" / "manifest.json"
    flip(manifest, manifest.read_bytes().index(b'"version":1') + len('"version":'), bit)
    assert specimen.load(run) == 1


def test_the_older_one_is_loaded_instead(specimen: Specimen, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever the newest has a flipped bit that is read; the log says why."""
    run = specimen.copy()
    for region in specimen.regions:
        path = run / "step-2" / region.file
        shared = path.stat().st_nlink > 1  # a file of both checkpoints: its damage may be the older one's, too
        flip(path, (region.start + region.stop) // 2, 3)
        caplog.clear()
        try:
            step = specimen.load(run)
        except NoCheckpoint:
            assert shared
            step = 0
        if step == 1:
            assert "step-2" in caplog.text
        else:
            unread = region.what in ("free room", "payload header") or region.file == "rank-00001.safetensors"
            assert step == (2 if unread else 0)
        flip(path, (region.start + region.stop) // 2, 3)
    assert specimen.load(run) == 2


# -- whole files ------------------------------------------------------------------------------------------------------


def cut_to(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def emptied(path: Path) -> None:
    """Every byte zero, as after a crash of a filesystem that knows the size but not the data."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def linked_elsewhere(path: Path) -> None:
    shutil.move(path, path.parent.parent / "moved-away")
    path.symlink_to(path.parent.parent / "moved-away")


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": os.unlink,
    "empty": cut_to(0),
    "cut to a half": cut_to(0.5),
    "one byte shorter": shorter,
    "one byte longer": longer,
    "all zero": emptied,
    "behind a symbolic link": linked_elsewhere,
    "a link to nothing": replaced_by(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replaced_by(lambda path: path.symlink_to(path.name)),
    "a folder": replaced_by(lambda path: path.mkdir()),
    "a pipe": replaced_by(os.mkfifo),
    "a link to a device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_is(damage: str, specimen: Specimen) -> None:
    """Each file of the newest checkpoint in turn: refused by verify, and the older one is loaded."""
    for name in sorted(os.listdir(specimen.newest)):
        run = specimen.copy()
        path = run / "step-2" / name
        if path.stat().st_nlink > 1:  # shared with the older one, which must stay as it is
            whole = path.read_bytes()
            path.unlink()
            path.write_bytes(whole)
        DAMAGES[damage](path)
        if damage.startswith("one byte") and "spool" in name:  # behind what the checkpoint needs, where a job may go on writing
            verify(run / "step-2")
            assert specimen.load(run) == 2
        else:
            with pytest.raises(CheckpointError):
                verify(run / "step-2")
            # whoever loads reads what is needed: not what is behind the end, and not the random numbers of other ranks
            unread = name == "rank-00001.safetensors" or (name.endswith(".safetensors") and damage == "one byte longer")
            assert specimen.load(run) in ({1, 2} if unread else {1}), name
        shutil.rmtree(run.parent)


def test_files_of_two_checkpoints_are_exchanged(specimen: Specimen) -> None:
    """A file that belongs to another checkpoint is not taken, even if it is whole."""
    for name in sorted(os.listdir(specimen.newest)):
        run = specimen.copy()
        newer, older = run / "step-2" / name, run / "step-1" / name
        if not older.exists() or older.read_bytes() == newer.read_bytes():
            continue
        newer.rename(run / "between")
        older.rename(newer)
        (run / "between").rename(older)
        for path in (run / "step-1", run / "step-2"):
            with pytest.raises(CheckpointError):
                verify(path)
        with pytest.raises(NoCheckpoint):
            specimen.load(run)
        shutil.rmtree(run.parent)


def test_files_of_one_checkpoint_are_exchanged(specimen: Specimen) -> None:
    names = sorted(os.listdir(specimen.newest))
    for one, other in itertools.combinations(names, 2):
        run = specimen.copy()
        a, b = run / "step-2" / one, run / "step-2" / other
        if a.read_bytes() == b.read_bytes():
            continue
        a.rename(run / "between")
        b.rename(a)
        (run / "between").rename(b)
        with pytest.raises(CheckpointError):
            verify(run / "step-2")
        assert specimen.load(run) == 1
        shutil.rmtree(run.parent)


def test_a_checkpoint_is_there_twice(specimen: Specimen) -> None:
    """A copy under another name is as good; one that misses something is passed over for the other."""
    run = specimen.copy()
    shutil.copytree(run / "step-2", run / "copy")
    assert specimen.load(run) == 2
    for name, other in (("copy", "step-2"), ("step-2", "copy")):
        (run / name / "rank-00000.json").rename(run / "between")
        assert specimen.load(run) == 2
        (run / "between").rename(run / name / "rank-00000.json")
        verify(run / other)


def test_files_that_do_not_belong_there(specimen: Specimen) -> None:
    """A checkpoint is what its manifest lists; what else is around does not matter."""
    run = specimen.copy()
    (run / "step-2" / "rank-00009.json").write_text("{}")
    (run / "step-2" / "notes").mkdir()
    (run / "LATEST").write_text("../../elsewhere\n")
    (run / "README").write_text("hello")
    (run / "empty").mkdir()
    (run / "link").symlink_to(run / "step-1")
    (run / "loop").symlink_to("loop")
    (run / ".new-step-3-0123456789abcdef").mkdir()
    shutil.copytree(run / "step-1", run / ".new-step-4-0123456789abcdef")
    os.mkfifo(run / "pipe")
    verify(run / "step-2")
    assert specimen.load(run) == 2
    (run / "LATEST").unlink()
    assert specimen.load(run) == 2


@pytest.mark.parametrize("name", ["a b", "ü", "x" * 200, "a\nb", os.fsdecode(b"a\xff")], ids=ascii)
def test_folders_with_odd_names(name: str, specimen: Specimen) -> None:
    """Refused when it is saved, or loaded like any other; somebody else's does not stop a run from being loaded."""
    run = specimen.copy()
    shutil.copytree(run / "step-1", run / name)
    assert specimen.load(run) == 2
    other = Trained("lora", "adamw_fused", Setup(), specimen.folder, 0)
    target = specimen.folder / "odd" / name
    try:
        lowtide.save(target, other.model, other.optimizer, extra={"step": 7}).wait()
    except lowtide.Error:
        return
    extra = lowtide.load(target, other.model, other.optimizer)
    assert extra == {"step": 7}
    assert lowtide.load(target.parent, other.model, other.optimizer) == extra
    shutil.rmtree(target.parent)


def test_nothing_is_there(specimen: Specimen, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NoCheckpoint):
            specimen.load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        specimen.load(tmp_path / "file")
    assert specimen.load(specimen.run) == 2
