"""What does recording cost? A step of a model that is recorded against the same step of one that is not, in turns.

    python benchmarks/recording.py --out benchmarks/results/recording.json    about twelve minutes
    python benchmarks/recording.py --quick                    one small model, few steps: does the script work here?

Three copies of a model are in one process: one sharded with ``run=``, built between two without. They take steps in turns, in
every order equally often, so that whatever else the machine does hits all. The cost is the median over rounds of the recorded
step over the mean of the other two, in seconds on the wall and in seconds of processor time, which a busy machine disturbs
less. The control is one unrecorded copy over the other: what this method sees where there is nothing to see. Beside them stands
what the recorder itself has counted, and how many bytes it wrote.
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
from pathlib import Path
from typing import Any

import torch
from benchkit import machine
from benchkit.turns import say

import lowtide
from lowtide.api import engine_of
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS, Shape

WARM_UP = 10  # steps, in which most is written


def build(shape: Shape, run: str | None, stage: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = GPT(shape)
    # No states: the step is as short as it can be, and what recording adds weighs most.
    return lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), stage=stage, run=run)


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds on the wall, and of all threads' processor time."""
    start, cpu = time.perf_counter(), time.process_time()
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, time.process_time() - cpu


def measure(preset: str, *, rounds: int, batch: int, stage: int) -> dict[str, Any]:
    """Neighbouring steps with and without recording."""
    shape = PRESETS[preset]
    tokens = torch.randint(shape.tokens, (batch, shape.context))
    taken: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": [], "control": []}
    with tempfile.TemporaryDirectory() as folder:
        copies = {name: build(shape, folder if name == "recorded" else None, stage) for name in taken}
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
        written = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
    return {
        "preset": preset,
        "stage": stage,
        "batch": batch,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "seconds": {name: statistics.median(wall for wall, _ in steps) for name, steps in taken.items()},
        **_costs(taken, "", 0),
        **_costs(taken, "processor_", 1),
        "cost_counted_by_the_recorder": counted / sum(cpu for _, cpu in taken["recorded"]),
        "bytes_per_step": written / (rounds + WARM_UP),
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
    cases = [("gpt-17m", 0), ("gpt-17m", 3), ("gpt-98m", 0), ("gpt-98m", 3)]
    cases = [case for case in cases if options.only in (None, case[0])]
    if options.quick:
        cases, options.rounds = cases[:1], 6
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for preset, stage in cases:
        rounds = options.rounds // (3 if preset == "gpt-98m" else 1)
        say(f"{preset}, stage {stage}: {rounds} rounds")
        rows.append(measure(preset, rounds=rounds, batch=options.batch, stage=stage))
        say(f"  {100 * rows[-1]['cost']:+.2f} %, control {100 * rows[-1]['control']:+.2f} %")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    result = {"benchmark": "recording", "command": command, "machine": machine.facts(), "cases": rows}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
