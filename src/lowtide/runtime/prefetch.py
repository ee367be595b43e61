"""Which unit comes next: the one that followed last time.

The order is observed, not declared, so a model may take another path at any time: a wrong guess gathers a unit in vain, and the
right one is gathered on demand. Ranks that run the same program make the same guesses.
"""

from __future__ import annotations

from lowtide.runtime.unit import Unit


class Successors:
    """Who followed whom in one direction of the step."""

    def __init__(self) -> None:
        self._next: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        self._previous: dict[Unit, Unit] = {}

    def restart(self) -> None:
        """A new pass begins."""
        self._last = None

    def observe(self, unit: Unit) -> bool:
        """Note that ``unit`` is in use; returns whether it was not the one in use before."""
        if unit is self._last:
            return False
        if self._last is not None:
            self._next[self._last] = unit
            self._previous[unit] = self._last
        self._last = unit
        return True

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """The ``count`` units expected after ``unit``."""
        return _follow(self._next, unit, count)

    def before(self, unit: Unit, count: int) -> list[Unit]:
        """The ``count`` units that came before ``unit``: a first guess for the way back."""
        return _follow(self._previous, unit, count)


def _follow(links: dict[Unit, Unit], unit: Unit, count: int) -> list[Unit]:
    out: list[Unit] = []
    while len(out) < count and (following := links.get(unit)) is not None and following not in out:
        out.append(following)
        unit = following
    return out
