"""What does recording cost? A step of a model that is recorded against the same step of one that is not, in turns.

    python benchmarks/recording.py --out benchmarks/results/recording.json
    python benchmarks/recording.py --quick                    one small model, few steps: does the script work here?

Two copies of a model are in one process, one sharded with ``run=``, one without. They take steps in turns, and who goes first
changes every time, so that whatever else the machine does hits both. The cost is the median of the ratios of neighbours, in
seconds on the wall and in seconds of processor time, which a busy machine disturbs less; beside it stands what the recorder
itself has counted, and how many bytes it wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchkit import machine

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


def measure(preset: str, *, pairs: int, batch: int, stage: int) -> dict[str, Any]:
    """Neighbouring steps with and without recording."""
    shape = PRESETS[preset]
    tokens = torch.randint(shape.tokens, (batch, shape.context))
    with tempfile.TemporaryDirectory() as folder:
        recorded, plain = build(shape, folder, stage), build(shape, None, stage)
        for _ in range(WARM_UP):
            step(*recorded, tokens)
            step(*plain, tokens)
        recorder = engine_of(recorded[0]).recorder
        assert recorder is not None
        spent = recorder._watch.spent  # type: ignore[attr-defined]
        on: list[tuple[float, float]] = []
        off: list[tuple[float, float]] = []
        for number in range(pairs):
            order = ((recorded, on), (plain, off)) if number % 2 else ((plain, off), (recorded, on))
            for pair, seconds in order:
                seconds.append(step(*pair, tokens))
        counted = recorder._watch.spent - spent  # type: ignore[attr-defined]
        recorder.end("done")
        written = sum(path.stat().st_size for path in Path(folder).rglob("*.jsonl"))
    wall, processor = (sorted(a[k] / b[k] - 1 for a, b in zip(on, off, strict=True)) for k in (0, 1))
    return {
        "preset": preset,
        "stage": stage,
        "batch": batch,
        "pairs": pairs,
        "threads": torch.get_num_threads(),
        "seconds_recorded": statistics.median(seconds for seconds, _ in on),
        "seconds_plain": statistics.median(seconds for seconds, _ in off),
        "cost": statistics.median(wall),
        "cost_quartiles": [wall[len(wall) // 4], wall[-1 - len(wall) // 4]],
        "processor_cost": statistics.median(processor),
        "processor_cost_quartiles": [processor[len(processor) // 4], processor[-1 - len(processor) // 4]],
        "cost_counted_by_the_recorder": counted / sum(cpu for _, cpu in on),
        "bytes_per_step": written / (pairs + WARM_UP),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--only", help="one model: gpt-17m or gpt-98m")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    cases = [("gpt-17m", 0), ("gpt-17m", 3), ("gpt-98m", 0), ("gpt-98m", 3)]
    cases = [case for case in cases if options.only in (None, case[0])]
    if options.quick:
        cases, options.pairs = cases[:1], 4
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = [measure(p, pairs=options.pairs // (3 if "98m" in p else 1), batch=options.batch, stage=stage) for p, stage in cases]
    result = {"machine": machine.facts(), "cases": rows}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
