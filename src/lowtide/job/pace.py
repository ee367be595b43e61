"""What this rank spends its steps on, and which rank the others wait for. Numbers pass between ranks with what they exchange
after each step anyway."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from lowtide.comm.stragglers import Straggler, Stragglers
from lowtide.comm.watch import Watch

_ROW = struct.Struct("<ddd")  # seconds of the step, of which for the disk, of which for other ranks


class Pace:
    """One per job and rank. All ranks come to the same answer."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._waited = watch.waited_seconds
        self._stragglers = Stragglers()
        self._found: Straggler | None = None
        self._row = _ROW.pack(0.0, 0.0, 0.0)

    @property
    def straggler(self) -> str | None:
        """The rank that the others wait for, and why, as of the last steps."""
        return str(self._found) if self._found is not None else None

    def begin(self) -> None:
        """A step begins: what this rank waited before does not count."""
        self._waited = self._watch.waited_seconds

    def note(self, seconds: float, disk_seconds: float) -> None:
        """The step is done, and this rank has stood still for the disk for so long in it."""
        self._row = _ROW.pack(seconds, disk_seconds, self._watch.waited_seconds - self._waited)

    def row(self) -> bytes:
        """What the other ranks should know of the last step; always as many bytes."""
        return self._row

    def hear(self, rows: Sequence[bytes]) -> str | None:
        """Everybody's row, in rank order. News, if another rank than before stands out, or none any more."""
        steps = [_ROW.unpack(row) for row in rows]
        causes = [{"compute": max(0.0, step - disk - others), "disk": disk} for step, disk, others in steps]
        found = self._stragglers.step(causes, max(step for step, _, _ in steps))
        before, self._found = self._found, found[0] if found else None
        who, was = ((s.rank, s.cause) if s is not None else None for s in (self._found, before))
        return None if who == was else self.straggler or "no rank stands out any more"
