"""A set of states that is larger than the memory of all nodes: what each node works through, and in how many rounds.

The back of the envelope before any plan: S bytes over N nodes are blocks of S/N. The *reuse factor* is how much of its block
a node can hold at once, node memory / block. At 1 or more the block stays in memory from step to step; below 1 it passes
through in rounds, and what does not fit is on disk. A step takes the sum of its phases and one synchronisation per round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What one node has of the states."""

    block_bytes: int
    """S/N, rounded up."""
    memory_bytes: int
    """Of its block that can be in memory at once."""
    disk_bytes: int
    """The rest of its block."""
    reuse_factor: float
    """Memory for states / block; infinite if there are no states."""
    rounds: int
    """In how many parts the block passes through memory in a step."""


def share_of_nodes(states_bytes: int, nodes: int, node_bytes: int, *, working_bytes: int = 0) -> Blocks:
    """Cut ``states_bytes`` between ``nodes`` of ``node_bytes`` memory each, of which ``working_bytes`` are for other things:
    slots, buffers, activations."""
    room = node_bytes - working_bytes
    if nodes < 1 or states_bytes < 0 or working_bytes < 0:
        raise ArgumentError(
            f"{states_bytes} bytes on {nodes} nodes, {working_bytes} to work with; give numbers >= 0, nodes >= 1."
        )
    block = -(-states_bytes // nodes)
    if room <= 0 and block:
        raise ArgumentError(f"{node_bytes} bytes of memory leave nothing for states beside {working_bytes} to work with.")
    held = min(room, block)
    return Blocks(
        block_bytes=block,
        memory_bytes=held,
        disk_bytes=block - held,
        reuse_factor=room / block if block else math.inf,
        rounds=-(-block // room) if block else 0,
    )


def total_seconds(phases: Iterable[float], synchronisations: int, sync_seconds: float) -> float:
    """The time of a step whose phases do not overlap: their sum, and n times a synchronisation."""
    return math.fsum(phases) + synchronisations * sync_seconds
