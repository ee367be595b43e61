"""Two hosts of two ranks over a slow link: lowtide beside DDP, FSDP2 and DeepSpeed stage 3, step time and bytes on the wire.

    python benchmarks/network.py --out network.json --plot network.png    about half an hour
    python benchmarks/network.py --quick                                  a tiny model: does the script work here?
    python benchmarks/network.py --markdown network.json                  the table for a README

The hosts are network namespaces, joined by a cable whose rate the kernel limits; what crosses it is read from the counters of
its two ends. Systems take turns, as in ranks.py, with FSDP2 in every group; every ratio is taken within one round of one group.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the kit that the tests use

from benchkit import machine
from benchkit.lineup import GIB, find_pythons, groups, model_facts, parameter_count, source_digest
from benchkit.network_report import markdown, plot, summary
from benchkit.rounds import QUIET_SHARE, WARM_UP_STEPS, Pace, Record, Rounds
from benchkit.team import Job, Place, Team
from benchkit.turns import SOURCE, say
from workers.gpt import Shape

from tests.kit.netns import Network, NetworkUnavailable

REFERENCE = "fsdp2"
RANKS_PER_HOST = (2, 2)
WORLD_SIZE = sum(RANKS_PER_HOST)
DEADLINE_SECONDS = 900.0
PORT = 29500  # never listened at: ranks meet through a file; DeepSpeed wants to see a number

MODELS = {
    "27m": Shape(layers=6, width=512, heads=8, tokens=8192, context=256, batch=1),
    "98m": Shape(layers=12, width=768, heads=12, tokens=8192, context=256, batch=1),
}
MODEL_QUICK = Shape(layers=2, width=64, heads=4, tokens=256, context=32, batch=1)

# What one rank needs at its peak, in bytes per parameter, rounded up: only for filling groups.
SYSTEMS = {"fsdp2": 24, "lowtide-3": 16, "lowtide-3-bf16": 16, "ddp": 22, "deepspeed-3": 34}
OPTIONAL = {"fsdp2-hybrid": 26, "lowtide-3-torch": 16, "lowtide-0": 22, "lowtide-1": 18, "lowtide-2": 16}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this run will do."""

    systems: tuple[str, ...]
    rates: tuple[str, ...]
    pace: Pace
    shape: Shape
    memory_bytes: int


def places(network: Network) -> tuple[Place, ...]:
    hosts = [host for host, count in enumerate(RANKS_PER_HOST) for _ in range(count)]
    return tuple(
        Place(
            network.command(host),
            {
                **network.environment(host, rank, RANKS_PER_HOST, PORT),
                # DeepSpeed's name for it, and what hybrid sharding goes by.
                "LOCAL_SIZE": str(RANKS_PER_HOST[host]),
            },
        )
        for rank, host in enumerate(hosts)
    )


class Starter:
    """Starts a system's ranks on their hosts."""

    def __init__(self, network: Network, shape: Shape, pythons: dict[str, str], folder: Path) -> None:
        self._network, self._shape, self._pythons, self._folder = network, shape, pythons, folder

    def __call__(self, name: str) -> Team:
        job = Job(
            system=name,
            python=self._pythons.get(name, sys.executable),
            python_path=str(SOURCE) if name.startswith("lowtide") else "",
            world_size=WORLD_SIZE,
            shape=self._shape,
            deadline_seconds=DEADLINE_SECONDS,
            places=places(self._network),
        )
        return Team(job, self._folder / name)


def measure(
    plan: Plan, network: Network, pythons: dict[str, str], present: tuple[str, ...], folder: Path
) -> list[tuple[str, str, Record]]:
    """``(rate, system, record)``: all systems of a group start at full speed, then take turns at every rate."""
    found: list[tuple[str, str, Record]] = []
    count = parameter_count(plan.shape)
    need = {name: bytes_each * count for name, bytes_each in {**SYSTEMS, **OPTIONAL}.items()}
    made = groups(present, reference=REFERENCE, rank_bytes=need, ranks=WORLD_SIZE, memory_bytes=plan.memory_bytes)
    for number, names in enumerate(made):
        start = Starter(network, plan.shape, pythons, folder / str(number))
        network.limit(None)
        with Rounds(number=number, names=names, reference=REFERENCE, pace=plan.pace, start=start, meter=network.sent) as rounds:
            rounds.start()
            for rate in plan.rates:
                say(f"at {rate}/s")
                network.limit(rate)
                rounds.measure()
                found += [(rate, name, record) for name, record in rounds.new_phase().items()]
    return found


