"""The training loop: the one that every PyTorch user writes, with one added line before it (in ``train.py``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import lowtide
from lowtide.errors import Error
from lowtide.job.batches import Batch, Batches
from lowtide.job.interrupt import StopRequest
from lowtide.job.memory import peak_bytes
from lowtide.job.progress import Reporter
from lowtide.job.ranks import Member, any_rank, mean_over_ranks
from lowtide.job.records import RunFolder, StepRecord, ValidationRecord
from lowtide.job.tiers import DiskTraffic, Meter

_SKIPS_IN_A_ROW = 10
"""So many steps with non-finite gradients mean that the model is lost."""
_VALIDATIONS = 10
_SHORTEST_GAP = 10
"""Steps between two validations, at least."""


class Diverged(Error, ArithmeticError):
    """The gradients are not finite any more; training on would do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a step on text differs from one on synthetic tokens, which has no clipping and a constant rate."""

    clip: float | None
    warmup_steps: int
    final_share: float
    """The learning rate at the end, as a share of the highest."""

    @classmethod
    def for_text(cls, steps: int) -> Recipe:
        return cls(clip=1.0, warmup_steps=min(50, max(1, steps // 10)), final_share=0.1)

    @classmethod
    def for_synthetic(cls) -> Recipe:
        return cls(clip=None, warmup_steps=0, final_share=1.0)

    def rate(self, step: int, steps: int) -> float:
        """The share of the highest learning rate that step ``step`` (from 0) uses."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * min(1.0, done))) / 2


@dataclass(slots=True)
class History:
    """What the loop has seen so far; one entry per step."""

    seconds: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    traffic: list[DiskTraffic] = field(default_factory=list[DiskTraffic])
    validation: list[ValidationRecord] = field(default_factory=list[ValidationRecord])
    skipped: int = 0
    skipped_in_a_row: int = 0
    interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Everything a step needs. The model and the optimizer have been sharded."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Batch], Tensor]
    batches: Batches
    steps: int
    recipe: Recipe
    meter: Meter
    member: Member
    reporter: Reporter
    folder: RunFolder | None
    stop: StopRequest

    def run(self) -> History:
        """Train until the last step, or until somebody asks to stop."""
        history = History()
        scheduler = LambdaLR(self.optimizer, lambda step: self.recipe.rate(step, self.steps))
        held_out = self.batches.held_out()
        self.model.train()
        for step in range(1, self.steps + 1):
            self._step(step, scheduler, history)
            last = step == self.steps
            if held_out and (last or step % max(_SHORTEST_GAP, self.steps // _VALIDATIONS) == 0):
                self._validate(step, held_out, history)
                self.meter.step()  # what validation moved belongs to no step
            if not last and any_rank(self.member, flag=self.stop.asked):
                history.interrupted = True
                break
        return history

    def _step(self, step: int, scheduler: LambdaLR, history: History) -> None:
        batch = self.batches.draw()
        rate = float(scheduler.get_last_lr()[0])
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        norm = lowtide.clip_grad_norm_(self.model, self.recipe.clip) if self.recipe.clip is not None else None
        self.optimizer.step()
        skipped = bool(getattr(self.optimizer, "step_was_skipped", False))
        if not skipped:
            scheduler.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        traffic = self.meter.step()
        self._note_skip(step, history, skipped=skipped)
        history.seconds.append(seconds)
        history.losses.append(loss.item())
        history.traffic.append(traffic)
        record = StepRecord(
            step=step,
            loss=loss.item(),
            seconds=seconds,
            tokens_per_second=batch[0].numel() * self.member.ranks / seconds,
            lr=rate,
            grad_norm=float(norm) if norm is not None else None,
            skipped=skipped,
            peak_bytes=peak_bytes(),
            host_bytes=self.meter.usage.host_bytes,
            disk_bytes=self.meter.usage.disk_bytes,
            disk_read_bytes=traffic.read_bytes,
            disk_written_bytes=traffic.written_bytes,
            disk_wait_seconds=traffic.wait_seconds,
        )
        if self.folder is not None:
            self.folder.add(record)
        self.reporter.step(record)

    def _note_skip(self, step: int, history: History, *, skipped: bool) -> None:
        history.skipped += skipped
        history.skipped_in_a_row = history.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            self.reporter.tell(f"step {step}: gradients are not finite, nothing was updated")
        if history.skipped_in_a_row == _SKIPS_IN_A_ROW:
            raise Diverged(f"gradients were not finite for {_SKIPS_IN_A_ROW} steps, until step {step}; try a lower --lr.")

    def _validate(self, step: int, held_out: Sequence[Batch], history: History) -> None:
        """The mean loss on the held-out batches of all ranks. Every rank takes part: a forward may need all of them."""
        self.model.eval()
        with torch.no_grad():
            mine = sum(self.loss(batch).item() for batch in held_out) / len(held_out)
        self.model.train()
        record = ValidationRecord(step=step, validation_loss=mean_over_ranks(mine, self.member))
        history.validation.append(record)
        if self.folder is not None:
            self.folder.add(record)
        self.reporter.validation(record)
