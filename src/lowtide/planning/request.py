"""What somebody wants planned: the limits they set, and the choices they leave open."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ArgumentError

VARIABLE = {"memory": "memory_bytes", "device-memory": "device_memory_bytes", "disk": "disk_bytes"}
"""Of what a plan may compare several sizes, and where it stands in a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``None`` and ``"auto"`` are left to the planner."""

    world_size: int = 1
    stage: int | str = "auto"
    precision: str = "fp32"
    optimizer: str = "adam"
    memory_bytes: int | None = None
    """What the job may use of the memory of one host, all its ranks there together."""
    rank_memory_bytes: tuple[int, ...] = ()
    """Instead: what every rank has, each on a host of its own."""
    part: float | None = None
    """Of what is sharded, the part of the rank that is planned; ``None``: as much as the others have."""
    device_memory_bytes: int | None = None
    disk_bytes: int | None = None
    """Room on the disk of one host; ``None``: what the hardware has, 0: no disk."""
    ranks_per_host: int | None = None
    activations: str = "auto"
    update: str = "step"
    accumulate: int = 1
    """Backward passes per update."""
    objective: str = "time"
    slack_bytes: int | None = None
    """Left free for what is not counted; ``None``: a share of the memory and a fixed part."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ArgumentError(f"world_size is {self.world_size}; give at least 1.")
        if self.rank_memory_bytes and len(self.rank_memory_bytes) != self.world_size:
            raise ArgumentError(
                f"there are {len(self.rank_memory_bytes)} memories for {self.world_size} ranks; give one for each."
            )
        if self.accumulate < 1:
            raise ArgumentError(f"accumulate is {self.accumulate}; give at least 1.")
        if self.objective not in ("time", "capacity"):
            raise ArgumentError(f"objective is {self.objective!r}; allowed: 'time', 'capacity'.")
        if self.update not in ("step", "backward"):
            raise ArgumentError(f"update is {self.update!r}; allowed: 'step', 'backward'.")
        if self.update == "backward" and self.accumulate > 1:
            raise ArgumentError("update='backward' updates after every backward pass; it cannot accumulate gradients.")
