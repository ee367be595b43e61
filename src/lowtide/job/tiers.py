"""What a job uses of host memory and disk, step by step, as the engine of its model counts it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

import lowtide
from lowtide.api import engine_of
from lowtide.config import Update
from lowtide.job.gauges import Limits
from lowtide.job.options import Options
from lowtide.job.planned import Choices
from lowtide.runtime.usage import Usage


def shard_as_asked(model: nn.Module, optimizer: Optimizer, options: Options, choices: Choices) -> None:
    """The one line that a plain loop gains, with everything that the job was asked for and what a plan chose for it."""
    update = Update(options.update_when)
    lowtide.shard(
        model,
        optimizer,
        memory=options.memory,
        disk=list(options.disk) or None,
        stage=choices.stage,
        activations=options.activations,
        update=update if choices.chunk_bytes is None else replace(update, chunk_bytes=choices.chunk_bytes),
        adapt=options.adapt,
        run=options.run,
    )


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """What one rank moved to and from the disk in one step, and how long it stood still for that."""

    read_bytes: int
    written_bytes: int
    wait_seconds: float


class Meter:
    """Reads the engine's counters, which run from the start of the job, and gives what each step added."""

    def __init__(self, model: nn.Module) -> None:
        self._engine = engine_of(model)
        self.usage = self._engine.usage()
        """The last reading."""

    def step(self) -> DiskTraffic:
        """What happened since the last call. Writes that a step leaves behind it count for the next one."""
        before, self.usage = self.usage, self._engine.usage()
        return DiskTraffic(
            self.usage.disk_read_bytes - before.disk_read_bytes,
            self.usage.disk_written_bytes - before.disk_written_bytes,
            self.usage.disk_wait_seconds - before.disk_wait_seconds,
        )


def limits_of(usage: Usage, options: Options) -> Limits:
    """What rank 0 may use, of what the caller asked to limit. A folder without a size is limited by the room that it has."""
    disk = usage.disk_limit_bytes
    if options.disk and disk is None:
        disk = usage.disk_bytes + _free_bytes(options.disk_folders)
    return Limits(
        host_bytes=usage.budget_bytes if options.memory is not None else None,
        disk_bytes=disk if options.disk else None,
    )


def _free_bytes(folders: Iterable[str]) -> int:
    """What is free on the disks of these folders, each disk once."""
    by_disk = {os.stat(folder).st_dev: folder for folder in folders}
    return sum(shutil.disk_usage(folder).free for folder in by_disk.values())
