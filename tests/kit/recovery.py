"""A training job in short, the same in every life: what tests of kills and power cuts run, and how they look at what is left.

A job takes a step, saves, takes another step and saves again; the second save is where things go wrong. What is in a checkpoint
is compared by one digest over all numbers, which an undisturbed run of the same job has written down before.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

import lowtide
from lowtide.checkpoint.save import Saving
from tests.kit.checkpoints import Setup, Trained
from tests.kit.crashes import CHANGING, Board, FaultPoints, kill, start

ACKNOWLEDGED = 0
"""Where on its board a job notes the last step that is saved for good."""
OPTIMIZER = "adamw_fused"


@dataclass(frozen=True)
class Job:
    """How a model is kept and saved. ``same_name``: every checkpoint replaces the one before."""

    setup: Setup
    specimen: str = "lora"
    background: bool = False
    link: bool = True
    keep: int | None = 1
    same_name: bool = False

    def name(self, step: int) -> str:
        return "last" if self.same_name else f"step-{step}"

    def trained(self, folder: Path, rank: int = 0, seed: int = 0) -> Trained:
        return Trained(self.specimen, OPTIMIZER, self.setup, folder, rank, seed=seed)

    def save(self, one: Trained, folder: Path, step: int) -> Saving:
        return lowtide.save(
            folder / "run" / self.name(step),
            one.model,
            one.optimizer,
            state=one.state(),
            extra={"step": step},
            background=self.background,
            keep=self.keep,
            link=self.link,
        )


def warm_up() -> None:
    """Load all code, so that a fork of this process need not. Starts no thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        job = Job(Setup())
        one = job.trained(Path(name))
        one.train(0, 1)
        job.save(one, Path(name), 1).wait()
        look(Path(name), reader(Path(name), job))
    assert threading.active_count() == 1


def digest(numbers: Mapping[str, Tensor]) -> str:
    """Of every bit, name, dtype and shape."""
    hasher = xxhash.xxh3_128()
    for name in sorted(numbers):
        tensor = numbers[name].detach().contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return hasher.hexdigest()


def life(folder: Path, job: Job, board: Board, points: FaultPoints, rank: int = 0) -> list[str]:
    """Two steps, each saved; ``points`` are armed during the second save. Returns the calls that were seen."""
    one = job.trained(folder, rank)
    one.train(0, 1)
    job.save(one, folder, 1).wait()
    board[ACKNOWLEDGED] = 1
    one.train(1, 1)
    with points:
        saving = job.save(one, folder, 2)
        if job.background:
            one.train(2, 2)
        saving.wait()
    board[ACKNOWLEDGED] = 2
    return points.seen


def reader(folder: Path, job: Job) -> Trained:
    """What loads a job's checkpoints: in memory, on one rank, with other numbers than the job's. Starts no thread."""
    return Job(Setup(), job.specimen).trained(folder, seed=1)


def look(folder: Path, two: Trained) -> tuple[int, str]:
    """What lowtide.load finds: the step, and the digest of all numbers."""
    extra = lowtide.load(folder / "run", two.model, two.optimizer, state=two.state())
    return extra["step"], digest(two.numbers())


def undisturbed(folder: Path, job: Job) -> dict[int, str]:
    """The digests after both steps. Forks if there are several ranks."""
    if job.setup.ranks == 1:
        return _digests(folder, job, 0)
    found = [child.wait() for child in ranks(folder, job.setup.ranks, _digests, folder, job)]
    return found[0].result()


def _digests(folder: Path, job: Job, rank: int) -> dict[int, str]:
    one = job.trained(folder, rank)
    out: dict[int, str] = {}
    for step in (1, 2):
        one.train(step - 1, 1)
        out[step] = digest(one.numbers())
    return out


def ranks(folder: Path, world: int, fn: Any, *args: Any, seconds: float = 60.0) -> list[Any]:
    """``fn(*args, rank)`` in forked processes, joined by gloo if there are several."""
    store = folder / f"store-{os.urandom(6).hex()}"
    return [start(_as_rank, rank, world, str(store), fn, args, seconds=seconds) for rank in range(world)]


def _as_rank(rank: int, world: int, store: str, fn: Any, args: tuple[Any, ...]) -> Any:
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return fn(*args, rank)


def lives_of_ranks(folder: Path, job: Job, board: Board, victim: int, at: int) -> list[Any]:
    """``life`` on several ranks, one of which is killed at its ``at``-th call."""
    return ranks(folder, job.setup.ranks, _one_of_ranks, folder, job, board, victim, at)


def _one_of_ranks(folder: Path, job: Job, board: Board, victim: int, at: int, rank: int) -> list[str]:
    return life(folder, job, board, FaultPoints(CHANGING, at if rank == victim else -1, kill), rank)
