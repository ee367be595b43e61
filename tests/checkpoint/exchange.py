"""Checkpoints to export, compare and clean: small sharded models that were trained for a few steps and saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.kit.checkpoints import Setup
from tests.kit.dist import run_ranks
from tests.kit.models import MENAGERIE
from tests.kit.models_hf import HUGGING_FACE
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.out_of_core import settle

ON_DISK = Setup(stage=3, disk=True)


class Job:
    """A model in training, and where its checkpoints go."""

    def __init__(self, folder: Path, specimen: str, setup: Setup = ON_DISK, *, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self.specimen = {**MENAGERIE, **HUGGING_FACE}[specimen]
        self.model: nn.Module = self.specimen.build(0)
        self.optimizer = OPTIMIZERS["adamw_fused"](p for p in self.model.parameters() if p.requires_grad)
        (folder / "spool").mkdir(exist_ok=True)
        lowtide.shard(self.model, self.optimizer, **setup.options(folder / "spool"))
        if setup.disk:
            settle(self.model, setup.resident)
        self.steps = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.specimen.loss(self.model, self.specimen.batch(self.steps, self.rank)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def save(self, name: str | None = None, **options: Any) -> Path:
        path = self.folder / "run" / (name or f"step-{self.steps}")
        return lowtide.save(path, self.model, self.optimizer, **options).wait()

    def tensors(self) -> dict[str, Tensor]:
        """The model's own state_dict: whole on rank 0."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def train_and_save(rank: int, world: int, folder: str, specimen: str, setup: Setup, link: bool) -> dict[str, Tensor]:
    job = Job(Path(folder), specimen, setup, rank=rank)
    job.train(2)
    job.save(link=link, extra={"epoch": 3})
    return job.tensors()


def saved(folder: Path, specimen: str, setup: Setup = ON_DISK, *, link: bool = True) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint after two steps, and the model's state_dict then."""
    args = (str(folder), specimen, setup, link)
    tensors = run_ranks(setup.ranks, train_and_save, *args)[0] if setup.ranks > 1 else train_and_save(0, 1, *args)
    return folder / "run" / "step-2", tensors


def killed(rank: int, world: int, folder: str, specimen: str, saves: int) -> None:
    """Two linked checkpoints or more, some steps that no checkpoint has, and a sudden end."""
    job = Job(Path(folder), specimen, Setup(stage=3, disk=True, chunk_bytes=1 << 16))  # blocks of several pages
    for _ in range(saves):
        job.train()
        job.save()
    job.train(2)
    os.kill(os.getpid(), signal.SIGKILL)


def dead_job(folder: Path, *, saves: int = 2, specimen: str = "gpt") -> Path:
    """The folder of a job that was killed after some saves."""
    run_ranks(1, killed, str(folder), specimen, saves, fresh=True, exit_codes=[-signal.SIGKILL])
    return folder / "run"


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            other.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        ), name
