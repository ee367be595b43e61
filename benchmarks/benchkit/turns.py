"""Systems of one process each that take turns, one step at a time, while all others are blocked in a read."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.cgroup import Cgroup, NoCgroup, memory_cgroup
from benchkit.team import Job, Team, TeamFailed

WORKER = Path(__file__).resolve().parent.parent / "workers" / "single.py"
SOURCE = Path(__file__).resolve().parent.parent.parent / "src"
REFERENCE = "plain"
THREADS = 2
QUIET_SHARE = 0.1  # of all cores: a round in which other processes used more in any turn says little about the systems


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One system as it is to be run. ``options`` go to the worker as they are."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 2
    need_bytes: int = 0
    """At its peak, rounded up: only for deciding who may be alive together."""
    cap_bytes: int | None = None
    """Run inside a control group of this size."""
    cap_without_cgroup: bool = False
    """Where no group can be made: whether a limit on private memory takes its place (or nothing does)."""
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """Everything that was measured of one system. ``rounds`` are the steps after the warm-up, ``steps`` all of them."""

    name: str
    kind: str
    group: str
    options: dict[str, Any]
    cap_bytes: int | None = None
    failure: str | None = None
    killed: bool = False
    cgroup: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    begin: dict[str, Any] = field(default_factory=dict)
    write_once: dict[str, Any] | None = None
    warm_up: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    foreign_cpu_shares: list[float] = field(default_factory=list)
    sampled_peak_bytes: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


class Solo:
    """One system's process, from its control group to its last step. A failure is noted in the record and raised."""

    def __init__(self, setting: Setting, *, shape: Any, group: str, folder: Path, deadline_seconds: float) -> None:
        self.setting = setting
        self.record = Record(setting.name, setting.kind, group, dict(setting.options), setting.cap_bytes)
        self.record.warm_up = setting.warm_up
        self._folder = folder / setting.name
        self._spool = folder / f"{setting.name}-spool"
        self._spool.mkdir(parents=True)
        self._exit = contextlib.ExitStack()
        self._cgroup: Cgroup | None = None
        limits = self._limits()
        job = Job(
            system=setting.kind,
            python=setting.python,
            python_path=str(SOURCE) if setting.kind == "lowtide" else "",
            world_size=1,
            shape=shape,
            deadline_seconds=deadline_seconds,
            worker=WORKER,
            threads=THREADS,
            environment=setting.environment,
            options={"spool": str(self._spool), "threads": THREADS, **limits, **setting.options},
        )
        self._team = Team(job, self._folder)

    def _limits(self) -> dict[str, Any]:
        cap = self.setting.cap_bytes
        if cap is None:
            return {}
        try:
            name = "lowtide-bench-" + re.sub(r"[^a-z0-9]+", "-", self.setting.name)
            self._cgroup = self._exit.enter_context(memory_cgroup(name, cap))
        except NoCgroup as error:
            say(f"  {self.setting.name}: no control group ({error}), so its size is not enforced by one")
            self.record.cgroup = {"missing": str(error)}
            return {"data_limit_bytes": cap} if self.setting.cap_without_cgroup else {}
        return {"cgroup": str(self._cgroup.path)}

    def _attempt(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return action()
        except (TeamFailed, OSError) as error:
            self.record.failure = str(error)
            self._note_cgroup()
            self.record.killed = bool((self.record.cgroup or {}).get("kills")) or "ended with code -9" in str(error)
            say(f"  {self.setting.name} {'was killed' if self.record.killed else 'failed'}: {error}")
            self.stop()
            raise

    def _sampled(self, do: str) -> dict[str, Any]:
        self._team.tell(do)
        answers, peaks = self._team.private_peak_while_answering()
        self.record.sampled_peak_bytes = max(self.record.sampled_peak_bytes, *peaks)
        return answers[0]

    def start(self) -> None:
        """Build the model, take it over."""
        self.record.facts = self._attempt(lambda: self._team.answers()[0])
        self.record.begin = self._attempt(lambda: self._sampled("begin"))
        say(
            f"  {self.setting.name}: {self.record.facts['parameters'] / 1e6:.0f} M parameters built in "
            f"{self.record.facts['build_seconds']:.1f} s, begun in {self.record.begin['seconds']:.1f} s"
        )

    def warm_up(self) -> None:
        for _ in range(self.setting.warm_up):
            self.step()

    def step(self) -> dict[str, Any]:
        answer = self._attempt(lambda: self._sampled("step"))
        self.record.steps.append(answer)
        say(f"  {self.setting.name:22} step {len(self.record.steps)}: {answer['seconds']:7.3f} s, loss {answer['loss']!r}")
        return answer

    def finish(self) -> None:
        self.record.memory = self._attempt(lambda: self._team.ask("memory")[0])
        self._note_cgroup()

    def _note_cgroup(self) -> None:
        if self._cgroup is not None:
            self.record.cgroup = {
                "version": self._cgroup.version,
                "kills": self._cgroup.kills(),
                "peak_bytes": self._cgroup.peak_bytes(),
            }

    def cpu_seconds(self) -> float:
        return self._team.cpu_seconds()

    def stop(self) -> None:
        """End the process and free its room on disk, before the control group goes."""
        self._team.stop()
        shutil.rmtree(self._spool, ignore_errors=True)
        self._exit.close()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often everything is measured, and what a turn waits for."""

    rounds: int
    patience: int
    wait_seconds: float
    deadline_seconds: float


class Turns:
    """The systems of one group. The reference must be among them; when it fails, there is nothing to compare with."""

    def __init__(self, group: str, settings: Sequence[Setting], *, shape: Any, folder: Path, pace: Pace) -> None:
        self._group, self._settings, self._shape = group, settings, shape
        self._folder, self._pace = folder / group, pace
        self._alive: dict[str, Solo] = {}
        self.records: list[Record] = []

    def measure(self, after_start: Callable[[Solo], None], around_rounds: Callable[[], None]) -> list[Record]:
        """``after_start`` may measure something else when a system has begun, ``around_rounds`` before and after all rounds."""
        say(f"group {self._group}: {', '.join(s.name for s in self._settings)}")
        try:
            for setting in self._settings:
                self._start(setting, after_start)
            around_rounds()
            self._rounds()
            around_rounds()
            for name in list(self._alive):
                self._attempt(name, lambda solo: solo.finish())
        finally:
            for solo in self._alive.values():
                solo.stop()
        return self.records

    def _start(self, setting: Setting, after_start: Callable[[Solo], None]) -> None:
        solo = Solo(
            setting,
            shape=self._shape,
            group=self._group,
            folder=self._folder,
            deadline_seconds=self._pace.deadline_seconds,
        )
        self._alive[setting.name] = solo
        self.records.append(solo.record)

        def begin(solo: Solo) -> None:
            solo.start()
            after_start(solo)
            solo.warm_up()

        self._attempt(setting.name, begin)

    def _attempt(self, name: str, action: Callable[[Solo], None]) -> None:
        """A system that fails keeps its place in the report, with its cause; the others go on."""
        try:
            action(self._alive[name])
        except (TeamFailed, OSError) as error:
            del self._alive[name]
            if name == REFERENCE:
                raise SystemExit(f"{REFERENCE} failed, so there is nothing to compare with: {error}") from error

    def _rounds(self) -> None:
        quiet = index = 0
        while quiet < self._pace.rounds and index < self._pace.rounds + self._pace.patience:
            machine.wait_for_quiet(share=QUIET_SHARE, at_most_seconds=self._pace.wait_seconds)
            names = list(self._alive)
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                self._attempt(name, self._turn)
            index += 1
            quiet += all(s.record.foreign_cpu_shares[-1] <= QUIET_SHARE for s in self._alive.values())

    def _turn(self, solo: Solo) -> None:
        before, foreign = self._cpu_seconds(), machine.Foreign()
        answer = solo.step()
        share = round(foreign.share(self._cpu_seconds() - before), 3)
        solo.record.rounds.append(answer)
        solo.record.foreign_cpu_shares.append(share)
        if share > QUIET_SHARE:
            say(f"  {'':22} {share:.0%} of the machine used by others")

    def _cpu_seconds(self) -> float:
        return sum(solo.cpu_seconds() for solo in self._alive.values())


def in_sequence(
    group: str, settings: Sequence[Setting], *, shape: Any, folder: Path, pace: Pace, records: list[Record]
) -> None:
    """Systems that do not fit in memory together, one after the other, each in a fresh process. Adds to ``records`` as it
    goes, so that what was measured outlives an interrupt."""
    for number, setting in enumerate(settings):
        say(f"group {group}: {setting.name}")
        place = folder / f"{group}-{number}"
        solo = Solo(setting, shape=shape, group=group, folder=place, deadline_seconds=pace.deadline_seconds)
        records.append(solo.record)
        try:
            solo.start()
            solo.warm_up()
            while len(solo.record.rounds) < pace.rounds:
                foreign, before = machine.Foreign(), solo.cpu_seconds()
                solo.record.rounds.append(solo.step())
                solo.record.foreign_cpu_shares.append(round(foreign.share(solo.cpu_seconds() - before), 3))
            solo.finish()
        except (TeamFailed, OSError):
            if setting.name == REFERENCE:
                raise SystemExit(f"{REFERENCE} failed, so there is nothing to compare with") from None
        finally:
            if solo.record.failure is None:
                solo.stop()
