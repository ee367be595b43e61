"""lowtide's stages beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: one model, two ranks, interleaved steps.

    python benchmarks/ranks.py --out ranks.json --plot ranks.png     about thirteen minutes
    python benchmarks/ranks.py --quick                               a tiny model: does the script work here?
    python benchmarks/ranks.py --markdown ranks.json                 the table for a README

Steps of different systems alternate, because a machine's speed moves by more in ten minutes than systems differ. All systems
at once would not fit in memory, so they run in groups, each with DDP in it; every ratio is taken within one round of one group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.peers import PeerUnavailable, deepspeed_python
from benchkit.ranks_report import markdown, plot, summary
from benchkit.team import Job, Team, TeamFailed
from workers.gpt import Shape

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
REFERENCE = "ddp"
WORLD_SIZE = 2
WARM_UP_STEPS = 2  # the first makes the optimizer's state; during the second, Pss is sampled
DEADLINE_SECONDS = 240.0
QUIET_SHARE = 0.1  # of all cores: a round in which other processes used more in any turn says little about the systems
GIB = 2**30

MODEL_98M = Shape(layers=12, width=768, heads=12, tokens=8192, context=256, batch=2)
MODEL_QUICK = Shape(layers=2, width=64, heads=4, tokens=256, context=32, batch=2)

# In the order in which groups are filled, so that systems that shard the same things are measured side by side.
# The number is what one rank needs at its peak, in bytes per parameter, rounded up: only for filling groups.
SYSTEMS = {
    "ddp": 22,
    "zero-redundancy": 18,
    "lowtide-1": 18,
    "fsdp2": 24,
    "lowtide-3": 16,
    "lowtide-0": 22,
    "deepspeed-1": 26,
    "lowtide-2": 16,
    "deepspeed-2": 24,
    "deepspeed-3": 34,
}
OPTIONAL = {"alone": 22}
PROCESS_BYTES = 400 * 2**20


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this run will do."""

    systems: tuple[str, ...]
    rounds: int
    steps: int
    patience: int
    wait_seconds: float
    shape: Shape
    memory_bytes: int


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def parameter_count(shape: Shape) -> int:
    block = 12 * shape.width**2 + 13 * shape.width
    return shape.layers * block + (2 * shape.tokens + shape.context + 2) * shape.width


def groups(plan: Plan) -> list[list[str]]:
    """Systems that are alive together: DDP and as many others as the memory allows."""
    parameters = parameter_count(plan.shape)
    needs = {**SYSTEMS, **OPTIONAL}

    def need(names: list[str]) -> int:
        return sum(WORLD_SIZE * (PROCESS_BYTES + needs[name] * parameters) for name in names)

    made: list[list[str]] = [[REFERENCE]]
    for name in plan.systems:
        if name == REFERENCE:
            continue
        if len(made[-1]) > 1 and need([*made[-1], name]) > plan.memory_bytes:
            made.append([REFERENCE])
        made[-1].append(name)
    return made


class Group:
    """Systems that are alive at the same time and take turns."""

    def __init__(self, *, number: int, names: list[str], plan: Plan, pythons: dict[str, str], folder: Path) -> None:
        self._plan = plan
        self._names = names
        self._pythons = pythons
        self._folder = folder
        self._teams: dict[str, Team] = {}
        self.records = {name: Record(group=number) for name in names}

    def measure(self) -> None:
        say(f"group {self.records[self._names[0]].group}: {', '.join(self._names)}")
        try:
            for name in self._names:
                self._attempt(name, self._start)
            quiet = index = 0
            while quiet < self._plan.rounds and index < self._plan.rounds + self._plan.patience:
                machine.wait_for_quiet(share=QUIET_SHARE, at_most_seconds=self._plan.wait_seconds)
                turn = index % len(self._names)
                for name in self._names[turn:] + self._names[:turn]:
                    self._attempt(name, self._turn)
                index += 1
                quiet += all(r.foreign_cpu_shares[-1] <= QUIET_SHARE for r in self.records.values() if r.failure is None)
            for name in self._names:
                self._attempt(name, self._finish)
        finally:
            for team in self._teams.values():
                team.stop()

    def _cpu_seconds(self) -> float:
        return sum(team.cpu_seconds() for team in self._teams.values())

    def _attempt(self, name: str, action: Any) -> None:
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
            if name == REFERENCE:
                raise SystemExit(f"{REFERENCE} failed, so there is nothing to compare with: {error}") from error

    def _start(self, name: str, record: Record) -> None:
        job = Job(
            system=name,
            python=self._pythons.get(name, sys.executable),
            python_path=str(SOURCE) if name.startswith("lowtide") else "",
            world_size=WORLD_SIZE,
            shape=self._plan.shape,
            deadline_seconds=DEADLINE_SECONDS,
        )
        self._teams[name] = team = Team(job, self._folder / name)
        record.facts = team.answers()
        self._keep_losses(record, team.ask("step", count=WARM_UP_STEPS - 1))
        team.tell("step", count=1)
        answers, record.pss_peak_bytes = team.pss_peak_while_answering()
        self._keep_losses(record, answers)
        team.ask("reset_peak")

    def _keep_losses(self, record: Record, answers: list[dict[str, Any]]) -> None:
        record.losses = record.losses or [[] for _ in answers]
        for kept, answer in zip(record.losses, answers, strict=True):
            kept.extend(answer["losses"])

    def _turn(self, name: str, record: Record) -> None:
        before, foreign = self._cpu_seconds(), machine.Foreign()
        answers = self._teams[name].ask("step", count=self._plan.steps)
        record.foreign_cpu_shares.append(round(foreign.share(self._cpu_seconds() - before), 3))
        self._keep_losses(record, answers)
        record.rounds.append([answer["seconds"] for answer in answers])
        record.cpu_rounds.append([answer["cpu_seconds"] for answer in answers])
        record.idle_cpu_seconds.append(max(answer["idle_cpu_seconds"] for answer in answers))
        seconds = max(sum(answer["seconds"]) for answer in answers) / self._plan.steps
        say(f"  {name:16} {seconds:7.3f} s a step, {record.foreign_cpu_shares[-1]:.0%} of the machine used by others")

    def _finish(self, name: str, record: Record) -> None:
        record.memory = self._teams[name].ask("memory")


