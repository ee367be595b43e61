"""The training loop: the one that every PyTorch user writes, with one added line before it (in ``train.py``)."""

from __future__ import annotations

import math
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error
from lowtide.job.batches import Batch
from lowtide.job.checkpoints import Checkpoints, Trainee
from lowtide.job.interrupt import StopRequest
from lowtide.job.memory import peak_bytes
from lowtide.job.options import Options
from lowtide.job.outlets import Outlets, note_loss
from lowtide.job.pace import Pace
from lowtide.job.progress import Reporter
from lowtide.job.ranks import Member
from lowtide.job.records import StepRecord, ValidationRecord
from lowtide.job.run_folder import RunFolder
from lowtide.job.tiers import Meter

_SIGNAL = struct.Struct("<q")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Everything a step needs. The model and the optimizer have been sharded, and loaded if the run goes on."""

    trainee: Trainee
    loss: Callable[[Batch], Tensor]
    options: Options
    recipe: Recipe
    meter: Meter
    member: Member
    reporter: Reporter
    folder: RunFolder | None
    checkpoints: Checkpoints
    stop: StopRequest
    pace: Pace
    outlets: Outlets

    def run(self) -> None:
        """Train until the last step, or until somebody asks to stop."""
        history, steps = self.trainee.history, self.options.steps
        held_out = self.trainee.batches.held_out()
        self.trainee.model.train()
        for step in range(history.step + 1, steps + 1):
            self._step(step)
            last = step == steps
            validates = bool(held_out) and (last or step % max(_SHORTEST_GAP, steps // _VALIDATIONS) == 0)
            if validates:
                self._validate(step, held_out)
            if not last:
                history.stopped_by = self._asked_to_stop(step)
            saved = self.checkpoints.after_step(ending="the last step" if last else history.stopped_by)
            if validates or saved:
                self.meter.step()  # what these moved belongs to no step
            if history.stopped_by is not None:
                break

    def _asked_to_stop(self, step: int) -> str | None:
        """The signal that any rank has got, so that all act on it at the same step. Collective; tells how fast each rank is."""
        exchange = engine_of(self.trainee.model).exchange
        notes = exchange.notes("signals", _SIGNAL.pack(self.stop.number) + self.pace.row())
        news = self.pace.hear([note[_SIGNAL.size :] for note in notes])
        if news is not None:
            self.checkpoints.events.note("straggler", news, step=step)
        number = max(_SIGNAL.unpack_from(note)[0] for note in notes)
        if not number:
            return None
        name = signal.Signals(number).name
        self.checkpoints.events.note("signal", name, step=step)
        return name

    def _step(self, step: int) -> None:
        trainee, history = self.trainee, self.trainee.history
        batch = trainee.batches.draw()
        rate = float(trainee.scheduler.get_last_lr()[0])
        self.pace.begin()
        start = time.perf_counter()
        loss = self.loss(batch)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        norm = lowtide.clip_grad_norm_(trainee.model, self.recipe.clip) if self.recipe.clip is not None else None
        trainee.optimizer.step()
        skipped = bool(getattr(trainee.optimizer, "step_was_skipped", False))
        if not skipped:
            trainee.scheduler.step()
        trainee.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        traffic = self.meter.step()
        history.seconds.append(seconds)
        history.losses.append(loss.item())
        history.own_traffic.append(traffic)
        self.pace.note(seconds, traffic.wait_seconds)
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
            straggler=self.pace.straggler,
        )
        note_loss(trainee.model, record.loss)
        self.outlets.step(record)
        if self.folder is not None:
            self.folder.add(record)
        self.reporter.step(record)
        self._note_skip(step, skipped=skipped)

    def _note_skip(self, step: int, *, skipped: bool) -> None:
        history = self.trainee.history
        history.skipped += skipped
        history.skipped_in_a_row = history.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        self.checkpoints.events.note("skip", "gradients are not finite, nothing was updated", step=step)
        self.reporter.tell(f"step {step}: gradients are not finite, nothing was updated")
        if self.options.nonfinite == "raise":
            problem = f"gradients were not finite at step {step}, and --nonfinite is 'raise'; nothing was updated."
        elif history.skipped_in_a_row == _SKIPS_IN_A_ROW:
            problem = f"gradients were not finite for {_SKIPS_IN_A_ROW} steps, until step {step}; try a lower --lr."
        else:
            return
        self.checkpoints.finish()  # all ranks are here, and the checkpoint is from before
        raise Diverged(problem)

    def _validate(self, step: int, held_out: Sequence[Batch]) -> None:
        """The mean loss on the held-out batches of all ranks. Every rank takes part: a forward may need all of them."""
        model = self.trainee.model
        model.eval()
        with torch.no_grad():
            mine = sum(self.loss(batch).item() for batch in held_out) / len(held_out)
        model.train()
        everybody = engine_of(model).exchange.notes("validation losses", struct.pack("<d", mine))
        mean = sum(struct.unpack("<d", note)[0] for note in everybody) / len(everybody)
        record = ValidationRecord(step=step, validation_loss=mean)
        self.trainee.history.validation.append(record)
        if self.folder is not None:
            self.folder.add(record)
        self.reporter.validation(record)
