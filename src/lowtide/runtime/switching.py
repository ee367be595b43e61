"""Why a placement is made anew, and whether it is worth the bytes that have to move for it."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planning.options import Tier
from lowtide.planning.placement import Forecast, Needs, Placement

_HORIZON = 50
"""Steps in which a move must have paid for itself. Fewer, and a disk that is slow for long would be put up with; more, and one
whose speed comes and goes would have bytes carried back and forth."""
_KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Reason:
    """In words; none while the first steps are learned from."""

    words: str
    may_stay: bool = False
    """Whether the placement in force holds as well: then another one is taken only if it pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What going from one placement to another brings, in every step, and costs, once."""

    saved_seconds: float
    moving_seconds: float

    @property
    def pays(self) -> bool:
        return self.saved_seconds * _HORIZON > self.moving_seconds

    def __str__(self) -> str:
        return f"{self.saved_seconds:.3f} s a step would be saved, and {self.moving_seconds:.3f} s needed to move"


def switch_between(needs: Needs, now: tuple[Placement, Forecast], new: tuple[Placement, Forecast]) -> Switch:
    """``now`` and ``new`` with what a step is expected to take in each, at the speeds of today."""
    moving = 0.0
    for unit, before, after in zip(needs.units, now[0].units, new[0].units, strict=True):
        for kind in _KINDS:
            if getattr(before, kind) is not getattr(after, kind):
                out = getattr(after, kind) is Tier.DISK
                moving += getattr(unit, kind) * (needs.rates.disk_write if out else needs.rates.disk_read)
    return Switch(saved_seconds=now[1].seconds - new[1].seconds, moving_seconds=moving)
