"""A run whose world changes: less memory in the middle, told and untold; a disk that turns slow and fast again.

    python benchmarks/squeeze.py --out benchmarks/results/squeeze.json
    python benchmarks/squeeze.py --quick                 a small model: does the script work here?

Three runs of one model with one seed. *undisturbed*; *memory*: half of it is taken away by ``lowtide.set_memory`` after a third
of the steps, and the control group around the process shrinks without a word after two thirds; *disk*: the control group slows
the disk down for a while. Every run must have the losses of the undisturbed one in every digit, and say what it did. Needs root
(control groups). What is held against a budget is the peak of a step, as the kernel's mark of this process has it, and not what
is left after it; a change between two steps begins a new peak. Exit code 1: a loss differs, a step was above its budget, or
nothing was said.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchkit.cgroup import memory_cgroup, slow_disk

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
SHAPES = {
    "gpt-705m": {"layers": 24, "width": 1536, "heads": 12, "tokens": 8192, "context": 256},
    "gpt-98m": {"layers": 12, "width": 768, "heads": 12, "tokens": 8192, "context": 256},
    "quick": {"layers": 8, "width": 512, "heads": 8, "tokens": 4096, "context": 128},
}


def worker(order: dict[str, Any]) -> None:
    """One run, in a process of its own; prints one JSON object."""
    for group in order["groups"]:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    import torch

    import lowtide
    from lowtide.api import engine_of
    from lowtide.job.gpt import GPT
    from lowtide.job.presets import Shape

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lowtide").addHandler(handler)
    logging.getLogger("lowtide").setLevel(logging.INFO)
    torch.set_num_threads(order["threads"])
    torch.manual_seed(0)
    shape = Shape(**order["shape"])
    with lowtide.deferred(disk=order["spool"]):
        model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = lowtide.shard(model, optimizer, memory=order["memory"], disk=order["spool"], update=order["update"])
    engine = engine_of(model)
    peaks = _watch_peaks(engine.budget)
    steps: list[dict[str, Any]] = []
    for step in range(order["steps"]):
        heard, first = len(said), len(peaks)
        for change in order["changes"]:
            if change["step"] == step and "memory" in change:
                lowtide.set_memory(model, change["memory"])
            elif change["step"] == step:
                Path(change["file"]).write_text(change["text"])
        torch.manual_seed(step)
        tokens = torch.randint(0, shape.tokens, (2, shape.context))
        start = time.perf_counter()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        steps.append(
            {
                "loss": loss.item(),
                "seconds": seconds,
                "budget_bytes": engine.budget.limit,
                "peak_bytes": max(peak for peak, _ in peaks[first:]),
                "above_bytes": max(peak - limit for peak, limit in peaks[first:]),
                "said": said[heard:],
            }
        )
        sys.stderr.write(f"    step {step + 1}: {seconds:.1f} s, {steps[-1]['said']}\n")
    json.dump(steps, sys.stdout)


def _watch_peaks(budget: Any) -> list[tuple[int, int]]:
    """A list that grows: every peak that the budget has come to, before it forgets it, and the limit that was in force."""
    peaks: list[tuple[int, int]] = []
    begin_anew, limit = budget.new_step, budget.limit

    def new_step(*, tidy: bool) -> None:
        nonlocal limit
        peaks.append((budget.peak, limit))
        begin_anew(tidy=tidy)
        limit = budget.limit

    budget.new_step = new_step
    return peaks


def run(name: str, order: dict[str, Any]) -> list[dict[str, Any]]:
    sys.stderr.write(f"  {name}\n")
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.stderr.write(f"  {name}: ended with {done.returncode}\n")
        return []
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-705m", choices=list(SHAPES))
    parser.add_argument("--memory", type=float, default=6.0, metavar="GiB")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--only", default="memory,disk", help="memory, disk")
    parser.add_argument("--update", default="step", choices=("step", "backward"))
    parser.add_argument("--slow", type=int, default=200, metavar="MB/s", help="of the disk while it is slow")
    parser.add_argument("--spool", type=Path, default=None, help="where a folder for the disk tier is made, and removed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return 0
    if args.quick:
        args.model, args.memory = "quick", 0.9
    memory, third = int(args.memory * GIB), args.steps // 3
    with tempfile.TemporaryDirectory(prefix="lowtide-squeeze-", dir=args.spool) as spool:
        order = {"shape": SHAPES[args.model], "memory": memory, "steps": args.steps, "update": args.update}
        order |= {"threads": os.cpu_count(), "spool": spool, "groups": [], "changes": []}
        results = {"undisturbed": run("undisturbed", order)}
        if "memory" in args.only:
            with memory_cgroup("squeeze", 2 * memory) as group:
                changes = [
                    {"step": third, "memory": memory // 2},
                    {"step": 2 * third, "file": str(group.limit_file), "text": str(int(memory // 2 * 0.93))},
                ]
                results["memory"] = run("memory", order | {"groups": [str(group.path)], "changes": changes})
        if "disk" in args.only:
            with slow_disk("squeeze", Path(spool)) as disk:
                changes = [{"step": third, "file": f, "text": disk.rule(args.slow * 10**6)} for f in disk.files]
                changes += [{"step": 2 * third, "file": f, "text": disk.rule(0)} for f in disk.files]
                results["disk"] = run("disk", order | {"groups": [str(disk.path)], "changes": changes})
    return report(args, results)


def report(args: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> int:
    truth = [step["loss"] for step in results["undisturbed"]]
    verdict: dict[str, Any] = {}
    for name, steps in results.items():
        verdict[name] = {
            "equal": [step["loss"] for step in steps] == truth and bool(steps),
            "above_budget": [i + 1 for i, s in enumerate(steps) if s["above_bytes"] > 0],
            "seconds": [round(step["seconds"], 2) for step in steps],
            "said": [text for step in steps for text in step["said"]],
        }
    result = {
        "command": f"python benchmarks/squeeze.py --model {args.model} --memory {args.memory} --steps {args.steps}",
        "model": args.model,
        "memory_gib": args.memory,
        "verdict": verdict,
        "runs": results,
    }
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        sys.stdout.write(text + "\n")
    good = all(v["equal"] and not v["above_budget"] and (v["said"] or name == "undisturbed") for name, v in verdict.items())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
