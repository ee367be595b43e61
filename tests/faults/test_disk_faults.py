"""A disk that fails, fills up, lies, or is shared with others: a typed error that names the place, or no effect."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide import errors
from lowtide.errors import DiskCorrupted, DiskError, DiskFull, SpoolRefused
from lowtide.tiers import spool as spool_module
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.spool import Folder, JobFolder, Spool, clean, leftovers
from lowtide.tiers.store import Extent, Key, Priority
from tests.kit.stores import Effect, FailingDisk, Fault, aligned_bytes

KEY = Key("blocks.3", "moments")
MIB = 1 << 20
FOREVER = 10**9


def random_bytes(nbytes: int) -> Tensor:
    return torch.from_numpy(aligned_bytes(nbytes)).random_(0, 256)


def get(store: DiskStore, extent: Extent, block: int = 0) -> Tensor:
    into = torch.from_numpy(aligned_bytes(extent.block_bytes(block))).zero_()
    store.read(extent, block, into, Priority.NOW).wait()
    return into


def put(store: DiskStore, nbytes: int = 20_000) -> tuple[Extent, Tensor]:
    extent, data = store.reserve(KEY, [0, nbytes]), random_bytes(nbytes)
    store.write(extent, 0, data, Priority.NOW).wait()
    return extent, data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FailingDisk]:
    with closing(FailingDisk([Folder(str(tmp_path))], rank=5)) as store:
        yield store


def names_the_place(error: DiskError, folder: Path) -> None:
    assert (error.file, error.unit, error.kind, error.rank) == (str(folder), "blocks.3", "moments", 5)
    assert error.offset is not None
    for word in ("moments of unit 'blocks.3'", "rank 5", str(folder), f"offset {error.offset}", "last checkpoint"):
        assert word in str(error)


# ---- calls that fail ----


def test_a_read_that_fails_once_is_read_again(store: FailingDisk, caplog: pytest.LogCaptureFixture) -> None:
    extent, data = put(store)
    for what in (errno.EIO, Effect.FLIP):
        store.arm(Fault(what, calls="read"))
        with caplog.at_level(logging.WARNING):
            assert torch.equal(get(store, extent), data)
        assert "Reading once more" in caplog.text
        assert "blocks.3" in caplog.text
        assert store.failed_calls == 1
        caplog.clear()


def test_a_read_that_fails_twice_is_an_error(store: FailingDisk, tmp_path: Path) -> None:
    extent, data = put(store)
    store.arm(Fault(errno.EIO, calls="read", times=2))
    with pytest.raises(DiskError, match="Input/output error") as caught:
        get(store, extent)
    names_the_place(caught.value, tmp_path)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value.__cause__, OSError)
    assert torch.equal(get(store, extent), data)  # the bytes are still there
    store.drain()


def test_a_failed_write_loses_the_block_until_it_is_written_again(store: FailingDisk, tmp_path: Path) -> None:
    extent, _ = put(store)
    data = random_bytes(20_000)
    store.arm(Fault(errno.EIO, calls="write"))
    with pytest.raises(DiskError, match="a write failed: Input/output error") as caught:
        store.write(extent, 0, data, Priority.NOW).wait()
    names_the_place(caught.value, tmp_path)
    for _ in range(2):
        with pytest.raises(DiskError, match="a write failed: Input/output error") as again:
            get(store, extent)
        assert str(again.value) == str(caught.value)
    store.drain()  # it was seen
    store.write(extent, 0, data, Priority.NOW).wait()
    assert torch.equal(get(store, extent), data)


@pytest.mark.parametrize("use", ["read", "write", "drain"])
def test_a_failed_write_that_nobody_waits_for_is_raised_by_the_next_use(store: FailingDisk, use: str) -> None:
    other, data = put(store)
    extent = store.reserve(KEY, [0, 4096])
    store.arm(Fault(errno.EIO, calls="write"))
    store.write(extent, 0, random_bytes(4096), Priority.WRITE_BACK)
    store._queue.settle()
    arguments = () if use == "drain" else (other, 0, data, Priority.NOW)
    with pytest.raises(DiskError, match="a write failed"):
        getattr(store, use)(*arguments)
    assert torch.equal(get(store, other), data)
    store.drain()


@pytest.mark.parametrize("nbytes", [20_000, 9 * MIB + 5])
@pytest.mark.parametrize("what", [Effect.SHORT, Effect.RAGGED, errno.EINTR, errno.EAGAIN], ids=str)
def test_short_and_interrupted_transfers_go_on(store: FailingDisk, what: Effect | int, nbytes: int) -> None:
    for times in (1, 3):
        store.arm(Fault(what, times=times))
        extent, data = put(store, nbytes)
        assert store.failed_calls == times
        store.arm(Fault(what, times=times))
        assert torch.equal(get(store, extent), data)
        assert store.failed_calls == times


@pytest.mark.parametrize("what", [Effect.SHORT, Effect.RAGGED], ids=str)
def test_without_direct_io_short_transfers_go_on_too(tmp_path: Path, no_direct_io: None, what: Effect) -> None:
    with closing(FailingDisk([Folder(str(tmp_path))])) as store:
        store.arm(Fault(what, times=4))
        extent, data = put(store, 100_001)
        store.arm(Fault(what, times=4))
        assert torch.equal(get(store, extent), data)
        assert store.failed_calls == 4


def test_a_disk_that_never_is_ready_is_an_error(store: FailingDisk) -> None:
    store.arm(Fault(errno.EAGAIN, times=FOREVER))
    with pytest.raises(DiskError, match="a write failed"):
        put(store)


@pytest.mark.parametrize("what", [Effect.TORN, Effect.FLIP], ids=str)
def test_a_write_that_lies_is_found_when_read(store: FailingDisk, tmp_path: Path, what: Effect) -> None:
    extent = store.reserve(KEY, [0, 20_000])
    store.write(extent, 0, random_bytes(20_000), Priority.NOW).wait()
    store.arm(Fault(what, calls="write"))
    store.write(extent, 0, random_bytes(20_000), Priority.NOW).wait()
    assert store.failed_calls == 1
    with pytest.raises(DiskCorrupted, match="write 2 of this block did not come back") as caught:
        get(store, extent)
    names_the_place(caught.value, tmp_path)


@pytest.mark.parametrize("what", [errno.EIO, errno.ENOSPC, *Effect], ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_whichever_call_goes_wrong_nothing_wrong_is_read(store: FailingDisk, what: int | Effect, times: int) -> None:
    """A step of writes and reads with the n-th call failing, for all n: right bytes or a typed error, and then all is well."""
    sizes = [4096, 9 * MIB + 100, 5000]
    extent = store.reserve(KEY, [0, *itertools.accumulate(sizes)])
    data = [random_bytes(n) for n in sizes]

    def step() -> list[DiskError]:
        wrong: list[DiskError] = []
        for block, bytes_ in enumerate(data):
            bytes_.add_(1)  # else a write that does not happen would be as good as one that does
            try:
                store.write(extent, block, bytes_, Priority.WRITE_BACK).wait()
                assert torch.equal(get(store, extent, block), bytes_)
            except DiskError as error:
                wrong.append(error)
        assert all(error.unit == "blocks.3" for error in wrong)
        return wrong

    store.arm(None)
    assert step() == []
    calls = store.calls["any"]
    assert calls == 2 * (1 + 3 + 2)
    errors_seen = 0
    for number in range(calls):
        store.arm(Fault(what, at=number, times=times))
        errors_seen += len(step())
        assert store.failed_calls >= 1
    assert bool(errors_seen) == (what not in (Effect.SHORT, Effect.RAGGED))
    store.arm(None)
    assert step() == []


# ---- the file changes under it ----


@contextmanager
def the_file(store: DiskStore) -> Iterator[int]:
    fd = os.open(f"/proc/self/fd/{store._spools[0].fd}", os.O_RDWR)
    yield fd
    os.close(fd)


def test_a_bit_that_flips_on_disk_is_found(store: FailingDisk, tmp_path: Path) -> None:
    first, kept = put(store)
    extent, _ = put(store)
    offset = store._records[extent].blocks[0].place.offset
    with the_file(store) as fd:
        byte = os.pread(fd, 1, offset + 12_345)
        os.pwrite(fd, bytes([byte[0] ^ 4]), offset + 12_345)
    with pytest.raises(DiskCorrupted, match="did not come back") as caught:
        get(store, extent)
    names_the_place(caught.value, tmp_path)
    assert caught.value.offset == offset
    assert torch.equal(get(store, first), kept)


def test_an_old_block_that_is_put_back_is_found(store: FailingDisk) -> None:
    extent, _ = put(store, 8192)
    with the_file(store) as fd:
        old = os.pread(fd, 8192, store._records[extent].blocks[0].place.offset)
        newer = random_bytes(8192)
        store.write(extent, 0, newer, Priority.NOW).wait()
        assert torch.equal(get(store, extent), newer)
        os.pwrite(fd, old, store._records[extent].blocks[0].place.offset)
    with pytest.raises(DiskCorrupted, match="write 2 of this block"):
        get(store, extent)


def test_a_block_of_another_unit_in_its_place_is_found(store: FailingDisk) -> None:
    (one, _), (two, _) = put(store, 8192), put(store, 8192)
    with the_file(store) as fd:
        os.pwrite(
            fd, os.pread(fd, 8192, store._records[two].blocks[0].place.offset), store._records[one].blocks[0].place.offset
        )
    with pytest.raises(DiskCorrupted):
        get(store, one)


@pytest.mark.parametrize("left", [0, 4096, 10_000])
def test_a_truncated_file_is_found(store: FailingDisk, left: int) -> None:
    extent, _ = put(store)
    with the_file(store) as fd:
        os.ftruncate(fd, left)
    with pytest.raises(DiskCorrupted, match=r"a read failed: the file ends|did not come back"):
        get(store, extent)


def test_deleting_the_folder_does_not_matter(store: FailingDisk, tmp_path: Path) -> None:
    extent, data = put(store)
    subprocess.run(["rm", "-r", *map(str, tmp_path.iterdir())], check=True)
    other, more = put(store, MIB)
    assert torch.equal(get(store, extent), data)
    assert torch.equal(get(store, other), more)
    store.close()
    assert list(tmp_path.iterdir()) == []


# ---- no room ----


@contextmanager
def small_filesystem(path: Path, nbytes: int, inodes: int = 1000) -> Iterator[Path]:
    path.mkdir()
    options = f"size={nbytes},nr_inodes={inodes}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("only root may mount a filesystem to fill up")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def free_bytes(path: Path) -> int:
    numbers = os.statvfs(path)
    return numbers.f_bavail * numbers.f_frsize


def test_a_full_disk_is_found_when_room_is_reserved(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", 8 * MIB) as folder, closing(DiskStore([Folder(str(folder))], rank=2)) as store:
        extent, data = put(store, 2 * MIB)
        free = free_bytes(folder)
        with pytest.raises(DiskFull, match="No space left") as caught:
            store.reserve(KEY, [0, MIB, 2 * MIB, 7 * MIB])
        assert caught.value.needed_bytes == 7 * MIB
        assert free <= caught.value.free_bytes <= 8 * MIB
        assert (caught.value.file, caught.value.unit, caught.value.rank) == (str(folder), "blocks.3", 2)
        for word in ("7.0 MiB more needed", "MiB free", str(folder), "add a folder"):
            assert word in str(caught.value)
        assert torch.equal(get(store, extent), data)
        room = store.reserve(KEY, [0, 4 * MIB])  # what was taken for the first blocks came back
        store.write(room, 0, random_bytes(4 * MIB), Priority.NOW).wait()


def test_a_full_folder_hands_over_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    with small_filesystem(tmp_path / "small", 6 * MIB) as small:
        with closing(DiskStore([Folder(str(small)), Folder(str(tmp_path / "large"))], rank=0)) as store:
            extent = store.reserve(KEY, [MIB * i for i in range(21)])
            data = [random_bytes(MIB) for _ in range(20)]
            for block, bytes_ in enumerate(data):
                store.write(extent, block, bytes_, Priority.NOW)
            assert all(torch.equal(get(store, extent, block), bytes_) for block, bytes_ in enumerate(data))
            used = [spool.used_bytes for spool in store._spools]
            assert sum(used) == 20 * MIB
            assert 0 < used[0] <= 6 * MIB


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    run_job(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        try:
            store.reserve(KEY, [0, 2 * MIB])
        except DiskFull as full:
            assert full.needed_bytes == 2 * MIB, full
            assert "ulimit -f" in str(full), full
        else:
            raise SystemExit("reserved more than the limit")
        store.reserve(KEY, [0, MIB // 2])
        """,
        tmp_path,
    )


