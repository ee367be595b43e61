"""How fast a folder's disk is, past the page cache, as the disk tier uses it: large aligned requests from several threads.

The bytes go to one private file that is reserved beforehand and has no name, so that nothing is left behind, however the
process ends. They are random: some disks compress, and some find zeros and store nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import xxhash

from lowtide.errors import DiskError, DiskFull, SpoolRefused
from lowtide.spec.hardware import Disk

MOST_BYTES = 1 << 30
"""Of the file: a probe must not fill a disk."""
_REQUEST = 4 << 20
_PAGE = 4096
_THREADS = 8
_TIER_THREADS = 4
"""Of the disk tier."""
_LEAST_REQUESTS = 2
_SHARE_OF_FREE = 4
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_IN_MEMORY = {"tmpfs", "ramfs"}


@dataclass(frozen=True, slots=True)
class _File:
    """The file that is measured with: its descriptor, its requests, and whether it bypasses the page cache."""

    fd: int
    requests: int
    direct: bool
    buffers: list[mmap.mmap]
    """One per thread."""


def measure_disk(folder: str, *, most_bytes: int, seconds: float, beside: Callable[[], float] | None = None) -> Disk:
    """Read, write and mixed speed of ``folder``, ``seconds`` for each; or a DiskError that says why it cannot be measured.

    ``beside`` computes something and says how long it took: it shows what a busy disk costs compute.
    """
    free = free_bytes(folder)
    size = min(most_bytes, MOST_BYTES, free // _SHARE_OF_FREE) // _REQUEST * _REQUEST
    if size < _LEAST_REQUESTS * _REQUEST:
        raise DiskFull("too little room to measure it", folder, needed_bytes=_LEAST_REQUESTS * _REQUEST, free_bytes=free)
    try:
        with _private_file(folder, size) as file:
            return _measure(file, seconds, free, beside)
    except DiskError:
        raise
    except OSError as cause:
        raise SpoolRefused(f"it cannot be measured: {cause.strerror}", folder) from cause


def free_bytes(folder: str) -> int:
    """What the filesystem of ``folder`` still has for this user."""
    try:
        numbers = os.statvfs(folder)
    except OSError as cause:
        raise SpoolRefused(f"it cannot be looked at: {cause.strerror}", folder) from cause
    return numbers.f_bavail * numbers.f_frsize


def device_of(folder: str) -> tuple[str, str]:
    """A name for the device behind ``folder``, the same for all folders on it, and the type of its filesystem."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mount, _, filesystem = line.partition(" - ")
            if mount.split()[2] == number:
                kind, source, *_ = filesystem.split()
                return f"{number} {source}", kind
    return number, ""


def is_memory(folder: str) -> bool:
    """Whether what is kept in ``folder`` counts as memory."""
    return device_of(folder)[1] in _IN_MEMORY


def _measure(file: _File, seconds: float, free: int, beside: Callable[[], float] | None) -> Disk:
    # The first pass writes into space that was only reserved, which costs the filesystem extra and happens once in a job.
    held, _ = _run(file, _Requests(held=file.requests, once=True), seconds)
    write = _rate(file, _Requests(held=held), seconds)
    read = _rate(file, _Requests(held=held, reads=2), seconds)
    mixed = _rate(file, _Requests(held=held, reads=1), seconds)
    disk = Disk(read=read, write=write, mixed=mixed, free_bytes=free, direct=file.direct)
    return disk if beside is None else replace(disk, busy=_lost(file, _Requests(held=held, reads=1), beside))


