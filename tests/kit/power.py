"""A filesystem whose power can be cut: ext4 on a loop device. Needs root.

``cut`` is ext4's own emergency stop without a flush of the journal: what was not synced is gone when the filesystem is mounted
again, as after a power cut. Whatever is open on it has to be closed, or its process dead, before ``restore``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_LOG_FLUSH = 2
_READ_ONLY, _REMOUNT = 1, 32
_TRIES = 200


class LoopDisk:
    """An empty ext4 of ``mib`` MiB in the file ``folder/image``, mounted at ``folder/mount``."""

    def __init__(self, folder: Path, mib: int = 64) -> None:
        self.path = folder / "mount"
        self.path.mkdir(parents=True)
        self._image = folder / "image"
        with open(self._image, "wb") as file:
            file.truncate(mib << 20)
        # a small journal without lazy initialisation: nothing goes on in the background
        options = ["-q", "-b", "4096", "-J", "size=4", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"]
        subprocess.run(["mkfs.ext4", *options, str(self._image)], check=True, capture_output=True)
        found = subprocess.run(["losetup", "--find", "--show", str(self._image)], check=True, capture_output=True, text=True)
        self._device = found.stdout.strip()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._mount(0)

    def cut(self) -> None:
        """The power is gone: from here on every write fails, and what was not synced is lost."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Everything that was written reaches the disk, in whatever order: as it may happen by chance before a cut."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._libc.syncfs(fd)
        finally:
            os.close(fd)

    def restore(self) -> None:
        """The machine starts again: the journal is replayed."""
        self._unmount()
        self._mount(0)

    def read_only(self, *, on: bool) -> None:
        self._mount(_REMOUNT | (_READ_ONLY if on else 0))

    def fill(self, leave: int = 0) -> None:
        """Take all room but ``leave`` bytes."""
        numbers = os.statvfs(self.path)
        nbytes = numbers.f_bavail * numbers.f_frsize - leave
        fd = os.open(self.path / f"filler-{time.monotonic_ns()}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while nbytes > 0:  # the last blocks go to the filesystem's own tables
                try:
                    os.posix_fallocate(fd, os.fstat(fd).st_size, nbytes)
                    return
                except OSError:
                    nbytes = nbytes * 7 // 8 // 4096 * 4096
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Remove everything."""
        for entry in self.path.iterdir():
            if entry.name != "lost+found":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def close(self) -> None:
        self._unmount()
        subprocess.run(["losetup", "--detach", self._device], check=True, capture_output=True)
        self._image.unlink()

    def _mount(self, flags: int) -> None:
        if self._libc.mount(self._device.encode(), os.fsencode(self.path), b"ext4", flags, b""):
            number = ctypes.get_errno()
            raise OSError(number, f"mount: {os.strerror(number)}", str(self.path))

    def _unmount(self) -> None:
        for _ in range(_TRIES):  # a process that was just killed may still be closing its files
            if not self._libc.umount2(os.fsencode(self.path), 0):
                return
            time.sleep(0.01)
        number = ctypes.get_errno()
        raise OSError(number, f"umount: {os.strerror(number)}", str(self.path))


def why_not(folder: Path) -> str | None:
    """Why there can be no LoopDisk here, or None."""
    if os.geteuid():
        return "needs root"
    if not shutil.which("mkfs.ext4") or not shutil.which("losetup"):
        return "needs mkfs.ext4 and losetup"
    try:
        disk = LoopDisk(folder / "probe", mib=16)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no loop device can be mounted: {error}"
    try:
        disk.cut()
        disk.restore()
    except OSError as error:
        return f"this kernel's ext4 cannot be stopped: {error}"
    finally:
        disk.close()
    return None
