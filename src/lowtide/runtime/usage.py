"""What a sharded model uses of each tier, for people and programs that watch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Facts about this rank, now. Traffic and waits are counted from the start; take differences for a step."""

    budget_bytes: int | None
    """What this rank may use of the host's memory; ``None``: no limit was given."""
    host_bytes: int
    """What the process uses of it, as the kernel counts it."""
    disk_bytes: int
    """Room taken on disk."""
    disk_limit_bytes: int | None
    disk_read_bytes: int
    disk_written_bytes: int
    disk_wait_seconds: float
    """How long compute stood still for the disk."""
    step_seconds: float | None
    """Measured, of the last step; ``None`` before the second one."""
    predicted_seconds: float | None
    """What the placement in force was expected to take; ``None`` without a memory number, and before the first step is over."""
    predicted_peak_bytes: int | None
    activations: str
    """``keep``, ``recompute`` or ``disk`` if all units do the same, else how many do which: ``keep 20, recompute 6``."""
    update: str
