"""``lowtide train`` in processes that a test may kill.

One rank is forked from a server that has imported torch (tests/kit/dist.py), so that it takes a second; several ranks, and
torchrun, are started as a user starts them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lowtide.checkpoint.source import open_source

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, self
        return json.loads(self.out)


class OneRank:
    """A job of one rank."""

    def __init__(self, folder: Path, *arguments: str, all_on_disk: bool = False, **environment: str) -> None:
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        args = (["train", *arguments], environment, str(self._out), str(self._err), all_on_disk)
        self._process = multiprocessing.get_context("forkserver").Process(target=_train, args=args)
        self._process.start()

    def send(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def out(self) -> str:
        """What it has written so far."""
        return self._out.read_text() if self._out.exists() else ""

    def wait(self, seconds: float = 60) -> Ended:
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still running: {self._err.read_text()}"
        return Ended(self._process.exitcode, self._out.read_text(), self._err.read_text())


def _train(arguments: list[str], environment: Mapping[str, str], out: str, err: str, all_on_disk: bool) -> None:
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ.update(environment)
    from lowtide.cli.main import run
    from lowtide.runtime import assembly

    if all_on_disk:  # small as it is
        assembly.default_budget = lambda: None
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


class Ranks:
    """A job that ``lowtide train --ranks N`` or torchrun starts in processes of their own."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by rank."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                environment = child.environ()
                if "RANK" in environment and any("lowtide" in word for word in child.cmdline()):
                    found[int(environment["RANK"])] = child
            except psutil.Error:
                continue
        return found

    def wait(self, seconds: float = 100) -> Ended:
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {seconds} s: {out} {err}") from None
        return Ended(self.process.returncode, out, err)


def lowtide_train(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lowtide", "train", *arguments]


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*agent, "--max-restarts", str(restarts), "-m", "--", "lowtide", "train", *arguments]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of steps."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [record for line in lines if line.endswith("\n") and "loss" in (record := json.loads(line))]


def events_of(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [entry for entry in entries if kind in (None, entry["event"])]


def wait_until(condition: Callable[[], bool], job: OneRank | Ranks, seconds: float = 60) -> None:
    """Until the condition holds, or the job is over."""
    deadline = time.monotonic() + seconds
    while not condition() and job.alive:
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def numbers_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every parameter and optimizer state of a checkpoint, whole."""
    numbers: dict[str, torch.Tensor] = {}
    with open_source(checkpoint) as source:
        for name, facts in source.parameters.items():
            for kind in source.kinds(name):
                numbers[f"{kind} of {name}"] = torch.empty(facts.numel, dtype=source.dtype(kind, name))
                source.read_into(kind, name, 0, facts.numel, numbers[f"{kind} of {name}"])
    return numbers


def assert_same_numbers(found: Path, expected: Path) -> None:
    """Two checkpoints hold the same bits."""
    ours, theirs = numbers_in(found), numbers_in(expected)
    assert ours.keys() == theirs.keys()
    assert ours
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
