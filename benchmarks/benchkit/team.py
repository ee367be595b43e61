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


@dataclass(frozen=True)
class Place:
    """Where one rank runs: what its command begins with, and the variables that only it has."""

    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


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
    places: tuple[Place, ...] = ()
    """One per rank, or none: then all run here."""


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
        place = job.places[rank] if job.places else Place()
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
            **place.environment,
        }
        log = folder / f"rank{rank}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*place.command, job.python, str(job.worker), json.dumps(order)],
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

    def memory_peak_while_answering(self) -> tuple[list[dict[str, Any]], list[int], int]:
        """Answers of an order that was told before; meanwhile, sampled from outside: each rank's highest Pss, and the most
        that all ranks had together at one moment, where a page that several of them map counts once."""
        pss, together = [0] * self.job.world_size, 0

        def look() -> None:
            nonlocal together
            seen = [_Footprint.of(rank.process.pid) for rank in self._ranks]
            for index, footprint in enumerate(seen):
                pss[index] = max(pss[index], footprint.pss)
            # Pages of files (libraries, mostly) are shared with everybody else, too, which makes Pss useless for them.
            together = max(together, sum(f.own for f in seen) + max(f.files for f in seen))

        return self._look_while_answering(look), pss, together

    def private_peak_while_answering(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The same with each rank's anonymous and shared memory, which no kernel counter keeps the peak of."""
        peaks = [0] * self.job.world_size

        def look() -> None:
            for index, rank in enumerate(self._ranks):
                peaks[index] = max(peaks[index], _not_of_files_bytes(rank.process.pid))

        return self._look_while_answering(look), peaks

    def _look_while_answering(self, look: Callable[[], None]) -> list[dict[str, Any]]:
        streams = [rank.process.stdout for rank in self._ranks if rank.process.stdout is not None]
        give_up = time.monotonic() + self.job.deadline_seconds
        while len(select.select(streams, [], [], 0)[0]) < len(streams) and time.monotonic() < give_up:
            if any(rank.process.poll() is not None for rank in self._ranks):
                break
            time.sleep(SAMPLE_SECONDS)
            look()
        return self.answers()

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


@dataclass(frozen=True)
class _Footprint:
    """The memory of one process, in bytes: by share (Pss), without the pages of files, and those pages."""

    pss: int
    own: int
    files: int

    @classmethod
    def of(cls, pid: int) -> _Footprint:
        shares, counts = _kilobytes(pid, "smaps_rollup"), _kilobytes(pid, "status")
        return cls(
            pss=shares.get("Pss", 0),
            own=shares.get("Pss_Anon", 0) + shares.get("Pss_Shmem", 0),
            files=counts.get("RssFile", 0),
        )


def _kilobytes(pid: int, file: str) -> dict[str, int]:
    """The lines of a file in /proc that end in kB, in bytes. Empty if the process has just ended: `answers` reports why."""
    try:
        with open(f"/proc/{pid}/{file}") as lines:
            fields = (line.split() for line in lines if line.rstrip().endswith(" kB"))
            return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields}
    except OSError:
        return {}


def _not_of_files_bytes(pid: int) -> int:
    counts = _kilobytes(pid, "status")
    return counts.get("RssAnon", 0) + counts.get("RssShmem", 0)


def _cpu_seconds(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
