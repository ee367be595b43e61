"""How long the parts of a step take: each unit's forward, the backward pass, the whole step. Measured, never decided on here.

A unit's seconds are those between the moment its parameters are there and the end of its module, so that waiting for the disk
or for other ranks is not taken for compute. Where one module runs inside another, only the inner one's unit is charged.

The same moments are ranges in a ``torch.profiler`` profile, if one is being taken, and spans of a timeline, if one is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from lowtide.runtime.profiling import Ranges
from lowtide.runtime.trace import Spans
from lowtide.runtime.unit import Unit


class StepClock:
    """One writer: the engine."""

    def __init__(self) -> None:
        self.forward: dict[Unit, float] = {}
        """Seconds of each unit's forward in this step so far, recomputation in backward aside."""
        self.backward = 0.0
        """Seconds of the backward passes of this step so far."""
        self.passes = 0
        """Backward passes in this step."""
        self.stood_still = 0.0
        """Seconds of this step so far in which backward may have waited for reductions."""
        self.spans: Spans | None = None
        """Where each stretch of compute is noted; None: nowhere."""
        self.listener: Callable[[str], None] | None = None
        """Hears when a unit's forward is over (``forward``) and when backward begins (``backward``)."""
        self.backward_since: float | None = None
        """When the backward pass under way began."""
        self._computing: list[tuple[Unit | None, float]] = []
        self._ranges = Ranges()
        self._backward_range = Ranges()
        self._step_since: float | None = None

    def enter(self, units: Sequence[Unit]) -> None:
        """A module that needs ``units`` begins to compute."""
        self._charge()
        unit = units[0] if units else None
        self._ranges.enter("recompute" if self.backward_since is not None else "forward", unit.name if unit else "")
        self._computing.append((unit, time.perf_counter()))

    def leave(self) -> None:
        """That module is done."""
        if not self._computing:
            return
        self._charge()
        self._computing.pop()
        self._ranges.leave()
        if self.listener is not None:
            self.listener("forward")
        if self._computing:
            self._computing[-1] = (self._computing[-1][0], time.perf_counter())

    def _charge(self) -> None:
        """Count what passed since the last event for the module that was computing."""
        if not self._computing:
            return
        unit, since = self._computing[-1]
        if unit is None:
            return
        now = time.perf_counter()
        if self.backward_since is None:
            self.forward[unit] = self.forward.get(unit, 0.0) + now - since
        if self.spans is not None:
            self.spans.add("compute", "forward" if self.backward_since is None else "recompute", unit.name, since, now)

    @contextmanager
    def reducing(self) -> Generator[None]:
        """Backward hands over gradients, or waits for them, inside."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self.stood_still += time.perf_counter() - since

    def backward_begins(self) -> None:
        self.backward_since = time.perf_counter()
        self._backward_range.enter("backward", "")
        if self.listener is not None:
            self.listener("backward")

    def backward_ends(self) -> None:
        self._backward_range.clear()
        if self.backward_since is not None:
            self.backward += time.perf_counter() - self.backward_since
            self.passes += 1
        self.backward_since = None

    def forget_passes(self) -> None:
        """What was under way was broken off."""
        self._computing.clear()
        self._ranges.clear()
        self._backward_range.clear()
        self.backward_since = None

    def end_step(self) -> float | None:
        """A step is over: its seconds since the step before was, if there was one. Begins anew."""
        now = time.perf_counter()
        seconds = now - self._step_since if self._step_since is not None else None
        self._step_since = now
        self.forward, self.backward, self.passes, self.stood_still = {}, 0.0, 0, 0.0
        self.forget_passes()
        return seconds
