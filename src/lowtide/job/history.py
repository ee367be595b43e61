"""What a run has seen, step by step, across all processes that have worked on it: a checkpoint carries it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lowtide.job.ranks import everybody
from lowtide.job.records import ValidationRecord
from lowtide.job.tiers import DiskTraffic
from lowtide.runtime.exchange import Exchange


@dataclass(slots=True)
class History:
    """One entry per step of the run. Losses and seconds are this rank's; those before a restart are rank 0's."""

    seconds: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    own_traffic: list[DiskTraffic] = field(default_factory=list[DiskTraffic])
    """This rank's, of the steps that ``traffic`` lacks."""
    traffic: list[DiskTraffic] = field(default_factory=list[DiskTraffic])
    """Of all ranks: what they moved together, and the longest wait."""
    validation: list[ValidationRecord] = field(default_factory=list[ValidationRecord])
    skipped: int = 0
    skipped_in_a_row: int = 0
    stopped_by: str | None = None
    """The signal that ended the job before its last step."""

    @property
    def step(self) -> int:
        """Steps done so far."""
        return len(self.losses)

    def add_up_traffic(self, exchange: Exchange) -> None:
        """Bring ``traffic`` up to date. Collective."""
        mine = [[t.read_bytes, t.written_bytes, t.wait_seconds] for t in self.own_traffic]
        for ranks in zip(*everybody(exchange, "disk traffic", mine), strict=True):
            read, written, waited = zip(*ranks, strict=True)
            self.traffic.append(DiskTraffic(sum(read), sum(written), max(waited)))
        self.own_traffic.clear()

    def to_extra(self) -> dict[str, Any]:
        """What a checkpoint keeps, once traffic has been added up. Long lists are tensors: bytes, not text."""
        return {
            "step": self.step,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
            "disk_bytes": torch.tensor([[t.read_bytes, t.written_bytes] for t in self.traffic], dtype=torch.int64),
            "disk_seconds": torch.tensor([t.wait_seconds for t in self.traffic], dtype=torch.float64),
            "validation": [asdict(record) for record in self.validation],
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def from_extra(self, extra: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept. One that another program has saved has no history: its steps are unknown."""
        if "losses" not in extra:
            return
        self.losses = extra["losses"].tolist()
        self.seconds = extra["seconds"].tolist()
        moved = zip(extra["disk_bytes"].tolist(), extra["disk_seconds"].tolist(), strict=True)
        self.traffic = [DiskTraffic(read, written, waited) for (read, written), waited in moved]
        self.validation = [ValidationRecord(**record) for record in extra["validation"]]
        self.skipped = extra["skipped"]
        self.skipped_in_a_row = extra["skipped_in_a_row"]