def source_digest() -> str:
    """Which lowtide was measured, also between two commits."""
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "lowtide").rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def find_pythons(systems: tuple[str, ...]) -> tuple[dict[str, str], str | None]:
    """Which interpreter runs which system, and why DeepSpeed has none, if so.

    What ships with PyTorch runs in the interpreter that runs lowtide: the same binary on both sides of the comparison.
    """
    wanted = [name for name in systems if name.startswith("deepspeed")]
    if not wanted:
        return {}, None
    try:
        python = str(deepspeed_python(HERE / ".peers", say))
    except PeerUnavailable as error:
        say(f"DeepSpeed cannot be installed: {error}")
        return {}, str(error)
    return dict.fromkeys(wanted, python), None


def run(plan: Plan, command: str) -> dict[str, Any]:
    """Measure every system of the plan; a system that cannot be measured keeps its place, with the reason."""
    pythons, unavailable = find_pythons(plan.systems)
    missing = tuple(name for name in plan.systems if unavailable is not None and name.startswith("deepspeed"))
    facts, digest = machine.facts(), source_digest()
    began = datetime.now(timezone.utc)
    measured: list[Group] = []
    with tempfile.TemporaryDirectory(prefix="lowtide-ranks-") as folder:
        present = replace(plan, systems=tuple(name for name in plan.systems if name not in missing))
        for number, names in enumerate(groups(present)):
            group = Group(number=number, names=names, plan=plan, pythons=pythons, folder=Path(folder, str(number)))
            group.measure()
            measured.append(group)
    records = [(name, record) for group in measured for name, record in group.records.items()]
    records += [(name, Record(group=-1, failure=f"not installed: {unavailable}")) for name in missing]
    return {
        "benchmark": "ranks",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "took_seconds": round((datetime.now(timezone.utc) - began).total_seconds(), 1),
        "lowtide_source_sha256": digest,
        "machine": facts,
        "model": {
            **asdict(plan.shape),
            "parameters": parameter_count(plan.shape),
            "dtype": "fp32",
            "optimizer": "AdamW(fused=True, lr=1e-3)",
        },
        "ranks": WORLD_SIZE,
        "threads_per_rank": 1,
        "rounds": plan.rounds,
        "patience_rounds": plan.patience,
        "steps_per_turn": plan.steps,
        "warm_up_steps": WARM_UP_STEPS,
        **summary([(name, asdict(record)) for name, record in records], reference=REFERENCE, quiet_share=QUIET_SHARE),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"some of {', '.join([*SYSTEMS, *OPTIONAL])} (ddp always runs)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="how often every system gets a turn")
    parser.add_argument("--steps", type=int, default=1, help="steps in one turn")
    parser.add_argument("--patience", type=int, default=4, help="rounds to repeat when other processes keep the machine busy")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for others before each round")
    parser.add_argument("--memory", type=float, default=16.0, metavar="GiB", help="what all systems alive together may need")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tests the script, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="plot an earlier result, run nothing")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of an earlier result, run nothing")
    chosen = parser.parse_args(arguments)
    chosen.systems = [name.strip() for name in chosen.systems.split(",") if name.strip()]
    unknown = [name for name in chosen.systems if name not in {**SYSTEMS, **OPTIONAL}]
    if unknown:
        parser.error(f"unknown system {unknown[0]!r}; allowed: {', '.join([*SYSTEMS, *OPTIONAL])}")
    if min(chosen.rounds, chosen.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    # So that the processes of a run that is told to end are stopped with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if chosen.markdown is not None:
        sys.stdout.write(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    if chosen.source is not None:
        result = json.loads(chosen.source.read_text())
    else:
        plan = Plan(
            systems=tuple(dict.fromkeys([REFERENCE, *chosen.systems])),
            rounds=chosen.rounds,
            steps=chosen.steps,
            patience=chosen.patience,
            wait_seconds=chosen.wait,
            shape=MODEL_QUICK if chosen.quick else MODEL_98M,
            memory_bytes=int(chosen.memory * GIB),
        )
        result = run(plan, shlex.join(["python", "benchmarks/ranks.py", *arguments]))
        text = json.dumps(result, indent=1) + "\n"
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(text)
            sys.stdout.write(markdown(result))
        else:
            sys.stdout.write(text)
    if chosen.plot is not None:
        plot(result, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
