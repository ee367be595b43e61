"""Checkpoint folders: made under another name, made durable, then renamed; found, kept and removed.

A checkpoint is there or not. Files are written and synced in a folder whose name begins with ``.new-``; the manifest is
written last; then the folder is renamed and its parent synced. ``LATEST`` names the last one, also by a rename; it is a hint
for people, since a reader looks at all of them. Whatever a crash leaves begins with a dot; ``lowtide ckpt gc`` removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import resource
import secrets
import shutil
import stat
import time
import weakref
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lowtide.checkpoint.manifest import COUNT_LIMIT, MANIFEST, MANIFEST_LIMIT, Manifest, parse_manifest, to_text
from lowtide.errors import CheckpointCorrupted, CheckpointError, CheckpointUnread
from lowtide.files import stored_bytes

LATEST = "LATEST"
_NEW, _OLD = ".new-", ".old-"
_LEFT = re.compile(r"\.(new|old)-(.{1,255})-[0-9a-f]{16}")
_NAME = re.compile(r"(\.old-)?[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,255}")
_PIECE = 1 << 20
_MOST_OPEN = 512
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A process that cannot open a file for these has not seen what is in it."""
_PATIENCE = 60.0  # seconds for a lock
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OURS = re.compile(r"manifest\.json|rank-\d{5,}(\.json|(-frozen)?\.safetensors|-spool-\d+)")
_OURS_OR_EXPORTED = re.compile(rf"{_OURS.pattern}|model.*\.safetensors(\.index\.json)?|[^.].*\.(json|txt|model|jinja)")
_LOOKS = 100  # at a folder that others change meanwhile
_LOOK_AGAIN_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose manifest is readable."""

    path: Path
    manifest: Manifest
    changed: int
    """When its manifest was written, in nanoseconds: the newer one of two whose numbers are the same."""


# -- writing ----------------------------------------------------------------------------------------------------------


def new_name(target: Path) -> str:
    """The name under which a checkpoint is written, that nobody else uses."""
    return f"{_NEW}{target.name}-{secrets.token_hex(8)}"


def make_folder(path: Path) -> None:
    """A new private folder, and those around it that are missing, each known to the disk."""
    make_around(path)
    os.mkdir(path, 0o700)
    sync_folder(path.parent)


def make_around(path: Path) -> None:
    """The folder that ``path`` is to be in, if it is missing; another job may make it at the same moment."""
    if not path.parent.exists():
        try:
            make_folder(path.parent)
        except FileExistsError:
            if not path.parent.is_dir():
                raise


class Mark:
    """A lock on a folder as long as this lives: whoever cleans up can tell a save under way from one that died."""

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)


def make_marked(path: Path) -> Mark:
    """Make a folder that is written into, and mark it. Whoever cleans up holds the same lock on the folder around, and so
    never sees it without its mark."""
    make_around(path)
    with locked(path.parent):
        make_folder(path)
        fd = os.open(path, _DIRECTORY)
        mark = Mark(fd)
        _wait_for_lock(fd, fcntl.LOCK_SH, path, _PATIENCE)
    return mark


def commit(working: Path, target: Path, manifest: Manifest) -> None:
    """All files of ``working`` are durable: write the manifest and make the folder appear as ``target``."""
    write_file(working / MANIFEST, to_text(manifest))
    sync_folder(working)
    parent = target.parent
    old = parent / f"{_OLD}{target.name}-{secrets.token_hex(8)}"
    replaced = _rename_away(target, old)
    try:
        os.rename(working, target)
        sync_folder(parent)
        _point_to(target)
    except BaseException:
        # The caller will believe that there is no such checkpoint, and use what it refers to again.
        with contextlib.suppress(OSError):
            os.rename(target, working)
        if replaced:
            with contextlib.suppress(OSError):
                os.rename(old, target)
        raise
    if replaced:
        with contextlib.suppress(OSError):  # it is in nobody's way
            remove(old)


def _point_to(target: Path) -> None:
    note = target.parent / f"{_NEW}{LATEST}-{secrets.token_hex(8)}"
    try:
        write_file(note, f"{target.name}\n".encode())
        os.rename(note, target.parent / LATEST)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(note)
        raise
    sync_folder(target.parent)


def _rename_away(target: Path, old: Path) -> bool:
    """Make room for a checkpoint of the same name: one that was damaged, or passed over and made again."""
    if not os.path.lexists(target):
        return False
    if target.is_symlink():  # what it leads to is somebody else's
        raise CheckpointError("there is a link of this name", str(target))
    if not is_checkpoint(target) and any(target.iterdir()):
        raise CheckpointError("there is a folder of this name that is not a checkpoint", str(target))
    os.rename(target, old)
    return True


def write_file(path: Path, text: bytes) -> str:
    """A new private file, on the disk when this returns; its checksum."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view, done = memoryview(text), 0
        while done < len(view):
            done += os.write(fd, view[done:])
        os.fsync(fd)
    finally:
        os.close(fd)
    return xxhash.xxh3_64_hexdigest(text)


