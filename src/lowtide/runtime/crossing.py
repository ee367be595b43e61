"""Gradients that cross a network between hosts: how much of a step is spent waiting for that, and what is done about it.

Only with ``adapt="throughput"``: a codec halves the bytes and changes results, so nobody gets one without having asked. All
ranks look at the same numbers and change the codec at the same step boundary, when no
reduction is under way. It stays changed: with half of the bytes the wait is shorter, and going back would bring it again.
"""

from __future__ import annotations

import logging
import struct

from lowtide.comm.group import Group
from lowtide.config import Config
from lowtide.runtime.exchange import Exchange

_log = logging.getLogger("lowtide")

_SHARE = 1 / 3
_IN_A_ROW = 3
_TO = "bf16"
_THREE = struct.Struct("<ddd")


class LongWaits:
    """Whether waiting has become the rule: more than a third of the step, three steps in a row. Noise changes nothing."""

    def __init__(self) -> None:
        self._shares: list[float] = []  # of the last steps, as long as they were too large

    def look(self, *, seconds: float, waited: float) -> str | None:
        """After a step of so many seconds, of which so many were waited: what is wrong, in words, or None."""
        share = waited / seconds if seconds > 0 else 0.0
        self._shares = [*self._shares, share] if share > _SHARE else []
        if len(self._shares) < _IN_A_ROW:
            return None
        least, self._shares = min(self._shares), []
        return f"for {_IN_A_ROW} steps {least:.0%} of the time or more was spent waiting for gradients to cross the network"


class Crossing:
    """How gradients cross. One writer: the engine, after every step."""

    def __init__(self, config: Config, group: Group, exchange: Exchange) -> None:
        self._group, self._exchange = group, exchange
        self._asked = config.adapt == "throughput"
        self._waits = LongWaits()
        self._before = 0.0

    def after_step(self, seconds: float | None, stood_still: float) -> str | None:
        """Collective, if anything may be changed. ``stood_still``: seconds in which backward may have waited for reductions;
        as far as gradients were on the network meanwhile, it waited for that. Returns what was changed, and why."""
        if not self._asked or self._group.codec in (None, _TO):
            return None
        now = self._group.crossing_seconds
        crossing, self._before = now - self._before, now
        # The first step has no length.
        notes = self._exchange.notes("the network", _THREE.pack(seconds or 0.0, stood_still, crossing))
        lengths, stills, crossings = zip(*map(_THREE.unpack, notes), strict=True)
        if not any(crossings):
            return None  # the step of a second optimizer, after the same backward
        # Where one rank stands still less than others, it is that one they wait for. All wait for the slowest way across.
        why = self._waits.look(seconds=max(lengths), waited=min(min(stills), max(crossings)))
        if why is None:
            return None
        self._group.use_codec(_TO)
        said = f"{why}: they cross as {_TO} from now on, which halves the bytes and changes results"
        if self._group.rank == 0:
            _log.info("%s", said)
        return said
