"""One private file without a name per folder, and the room in it.

A job makes a folder of its own inside the user's (0700, a name nobody can guess) and opens the file there by ``O_TMPFILE``: no
other program finds it, and when the process ends, however it ends, the kernel frees the space. What a killed job leaves is
an empty folder with an empty lock file. The lock is held as long as the job lives, which is how ``leftovers`` tells the dead
from the living: a process id would say nothing about other containers and other hosts.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from lowtide.errors import DiskFull, SpoolRefused
from lowtide.tiers.store import ALIGNMENT

_log = logging.getLogger(__name__)

_NAME = re.compile(r"lowtide-\d+-[0-9a-f]{16}")
_LOCK = "lock"
_FILE = "bytes"  # only where the filesystem has no files without a name, and only for a moment
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK_PATIENCE = 5.0  # seconds; the user's folder is locked only while a job's folder is made or removed
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that the disk tier may use, and how many bytes of it this rank may take at most."""

    path: str
    limit: int | None = None


class Spool:
    """The file of one folder: its descriptor and the sole owner of its free list. Callers hold a lock around calls.

    ``direct``: whether the file bypasses the page cache; then offsets, lengths and memory are multiples of ``ALIGNMENT``.
    """

    def __init__(self, folder: Folder, *, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.used_bytes = 0
        self.size_bytes = 0
        self._pid = os.getpid()
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset, neighbours merged
        self._kept: dict[int, list[int]] = {}  # offset: bytes, and how many checkpoints refer to them
        self._home = JobFolder(folder.path, rank=rank)
        self.path = self._home.path
        try:
            self.fd, self.direct, self._never_named = _open_file(self._home, rank)
            # Held as long as the job lives: whoever finds the file in a checkpoint can tell whether it is still written to.
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_SH)
        except BaseException:
            self._home.remove()
            raise

    def take(self, nbytes: int) -> int:
        """The offset of ``nbytes`` (a multiple of ``ALIGNMENT``) that are surely there, or DiskFull."""
        for index, (offset, free) in enumerate(self._free):
            if free >= nbytes:
                self._free[index : index + 1] = [(offset + nbytes, free - nbytes)] if free > nbytes else []
                self.used_bytes += nbytes
                return offset
        offset = self.size_bytes
        last = self._free[-1] if self._free else (0, 0)
        if sum(last) == self.size_bytes:  # the file ends in free space: add only what is missing
            offset = last[0] if last[1] else offset
        self.grow(offset + nbytes - self.size_bytes)
        if offset == last[0] and last[1]:
            self._free.pop()
        self.used_bytes += nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take room back."""
        if not nbytes:
            return
        self.used_bytes -= nbytes
        index = bisect.bisect_left(self._free, (offset, 0))
        end = offset + nbytes
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset = self._free.pop(index)[0]
        self._free.insert(index, (offset, end - offset))

    def grow(self, nbytes: int) -> None:
        """Make the file longer, with its space reserved: a later write into it cannot find the disk full."""
        limit = self.folder.limit
        if limit is not None and self.size_bytes + nbytes > limit:
            raise self._full(f"the folder's limit of {limit / 2**20:.1f} MiB is reached", nbytes, limit - self.used_bytes)
        try:
            _allocate(self.fd, self.size_bytes, nbytes)
        except OSError as cause:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size_bytes)  # a part may have been reserved
            if cause.errno not in _FULL:
                raise SpoolRefused(f"no room could be reserved: {cause.strerror}", self.folder.path, rank=self.rank) from cause
            reason = "the size limit for files (ulimit -f)" if cause.errno == errno.EFBIG else cause.strerror
            raise self._full(f"no room could be reserved: {reason}", nbytes, self.free_bytes()) from cause
        self.size_bytes += nbytes

    def free_bytes(self) -> int:
        """What this spool could still take: unused room in the file and what the filesystem and the limit leave."""
        inside = self.size_bytes - self.used_bytes
        with contextlib.suppress(OSError):
            numbers = os.fstatvfs(self.fd)
            outside = numbers.f_bavail * numbers.f_frsize
            if self.folder.limit is not None:
                outside = min(outside, self.folder.limit - self.size_bytes)
            return inside + max(outside, 0)
        return inside

    # -- places that a checkpoint refers to ---------------------------------------------------------------------------

    def link(self, folder: int, name: str) -> None:
        """Give the file a name in ``folder``, a descriptor, and make sure that what is in it is on the disk."""
        os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=folder, follow_symlinks=True)
        self._never_named = False
        os.fdatasync(self.fd)

    def can_link_to(self, folder: int) -> bool:
        """Whether the file could get a name in ``folder``: same filesystem, and it has one or never had one (the kernel gives
        no name to a file that has lost its last)."""
        facts = os.fstat(self.fd)
        return (self._never_named or facts.st_nlink > 0) and os.fstat(folder).st_dev == facts.st_dev

    def links(self) -> int:
        """How many names the file has."""
        return os.fstat(self.fd).st_nlink

    def keep(self, offset: int, nbytes: int) -> None:
        """These bytes stay when the job ends."""
        self._kept.setdefault(offset, [nbytes, 0])[1] += 1

    def let_go(self, offset: int) -> None:
        """Undo one ``keep``, if there was one."""
        entry = self._kept.get(offset)
        if entry is not None:
            entry[1] -= 1
            if not entry[1]:
                del self._kept[offset]

    def close(self) -> None:
        """Free the space and remove the job's folder. Idempotent; in a forked process it does nothing."""
        if os.getpid() != self._pid or self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        with contextlib.suppress(OSError):
            if self._kept and os.fstat(fd).st_nlink:
                free_all_but(fd, [(offset, nbytes) for offset, (nbytes, _) in self._kept.items()])
            else:
                os.ftruncate(fd, 0)  # forked processes may hold the file open; the space should not wait for them
        os.close(fd)
        self._home.remove()

    def _full(self, problem: str, needed: int, free: int) -> DiskFull:
        return DiskFull(problem, self.folder.path, rank=self.rank, needed_bytes=needed, free_bytes=max(free, 0))