def sync_folder(path: Path) -> None:
    fd = os.open(path, _DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a crash half-way leaves nothing that looks like one."""
    fd = os.open(path, _DIRECTORY | os.O_NOFOLLOW)  # nothing behind a link is removed
    try:
        if not path.name.startswith("."):
            away = path.parent / f"{_OLD}{path.name}-{secrets.token_hex(8)}"
            os.rename(path, away)
            sync_folder(path.parent)
            path = away
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(MANIFEST, dir_fd=fd)  # or what is left of it would be found as a checkpoint
    finally:
        os.close(fd)
    shutil.rmtree(path)


def leftovers(folder: Path) -> list[Path]:
    """What saves and removals that never ended have left in ``folder``. A checkpoint that was put aside for a new one which
    never came is none: it is the one that counts."""
    left: list[Path] = []
    for entry in _entries(folder):
        match = _LEFT.fullmatch(entry.name)
        if match is None or entry.is_symlink():
            continue
        if match[1] == "new" or not is_checkpoint(entry) or is_checkpoint(folder / match[2]):
            left.append(entry)
    return left


def stranger_in(left: Path) -> str | None:
    """What in a leftover no save, export or import can have made, so that it is somebody else's; None if nothing is."""
    match = _LEFT.fullmatch(left.name)
    if match is None:
        return left.name
    if not stat.S_ISDIR(left.lstat().st_mode):
        return None if match[1] == "new" and match[2] == LATEST and stat.S_ISREG(left.lstat().st_mode) else left.name
    ours = _OURS if match[1] == "old" else _OURS_OR_EXPORTED
    for entry in _entries(left):
        if not ours.fullmatch(entry.name) or not stat.S_ISREG(entry.lstat().st_mode):
            return entry.name
    return None


@contextlib.contextmanager
def locked(parent: Path, patience: float = _PATIENCE) -> Generator[None]:
    """One change of what is in ``parent`` at a time: two jobs may save into one folder, and somebody may clean it."""
    fd = os.open(parent, _DIRECTORY)
    try:
        _wait_for_lock(fd, fcntl.LOCK_EX, parent, patience)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, kind: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    while not _try_lock(fd, kind):
        if time.monotonic() > end:
            raise CheckpointError(f"another job has held its lock for {patience:.0f} s", str(path))
        time.sleep(0.02)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a filesystem without locks: nobody can be kept out
    return True


# -- finding ----------------------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except OSError:  # a folder that one may not enter
        return False


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called so: what every filesystem, shell and terminal takes as it is."""
    return _NAME.fullmatch(name) is not None and not name.startswith(".") and len(name) <= 200


def checkpoints(folder: Path) -> tuple[list[Found], list[tuple[Path, CheckpointError]]]:
    """The checkpoints in ``folder``, the newest first; and those whose manifest cannot be used, with the reason.

    Others may save and remove there meanwhile: what was removed is in neither list, and if nothing else is there, what came
    instead is looked for.
    """
    found, refused, changes = _look(folder)
    for _ in range(_LOOKS):
        if found or not changes:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
        found, refused, changes = _look(folder)
    found.sort(key=lambda f: (f.manifest.sequence, f.changed, f.path.name), reverse=True)
    return found, refused


def _look(folder: Path) -> tuple[list[Found], list[tuple[Path, CheckpointError]], bool]:
    """What is there now, and whether some of it went away while it was looked at."""
    found: list[Found] = []
    refused: list[tuple[Path, CheckpointError]] = []
    changes = False
    for entry in _entries(folder):
        if not _NAME.fullmatch(entry.name) or entry.is_symlink():
            continue
        if not is_checkpoint(entry):
            changes |= not os.path.lexists(entry)
            continue
        try:
            found.append(_found(entry))
        except CheckpointUnread:
            raise
        except CheckpointError as error:
            if is_checkpoint(entry):
                refused.append((entry, error))
            else:
                changes = True
    return found, refused, changes


def next_sequence(folder: Path) -> int:
    """A number that makes a checkpoint the newest in ``folder``. It ends at the largest; from there on the time decides."""
    return min(max((f.manifest.sequence for f in checkpoints(folder)[0]), default=0) + 1, COUNT_LIMIT - 1)


def put_aside(path: Path) -> list[Path]:
    """Checkpoints that were called ``path`` until a moment ago, when a save of the same name began to replace them."""
    rows: list[Path] = []
    with contextlib.suppress(CheckpointError):  # one may be allowed to enter a folder, and not to list it
        rows = [entry for entry in _entries(path.parent) if entry.name.startswith(f"{_OLD}{path.name}-")]
    return [row for row in rows if _LEFT.fullmatch(row.name) and not row.is_symlink() and is_checkpoint(row)]


def read_manifest(path: Path) -> Manifest:
    return _found(path).manifest


def _found(path: Path) -> Found:
    """The checkpoint ``path``. If another takes its place meanwhile, that one: what it was is no damage of what is."""
    for _ in range(_LOOKS):
        before = _identity(path)
        try:
            with opened(path) as there:
                return Found(path, there.manifest(), there.changed_ns())
        except CheckpointUnread:
            raise
        except CheckpointError:
            if before == _identity(path):
                raise
    raise CheckpointError("another one takes its place each time that it is read", str(path))


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        facts = os.stat(path)
        return facts.st_dev, facts.st_ino
    return None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", str(folder)) from error


class OpenFolder:
    """A folder that is open for reading: files in it are opened by plain name, never through a link out of it.

    Files stay open, so that what was removed in the meantime can still be read; of very many the last that were used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, _DIRECTORY)
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise CheckpointUnread(f"it cannot be opened: {error.strerror}", str(path)) from error
            raise CheckpointError(f"it cannot be opened: {error.strerror}", str(path)) from error
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, soft // 4))

    def file(self, name: str) -> tuple[int, int]:
        """A descriptor of a regular file, valid until the next call, and its size."""
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        while len(self._files) >= self._most:
            self._close_oldest()
        fd = self._opened(name)
        try:
            facts = os.fstat(fd)
        except OSError as error:
            os.close(fd)
            raise CheckpointCorrupted(f"{name} cannot be looked at: {error.strerror}", str(self.path)) from error
        if not stat.S_ISREG(facts.st_mode):
            os.close(fd)
            raise CheckpointCorrupted(f"{name} is not a regular file", str(self.path))
        self._files[name] = (fd, facts.st_size)
        return self._files[name]

    def _opened(self, name: str) -> int:
        """A descriptor; if there are too few, those of files that were used before have to do."""
        while True:
            try:
                return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
            except OSError as error:
                if error.errno in _SHORTAGES:
                    if self._files:
                        self._close_oldest()
                        continue
                    raise CheckpointUnread(f"{name} cannot be opened: {error.strerror}", str(self.path)) from error
                why = "it is a link" if error.errno == errno.ELOOP else error.strerror
                raise CheckpointCorrupted(f"{name} cannot be opened: {why}", str(self.path)) from error

    def _close_oldest(self) -> None:
        fd, _ = self._files.popitem(last=False)[1]
        os.close(fd)

    def hold(self, names: Iterable[str]) -> None:
        """Open these files now, as many as may be open at once; what is wrong with one is told when it is read."""
        for name in itertools.islice(names, self._most):
            with contextlib.suppress(CheckpointCorrupted):
                self.file(name)

    def stored_bytes(self, names: Iterable[str]) -> int:
        """How many bytes of these files are really there."""
        found = 0
        for name in names:
            with contextlib.suppress(CheckpointCorrupted):  # told when it is read, if it is
                fd = self.file(name)[0]
                try:
                    found += stored_bytes(fd)
                except OSError as error:
                    raise CheckpointError(f"{name} cannot be read: {error.strerror}", str(self.path)) from error
        return found

    def manifest(self) -> Manifest:
        return parse_manifest(self.read(MANIFEST, MANIFEST_LIMIT), str(self.path))

    def changed_ns(self) -> int:
        """When its manifest was written."""
        try:
            return os.fstat(self.file(MANIFEST)[0]).st_mtime_ns
        except OSError as error:
            raise CheckpointCorrupted(f"{MANIFEST} cannot be read: {error.strerror}", str(self.path)) from error

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file."""
        fd, size = self.file(name)
        if size > limit:
            raise CheckpointCorrupted(f"{name} has {size} bytes; at most {limit} are read", str(self.path))
        out = bytearray(size)
        self.fill(name, fd, memoryview(out), 0)
        return bytes(out)

    def fill(self, name: str, fd: int, into: memoryview, offset: int) -> None:
        """Read ``into`` full from ``offset`` on."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(fd, [into[done:]], offset + done)
            except OSError as error:
                kind = CheckpointUnread if error.errno in _SHORTAGES else CheckpointCorrupted
                raise kind(f"{name}, byte {offset + done}: {error.strerror}", str(self.path)) from error
            if not count:
                raise CheckpointCorrupted(f"{name} ends at byte {offset + done}", str(self.path))
            done += count

    def checksum(self, name: str, nbytes: int) -> str:
        """Of the whole file, which must have ``nbytes``."""
        fd, size = self.file(name)
        if size != nbytes:
            raise CheckpointCorrupted(f"{name} has {size} bytes, not {nbytes}", str(self.path))
        hasher = xxhash.xxh3_64()
        buffer = memoryview(bytearray(min(_PIECE, max(nbytes, 1))))
        for start in range(0, nbytes, _PIECE):
            piece = buffer[: min(_PIECE, nbytes - start)]
            self.fill(name, fd, piece, start)
            hasher.update(piece)
        return hasher.hexdigest()

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def opened(path: Path) -> Generator[OpenFolder]:
    folder = OpenFolder(path)
    try:
        yield folder
    finally:
        folder.close()


def unused(folder: Path, keep: int) -> Iterator[Path]:
    """Checkpoints beyond the ``keep`` newest."""
    found, _ = checkpoints(folder)
    yield from (f.path for f in found[keep:])
