"""What the disk itself gives, measured in the run whose numbers are held against it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIECE = 8 << 20
THREADS = 4
FIO_SECONDS = 300


class _File:
    """A preallocated file without page cache where the folder allows that; removed at the end."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._path = folder / "disk-limit"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self.handle = os.open(self._path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:  # tmpfs, some network mounts
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self.handle = os.open(self._path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self.handle, 0, nbytes)

    def close(self) -> None:
        os.close(self.handle)
        self._path.unlink()


def _pieces(nbytes: int) -> int:
    return max(THREADS, -(-nbytes // PIECE))


def _in_threads(count: int, pieces: int, work: Callable[[mmap.mmap, int], None]) -> float:
    """Seconds in which ``count`` threads do all pieces, each with page-aligned memory of its own."""
    errors: list[Exception] = []

    def run(first: int) -> None:
        memory = mmap.mmap(-1, PIECE)
        memory[:] = os.urandom(1 << 20) * (PIECE >> 20)
        ready.wait()
        try:
            for piece in range(first, pieces, count):
                work(memory, piece)
        except OSError as error:
            errors.append(error)

    ready = threading.Barrier(count + 1)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


def write_once(folder: Path, nbytes: int) -> dict[str, Any]:
    """Seconds to write so many bytes to a new file in order: by one thread, as dd does, and by four."""
    pieces = _pieces(nbytes)
    seconds: dict[int, float] = {}
    direct = True
    for threads in (1, THREADS):
        file = _File(folder, pieces * PIECE)
        try:

            def write(memory: mmap.mmap, piece: int, handle: int = file.handle) -> None:
                os.pwritev(handle, [memory], piece * PIECE)

            seconds[threads] = _in_threads(threads, pieces, write)
            direct = file.direct
        finally:
            file.close()
    # Whole pieces were written; the caller's bytes take their share of that time.
    share = nbytes / (pieces * PIECE)
    return {
        "bytes": nbytes,
        "direct": direct,
        "seconds_1_thread": seconds[1] * share,
        "seconds_4_threads": seconds[THREADS] * share,
        "seconds": min(seconds.values()) * share,
    }


def mixed_limit(folder: Path, nbytes: int) -> dict[str, Any]:
    """Bytes per second, reads and writes together, half of each: fio's if it is installed, else a loop's."""
    if shutil.which("fio") is None:
        return {**_loop(folder, nbytes), "why_not_fio": "not installed"}
    try:
        return _fio(folder, nbytes)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return {**_loop(folder, nbytes), "why_not_fio": str(error)}


def _fio(folder: Path, nbytes: int) -> dict[str, Any]:
    path = folder / "fio-limit"
    options = ["--rw=rw", "--bs=8M", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--rwmixread=50"]
    command = ["fio", "--name=mixed", f"--filename={path}", f"--size={_pieces(nbytes) * PIECE}", *options]
    try:
        # Laid out and written first, so that reads find data and writes no unwritten extents, as in a training step.
        subprocess.run([*command[:4], "--rw=write", *options[1:5]], check=True, capture_output=True, timeout=FIO_SECONDS)
        done = subprocess.run(
            [*command, "--output-format=json"], check=True, capture_output=True, text=True, timeout=FIO_SECONDS
        )
    finally:
        path.unlink(missing_ok=True)
    job = json.loads(done.stdout)["jobs"][0]
    rate = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
    return {"tool": " ".join(["fio", *options]), "bytes_per_second": rate}


def _loop(folder: Path, nbytes: int) -> dict[str, Any]:
    pieces = _pieces(nbytes)
    file = _File(folder, pieces * PIECE)
    try:

        def write(memory: mmap.mmap, piece: int) -> None:
            os.pwritev(file.handle, [memory], piece * PIECE)

        def mixed(memory: mmap.mmap, piece: int) -> None:
            call = os.preadv if (piece // THREADS) % 2 else os.pwritev
            call(file.handle, [memory], piece * PIECE)

        _in_threads(THREADS, pieces, write)
        seconds = _in_threads(THREADS, pieces, mixed)
    finally:
        file.close()
    tool = f"Python, {THREADS} threads of preadv and pwritev, 8 MiB, {'O_DIRECT' if file.direct else 'page cache'}"
    return {"tool": tool, "bytes_per_second": pieces * PIECE / seconds}
