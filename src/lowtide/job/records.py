"""What a job reports: one record per step, one result at the end. Times are in seconds, memory in bytes, losses in nats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SUMMARY = (
    "params",
    "stage",
    "ranks",
    "seconds",
    "losses",
    "peak_bytes",
    "peak_bytes_per_rank",
    "counted_bytes",
    "budget_bytes",
    "disk_read_bytes",
    "disk_written_bytes",
    "disk_wait_seconds",
    "activations",
    "update",
    "batch",
    "predicted_seconds",
    "predicted_peak_bytes",
    "skipped",
    "stopped_by",
    "resumed_from",
    "checkpoints",
    "saves_seconds",
    "events",
    "straggler",
)
"""The fields of a result that ``--json`` prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step, as rank 0 saw it."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    lr: float
    grad_norm: float | None
    skipped: bool
    peak_bytes: int
    """Of rank 0, since training started."""
    host_bytes: int
    """What rank 0 uses of its memory number after the step."""
    disk_bytes: int
    """Room that rank 0 has on disk."""
    disk_read_bytes: int
    disk_written_bytes: int
    disk_wait_seconds: float
    """How long rank 0 stood still for the disk in this step."""
    straggler: str | None = None
    """The rank that the others wait for, and by how much, as of the steps before; ``None`` if none stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """The mean loss on held-out text, over all ranks."""

    step: int
    validation_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out. Lists have one entry per step of the whole run, also of steps that earlier processes took before it
    was resumed; losses and seconds are rank 0's own, unrounded.

    Bytes read and written are those of all ranks together, the wait is that of the rank that waited longest.
    """

    params: int
    stage: int
    ranks: int
    seconds: list[float]
    losses: list[float]
    validation: list[ValidationRecord]
    peak_bytes: int
    peak_bytes_per_rank: list[int]
    counted_bytes: int
    """The part of ``peak_bytes`` that counts against the memory number: without pages of files, which the kernel can drop."""
    budget_bytes: int | None
    disk_bytes: int
    disk_read_bytes: list[int]
    disk_written_bytes: list[int]
    disk_wait_seconds: list[float]
    activations: str
    update: str
    skipped: int
    """Steps that changed nothing, because gradients were not finite."""
    stopped_by: str | None
    """The signal that ended the job before its last step."""
    resumed_from: int | None
    """The step of the checkpoint that this process went on from."""
    checkpoints: list[str]
    """What this process has saved, oldest first; ``--keep`` may have removed some since."""
    saves_seconds: list[float]
    """How long training stood still for each of them."""
    events: dict[str, int]
    """How often things happened to the run, over all its processes."""
    batch: int
    """Sequences per step and rank."""
    predicted_seconds: float | None
    """Of a step, by the plan that was made before the first; ``None`` if there was no plan."""
    predicted_peak_bytes: int | None
    """Of the whole job on this host; to be held against ``counted_bytes``."""
    straggler: str | None = None
    """The rank that the others waited for at the end, if one stood out."""

    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {key: getattr(self, key) for key in SUMMARY}
