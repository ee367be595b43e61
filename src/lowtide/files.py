"""Files in folders that others may have put something into: plain files only, never through a link, and never waiting.

A run's folder has files of fixed names. What stands there under such a name need not be a file that a run has made: a link
would lead a write to another file, a named pipe would keep a reader waiting for ever, and a device has no end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


class NotPlain(OSError):
    """What is there is a link, a pipe, a device or a folder; it was neither read nor written."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a plain file", str(path))


def open_plain(path: Path, flags: int = os.O_RDONLY, *, mode: int = 0o644) -> int:
    """A descriptor of the plain file ``path``. Raises ``NotPlain``, or any other ``OSError``."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its other end; for a plain file it means nothing.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP: a link. ENXIO: a pipe that nobody reads, a socket, or a device that is not there. EISDIR: a folder.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotPlain(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotPlain(path)
    return fd


def read_plain(path: Path, most: int) -> bytes:
    """The whole file, which may have ``most`` bytes. Raises ``OSError``, also for a larger one."""
    with open(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read(most)


def replace_plain(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Give ``path`` these bytes: a reader sees the old file or the new one. Raises ``OSError``, and then leaves nothing."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise NotPlain(path)
    temporary = path.with_name(f".{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process that died; of a link, the link
    fd = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


# -- what a file may cost ---------------------------------------------------------------------------------------------

_ALWAYS = 64 << 20
_TIMES = 4
_MOST_HOLES = 10_000
_OF_LIST, _OF_OBJECT, _OF_TEXT, _OF_VALUE = 150, 240, 90, 70
"""Bytes of memory for each, at most, while JSON becomes objects and they are looked at."""


def allowed_bytes(stored: int) -> int:
    """Memory that files may take that hold ``stored`` bytes: nobody should have to give more for what costs nothing to send."""
    return _ALWAYS + _TIMES * stored


def json_bytes(text: bytes | bytearray) -> int:
    """What JSON takes in memory at most, once it is parsed: its brackets, texts and commas tell, without parsing it."""
    rows = ((b"[", _OF_LIST), (b"{", _OF_OBJECT), (b'"', _OF_TEXT // 2), (b",", _OF_VALUE))
    return 2 * len(text) + sum(text.count(mark) * nbytes for mark, nbytes in rows)


def stored_bytes(fd: int) -> int:
    """How many bytes of a file are really there: holes have a size and are nowhere."""
    facts = os.fstat(fd)
    if facts.st_blocks * 512 >= facts.st_size:
        return facts.st_size
    found = end = 0
    for _ in range(_MOST_HOLES):
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:  # ENXIO: no more data. Otherwise a file system that knows of no holes.
            return found if error.errno == errno.ENXIO else facts.st_size
        found += end - start
    return found
