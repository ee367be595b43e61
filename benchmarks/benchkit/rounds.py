"""Systems of several ranks that take turns, a few steps at a time, while all others are blocked in a read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from benchkit import machine
from benchkit.team import Team, TeamFailed
from benchkit.turns import say

WARM_UP_STEPS = 2  # the first makes the optimizer's state; during the second, memory is sampled
QUIET_SHARE = 0.1  # of all cores: a round in which other processes used more in any turn says little about the systems
STILL_SECONDS = 0.25  # so long nothing is on the wire before a turn counts as over
NOISE_BYTES = 16 << 10  # between two looks: a heartbeat of somebody who waits, not a step
LOOK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often everything is measured, and what a round waits for."""

    rounds: int
    steps: int
    patience: int
    wait_seconds: float


@dataclass
class Record:
    """Everything that was measured of one system. ``rounds[i][r]`` are the seconds of its steps in round i on rank r,
    ``cpu_rounds`` the CPU seconds of all its threads, which other processes on the machine disturb less."""

    group: int
    failure: str | None = None
    facts: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[list[list[float]]] = field(default_factory=list)
    cpu_rounds: list[list[list[float]]] = field(default_factory=list)
    foreign_cpu_shares: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    idle_cpu_seconds: list[float] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    pss_peak_bytes: list[int] = field(default_factory=list)
    together_peak_bytes: int = 0
    """Of all ranks at one moment; pages that several of them map count once."""
    wire_bytes: list[int] = field(default_factory=list)
    """In each round, by the meter."""
    drain_seconds: list[float] = field(default_factory=list)
    """How long a turn's bytes were still on the wire after the last rank had answered."""

    def of_a_new_phase(self) -> Record:
        """The same system with no rounds yet."""
        counted = "rounds", "cpu_rounds", "foreign_cpu_shares", "idle_cpu_seconds", "wire_bytes", "drain_seconds"
        fresh: dict[str, Any] = {name: [] for name in counted}
        return replace(self, **fresh)


class Rounds:
    """Systems that are alive at the same time. The reference must be among them: without it there is nothing to compare with.

    ``meter``, if given, reads a counter of bytes that only grows; what a turn adds to it is the system's."""

    def __init__(
        self,
        *,
        number: int,
        names: Sequence[str],
        reference: str,
        pace: Pace,
        start: Callable[[str], Team],
        meter: Callable[[], int] | None = None,
    ) -> None:
        self._names, self._reference, self._pace = list(names), reference, pace
        self._make, self._meter = start, meter
        self._teams: dict[str, Team] = {}
        self.records = {name: Record(group=number) for name in names}

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for team in self._teams.values():
            team.stop()

    def start(self) -> None:
        """Build and warm up, one system after the other."""
        say(f"group {self.records[self._names[0]].group}: {', '.join(self._names)}")
        self._all(self._start)

    def measure(self) -> None:
        """As many quiet rounds as the pace says, or what its patience allows. The order rotates from round to round."""
        quiet = index = 0
        while quiet < self._pace.rounds and index < self._pace.rounds + self._pace.patience:
            machine.wait_for_quiet(share=QUIET_SHARE, at_most_seconds=self._pace.wait_seconds)
            turn = index % len(self._names)
            for name in self._names[turn:] + self._names[:turn]:
                self._attempt(name, self._turn)
            index += 1
            quiet += all(r.foreign_cpu_shares[-1] <= QUIET_SHARE for r in self.records.values() if r.failure is None)

    def finish(self) -> None:
        """Memory: the peak of the rounds, and one more step in which all ranks are looked at together."""
        self._all(self._finish)

    def new_phase(self) -> dict[str, Record]:
        """The records so far; from here on new ones are filled."""
        so_far = self.records
        self.records = {name: record.of_a_new_phase() for name, record in so_far.items()}
        return so_far

    def _all(self, action: Callable[[str, Record], None]) -> None:
        for name in self._names:
            self._attempt(name, action)

    def _attempt(self, name: str, action: Callable[[str, Record], None]) -> None:
        """A system that fails keeps its place in the report, with its cause; the others go on, unless it is the reference."""
        record = self.records[name]
        if record.failure is not None:
            return
        try:
            action(name, record)
        except (TeamFailed, OSError) as error:
            record.failure = str(error)
            say(f"  {name} failed: {error}")
            if name in self._teams:
                self._teams.pop(name).stop()
            if name == self._reference:
                raise SystemExit(f"{name} failed, so there is nothing to compare with: {error}") from error

    def _start(self, name: str, record: Record) -> None:
        self._teams[name] = team = self._make(name)
        record.facts = team.answers()
        self._keep_losses(record, team.ask("step", count=WARM_UP_STEPS - 1))
        self._watched_step(team, record)
        team.ask("reset_peak")

    def _watched_step(self, team: Team, record: Record) -> None:
        team.tell("step", count=1)
        answers, pss, together = team.memory_peak_while_answering()
        self._keep_losses(record, answers)
        before = record.pss_peak_bytes or [0] * len(pss)
        record.pss_peak_bytes = [max(a, b) for a, b in zip(before, pss, strict=True)]
        record.together_peak_bytes = max(record.together_peak_bytes, together)

    def _keep_losses(self, record: Record, answers: list[dict[str, Any]]) -> None:
        record.losses = record.losses or [[] for _ in answers]
        for kept, answer in zip(record.losses, answers, strict=True):
            kept.extend(answer["losses"])

    def _turn(self, name: str, record: Record) -> None:
        before, foreign = self._cpu_seconds(), machine.Foreign()
        counted = self._meter() if self._meter is not None else 0
        answers = self._teams[name].ask("step", count=self._pace.steps)
        record.foreign_cpu_shares.append(round(foreign.share(self._cpu_seconds() - before), 3))
        self._keep_losses(record, answers)
        record.rounds.append([answer["seconds"] for answer in answers])
        record.cpu_rounds.append([answer["cpu_seconds"] for answer in answers])
        record.idle_cpu_seconds.append(max(answer["idle_cpu_seconds"] for answer in answers))
        seconds = max(sum(answer["seconds"]) for answer in answers)
        wire = ""
        if self._meter is not None:
            until, drain = _still(self._meter)
            record.wire_bytes.append(until - counted)
            record.drain_seconds.append(drain)
            seconds += drain
            wire = f", {(until - counted) / self._pace.steps / 1e6:.1f} MB on the wire"
        share = f"{record.foreign_cpu_shares[-1]:.0%} of the machine used by others"
        say(f"  {name:16} {seconds / self._pace.steps:7.3f} s a step{wire}, {share}")

    def _cpu_seconds(self) -> float:
        return sum(team.cpu_seconds() for team in self._teams.values())

    def _finish(self, name: str, record: Record) -> None:
        record.memory = self._teams[name].ask("memory")
        self._watched_step(self._teams[name], record)


def _still(meter: Callable[[], int]) -> tuple[int, float]:
    """The counter once it rests, and after how many seconds it did."""
    began = changed = time.monotonic()
    seen = meter()
    while time.monotonic() - changed < STILL_SECONDS:
        time.sleep(LOOK_SECONDS)
        now = meter()
        if now - seen > NOISE_BYTES:
            changed = time.monotonic()
        seen = now
    return seen, changed - began
