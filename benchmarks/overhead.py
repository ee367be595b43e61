"""What does lowtide cost a model that fits? Steps of a small model through it beside plain PyTorch's, in turns.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json      about two minutes
    python benchmarks/overhead.py --rounds 6                                  does the script work here?

Five copies of gpt-17m are in one process: plain PyTorch twice, one through ``shard(model, optimizer)``, one with
``memory="8GiB"``, one with ``memory="8GiB", disk=...``. They take steps in turns, in random orders; a ratio is that of a step
over the mean of the two plain ones of the same round. The second plain copy over the first is the control: what this method
sees where there is nothing to see.
"""

from __future__ import annotations

import argparse
import json
import random
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
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS

WARM_UP = 6  # steps; the placement is found in the first three
PRESET = "gpt-17m"


def build(way: dict[str, Any] | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = GPT(PRESETS[PRESET])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return (model, optimizer) if way is None else lowtide.shard(model, optimizer, **way)


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds, and the loss."""
    start = time.perf_counter()
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss.item()


def run(rounds: int, batch: int) -> dict[str, Any]:
    shape = PRESETS[PRESET]
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "shard": {},
            "shard with a memory number": {"memory": "8GiB"},
            "shard with a memory number and a disk": {"memory": "8GiB", "disk": folder},
            "control": None,
        }
        copies = {name: build(way) for name, way in ways.items()}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        losses: dict[str, list[float]] = {name: [] for name in ways}
        chance = random.Random(0)
        generator = torch.Generator().manual_seed(0)
        for number in range(WARM_UP + rounds):
            tokens = torch.randint(shape.tokens, (batch, shape.context), generator=generator)
            if number % 12 == 0:
                say(f"round {number + 1} of {WARM_UP + rounds}")
            for name in chance.sample(list(copies), len(copies)):
                seconds, loss = step(*copies[name], tokens)
                losses[name].append(loss)
                if number >= WARM_UP:
                    taken[name].append(seconds)
        del copies
    out: dict[str, Any] = {}
    for name in (name for name in taken if name != "plain"):
        pairs = zip(taken[name], taken["plain"], taken["control"], strict=True)
        ratios = sorted(mine / (plain if name == "control" else (plain + other) / 2) for mine, plain, other in pairs)
        out[name] = {
            "ratio": statistics.median(ratios),
            "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "seconds": statistics.median(taken[name]),
            "losses_equal_plain_in_every_digit": losses[name] == losses["plain"],
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    command = f"python benchmarks/overhead.py --rounds {chosen.rounds} --batch {chosen.batch}"
    result = {
        "benchmark": "overhead",
        "command": command,
        "preset": PRESET,
        "threads": torch.get_num_threads(),
        "machine": machine.facts(),
        "over_plain": run(chosen.rounds, chosen.batch),
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
