"""The ZeRO stages as a table: which kinds of bytes are sharded over the ranks. Nothing else in lowtide knows stage numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What one stage shards. Parameters that are not sharded stay whole and resident on every rank."""

    number: int
    optimizer: bool
    gradients: bool
    parameters: bool


STAGES = {
    0: Stage(0, optimizer=False, gradients=False, parameters=False),
    1: Stage(1, optimizer=True, gradients=False, parameters=False),
    2: Stage(2, optimizer=True, gradients=True, parameters=False),
    3: Stage(3, optimizer=True, gradients=True, parameters=True),
}
