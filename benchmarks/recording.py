"""What does recording cost? A step of a model that is recorded against the same step of one that is not, in turns.

    python benchmarks/recording.py --out benchmarks/results/recording.json    about twenty minutes
    python benchmarks/recording.py --quick                    the small model, few steps: does the script work here?

Three copies of a model are in one process: one sharded with ``run=``, built between two without. They take steps in turns, in
every order equally often, so that whatever else the machine does hits all. The cost is the median over rounds of the recorded
step over the mean of the other two, in seconds on the wall and in seconds of processor time, which a busy machine disturbs
less. The control is one unrecorded copy over the other: what this method sees where there is nothing to see. Beside them stands
what the recorder itself has counted, and how many bytes it wrote.

Cases: in memory at stages 0 and 3; with everything on disk, where every block that comes and goes is noted; and on two ranks,
where every exchange is. Of two ranks the first one's steps are measured; both record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from benchkit import machine
from benchkit.turns import say

import lowtide
from lowtide.api import engine_of
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS
from lowtide.runtime import assembly

WARM_UP = 10  # steps, in which most is written


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained. ``tier``: where everything lives, memory or disk."""

    preset: str
    stage: int
    tier: str = "memory"
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.preset}, stage {self.stage}, in {self.tier}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


CASES = (
    Case(preset="gpt-17m", stage=0),
    Case(preset="gpt-17m", stage=3),
    Case(preset="gpt-17m", stage=3, tier="disk"),
    Case(preset="gpt-17m", stage=3, ranks=2),
    Case(preset="gpt-98m", stage=0),
    Case(preset="gpt-98m", stage=3),
)


def build(case: Case, run: str | None, spool: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = GPT(PRESETS[case.preset])
    # No states: the step is as short as it can be, and what recording adds weighs most.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if case.tier == "memory":
        return lowtide.shard(model, optimizer, stage=case.stage, run=run)
    assembly.default_budget = lambda: None  # a disk and no number means: what the machine has room for; here: nothing
    return lowtide.shard(model, optimizer, stage=case.stage, disk=spool, run=run)


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds on the wall, and of all threads' processor time."""
    start, cpu = time.perf_counter(), time.process_time()
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, time.process_time() - cpu


def measure(case: Case, *, rounds: int, batch: int) -> dict[str, Any]:
    """Neighbouring steps with and without recording."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("run", "spool"):
            (Path(folder) / name).mkdir()
        if case.ranks == 1:
            found = take_turns(case, folder, rounds=rounds, batch=batch)
        else:
            multiprocessing.spawn(one_rank, (case, folder, rounds, batch), nprocs=case.ranks)
            found = json.loads((Path(folder) / "found.json").read_text())
        written = sum(path.stat().st_size for path in (Path(folder) / "run").rglob("*.jsonl"))
    return {**asdict(case), "batch": batch, "rounds": rounds, **found, "bytes_per_step": written / (rounds + WARM_UP)}


def one_rank(rank: int, case: Case, folder: str, rounds: int, batch: int) -> None:
    """In a process of its own; the first rank tells what it found."""
    torch.set_num_threads(max(1, torch.get_num_threads() // case.ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=case.ranks)
    found = take_turns(case, folder, rounds=rounds, batch=batch)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def take_turns(case: Case, folder: str, *, rounds: int, batch: int) -> dict[str, Any]:
    """On one rank: three copies, and what their steps took."""
    shape = PRESETS[case.preset]
    tokens = torch.randint(shape.tokens, (batch, shape.context))
    taken: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": [], "control": []}
    copies = {name: build(case, f"{folder}/run" if name == "recorded" else None, f"{folder}/spool") for name in taken}
    for _ in range(WARM_UP):
        for pair in copies.values():
            step(*pair, tokens)
    recorder = engine_of(copies["recorded"][0]).recorder
    assert recorder is not None
    spent = recorder._watch.spent  # type: ignore[attr-defined]
    orders = itertools.cycle(itertools.permutations(copies))
    for _ in range(rounds):
        for name in next(orders):
            taken[name].append(step(*copies[name], tokens))
    counted = recorder._watch.spent - spent  # type: ignore[attr-defined]
    recorder.end("done")
    return {
        "threads": torch.get_num_threads(),
        "seconds": {name: statistics.median(wall for wall, _ in steps) for name, steps in taken.items()},
        **_costs(taken, "", 0),
        **_costs(taken, "processor_", 1),
        "cost_counted_by_the_recorder": counted / sum(cpu for _, cpu in taken["recorded"]),
    }


def _costs(taken: dict[str, list[tuple[float, float]]], prefix: str, clock: int) -> dict[str, Any]:
    """What recording adds, and what the control sees: medians and quartiles over the rounds."""
    plain, recorded, control = ([seconds[clock] for seconds in steps] for steps in taken.values())
    cost = sorted(r / ((p + c) / 2) - 1 for p, r, c in zip(plain, recorded, control, strict=True))
    nothing = sorted(c / p - 1 for p, c in zip(plain, control, strict=True))
    out: dict[str, Any] = {}
    for name, ratios in (("cost", cost), ("control", nothing)):
        out[prefix + name] = statistics.median(ratios)
        out[f"{prefix}{name}_quartiles"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=60, help="a third of them for gpt-98m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", help="one model: gpt-17m or gpt-98m")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in (None, case.preset)]
    if options.quick:
        cases, options.rounds = [case for case in cases if case.preset == "gpt-17m"], 3
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for case in cases:
        rounds = options.rounds // (3 if case.preset == "gpt-98m" else 1)
        say(f"{case}: {rounds} rounds")
        rows.append(measure(case, rounds=rounds, batch=options.batch))
        say(f"  {100 * rows[-1]['cost']:+.2f} %, control {100 * rows[-1]['control']:+.2f} %")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    result = {"benchmark": "recording", "command": command, "machine": machine.facts(), "cases": rows}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
