"""Checkpoint folders: made under another name, made durable, then renamed; found, kept and removed.

A checkpoint is there or not. Files are written and synced in a folder whose name begins with ``.new-``; the manifest is
written last; then the folder is renamed and its parent synced. ``LATEST`` names the last one, also by a rename; it is a hint
for people, since a reader looks at all of them. Whatever a crash leaves begins with a dot; ``lowtide ckpt gc`` removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lowtide.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, Manifest, parse_manifest, to_text
from lowtide.errors import CheckpointCorrupted, CheckpointError

LATEST = "LATEST"
_NEW, _OLD = ".new-", ".old-"
_LEFT = re.compile(r"\.(new|old)-(.{1,255})-[0-9a-f]{16}")
_NAME = re.compile(r"(\.old-)?[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,255}")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose manifest is readable."""

    path: Path
    manifest: Manifest


# -- writing ----------------------------------------------------------------------------------------------------------


def new_name(target: Path) -> str:
    """The name under which a checkpoint is written, that nobody else uses."""
    return f"{_NEW}{target.name}-{secrets.token_hex(8)}"


def make_folder(path: Path) -> None:
    """A new private folder, and those around it that are missing, each known to the disk."""
    if not path.parent.exists():
        make_folder(path.parent)
    os.mkdir(path, 0o700)
    sync_folder(path.parent)


class Mark:
    """A lock on a folder as long as this lives: whoever cleans up can tell a save under way from one that died."""

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)


def marked_alive(path: Path) -> Mark:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a filesystem without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return Mark(fd)


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
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a crash half-way leaves nothing that looks like one."""
    if not path.name.startswith("."):
        away = path.parent / f"{_OLD}{path.name}-{secrets.token_hex(8)}"
        os.rename(path, away)
        sync_folder(path.parent)
        path = away
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / MANIFEST)  # or what is left of it would be found as a checkpoint
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


@contextlib.contextmanager
def locked(parent: Path, patience: float = 60.0) -> Generator[None]:
    """One change of what is in ``parent`` at a time: two jobs may save into one folder, and somebody may clean it."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + patience
        while not _try_lock(fd):
            if time.monotonic() > end:
                raise CheckpointError(f"another job has held its lock for {patience:.0f} s", str(parent))
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """The checkpoints in ``folder``, the newest first; and those whose manifest cannot be used, with the reason."""
    found: list[Found] = []
    refused: list[tuple[Path, CheckpointError]] = []
    for entry in _entries(folder):
        if not _NAME.fullmatch(entry.name) or entry.is_symlink() or not is_checkpoint(entry):
            continue
        try:
            found.append(Found(entry, read_manifest(entry)))
        except CheckpointError as error:
            refused.append((entry, error))
    found.sort(key=lambda f: (f.manifest.sequence, f.path.name), reverse=True)
    return found, refused


def read_manifest(path: Path) -> Manifest:
    with opened(path) as folder:
        return parse_manifest(folder.read(MANIFEST, MANIFEST_LIMIT), str(path))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", str(folder)) from error


class OpenFolder:
    """A folder that is open for reading: files in it are opened by plain name, never through a link out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"it cannot be opened: {error.strerror}", str(path)) from error
        self._files: dict[str, tuple[int, int]] = {}

    def file(self, name: str) -> tuple[int, int]:
        """A descriptor of a regular file, and its size."""
        if name not in self._files:
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                fd = os.open(name, flags, dir_fd=self._fd)
            except OSError as error:
                why = "it is a link" if error.errno == errno.ELOOP else error.strerror
                raise CheckpointCorrupted(f"{name} cannot be opened: {why}", str(self.path)) from error
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
                raise CheckpointCorrupted(f"{name}, byte {offset + done}: {error.strerror}", str(self.path)) from error
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