def run(plan: Plan, command: str) -> dict[str, Any]:
    """Measure every system of the plan; a system that cannot be measured keeps its place, with the reason."""
    pythons, unavailable = find_pythons(plan.systems)
    missing = tuple(name for name in plan.systems if unavailable is not None and name.startswith("deepspeed"))
    facts, digest = machine.facts(), source_digest()
    began = datetime.now(timezone.utc)
    with tempfile.TemporaryDirectory(prefix="lowtide-network-") as folder, Network(len(RANKS_PER_HOST)) as network:
        present = tuple(name for name in plan.systems if name not in missing)
        records = measure(plan, network, pythons, present, Path(folder))
    absent = Record(group=-1, failure=f"not installed: {unavailable}")
    records += [(rate, name, absent) for rate in plan.rates for name in missing]
    return {
        "benchmark": "network",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "took_seconds": round((datetime.now(timezone.utc) - began).total_seconds(), 1),
        "lowtide_source_sha256": digest,
        "machine": facts,
        "model": model_facts(plan.shape),
        "ranks_per_host": list(RANKS_PER_HOST),
        "threads_per_rank": 1,
        "link": {
            "kind": "veth between network namespaces, tbf on both ends",
            "rates": list(plan.rates),
        },
        "rounds": plan.pace.rounds,
        "patience_rounds": plan.pace.patience,
        "steps_per_turn": plan.pace.steps,
        "warm_up_steps": WARM_UP_STEPS,
        **summary(
            [(rate, name, asdict(record)) for rate, name, record in records],
            reference=REFERENCE,
            quiet_share=QUIET_SHARE,
            steps=plan.pace.steps,
        ),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*SYSTEMS, *OPTIONAL]
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"some of {', '.join(every)} ({REFERENCE} always runs)")
    parser.add_argument("--rates", default="1gbit,200mbit", help="what the link carries, in the words of tc")
    parser.add_argument("--model", default="27m", choices=list(MODELS), help="how large a model")
    parser.add_argument("--batch", type=int, help="samples per rank, instead of the model's own")
    parser.add_argument("--rounds", type=int, default=6, help="how often every system gets a turn at every rate")
    parser.add_argument("--steps", type=int, default=2, help="steps in one turn")
    parser.add_argument("--patience", type=int, default=2, help="rounds to repeat when other processes keep the machine busy")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for others before each round")
    parser.add_argument("--memory", type=float, default=16.0, metavar="GiB", help="what all systems alive together may need")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tests the script, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="plot an earlier result, run nothing")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of an earlier result, run nothing")
    chosen = parser.parse_args(arguments)
    for option in ("systems", "rates"):
        setattr(chosen, option, [name.strip() for name in getattr(chosen, option).split(",") if name.strip()])
    if unknown := [name for name in chosen.systems if name not in every]:
        parser.error(f"unknown system {unknown[0]!r}; allowed: {', '.join(every)}")
    if min(chosen.rounds, chosen.steps) < 1 or not chosen.rates:
        parser.error("--rounds and --steps must be at least 1, and --rates must name one")
    return chosen


def plan_of(chosen: argparse.Namespace) -> Plan:
    shape = MODEL_QUICK if chosen.quick else MODELS[chosen.model]
    return Plan(
        systems=tuple(dict.fromkeys([REFERENCE, *chosen.systems])),
        rates=tuple(chosen.rates),
        pace=Pace(rounds=chosen.rounds, steps=chosen.steps, patience=chosen.patience, wait_seconds=chosen.wait),
        shape=replace(shape, batch=chosen.batch) if chosen.batch else shape,
        memory_bytes=int(chosen.memory * GIB),
    )


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    # So that the processes of a run that is told to end are stopped with it, and the hosts removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if chosen.markdown is not None:
        sys.stdout.write(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    if chosen.source is not None:
        result = json.loads(chosen.source.read_text())
    else:
        try:
            result = run(plan_of(chosen), shlex.join(["python", "benchmarks/network.py", *arguments]))
        except NetworkUnavailable as error:
            say(f"this machine does not let us make hosts: {error}")
            return 1
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
