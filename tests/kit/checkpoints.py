"""Models that are trained for a few steps, saved and loaded, in any setup: what the tests of checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.kit.models import MENAGERIE
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.out_of_core import Where, settle


@dataclass(frozen=True)
class Setup:
    """How a model is kept while it is trained."""

    ranks: int = 1
    stage: int = 0
    disk: bool = False
    resident: str = "disk"
    update: str = "step"
    chunk_bytes: int = 4096
    precision: str | None = None

    def __str__(self) -> str:
        where = f"-{self.resident}-{self.update}-{self.chunk_bytes}" if self.disk else ""
        return f"{self.ranks}ranks-stage{self.stage}{where}{'-' + self.precision if self.precision else ''}"

    def options(self, folder: Path) -> dict[str, Any]:
        options: dict[str, Any] = {"stage": self.stage, "precision": self.precision}
        if self.disk:
            where = Where(self.update, chunk_bytes=self.chunk_bytes, resident=self.resident)
            options |= where.options(str(folder))
        else:
            options["comm"] = lowtide.Comm(bucket_bytes=0, deadline=30)
        return options


class Trained:
    """A sharded specimen with its optimizer and a scheduler."""

    def __init__(self, specimen: str, optimizer: str, setup: Setup, folder: Path, rank: int, *, seed: int = 0) -> None:
        self.specimen, self.rank = MENAGERIE[specimen], rank
        self.model: nn.Module = self.specimen.build(seed)
        self.optimizer = OPTIMIZERS[optimizer](p for p in self.model.parameters() if p.requires_grad)
        (folder / "spool").mkdir(exist_ok=True)
        lowtide.shard(self.model, self.optimizer, **setup.options(folder / "spool"))
        if setup.disk:
            settle(self.model, setup.resident)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def train(self, first: int, steps: int) -> list[Tensor]:
        """The losses of some steps."""
        losses: list[Tensor] = []
        for step in range(first, first + steps):
            loss = self.specimen.loss(self.model, self.specimen.batch(step, self.rank))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def numbers(self) -> dict[str, Tensor]:
        """All of them, whole: on rank 0, nothing on others."""
        out = {f"parameter {n}": t for n, t in self.model.state_dict().items()}
        whole = self.optimizer.state_dict()
        for index, state in whole.get("state", {}).items():
            out |= {
                f"state {index} {n}": v if isinstance(v, Tensor) else torch.tensor(v) for n, v in state.items() if v is not None
            }
        return {n: t.detach().clone() for n, t in out.items()} if self.rank == 0 else {}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor has the same bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(other.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name