class JobFolder:
    """This job's folder inside the user's: made, checked and marked as alive."""

    def __init__(self, parent: str, *, rank: int, name: str | None = None) -> None:
        name = name or f"lowtide-{os.getpid()}-{secrets.token_hex(8)}"
        self.path = os.path.join(parent, name)
        self._name = name
        self._rank = rank
        self._parent_fd = self.fd = self._lock_fd = -1
        try:
            self._parent_fd = os.open(parent, _DIRECTORY)
            with _folder_locked(self._parent_fd):
                self._make(name)
        except OSError as cause:
            self._close()
            if isinstance(cause, SpoolRefused):
                raise
            raise self._refused(f"{self.path!r} cannot be made: {cause.strerror}") from cause

    def _make(self, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=self._parent_fd)
        except FileExistsError:
            raise self._refused(f"{self.path!r} is there already, and not made by this job") from None
        self._enter(name)
        try:
            self._lock_fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)
        except OSError:
            self._erase()
            raise
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _log.warning("%s has no file locks (%s): lowtide cannot tell dead jobs from live ones there", self.path, error)

    def _enter(self, name: str) -> None:
        """Open what was just made, and make sure that it is that: somebody may have put another thing in its place."""
        try:
            self.fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._parent_fd)
        except OSError as cause:
            problem = f"{self.path!r} was replaced by something that is not a folder: {cause.strerror}"
            raise self._refused(problem) from cause
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise self._refused(f"{self.path!r} belongs to user {found.st_uid}, not to this one ({os.geteuid()})")
        if stat.S_IMODE(found.st_mode) & 0o777 != 0o700:
            raise self._refused(f"{self.path!r} has mode {stat.S_IMODE(found.st_mode):04o}, not 0700: others could look in")

    def remove(self) -> None:
        """Remove the folder and the mark. What is in the way stays: only what this job made is removed."""
        self._erase()
        self._close()

    def _erase(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_LOCK, dir_fd=self.fd)
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._parent_fd)

    def _close(self) -> None:
        for fd in (self._lock_fd, self.fd, self._parent_fd):
            if fd >= 0:
                os.close(fd)
        self._parent_fd = self.fd = self._lock_fd = -1

    def _refused(self, problem: str) -> SpoolRefused:
        return SpoolRefused(problem, os.path.dirname(self.path), rank=self._rank)


def leftovers(folder: str) -> list[str]:
    """The folders that dead jobs of this user left in ``folder``. They hold no space worth mentioning."""
    return _visit_dead(folder, remove=False)


def clean(folder: str) -> list[str]:
    """Remove what ``leftovers`` finds, and nothing else; returns what was removed."""
    return _visit_dead(folder, remove=True)


