"""What does the norm of all gradients cost? Processor seconds of clipping gpt-98m, over torch's own on plain PyTorch.

    python benchmarks/clipping.py --out benchmarks/results/clipping.json      about two minutes
    python benchmarks/clipping.py --preset gpt-17m --rounds 3                 does the script work here?

One process holds the gradients of one model three times: plain PyTorch's, clipped by ``torch.nn.utils.clip_grad_norm_``;
those of ``shard(model, optimizer)``, which are ordinary tensors; and those of ``shard(model, optimizer, disk=...)``, whose
norms are known when backward ends. Besides, the norm of the plain ones is added in the order that several ranks use. Each round
measures all in a random order, on one thread; a ratio is taken within a round. ``ulp_from_torch`` is how far a norm is from
torch's, in units in the last place of torch's fp32 number.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchkit import machine
from benchkit.turns import say

import lowtide
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS
from lowtide.runtime import norm
from lowtide.runtime.unit import dense_stride, flat_view

FAR = 1e9  # a limit that no gradient reaches: the norm is measured, without the multiplication, which is the same for all


class Copy:
    """A model with the gradients of one backward."""

    def __init__(self, preset: str, tokens: torch.Tensor, way: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model = GPT(PRESETS[preset])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if way is not None:
            lowtide.shard(self.model, self.optimizer, **way)
        self._tokens = tokens

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._tokens, self._tokens).backward()


def fixed_order(model: torch.nn.Module) -> float:
    """The norm as several ranks add it, of plain gradients on one."""
    parts: dict[int, norm.PartialNorm] = {}
    for key, param in enumerate(model.parameters()):
        if param.grad is not None:
            collector = norm.NormCollector(param.grad.numel(), 2.0)
            collector.add(0, flat_view(param.grad, dense_stride(param)))
            parts[key] = collector.finish()
    return norm.total_norm(norm.norms(parts, 2.0, lambda mine: [mine]).values(), 2.0)


def measure(preset: str, rounds: int, folder: str) -> dict[str, Any]:
    tokens = torch.randint(PRESETS[preset].tokens, (1, 16), generator=torch.Generator().manual_seed(0))
    plain = Copy(preset, tokens, None)
    sharded = {
        "shard": Copy(preset, tokens, {}),
        "shard with a disk": Copy(preset, tokens, {"memory": "12GiB", "disk": folder}),
    }
    ways: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.nn.utils.clip_grad_norm_(plain.model.parameters(), FAR),
        "fixed order of several ranks": lambda: fixed_order(plain.model),
    }
    for name, copy in sharded.items():
        ways[name] = lambda copy=copy: lowtide.clip_grad_norm_(copy.model, FAR)
        ways[f"{name}, torch's function"] = lambda copy=copy: torch.nn.utils.clip_grad_norm_(copy.model.parameters(), FAR)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    norms: dict[str, float] = {}
    chance = random.Random(0)
    for number in range(rounds + 1):
        for copy in (plain, *sharded.values()):
            copy.backward()
        for name in chance.sample(list(ways), len(ways)):
            start = time.process_time()
            norms[name] = float(ways[name]())
            if number:  # the first round warms up
                taken[name].append(time.process_time() - start)
        say(f"round {number} of {rounds}")
    ratios = {
        name: [mine / torchs for mine, torchs in zip(seconds, taken["torch"], strict=True)] for name, seconds in taken.items()
    }
    return {
        name: {
            "norm": norms[name],
            "ulp_from_torch": abs(norms[name] - norms["torch"]) / float(np.spacing(np.float32(norms["torch"]))),
            "processor_seconds": statistics.median(taken[name]),
            "over_torch": statistics.median(ratios[name]),
            "range": [min(ratios[name]), max(ratios[name])],
        }
        for name in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-98m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "benchmark": "clipping",
        "command": shlex.join(["python", "benchmarks/clipping.py", *sys.argv[1:]]),
        "preset": chosen.preset,
        "threads": 1,
        "machine": machine.facts(),
    }
    with tempfile.TemporaryDirectory() as folder:
        result["norms"] = measure(chosen.preset, chosen.rounds, folder)
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
