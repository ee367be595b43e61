"""When a job saves, and what it goes on from.

Checkpoints lie in ``checkpoints/step-000123`` of the run folder. A job that is started again, by hand, by torchrun or by
``--restarts``, with any number of ranks, goes on from the newest one that can be read as a whole.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import lowtide
from lowtide.api import engine_of
from lowtide.checkpoint import folder as folders
from lowtide.checkpoint import load as loading
from lowtide.checkpoint.save import Saving
from lowtide.errors import CheckpointError
from lowtide.job.batches import Batches
from lowtide.job.events import Events
from lowtide.job.history import History
from lowtide.job.options import Options
from lowtide.job.progress import Reporter
from lowtide.job.ranks import Member, everybody
from lowtide.job.run_folder import CHECKPOINTS

_STRIDE = 1 << 20
"""Keeps random numbers of a rank that joins a run apart from those that others have used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """Everything that a checkpoint must hold, so that a job goes on as if nothing had happened."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    batches: Batches
    history: History

    @property
    def state(self) -> dict[str, Any]:
        """What has a ``state_dict``, beside model and optimizer."""
        return {"scheduler": self.scheduler, "batches": self.batches}


@dataclass(slots=True)
class _Pending:
    """A checkpoint on its way, and how long training has stood still for it."""

    saving: Saving
    step: int
    why: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run, as every rank sees them; rank 0 tells and notes what happens."""

    trainee: Trainee
    options: Options
    member: Member
    reporter: Reporter
    events: Events
    paths: list[str] = field(default_factory=list[str])
    """What this process has saved."""
    seconds: list[float] = field(default_factory=list[float])
    _pending: _Pending | None = None
    _last_step: int = 0

    # -- going on -----------------------------------------------------------------------------------------------------

    def resume(self) -> int | None:
        """Load what the job goes on from, if there is something; the step of it. Collective."""
        engine = engine_of(self.trainee.model)
        mine = self._choose() if self.member.rank == 0 else None
        source = everybody(engine.exchange, "where to go on", mine)[0]
        if source is None:
            return None
        start = time.perf_counter()
        wish = loading.Wish(path=Path(source), state=self.trainee.state, strict=True, progress=None)
        loaded = loading.load(engine, self.trainee.optimizer, wish)
        history = self.trainee.history
        history.from_extra(loaded.extra)
        self._last_step = history.step
        self._set_rate()
        if self.member.rank >= loaded.world_size:  # there is no state of random numbers for this rank
            seed = self.options.seed + self.member.rank + _STRIDE * history.step
            torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
        for reason in loaded.passed_over:
            self._note("passed_over", f"passed over {reason}")
        ranks = f"{loaded.world_size} -> {self.member.ranks} ranks, " if loaded.world_size != self.member.ranks else ""
        seconds = time.perf_counter() - start
        remark = f"; {self.trainee.batches.remark}" if self.trainee.batches.remark else ""
        self._note("resume", f"going on from step {history.step}: {loaded.path} ({ranks}{seconds:.1f} s){remark}")
        return history.step

    def _choose(self) -> str | None:
        """The folder to load from; rank 0 decides for all."""
        own = self.folder
        if own is not None:
            _remove_unfinished(own)
        path = _source(self.options, own)
        if path is None or (path == own and not any(folders.checkpoints(path))):
            return None
        return str(path)

    def _set_rate(self) -> None:
        """The next step uses the rate that this job was asked for, also if ``--lr`` or ``--steps`` have changed."""
        scheduler = self.trainee.scheduler
        state = scheduler.state_dict()
        rates = [self.options.lr * share(state["last_epoch"]) for share in scheduler.lr_lambdas]
        for group, rate in zip(self.trainee.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler.load_state_dict({**state, "base_lrs": [self.options.lr] * len(rates), "_last_lr": rates})

    # -- saving -------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """Where this run's checkpoints are."""
        return Path(self.options.run).absolute() / CHECKPOINTS if self.options.run is not None else None

    def after_step(self, *, ending: str | None) -> bool:
        """Save if it is time to, or if the job ends here (``ending`` says why); whether it tried. Collective."""
        every = self.options.save_every
        step = self.trainee.history.step
        if not self.options.saves or (ending is None and not (every and step % every == 0)):
            return False
        self._finish(strict=False)
        if ending is not None:
            if step != self._last_step:
                self._save(ending, background=False)
                self._finish(strict=True)
            return True
        try:
            self._save(f"every {every} steps", background=self.options.background_saves)
        except CheckpointError as error:
            self._note_failed(step, error)
        if not self.options.background_saves:
            self._finish(strict=False)
        return True

    def finish(self) -> None:
        """Wait for a save in the background, if there is one. Collective."""
        self._finish(strict=False)

    def _save(self, why: str, *, background: bool) -> None:
        trainee, folder = self.trainee, self.folder
        if folder is None:
            return
        start = time.perf_counter()
        trainee.history.add_up_traffic(engine_of(trainee.model).exchange)
        saving = lowtide.save(
            folder / f"step-{trainee.history.step:06d}",
            trainee.model,
            trainee.optimizer,
            state=trainee.state,
            extra=trainee.history.to_extra(),
            background=background,
            keep=self.options.keep,
            progress=self.reporter.saving,
        )
        self._pending = _Pending(saving, trainee.history.step, why, time.perf_counter() - start)

    def _finish(self, *, strict: bool) -> None:
        """Wait for the save that is under way, and note how it went; ``strict`` raises if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            path = pending.saving.wait()
        except CheckpointError as error:
            if strict:
                raise
            self._note_failed(pending.step, error)
            return
        seconds = pending.seconds + time.perf_counter() - start
        self._last_step = pending.step
        self.paths.append(os.path.relpath(path) if not os.path.isabs(self.options.run or "") else str(path))
        self.seconds.append(seconds)
        self._note("save", f"saved {path.name} ({pending.why}, {seconds:.1f} s)", step=pending.step)

    def _note_failed(self, step: int, error: CheckpointError) -> None:
        """All ranks come here together, and the checkpoint before is still there: training goes on."""
        self._note("save_failed", f"step {step} was not saved: {error}", step=step)

    def _note(self, event: str, what: str, *, step: int | None = None) -> None:
        self.events.note(event, what, step=self.trainee.history.step if step is None else step)
        self.reporter.tell(what)


def _source(options: Options, own: Path | None) -> Path | None:
    """What ``--resume`` means: the run's own checkpoints come first, or a job that is started again would lose its work.

    A checkpoint of this very run that is named is loaded though newer ones are there, unless a launcher starts the job again.
    """
    has_own = own is not None and any(folders.checkpoints(own))
    if options.resume == "auto" or (has_own and options.attempt):
        return own
    if options.resume == "never":
        return None
    named = Path(options.resume).absolute()
    if own is not None and named.parent == own:
        return named
    if has_own:
        return own
    return named / CHECKPOINTS if (named / CHECKPOINTS).is_dir() and not folders.is_checkpoint(named) else named


def _remove_unfinished(folder: Path) -> None:
    """What saves that never ended have left. The run is locked, so nobody writes there now."""
    for left in folders.leftovers(folder):
        if folders.stranger_in(left) is not None:
            continue  # it is called as if a save had left it, and is somebody's
        if left.is_dir():
            folders.remove(left)
        else:
            left.unlink()