def _lost(file: _File, requests: _Requests, beside: Callable[[], float]) -> float:
    """Which share of compute is lost while the disk works and every byte is hashed, as the disk tier does."""
    alone = beside()
    stop = threading.Event()
    numbers = itertools.count()

    def work(buffer: mmap.mmap) -> None:
        while not stop.is_set():
            is_read, place = requests[next(numbers)]
            _transfer(os.preadv if is_read else os.pwritev, file.fd, buffer, place * _REQUEST)
            hasher = xxhash.xxh3_64()
            hasher.update(buffer)

    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(work, buffer) for buffer in file.buffers[:_TIER_THREADS]]
        try:
            disturbed = beside()
        finally:
            stop.set()
        for future in futures:
            future.result()
    return min(max(0.0, 1 - alone / disturbed), 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    """What to do to the first ``held`` places of the file: go through them ``once`` or again and again."""

    held: int
    reads: int = 0
    """Of every two requests."""
    once: bool = False

    def __getitem__(self, number: int) -> tuple[bool, int]:
        """Whether a request is a read, and its place."""
        if self.reads != 1:
            return self.reads == 2, number % self.held
        # Reads and writes go to the two halves of the file, as a job reads one unit while it writes another.
        half = max(self.held // 2, 1)
        is_read, turn = number % 2 == 0, number // 2 % half
        return is_read, turn if is_read else self.held - 1 - turn


def _rate(file: _File, requests: _Requests, seconds: float) -> float:
    """Bytes per second."""
    if not file.direct:  # reading back what was just written would measure memory
        os.fdatasync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    done, took = _run(file, requests, seconds)
    return done * _REQUEST / took


def _run(file: _File, requests: _Requests, seconds: float) -> tuple[int, float]:
    """Make requests from several threads until ``seconds`` have passed; returns how many were made, and the time it took."""
    lock = threading.Lock()
    started = time.perf_counter()
    taken = 0

    def next_number() -> int | None:
        nonlocal taken
        with lock:
            late = time.perf_counter() - started > seconds and taken >= _LEAST_REQUESTS
            if late or (requests.once and taken >= requests.held):
                return None
            taken += 1
            return taken - 1

    def work(buffer: mmap.mmap) -> None:
        while (number := next_number()) is not None:
            is_read, place = requests[number]
            _transfer(os.preadv if is_read else os.pwritev, file.fd, buffer, place * _REQUEST)

    with ThreadPoolExecutor(_THREADS) as pool:
        for future in [pool.submit(work, buffer) for buffer in file.buffers]:
            future.result()
    if not file.direct:
        os.fdatasync(file.fd)
    return taken, time.perf_counter() - started


def _random_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, _REQUEST)  # a map starts on a page, as direct transfers need
    buffer.write(secrets.token_bytes(_REQUEST))
    return buffer


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, buffer: mmap.mmap, offset: int) -> None:
    with memoryview(buffer) as whole:
        done = 0
        while done < len(whole):
            with whole[done:] as rest:
                moved = call(fd, [rest], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, "the file ended early")
            done += moved


@contextlib.contextmanager
def _private_file(folder: str, size: int) -> Generator[_File, None, None]:
    with contextlib.ExitStack() as held:
        fd, direct = _open(folder)
        held.callback(os.close, fd)
        os.posix_fallocate(fd, 0, size)
        buffers = [held.enter_context(_random_buffer()) for _ in range(_THREADS)]
        yield _File(fd=fd, requests=size // _REQUEST, direct=direct, buffers=buffers)


def _open(folder: str) -> tuple[int, bool]:
    """A private file in ``folder`` without a name, and whether it bypasses the page cache."""
    for flag in (0,) if is_memory(folder) else (os.O_DIRECT, 0):
        try:
            fd = _open_nameless(folder, flag)
        except OSError as error:
            if flag and error.errno in _UNSUPPORTED:
                continue
            raise
        if not flag or _direct_works(fd):
            return fd, bool(flag)
        os.close(fd)
    raise OSError(errno.EINVAL, "no file can be made there")


def _open_nameless(folder: str, flag: int) -> int:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flag, 0o600)
    path = os.path.join(folder, f"lowtide-probe-{secrets.token_hex(8)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag, 0o600)
    os.unlink(path)
    return fd


def _direct_works(fd: int) -> bool:
    """Some filesystems open a file for direct transfers and then refuse them."""
    with mmap.mmap(-1, _PAGE) as page:
        try:
            os.pwritev(fd, [page], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
