"""A simulated accelerator: memory that the host cannot touch, streams that run late. See README.md."""

from __future__ import annotations

from tests.kit.simdevice.schedules import (
    LATE,
    RANDOM,
    SCHEDULES,
    SIDE_EARLY,
    SIDE_LATE,
    SYNC,
    Report,
    Schedule,
    configure,
    report,
    scheduled,
    set_hardware,
)
from tests.kit.simdevice.worker import needs_compiler, on_sim, on_sim_ranks

__all__ = [
    "LATE",
    "RANDOM",
    "SCHEDULES",
    "SIDE_EARLY",
    "SIDE_LATE",
    "SYNC",
    "Report",
    "Schedule",
    "configure",
    "needs_compiler",
    "on_sim",
    "on_sim_ranks",
    "report",
    "scheduled",
    "set_hardware",
]
