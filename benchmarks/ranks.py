"""lowtide's stages and transports beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed: one model, two ranks, in turns.

    python benchmarks/ranks.py --out ranks.json --plot ranks.png     about thirteen minutes
    python benchmarks/ranks.py --clip 1.0 --out ranks_clipped.json   gradients are clipped in every step, by torch's function
    python benchmarks/ranks.py --quick                               a tiny model: does the script work here?
    python benchmarks/ranks.py --markdown ranks.json                 the tables for a README

Steps of different systems alternate, because a machine's speed moves by more in ten minutes than systems differ. All systems
at once would not fit in memory, so they run in groups, each with DDP in it; every ratio is taken within one round of one group.
Beside them: the memory of one plain process, and how fast ranks reduce through shared memory, over how fast they copy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine, reduce_scatter
from benchkit.lineup import GIB, find_pythons, groups, model_facts, parameter_count, source_digest
from benchkit.ranks_report import markdown, plot, summary
from benchkit.rounds import QUIET_SHARE, WARM_UP_STEPS, Pace, Record, Rounds
from benchkit.team import Job, Team, TeamFailed
from benchkit.turns import SOURCE, say
from workers.gpt import Shape

REFERENCE = "ddp"
WORLD_SIZE = 2
DEADLINE_SECONDS = 240.0

MODEL_98M = Shape(layers=12, width=768, heads=12, tokens=8192, context=256, batch=2)
MODEL_QUICK = Shape(layers=2, width=64, heads=4, tokens=256, context=32, batch=2)
REDUCE_BYTES = 4 * 10**6, 28 * 10**6  # a small unit, and one block of the model
REDUCE_BYTES_QUICK = (10**5,)

# In the order in which groups are filled, so that systems that shard the same things are measured side by side.
# The number is what one rank needs at its peak, in bytes per parameter, rounded up: only for filling groups.
SYSTEMS = {
    "ddp": 22,
    "zero-redundancy": 18,
    "lowtide-1": 18,
    "fsdp2": 24,
    "lowtide-3-shared": 16,
    "lowtide-3-memory": 14,
    "lowtide-3-torch": 16,
    "lowtide-0": 22,
    "deepspeed-1": 26,
    "lowtide-2": 16,
    "deepspeed-2": 24,
    "deepspeed-3": 34,
}
OPTIONAL = {"alone": 22, "lowtide-3": 16}
PARTS = "systems", "plain", "reduce-scatter"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this run will do."""

    systems: tuple[str, ...]
    parts: tuple[str, ...]
    pace: Pace
    shape: Shape
    memory_bytes: int
    reduce_bytes: tuple[int, ...]
    clip: float | None


class Starter:
    """Starts a system's ranks, each in a folder of its own."""

    def __init__(self, plan: Plan, pythons: dict[str, str], folder: Path) -> None:
        self._plan, self._pythons, self._folder = plan, pythons, folder

    def __call__(self, name: str, world_size: int = WORLD_SIZE) -> Team:
        job = Job(
            system=name,
            python=self._pythons.get(name, sys.executable),
            python_path=str(SOURCE) if name.startswith("lowtide") else "",
            world_size=world_size,
            shape=self._plan.shape,
            deadline_seconds=DEADLINE_SECONDS,
            options={"clip": self._plan.clip},
        )
        return Team(job, self._folder / name)


def measure_systems(plan: Plan, present: tuple[str, ...], pythons: dict[str, str], folder: Path) -> list[tuple[str, Record]]:
    found: list[tuple[str, Record]] = []
    count = parameter_count(plan.shape)
    need = {name: bytes_each * count for name, bytes_each in {**SYSTEMS, **OPTIONAL}.items()}
    made = groups(present, reference=REFERENCE, rank_bytes=need, ranks=WORLD_SIZE, memory_bytes=plan.memory_bytes)
    for number, names in enumerate(made):
        start = Starter(plan, pythons, folder / str(number))
        with Rounds(number=number, names=names, reference=REFERENCE, pace=plan.pace, start=start) as rounds:
            rounds.start()
            rounds.measure()
            rounds.finish()
            found += rounds.records.items()
    return found


