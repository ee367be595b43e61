"""What nobody needs any more in a folder of checkpoints, and its space: ``lowtide ckpt gc``.

Three things. *Leftovers*: folders of saves and removals that never ended. One is touched only if no live save can own it:
nobody holds a lock on it (a save does while it writes), and, for filesystems without locks, nothing in it was changed for an
hour. *Old checkpoints*, beyond ``keep``: only those that can be read count, so a damaged new one never costs a good old one.
*Space in spool files* that checkpoints are linked to: everything that no checkpoint refers to, once the job is dead. A live one
holds a lock on the file; and the kernel grants a write lease on a file only if nobody else has it open. A file that has names
elsewhere is left alone, because there may be checkpoints there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lowtide.checkpoint import folder
from lowtide.checkpoint.source import Source, open_source
from lowtide.errors import ArgumentError, CheckpointError
from lowtide.tiers.spool import free_all_but
from lowtide.tiers.store import ALIGNMENT

MINUTES = 60.0
"""How long nothing must have changed in a leftover."""

_WAS = re.compile(r"\.old-(.{1,255})-[0-9a-f]{16}")
_WORTH_IT = 64 << 10
"""Less than this is the filesystem's own bookkeeping."""

_Inode = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was not touched, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Freed:
    """A spool file that gave space back."""

    path: Path
    nbytes: int


@dataclass(slots=True)
class Collected:
    """What was done, or would be done if it was a dry run."""

    leftovers: list[Path] = field(default_factory=list[Path])
    restored: list[Path] = field(default_factory=list[Path])
    """Checkpoints that were put aside by a save that never ended, and are back under their name."""
    checkpoints: list[Path] = field(default_factory=list[Path])
    spools: list[Freed] = field(default_factory=list[Freed])
    left: list[Left] = field(default_factory=list[Left])
    nbytes: int = 0
    """At most so many were given back: a live job keeps its spool file."""


def collect(
    where: str | os.PathLike[str], *, keep: int | None = None, dry_run: bool = False, minutes: float = MINUTES
) -> Collected:
    """Clean the folder around checkpoints; see the module's docstring. ``dry_run`` only says what would be done.

    ``minutes``: how long nothing must have changed in a leftover; 0 trusts the locks alone.
    """
    path = Path(os.path.abspath(where))
    if not path.is_dir():
        raise ArgumentError(f"{str(where)!r} is not a folder.")
    if folder.is_checkpoint(path):
        raise ArgumentError(f"{str(where)!r} is a checkpoint; give the folder around it.")
    if keep is not None and keep < 1:
        raise ArgumentError(f"keep={keep}: at least 1 checkpoint stays.")
    if not 0 <= minutes < 1e9:
        raise ArgumentError(f"minutes={minutes}: give a number >= 0.")
    try:
        with folder.locked(path):
            return _Collecting(path, keep, dry_run, minutes).run()
    except OSError as error:
        raise CheckpointError(f"it cannot be cleaned: {error.strerror or error}", str(path)) from error


