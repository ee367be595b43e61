"""Processes that die, and system calls that fail, at a chosen point.

``apart(fn)`` runs a function in a process that has imported torch and started no thread, so that it may fork; ``forked(fn)``
runs one in a child of that process and says how it ended. ``FaultPoints`` counts the system calls that the library makes and
does something at one of them: kills the process, raises an error, cuts the power, fills the disk. Whoever counts first and then
tries every number has tried every moment.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import re
import select
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.dist import _CONTEXT, _PR_SET_PDEATHSIG

CHANGING = (
    *("open", "mkdir", "write", "pwrite", "posix_fallocate", "fsync", "fdatasync"),
    *("rename", "link", "unlink", "rmdir", "ftruncate"),
)
"""Calls that a save makes: each may be the last one."""
READING = ("open", "fstat", "preadv", "listdir", "scandir")
"""Calls that a load makes."""

Action = Callable[[str], None]
_TEXT_BYTES = 1024
_HEX = re.compile(r"[0-9a-f]{16}")


def kill(_: str) -> None:
    """The process ends here, as by ``kill -9``."""
    os.kill(os.getpid(), signal.SIGKILL)


def fails(number: int) -> Action:
    """The call fails with this errno."""

    def action(_: str) -> None:
        raise OSError(number, os.strerror(number))

    return action


@dataclass
class FaultPoints:
    """While it is entered, the ``at``-th call (0: the first) of ``calls`` and the ``times - 1`` after it begin with ``do``."""

    calls: Sequence[str]
    at: int = -1
    do: Action = kill
    times: int = 1
    seen: list[str] = field(default_factory=list)
    """Every call so far, with the name of the file that it was about."""
    _real: dict[str, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> FaultPoints:
        for name in self.calls:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._point(name, self._real[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)

    @property
    def hit(self) -> bool:
        return 0 <= self.at < len(self.seen)

    def _point(self, name: str, call: Any) -> Any:
        def point(*args: Any, **options: Any) -> Any:
            with self._lock:
                number = len(self.seen)
                self.seen.append(f"{name} {_file_of(args)}")
            if self.at <= number < self.at + self.times and self.at >= 0:
                self.do(name)
            return call(*args, **options)

        return point


def moments(seen: Sequence[str], *, all_of_them: bool) -> list[int]:
    """The numbers of the calls to try: all, or without the middle of long stretches of the same call on the same file. The
    number behind the last is one of them: there, nothing happens."""
    plain = [_HEX.sub("", call) for call in seen]
    ends = (i for i in range(len(plain)) if plain[i - 1 : i] != plain[i : i + 1] or plain[i + 1 : i + 2] != plain[i : i + 1])
    return [*(range(len(seen)) if all_of_them else ends), len(seen)]


def _file_of(args: tuple[Any, ...]) -> str:
    if not args or isinstance(args[0], bytes):
        return "?"
    try:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
    except (OSError, TypeError):
        return "?"
    return os.path.basename(str(path)) or str(path)


class Board:
    """A few numbers that a child writes and its parent reads, also after the child was killed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __setitem__(self, place: int, number: int) -> None:
        struct.pack_into("<q", self._memory, 8 * place, number)

    def __getitem__(self, place: int) -> int:
        return struct.unpack_from("<q", self._memory, 8 * place)[0]

    def write(self, text: str) -> None:
        """One text beside the numbers, of at most a few hundred letters."""
        raw = text.encode()[:_TEXT_BYTES]
        self._memory[-_TEXT_BYTES:] = raw.ljust(_TEXT_BYTES, b"\0")

    def read(self) -> str:
        return self._memory[-_TEXT_BYTES:].rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class Ended:
    """How a child ended: ``status`` is its exit code, or minus the signal that killed it."""

    status: int
    value: Any = None
    error: str = ""

    @property
    def killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def result(self) -> Any:
        """What the function returned; an AssertionError if it did not."""
        assert self.status == 0, f"exit status {self.status}\n{self.error}"
        return self.value


def forked(fn: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Ended:
    """``fn(*args)`` in a child of this process. One that takes too long is killed, after it has said where it stands."""
    return start(fn, *args, seconds=seconds).wait()


@dataclass
class Child:
    """A forked function."""

    pid: int
    pipe: int
    seconds: float

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> Ended:
        """Until it ends."""
        data, end = b"", time.monotonic() + self.seconds
        while time.monotonic() < end and select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            more = os.read(self.pipe, 1 << 20)
            if not more:
                break
            data += more
        else:
            os.kill(self.pid, signal.SIGABRT)  # its stacks go to stderr
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        value, error = pickle.loads(data) if data else (None, "")
        return Ended(status, value, error)


def start(fn: Callable[..., Any], *args: Any, seconds: float = 60.0) -> Child:
    """The same, without waiting."""
    theirs, ours = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(ours)
        return Child(pid, theirs, seconds)
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(3)
        faulthandler.enable()
        import torch

        torch.set_num_threads(1)
        answer, status = (fn(*args), ""), 0
    except BaseException:
        answer, status = (None, traceback.format_exc()), 1
    try:
        data = memoryview(pickle.dumps(answer))
        while data:
            data = data[os.write(ours, data) :]
    finally:
        os._exit(status)


def apart(fn: Callable[..., Any], *args: Any, seconds: float = 300.0) -> Any:
    """``fn(*args)`` in a process without threads, which may fork: a fork of one that is kept and has loaded everything."""
    if "kept" not in _zygote:
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _zygote["kept"] = (process, ours)
    process, pipe = _zygote["kept"]
    pipe.send((fn, args, seconds))
    try:
        ended = pipe.recv() if pipe.poll(seconds + 30.0) else None
    except EOFError:
        ended = None
    if ended is None:
        process.kill()
        del _zygote["kept"]
        raise AssertionError(f"{fn.__name__}: no answer within {seconds} s")
    return ended.result()


_zygote: dict[str, Any] = {}


def _serve(pipe: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from tests.kit.recovery import warm_up

    warm_up()
    while True:
        try:
            fn, args, seconds = pipe.recv()
        except EOFError:
            return
        pipe.send(forked(fn, *args, seconds=seconds))
