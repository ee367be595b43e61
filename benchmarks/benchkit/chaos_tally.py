"""What one kind of chaos has done so far: counts, and every difference with the seed that shows it again."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_DIFFERENCES = 20
"""Kept in full; more are only counted."""
NOTE_SECONDS = 10.0


@dataclass
class Tally:
    """``planned`` and ``done`` count the same thing: kills, power cuts, flips, hostile inputs."""

    kind: str
    planned: int
    deadline: float
    """A moment of time.monotonic after which nothing new is begun."""
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)
    differences: list[dict[str, Any]] = field(default_factory=list)
    difference_count: int = 0
    _began: float = field(default_factory=time.monotonic)
    _noted: float = field(default_factory=time.monotonic)

    @property
    def goes_on(self) -> bool:
        return self.done < self.planned and time.monotonic() < self.deadline

    def differs(self, seed: int, what: str, **more: Any) -> None:
        """Something is not as it must be."""
        self.difference_count += 1
        if len(self.differences) < MOST_DIFFERENCES:
            self.differences.append({"seed": seed, "again": f"--again {self.kind}:{seed}", "what": what[-3000:], **more})
        sys.stderr.write(f"{self.kind}: seed {seed}: {what.strip().splitlines()[-1][:300] if what.strip() else '?'}\n")

    def note(self) -> None:
        """A line on stderr now and then."""
        now = time.monotonic()
        if now - self._noted >= NOTE_SECONDS:
            self._noted = now
            speed = self.done / max(now - self._began, 1e-9)
            sys.stderr.write(
                f"{self.kind}: {self.done} of {self.planned}, {speed:.1f}/s, {self.difference_count} differences\n"
            )
            sys.stderr.flush()

    def result(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began
        return {
            "planned": self.planned,
            "done": self.done,
            "seconds": round(seconds, 1),
            "per_second": round(self.done / max(seconds, 1e-9), 2),
            "differences": self.difference_count,
            "counts": dict(sorted(self.counts.items())),
            **self.facts,
            "first_differences": self.differences,
        }
