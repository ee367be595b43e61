"""Start the ranks of a job on this host and see them through to one end.

The ranks meet through a file in a private folder and then talk over the loopback interface only: no port is open to the
network, and there is no rendezvous server. The first rank that fails ends all of them, and its cause is shown once.
Ranks stand in sessions of their own, so Ctrl-C reaches this process alone, which passes it on: once asks the ranks to
stop where they choose, twice ends them. SIGTERM and SIGUSR1 are passed on as well, however often they come.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lowtide.job.failure import FOLDER_VARIABLE, PARENT_VARIABLE, Failure, first_cause, read_reports
from lowtide.job.interrupt import SIGNALS
from lowtide.launchers import Placement, discover
from lowtide.reporting.oom import Counters, how_it_died, read_counters

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.5
"""What the other ranks get to end by themselves after one has failed; then they are killed."""
_LOG_TAIL_BYTES = 2000
_REPORT_TAIL_BYTES = 20_000
_SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides the cursor, and a rank that is killed cannot bring it back."""


def start_ranks(command: Sequence[str], ranks: int) -> Failure | None:
    """Run ``command`` as ``ranks`` processes and wait for all; returns the cause if they did not all succeed.

    Rank 0 shares this process' output; what the others write is kept until the end, and its tail shown if they die.
    """
    folder = Path(tempfile.mkdtemp(prefix="lowtide-ranks-"))  # mode 0700
    running = _Running()
    try:
        with _signals_to(running.on_signal):
            for rank in range(ranks):
                running.processes.append(_start(command, rank, ranks, folder))
            failure = first_cause(_watch(folder, running))
            if failure is not None:
                _show_for_rank_0(folder, running, failure)
            return failure
    finally:
        _kill(running.processes)
        shutil.rmtree(folder, ignore_errors=True)


def started_by_launch() -> bool:
    """Whether this process is a rank that :func:`start_ranks` started."""
    return FOLDER_VARIABLE in os.environ


def launched_by() -> Placement | None:
    """Who this process is, if another launcher has started it as one of several ranks (torchrun: also as the only one)."""
    if started_by_launch():
        return None
    placement = discover(os.environ)
    return placement if placement is not None and (placement.size > 1 or "RANK" in os.environ) else None


@dataclass(slots=True)
class _Running:
    """The ranks, and what signals asked of them. Signals are noted by the handler and read by the watching loop."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    signals: list[int] = field(default_factory=list[int])
    counters: Counters = field(default_factory=read_counters)
    """Of the kernel, before the ranks were started."""

    @property
    def must_end_now(self) -> bool:
        return self.signals.count(signal.SIGINT) > 1

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def _start(command: Sequence[str], rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        FOLDER_VARIABLE: str(folder),
        PARENT_VARIABLE: str(os.getpid()),
    }
    if rank == 0:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _watch(folder: Path, running: _Running) -> list[Failure]:
    """Wait until all ranks are gone, or until one has failed (or Ctrl-C came twice) and the others had their time to end."""
    deaths: dict[int, Failure] = {}
    deadline: float | None = None
    while any(process.poll() is None for process in running.processes):
        _note_deaths(folder, running, deaths)
        if deadline is None and (deaths or running.must_end_now or read_reports(folder)):
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    _note_deaths(folder, running, deaths)
    failures = [*deaths.values(), *read_reports(folder)]
    deaf = [rank for rank, process in enumerate(running.processes) if process.poll() is None]
    if deaf and not failures:  # Ctrl-C came twice and they did not end
        failures.append(_failure(deaf[0], "interrupted", "interrupted"))
    return failures


def _note_deaths(folder: Path, running: _Running, deaths: dict[int, Failure]) -> None:
    """Add the ranks that are gone with a bad exit code and without a report."""
    codes = [process.poll() for process in running.processes]
    # Read after the exit codes: a rank writes its report before it ends.
    reported = {failure.rank for failure in read_reports(folder)}
    for rank, code in enumerate(codes):
        if code is None or code == 0 or rank in reported or rank in deaths:
            continue
        if (stopped_by := _asked(code, running.signals)) is not None:
            deaths[rank] = _failure(rank, stopped_by, f"ended by {stopped_by} before there was a checkpoint")
        else:
            how = how_it_died(code, running.counters, read_counters())
            deaths[rank] = _failure(rank, "died", f"rank {rank} {how}", _log_tail(folder / f"rank-{rank}.log"))


def _asked(code: int, signals: list[int]) -> str | None:
    """The kind of failure of a rank that ended because a signal asked it to, whether it had time to say so or not."""
    number = code - 128 if code > 128 else -code if -code in signals else 0
    if number == signal.SIGINT:
        return "interrupted"
    return signal.Signals(number).name if number in (signal.SIGTERM, signal.SIGUSR1) else None


def _failure(rank: int, kind: str, message: str, output: str = "") -> Failure:
    return Failure(rank=rank, kind=kind, message=message, traceback=output, time=time.time(), secondary=False)


def _show_for_rank_0(folder: Path, running: _Running, failure: Failure) -> None:
    """Rank 0 speaks for all. If it did not end by itself, what the rank that knows the cause wrote last is shown instead."""
    if failure.rank > 0 and failure.secondary and running.processes[0].poll() is None:
        sys.stderr.write(_log_tail(folder / f"rank-{failure.rank}.log", _REPORT_TAIL_BYTES))
        sys.stderr.flush()


def _log_tail(path: Path, nbytes: int = _LOG_TAIL_BYTES) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-nbytes:].decode("utf-8", "replace")


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            if sys.stdout.isatty():
                sys.stdout.write(_SHOW_CURSOR)
    for process in processes:
        process.wait()


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], Any]) -> Generator[None, None, None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone handle signals
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
