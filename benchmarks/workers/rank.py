"""One rank of one system: builds it, then runs steps when told to, and is blocked in a read in between.

Reads one JSON object per line on stdin and answers each with one on its first stdout; what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from importlib import metadata
from typing import Any, TextIO

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from systems import BUILDERS, Task


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def _pss() -> int:
    """Resident bytes with each shared page divided by the number of processes that map it."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Worker:
    """A system on this rank, and the numbers that belong to it."""

    def __init__(self, *, system: str, rank: int, world_size: int, rendezvous: str, shape: Shape, clip: float | None) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        self._imported_bytes = _status("VmRSS")
        torch.manual_seed(0)
        model = GPT(shape)
        self._parameters = sum(p.numel() for p in model.parameters())
        self._shape = shape
        # A generator of its own: a system that draws random numbers must not change the data it is trained on.
        self._data = torch.Generator().manual_seed(rank)
        self._step = BUILDERS[system](model, Task(shape.batch, clip))
        self._busy_until = time.process_time()

    def facts(self) -> dict[str, Any]:
        packages = ("torch", "deepspeed", "lowtide")
        found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
        return {
            "parameters": self._parameters,
            "imported_bytes": self._imported_bytes,
            "threads": torch.get_num_threads(),
            "python": sys.version.split()[0],
            "versions": {name: found[name] for name in packages if name in found},
        }

    def step(self, count: int) -> dict[str, Any]:
        # CPU time since the last answer: work that a system leaves for after the step, or a thread that polls.
        idle_cpu = time.process_time() - self._busy_until
        seconds: list[float] = []
        cpu_seconds: list[float] = []
        losses: list[float] = []
        for _ in range(count):
            size = (self._shape.batch, self._shape.context)
            batch = torch.randint(0, self._shape.tokens, size, generator=self._data)
            start, start_cpu = time.perf_counter(), time.process_time()
            losses.append(self._step(batch))
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - start_cpu)
        self._busy_until = time.process_time()
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses, "idle_cpu_seconds": idle_cpu}

    def reset_peak(self) -> dict[str, Any]:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return {}

    def memory(self) -> dict[str, Any]:
        return {"peak_bytes": _status("VmHWM"), "rest_bytes": _status("VmRSS"), "rest_pss_bytes": _pss()}


def _answer(out: TextIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    try:
        worker = Worker(
            system=job["system"],
            rank=job["rank"],
            world_size=job["world_size"],
            rendezvous=job["rendezvous"],
            shape=Shape(**job["shape"]),
            clip=job.get("clip"),
        )
        _answer(out, worker.facts())
        for line in sys.stdin:
            order = json.loads(line)
            _answer(out, getattr(worker, order.pop("do"))(**order))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        _answer(out, {"error": f"{type(error).__name__}: {error}"})
        # The other rank may be waiting in a collective that will never end: no orderly shutdown to hope for.
        os._exit(1)


if __name__ == "__main__":
    main()
