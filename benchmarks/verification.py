"""What does it cost to look again? Processor seconds of a step with and without what guards against silent wrong numbers.

    python benchmarks/verification.py --out benchmarks/results/verification.json      gpt-705m at 1.3 GiB, about an hour
    python benchmarks/verification.py --only "all guards"      all of them against none: a quarter of an hour
    python benchmarks/verification.py --preset gpt-17m --memory 600MiB --context 64 --rounds 2      does the script work here?

Guards are switched off one at a time, and all together, by replacing the function that does the work, inside one process that
trains one model out of core. Each round runs one step of every kind in a random order; a ratio is taken within a round, over
the step with no guard.

    prints    hashes of what is computed again, in forward and in backward (runtime/prints.py)
    looks     what modules and arguments hold, before and after each forward (runtime/hidden_state.py)
    writes    hashes of parameters when they come and when they go (runtime/writes.py)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchkit import machine, stats
from benchkit.turns import say

import lowtide
from lowtide.api import engine_of
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS

WARM_UP_STEPS = 5  # three in which the placement is found, and one without an update in it


class _NoLook:
    def __init__(self, *_: object) -> None: ...

    def difference(self, _: object) -> None: ...


GUARDS: dict[str, tuple[str, Any]] = {
    "prints": ("lowtide.runtime.recompute.print_of", lambda _: 0),
    "looks": ("lowtide.runtime.recompute.Look", _NoLook),
    "writes": ("lowtide.runtime.residency.prints_of", lambda *_: []),
}
WITHOUT: dict[str, tuple[str, ...]] = {
    "all guards": (),
    **{f"without {name}": (name,) for name in GUARDS},
    "no guard": tuple(GUARDS),
}


@contextlib.contextmanager
def without(guards: tuple[str, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in guards:
            stack.enter_context(mock.patch(*GUARDS[name]))
        yield


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(chosen: argparse.Namespace, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with lowtide.deferred(disk=folder):
        model = GPT(PRESETS[chosen.preset])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options: dict[str, Any] = {"memory": chosen.memory, "disk": folder, "update": chosen.update}
    lowtide.shard(model, optimizer, activations=chosen.activations, **options)
    size = (chosen.batch, chosen.context or PRESETS[chosen.preset].context)
    tokens = torch.randint(PRESETS[chosen.preset].tokens, size, generator=torch.Generator().manual_seed(0))

    def step() -> float:
        start = processor_seconds()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return processor_seconds() - start

    for number in range(WARM_UP_STEPS):
        say(f"warm-up {number + 1} of {WARM_UP_STEPS}: {step():.2f} processor seconds")
    kinds = [name for name in WITHOUT if name in (*chosen.only, "no guard")]
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    chance = random.Random(0)
    for number in range(chosen.rounds):
        for name in chance.sample(kinds, len(kinds)):
            with without(WITHOUT[name]):
                taken[name].append(step())
        say(f"round {number + 1} of {chosen.rounds}")
    return {"activations": engine_of(model).usage().activations, "steps": {name: summary(taken, name) for name in kinds}}


def summary(taken: dict[str, list[float]], name: str) -> dict[str, Any]:
    ratios = [mine / bare for mine, bare in zip(taken[name], taken["no guard"], strict=True)]
    interval = stats.interval(ratios)
    return {
        "processor_seconds": statistics.median(taken[name]),
        "over_no_guard": statistics.median(ratios),
        "interval": [interval.low, interval.high],
        "all": taken[name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-705m")
    parser.add_argument("--memory", default="1.3GiB")
    parser.add_argument("--update", default="backward")
    parser.add_argument("--activations", default="recompute")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=None, help="tokens per sample; default: the preset's")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=WITHOUT, default=list(WITHOUT), help="beside steps with no guard")
    parser.add_argument("--disk", type=Path, help="default: a folder for temporary files")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "verification",
        "command": shlex.join(["python", "benchmarks/verification.py", *sys.argv[1:]]),
        "preset": chosen.preset,
        "memory": chosen.memory,
        "update": chosen.update,
        "threads": torch.get_num_threads(),
        "machine": machine.facts(),
    }
    with tempfile.TemporaryDirectory(dir=chosen.disk) as folder:
        result |= measure(chosen, folder)
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