def measure_plain(plan: Plan, folder: Path) -> dict[str, Any]:
    """The memory of one process that trains the same model by itself."""
    say("one plain process")
    team = Starter(plan, {}, folder)("plain", world_size=1)
    try:
        team.answers()
        team.ask("step", count=WARM_UP_STEPS - 1)
        team.tell("step", count=1)
        answers, _, peak = team.memory_peak_while_answering()
    except (TeamFailed, OSError) as error:
        return {"failure": str(error)}
    finally:
        team.stop()
    return {"failure": None, "peak_bytes": peak, "step_seconds": answers[0]["seconds"][0]}


def run(plan: Plan, command: str) -> dict[str, Any]:
    """Measure every system of the plan; a system that cannot be measured keeps its place, with the reason."""
    pythons, unavailable = find_pythons(plan.systems)
    missing = tuple(name for name in plan.systems if unavailable is not None and name.startswith("deepspeed"))
    facts, digest = machine.facts(), source_digest()
    began = datetime.now(timezone.utc)
    records: list[tuple[str, Record]] = []
    extra: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lowtide-ranks-") as folder:
        if "plain" in plan.parts:
            extra["plain"] = measure_plain(plan, Path(folder, "plain"))
        if "reduce-scatter" in plan.parts:
            extra["reduce_scatter"] = reduce_scatter.measure(
                Path(folder, "reduce-scatter"), ranks=WORLD_SIZE, sizes=plan.reduce_bytes, source=SOURCE
            )
        if "systems" in plan.parts:
            present = tuple(name for name in plan.systems if name not in missing)
            records += measure_systems(plan, present, pythons, Path(folder))
    records += [(name, Record(group=-1, failure=f"not installed: {unavailable}")) for name in missing]
    return {
        "benchmark": "ranks",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "took_seconds": round((datetime.now(timezone.utc) - began).total_seconds(), 1),
        "lowtide_source_sha256": digest,
        "machine": facts,
        "model": model_facts(plan.shape),
        "clip": plan.clip,
        "ranks": WORLD_SIZE,
        "threads_per_rank": 1,
        "rounds": plan.pace.rounds,
        "patience_rounds": plan.pace.patience,
        "steps_per_turn": plan.pace.steps,
        "warm_up_steps": WARM_UP_STEPS,
        **extra,
        **summary(
            [(name, asdict(record)) for name, record in records],
            reference=REFERENCE,
            quiet_share=QUIET_SHARE,
            plain_bytes=extra.get("plain", {}).get("peak_bytes"),
        ),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), help=f"some of {', '.join([*SYSTEMS, *OPTIONAL])} (ddp always runs)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=6, help="how often every system gets a turn")
    parser.add_argument("--steps", type=int, default=1, help="steps in one turn")
    parser.add_argument("--patience", type=int, default=4, help="rounds to repeat when other processes keep the machine busy")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for others before each round")
    parser.add_argument("--memory", type=float, default=16.0, metavar="GiB", help="what all systems alive together may need")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip gradients to this norm in every step")
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
    chosen.parts = [name.strip() for name in chosen.parts.split(",") if name.strip()]
    if unknown := [name for name in chosen.parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
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
            parts=tuple(chosen.parts),
            pace=Pace(rounds=chosen.rounds, steps=chosen.steps, patience=chosen.patience, wait_seconds=chosen.wait),
            shape=MODEL_QUICK if chosen.quick else MODEL_98M,
            memory_bytes=int(chosen.memory * GIB),
            reduce_bytes=REDUCE_BYTES_QUICK if chosen.quick else REDUCE_BYTES,
            clip=chosen.clip,
        )
        result = run(plan, shlex.join(["python", "benchmarks/ranks.py", *arguments]))
        text = json.dumps(result, indent=1) + "\n"
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(text)
            sys.stdout.write(markdown(result))
        else:
            sys.stdout.write(text)
    if chosen.plot is not None and result["systems"]:
        plot(result, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