def test_a_folder_has_a_limit(tmp_path: Path) -> None:
    with closing(DiskStore([Folder(str(tmp_path), 3 * MIB)], rank=0)) as store:
        first = store.reserve(KEY, [0, MIB, 2 * MIB])
        with pytest.raises(DiskFull, match=r"limit of 3\.0 MiB") as caught:
            store.reserve(KEY, [0, MIB + 1])
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (MIB + 4096, MIB)
        store.reserve(KEY, [0, MIB])
        store.free(first)
        store.reserve(KEY, [0, 2 * MIB])
        assert store._spools[0].size_bytes == 3 * MIB


def test_limits_of_several_folders_add_up(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    folders = [Folder(str(tmp_path / "a"), MIB), Folder(str(tmp_path / "b"), 3 * MIB)]
    with closing(DiskStore(folders, rank=0)) as store:
        store.reserve(KEY, [MIB // 4 * i for i in range(17)])
        assert [spool.size_bytes for spool in store._spools] == [MIB, 3 * MIB]
        with pytest.raises(DiskFull) as caught:
            store.reserve(KEY, [0, 1])
        assert caught.value.free_bytes == 0


def test_room_under_pending_requests_is_waited_for(tmp_path: Path) -> None:
    with closing(DiskStore([Folder(str(tmp_path), 9 * MIB)], rank=0, threads=1)) as store:
        for _ in range(5):
            extent = store.reserve(KEY, [0, 9 * MIB])
            store.write(extent, 0, random_bytes(9 * MIB), Priority.WRITE_BACK)
            store.free(extent)
        store.drain()


# ---- filesystems that can do less ----


@pytest.fixture
def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on filesystems that refuse O_DIRECT when a file is opened; there is none to mount here."""
    refuse_flag(monkeypatch, os.O_DIRECT, errno.EINVAL)


def refuse_flag(monkeypatch: pytest.MonkeyPatch, flag: int, number: int) -> None:
    real = os.open

    def fake(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & flag == flag:
            raise OSError(number, os.strerror(number))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", fake)


def test_without_direct_io_it_works_and_says_so_once(
    tmp_path: Path, no_direct_io: None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with closing(DiskStore([Folder(str(tmp_path))], rank=0)) as store:
            assert not store._spools[0].direct
            extent, data = put(store)
            assert torch.equal(get(store, extent), data)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"{tmp_path} has no direct I/O" in caplog.text


def test_a_folder_in_memory_is_named_as_such(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", 8 * MIB) as folder, closing(DiskStore([Folder(str(folder))], rank=0)):
        assert f"{folder} is memory, not a disk" in caplog.text


def test_without_nameless_files_the_name_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flag(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    with closing(DiskStore([Folder(str(tmp_path))], rank=0)) as store:
        assert store._spools[0].direct
        assert [path.name for path in tmp_path.glob("*/*")] == ["lock"]
        extent, data = put(store)
        assert torch.equal(get(store, extent), data)


def test_without_reservation_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with closing(Spool(Folder(str(tmp_path)), rank=0)) as spool:
        spool.take(3 * MIB + 4096)
        assert os.fstat(spool.fd).st_blocks * 512 >= 3 * MIB + 4096
    with small_filesystem(tmp_path / "small", 4 * MIB) as folder, closing(Spool(Folder(str(folder)), rank=0)) as spool:
        with pytest.raises(DiskFull):
            spool.take(8 * MIB)
        assert os.fstat(spool.fd).st_size == 0
        assert free_bytes(folder) > 3 * MIB


# ---- whose folder it is ----


def test_the_folder_and_the_file_are_private(store: FailingDisk, tmp_path: Path) -> None:
    (home,) = tmp_path.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    found = os.fstat(store._spools[0].fd)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_nlink == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()] == [0o600]


def is_there_already(path: Path, elsewhere: Path) -> None:
    path.mkdir(mode=0o700)


def is_a_symlink(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def is_a_file(path: Path, elsewhere: Path) -> None:
    path.touch()


@pytest.mark.parametrize("put_there", [is_there_already, is_a_symlink, is_a_file])
def test_what_waits_at_the_path_is_refused(tmp_path: Path, put_there: Callable[[Path, Path], None]) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    name = "lowtide-1-0123456789abcdef"
    put_there(folder / name, elsewhere)
    with pytest.raises(SpoolRefused, match="is there already") as caught:
        JobFolder(str(folder), rank=1, name=name)
    assert (caught.value.file, caught.value.rank) == (str(folder), 1)
    assert "Give a folder" in str(caught.value)
    assert list(elsewhere.iterdir()) == []


def becomes_a_symlink(path: Path, elsewhere: Path) -> None:
    path.rmdir()
    path.symlink_to(elsewhere)


def becomes_another_users(path: Path, elsewhere: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a folder away")
    os.chown(path, 65534, 65534)


def becomes_open_to_others(path: Path, elsewhere: Path) -> None:
    path.chmod(0o750)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (becomes_a_symlink, "was replaced by something that is not a folder"),
        (becomes_another_users, "belongs to user 65534"),
        (becomes_open_to_others, "has mode 0750, not 0700"),
    ],
)
def test_a_folder_that_is_swapped_while_it_is_made_is_refused(
    tmp_path: Path, change: Callable[[Path, Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    enter = JobFolder._enter

    def late(self: JobFolder, name: str) -> None:
        change(folder / name, elsewhere)
        enter(self, name)

    monkeypatch.setattr(JobFolder, "_enter", late)
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SpoolRefused, match=words):
        DiskStore([Folder(str(folder))], rank=0)
    assert list(elsewhere.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= fds


@pytest.mark.parametrize("kind", ["missing", "file", "not writable"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "folder"
    if kind == "file":
        path.touch()
    elif kind == "not writable":
        path = Path("/proc/self")
    (tmp_path / "good").mkdir()
    with pytest.raises(SpoolRefused, match="cannot be made") as caught:
        DiskStore([Folder(str(tmp_path / "good")), Folder(str(path))], rank=0)
    assert caught.value.file == str(path)
    assert list((tmp_path / "good").iterdir()) == []  # the first folder is left as it was


@pytest.mark.parametrize("inodes", [1, 2, 3])
def test_a_filesystem_without_room_for_another_file_is_left_as_it_was(tmp_path: Path, inodes: int) -> None:
    with small_filesystem(tmp_path / "small", MIB, inodes) as folder:
        with pytest.raises(SpoolRefused, match="No space left"):
            DiskStore([Folder(str(folder))], rank=0)
        assert list(folder.iterdir()) == []


# ---- jobs that share a folder, jobs that die ----

JOB = """
import os, resource, sys
import torch
from lowtide.errors import DiskFull
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.spool import Folder
from lowtide.tiers.store import Key, Priority
MIB, KEY = 1 << 20, Key("blocks.3", "moments")
store = DiskStore([Folder(sys.argv[1])], rank=0)
"""
HOLDS = """
extent = store.reserve(KEY, [0, 4 * MIB])
data = torch.full((4 * MIB,), 7, dtype=torch.uint8)
store.write(extent, 0, data, Priority.NOW).wait()
print("ready", flush=True)
sys.stdin.readline()
store.read(extent, 0, data.zero_(), Priority.NOW).wait()
assert bool((data == 7).all())
"""


def start_job(body: str, folder: Path) -> subprocess.Popen[str]:
    code = JOB + textwrap.dedent(body)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run_job(body: str, folder: Path) -> None:
    with start_job(body, folder) as job:
        _, problems = job.communicate(timeout=100)
    assert job.returncode == 0, problems


@contextmanager
def job_under_way(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with start_job(HOLDS, folder) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        try:
            yield job
        finally:
            job.kill()


def kill(job: subprocess.Popen[str]) -> None:
    job.send_signal(signal.SIGKILL)
    job.wait(60)


def test_two_jobs_in_one_folder_do_not_disturb_each_other(store: FailingDisk, tmp_path: Path) -> None:
    extent, data = put(store, 4 * MIB)
    with job_under_way(tmp_path) as job:
        assert len(list(tmp_path.iterdir())) == 2
        assert leftovers(str(tmp_path)) == clean(str(tmp_path)) == []
        assert torch.equal(get(store, extent), data)
        _, problems = job.communicate("go on\n", timeout=60)
        assert job.returncode == 0, problems
    assert len(list(tmp_path.iterdir())) == 1  # it took its folder away, without a call of close
    assert torch.equal(get(store, extent), data)


def test_a_killed_job_leaves_no_bytes_and_clean_removes_the_rest(tmp_path: Path) -> None:
    with small_filesystem(tmp_path / "small", 16 * MIB) as folder:
        free = free_bytes(folder)
        with closing(DiskStore([Folder(str(folder))], rank=0)) as store, job_under_way(folder) as job:
            assert free_bytes(folder) <= free - 4 * MIB
            alive = store._spools[0].path
            kill(job)
            assert free_bytes(folder) >= free - 65536
            (dead,) = [str(path) for path in folder.iterdir() if str(path) != alive]
            assert [(path.name, path.stat().st_size) for path in Path(dead).iterdir()] == [("lock", 0)]
            assert leftovers(str(folder)) == [dead]
            assert clean(str(folder)) == [dead]
            assert clean(str(folder)) == []
            assert [str(path) for path in folder.iterdir()] == [alive]
            extent, data = put(store)
            assert torch.equal(get(store, extent), data)


def test_clean_removes_only_what_dead_jobs_left(tmp_path: Path) -> None:
    name = "lowtide-1-0123456789abcde"
    dead = tmp_path / f"{name}0"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    unborn = tmp_path / f"{name}1"
    unborn.mkdir(mode=0o700)
    half = tmp_path / f"{name}2"
    half.mkdir(mode=0o700)
    (half / "bytes").touch()
    users = tmp_path / f"{name}3"
    users.mkdir()
    (users / "lock").touch()
    (users / "thesis.txt").write_text("mine")
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / f"{name}4").symlink_to(target)
    (tmp_path / f"{name}5").write_text("a file")
    (tmp_path / "lowtide-results").mkdir()
    linked = tmp_path / f"{name}6"
    linked.mkdir(mode=0o700)
    (linked / "lock").symlink_to(target / "lock")
    if not os.geteuid():
        other = tmp_path / f"{name}7"
        other.mkdir()
        os.chown(other, 65534, 65534)
    before = {path.name for path in tmp_path.iterdir()}
    removed = clean(str(tmp_path))
    assert removed == [str(dead), str(unborn), str(half)]
    assert {path.name for path in tmp_path.iterdir()} == before - {dead.name, unborn.name, half.name}
    assert (users / "thesis.txt").read_text() == "mine"
    assert (target / "lock").exists()


def test_clean_waits_for_a_job_that_is_just_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making its folder and marking it a job looks dead; the folder around is locked meanwhile."""
    monkeypatch.setattr(spool_module, "_LOCK_PATIENCE", 0.05)
    enter = JobFolder._enter
    refusals: list[str] = []

    def looked_at(self: JobFolder, name: str) -> None:
        with pytest.raises(SpoolRefused, match="try again") as caught:
            clean(str(tmp_path))
        refusals.append(str(caught.value))
        enter(self, name)

    monkeypatch.setattr(JobFolder, "_enter", looked_at)
    with closing(DiskStore([Folder(str(tmp_path))], rank=0)):
        assert len(refusals) == 1
        assert clean(str(tmp_path)) == []


def test_clean_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpoolRefused, match="cannot be opened"):
        clean(str(tmp_path / "missing"))


# ---- the errors ----


@pytest.mark.parametrize("kind", [DiskError, DiskCorrupted, DiskFull, SpoolRefused])
def test_errors_pass_between_processes(kind: type[DiskError]) -> None:
    here = kind("it broke", "/scratch", 4096, "blocks.3", "moments", 7)
    if isinstance(here, DiskFull):
        here.needed_bytes, here.free_bytes = 5 * MIB, 3 * MIB
    there = pickle.loads(pickle.dumps(here))
    assert type(there) is kind
    assert str(there) == str(here)
    assert vars(there) == vars(here)
    assert isinstance(there, errors.Error)


def test_a_stalled_disk_passes_too() -> None:
    here = errors.DiskStalled("read of moments of 'head'", 300.0)
    there = pickle.loads(pickle.dumps(here))
    assert str(there) == str(here)
    assert isinstance(there, TimeoutError)
