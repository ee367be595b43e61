"""The ranks of one system as processes that stay alive, idle until they are told to run a step."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent.parent / "workers" / "rank.py"
SAMPLE_SECONDS = 0.05
GRACE_SECONDS = 5.0


class TeamFailed(Exception):
    """A rank raised, died or did not answer; the message is the cause."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one system is asked to train, and with which interpreter."""

    system: str
    python: str
    python_path: str
    world_size: int
    shape: Any
    deadline_seconds: float
    worker: Path = WORKER
    threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # what only this worker's order has
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    log: Path
    pending: bytes = b""


class Team:
    """Starts with the first instruction, ends with ``stop``. Every answer is a list with one dictionary per rank."""

    def __init__(self, job: Job, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.job = job
        self._ranks = [self._start(rank, folder) for rank in range(job.world_size)]

    def _start(self, rank: int, folder: Path) -> _Rank:
        job = self.job
        order = {
            "system": job.system,
            "rank": rank,
            "world_size": job.world_size,
            "rendezvous": str(folder / "rendezvous"),
            "shape": asdict(job.shape),
            **job.options,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": job.python_path,
            "OMP_NUM_THREADS": str(job.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            # DeepSpeed reads these even when a process group exists.
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_SIZE": str(job.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "DS_ACCELERATOR": "cpu",
            **job.environment,
        }
        log = folder / f"rank{rank}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [job.python, str(job.worker), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                env=environment,
                cwd=folder,
            )
        return _Rank(process, log)

    def _failure(self, rank: _Rank, what: str) -> TeamFailed:
        tail = [line for line in rank.log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return TeamFailed(f"{what}{': ' + tail[0].strip() if tail else ''}")

    def _read(self, index: int, deadline: float) -> dict[str, Any]:
        rank = self._ranks[index]
        stream = rank.process.stdout
        if stream is None:
            raise TeamFailed(f"rank {index} has no pipe")
        while b"\n" not in rank.pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                raise self._failure(rank, f"rank {index} did not answer within {self.job.deadline_seconds:.0f} s")
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                raise self._failure(rank, f"rank {index} ended with code {rank.process.wait()}")
            rank.pending += data
        line, rank.pending = rank.pending.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise TeamFailed(f"rank {index}: {answer['error']}")
        return answer

    def answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.job.deadline_seconds
        answers: list[dict[str, Any]] = []
        causes: list[str] = []
        for index in range(self.job.world_size):
            try:
                answers.append(self._read(index, deadline))
            except TeamFailed as error:
                causes.append(str(error))
                # One rank's failure leaves the others waiting for it; what they have to say, they say soon.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if causes:
            raise TeamFailed("; ".join(causes))
        return answers

    def tell(self, do: str, **arguments: Any) -> None:
        for rank in self._ranks:
            if rank.process.stdin is not None:
                # A rank that has ended is reported by `answers`, with its exit code.
                with contextlib.suppress(BrokenPipeError):
                    rank.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        self.tell(do, **arguments)
        return self.answers()

    def pss_peak_while_answering(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Answers of an order that was told before, and each rank's highest Pss meanwhile, sampled from outside."""
        return self._peak_while_answering(_pss_bytes)

    def private_peak_while_answering(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The same with anonymous and shared memory, which no kernel counter keeps the peak of."""
        return self._peak_while_answering(_not_of_files_bytes)

    def _peak_while_answering(self, read: Callable[[int], int]) -> tuple[list[dict[str, Any]], list[int]]:
        peaks = [0] * self.job.world_size
        streams = [rank.process.stdout for rank in self._ranks if rank.process.stdout is not None]
        give_up = time.monotonic() + self.job.deadline_seconds
        while len(select.select(streams, [], [], 0)[0]) < len(streams) and time.monotonic() < give_up:
            if any(rank.process.poll() is not None for rank in self._ranks):
                break
            time.sleep(SAMPLE_SECONDS)
            for index, rank in enumerate(self._ranks):
                peaks[index] = max(peaks[index], read(rank.process.pid))
        return self.answers(), peaks

    def cpu_seconds(self) -> float:
        return sum(_cpu_seconds(rank.process.pid) for rank in self._ranks)

    def stop(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            for stream in (rank.process.stdin, rank.process.stdout):
                if stream is not None:
                    stream.close()


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0  # the process has just ended: `answers` reports why


def _not_of_files_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    except OSError:
        return 0


def _cpu_seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