def _visit_dead(folder: str, *, remove: bool) -> list[str]:
    found: list[str] = []
    try:
        parent = os.open(folder, _DIRECTORY)
    except OSError as cause:
        raise SpoolRefused(f"it cannot be opened: {cause.strerror}", folder) from cause
    try:
        with _folder_locked(parent) as locked:
            if not locked:
                raise SpoolRefused("another program holds a lock on it; try again", folder)
            for name in sorted(filter(_NAME.fullmatch, os.listdir(parent))):
                with contextlib.suppress(OSError), _dead(parent, name) as fd:
                    if remove:
                        _remove_dead(parent, name, fd)
                    found.append(os.path.join(folder, name))
    finally:
        os.close(parent)
    return found


@contextlib.contextmanager
def _dead(parent: int, name: str) -> Generator[int, None, None]:
    """A descriptor of a dead job's folder, with its mark held; an OSError if it is not one."""
    fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's")
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=fd)
        except FileNotFoundError:  # it died before it made one: while it makes one, the folder around is locked
            yield fd
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        finally:
            os.close(lock)
    finally:
        os.close(fd)


def _remove_dead(parent: int, name: str, fd: int) -> None:
    for known in (_FILE, _LOCK):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(known, dir_fd=fd)
    os.rmdir(name, dir_fd=parent)


@contextlib.contextmanager
def _folder_locked(fd: int) -> Generator[bool, None, None]:
    """Hold the user's folder for a moment, so that a job's folder is never seen without its mark.

    Says whether it worked: a filesystem without locks, or somebody who does not let go, must not keep a job from starting.
    """
    locked = False
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        except OSError:
            break
    try:
        yield locked
    finally:
        if locked:
            fcntl.flock(fd, fcntl.LOCK_UN)


def _open_file(home: JobFolder, rank: int) -> tuple[int, bool, bool]:
    """An empty file without a name in ``home``, whether it bypasses the page cache, and whether it never had a name."""
    in_memory = _filesystem(home.fd) in _MEMORY_FILESYSTEMS
    attempts = [os.O_DIRECT, 0] if hasattr(os, "O_DIRECT") and not in_memory else [0]
    fd, direct, never_named = -1, False, False
    for flag in attempts:
        try:
            fd, never_named = _open_nameless(home, flag)
        except OSError as cause:
            if flag and cause.errno in _CANNOT:
                continue
            raise SpoolRefused(f"no file can be made: {cause.strerror}", os.path.dirname(home.path), rank=rank) from cause
        direct = bool(flag) and _direct_works(fd)
        break
    if not direct:
        _warn_once(os.path.dirname(home.path), in_memory=in_memory)
    return fd, direct, never_named


def _open_nameless(home: JobFolder, flag: int) -> tuple[int, bool]:
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | flag, 0o600, dir_fd=home.fd), True
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    fd = os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flag, 0o600, dir_fd=home.fd)
    os.unlink(_FILE, dir_fd=home.fd)
    return fd, False


def _direct_works(fd: int) -> bool:
    """Some filesystems open a file for direct I/O and then refuse the transfers; such a file goes on without."""
    page = mmap.mmap(-1, ALIGNMENT)
    try:
        os.pwritev(fd, [page], 0)
        os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            return True  # a full or a broken disk: reserving will tell
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    finally:
        os.ftruncate(fd, 0)
    return True


def _warn_once(folder: str, *, in_memory: bool) -> None:
    if folder in _warned:
        return
    _warned.add(folder)
    if in_memory:
        _log.warning("%s is memory, not a disk: what lowtide keeps there counts as memory. Give a folder on a disk.", folder)
    else:
        _log.warning("%s has no direct I/O: the disk tier works there through the page cache, more slowly.", folder)


def _filesystem(fd: int) -> str:
    """The type of the filesystem that holds ``fd``, or nothing if the system does not say."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            mount, _, filesystem = line.partition(" - ")
            if mount.split()[2] == wanted:
                return filesystem.split()[0]
    return ""


def free_all_but(fd: int, kept: Iterable[tuple[int, int]]) -> int:
    """Give the space of everything else in the file back to the filesystem; how many bytes that were at most."""
    end = freed = 0
    size = os.fstat(fd).st_size
    for offset, nbytes in [*sorted(kept), (size, 0)]:
        if offset > end:
            _punch(fd, end, offset - end)
            freed += offset - end
        end = max(end, offset + nbytes)
    return freed


def _punch(fd: int, offset: int, nbytes: int) -> None:
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        _write_zeros(fd, offset, nbytes)


def _write_zeros(fd: int, offset: int, nbytes: int) -> None:
    """Where the filesystem cannot reserve, only written bytes are surely there."""
    zeros = memoryview(mmap.mmap(-1, 1 << 20))
    end = offset + nbytes
    while offset < end:
        offset += os.pwritev(fd, [zeros[: end - offset]], offset)