@dataclass(slots=True)
class _Collecting:
    where: Path
    keep: int | None
    dry_run: bool
    minutes: float
    out: Collected = field(default_factory=Collected)
    _gone: Counter[_Inode] = field(default_factory=Counter[_Inode])
    """Names of every file that were removed, or would be."""

    def run(self) -> Collected:
        for path in [*_put_aside(self.where), *folder.leftovers(self.where)]:
            try:
                self._look_at_leftover(path)
            except OSError as error:
                self.out.left.append(Left(path, error.strerror or str(error)))
        staying = self._look_at_checkpoints()
        spools = self._spools(staying)
        for inode in sorted(spools):
            self._look_at_spool(inode, spools[inode])
        return self.out

    # -- leftovers ----------------------------------------------------------------------------------------------------

    def _look_at_leftover(self, path: Path) -> None:
        with _held_by_nobody(path) as free:
            if not free:
                self.out.left.append(Left(path, "it is being written"))
                return
            age = (time.time() - _last_change(path)) / 60
            if age < self.minutes:
                self.out.left.append(Left(path, f"it was changed {age:.0f} minutes ago (--now removes it)"))
                return
            was = _put_aside(self.where).get(path)
            if was is None and (stranger := folder.stranger_in(path)) is not None:
                self.out.left.append(Left(path, f"no save has made {stranger!r} there"))
                return
            if was is None:
                self._remove(path)
                self.out.leftovers.append(path)
                return
            if not self.dry_run:
                os.rename(path, was)
                folder.sync_folder(self.where)
            self.out.restored.append(was)

    def _remove(self, path: Path) -> None:
        for file in path.iterdir() if path.is_dir() else [path]:
            facts = file.lstat()
            inode = (facts.st_dev, facts.st_ino)
            self._gone[inode] += 1
            if facts.st_nlink == (self._gone[inode] if self.dry_run else 1):
                self.out.nbytes += facts.st_blocks * 512
        if self.dry_run:
            return
        if path.is_dir():
            folder.remove(path)
        else:
            os.unlink(path)

    # -- old checkpoints ----------------------------------------------------------------------------------------------

    def _look_at_checkpoints(self) -> list[Path]:
        """Remove the old ones; those that stay."""
        found, refused = folder.checkpoints(self.where)
        for path, error in refused:
            self.out.left.append(Left(path, error.problem))
        staying: list[Path] = []
        for path in [f.path for f in found if not f.path.name.startswith(".")]:
            if self.keep is not None and len(staying) >= self.keep:
                try:
                    self._remove(path)
                    self.out.checkpoints.append(path)
                except OSError as error:
                    self.out.left.append(Left(path, error.strerror or str(error)))
            elif (problem := _problem_of(path)) is not None:
                self.out.left.append(Left(path, f"it is damaged, and counts for nothing: {problem}"))
            else:
                staying.append(path)
        return staying

    # -- spool files --------------------------------------------------------------------------------------------------

    def _spools(self, checkpoints: Iterable[Path]) -> dict[_Inode, _Spool]:
        """The spool files of these checkpoints, and what they refer to in them."""
        out: dict[_Inode, _Spool] = {}
        for path in checkpoints:
            try:
                with open_source(path) as source:
                    _add_references(source, out)
            except (CheckpointError, OSError) as error:
                self.out.left.append(Left(path, str(error)))
        return out

    def _look_at_spool(self, inode: _Inode, spool: _Spool) -> None:
        path = spool.names[0]
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.out.left.append(Left(path, f"it cannot be opened: {error.strerror}"))
            return
        try:
            facts = os.fstat(fd)
            kept = [_rounded(offset, nbytes) for offset, nbytes in spool.kept]
            could = facts.st_blocks * 512 - _covered(kept)
            if could < _WORTH_IT or (facts.st_dev, facts.st_ino) != inode:
                return
            reason = self._why_not(fd, facts, spool)
            if reason is not None:
                self.out.left.append(Left(path, reason))
                return
            if not self.dry_run:
                free_all_but(fd, kept)
                os.fsync(fd)
                could = facts.st_blocks * 512 - os.fstat(fd).st_blocks * 512
            self.out.spools.append(Freed(path, could))
            self.out.nbytes += could
        finally:
            os.close(fd)

    def _why_not(self, fd: int, facts: os.stat_result, spool: _Spool) -> str | None:
        names = facts.st_nlink - (self._gone[facts.st_dev, facts.st_ino] if self.dry_run else 0)
        if names != len(spool.names):
            return f"it has {names} names, {len(spool.names)} of them in checkpoints here: others may refer to it"
        used = _is_used(fd)
        if used is None:
            return "the filesystem does not say whether a job still uses it"
        return "a job still uses it" if used else None


@dataclass(slots=True)
class _Spool:
    """The names of one spool file, and the ranges of it that checkpoints refer to."""

    names: list[Path] = field(default_factory=list[Path])
    kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def _add_references(source: Source, out: dict[_Inode, _Spool]) -> None:
    spools: dict[str, _Spool] = {}
    for file in source.manifest.files:
        if file.xxh3 is None:
            facts = (source.path / file.name).lstat()
            spools[file.name] = out.setdefault((facts.st_dev, facts.st_ino), _Spool())
            spools[file.name].names.append(source.path / file.name)
    for table in source.tables:
        for block in table.blocks:
            spool = spools.get(table.files[block.file])
            if spool is not None:
                spool.kept.append((block.offset, block.nbytes))


def _rounded(offset: int, nbytes: int) -> tuple[int, int]:
    start = offset // ALIGNMENT * ALIGNMENT
    return start, -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT - start


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes in at least one of the ranges."""
    total = end = 0
    for offset, nbytes in sorted(ranges):
        total += max(0, offset + nbytes - max(end, offset))
        end = max(end, offset + nbytes)
    return total


def _is_used(fd: int) -> bool | None:
    """Whether a job still has the file open, in any container of this machine; None if the filesystem cannot tell."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_locks = True
    except BlockingIOError:
        return True
    except OSError:
        has_locks = False
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # what an opener in the next microsecond sends us; SIGIO would end us
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False if has_locks else None
    return False


# -- what is known of a folder ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _held_by_nobody(path: Path) -> Generator[bool]:
    """Whether no save holds a lock on ``path``; none gets one while it is looked at."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:
            free = True  # a filesystem without locks: the age has to do
        yield free
    finally:
        os.close(fd)


def _last_change(path: Path) -> float:
    """When anything in a folder was last written, made, renamed or removed."""
    entries = [path, *path.iterdir()] if path.is_dir() else [path]
    facts = [entry.lstat() for entry in entries]
    return max(max(f.st_mtime, f.st_ctime) for f in facts)


def _put_aside(where: Path) -> dict[Path, Path]:
    """Checkpoints that made room for a new one which never came (a crash between two renames), and what they were called."""
    found = {path: _WAS.fullmatch(path.name) for path in sorted(where.iterdir()) if not path.is_symlink()}
    names = {path: where / match[1] for path, match in found.items() if match is not None and folder.is_checkpoint(path)}
    return {path: name for path, name in names.items() if not os.path.lexists(name)}


def _problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, as far as that is known without reading its tensors."""
    try:
        with open_source(path) as source:
            for file in source.manifest.files:
                facts = (path / file.name).lstat()
                enough = facts.st_size == file.nbytes if file.xxh3 is not None else True  # a spool may grow after the save
                if not stat.S_ISREG(facts.st_mode) or not enough:
                    return f"{file.name} has {facts.st_size} bytes, not {file.nbytes}"
    except CheckpointError as error:
        return error.problem
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None
