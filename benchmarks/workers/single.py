"""One system in one process: builds the model, begins, then runs steps when told to, and is blocked in a read in between.

Speaks as ``rank.py`` does: one JSON object per line on stdin, one answer each on its first stdout. Joins its control group
before it imports torch, so that everything it ever takes is counted there.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from importlib import metadata
from typing import Any, TextIO


def _enter_limits(order: dict[str, Any]) -> None:
    if order.get("cgroup"):
        with open(os.path.join(order["cgroup"], "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    if order.get("data_limit_bytes"):
        resource.setrlimit(resource.RLIMIT_DATA, (order["data_limit_bytes"],) * 2)


def status() -> dict[str, int]:
    """The kernel's account of this process, in bytes. ``VmHWM`` is the peak since the last reset."""
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith(("Vm", "Rss"))}


class Worker:
    """A system, its data and the numbers that belong to both."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        from gpt import Shape
        from single_systems import SYSTEMS

        torch.set_num_threads(order["threads"])
        self._torch = torch
        self._shape = Shape(**order["shape"])
        # A generator of its own: a system that draws random numbers must not change the data it is trained on.
        self._data = torch.Generator().manual_seed(1)
        self._imported_bytes = status()["VmRSS"]
        self._system = SYSTEMS[order["system"]](self._shape, order)
        torch.manual_seed(0)
        start = time.perf_counter()
        self._parameters = self._system.build()
        self._build_seconds = time.perf_counter() - start
        self._busy_until = 0.0

    def facts(self) -> dict[str, Any]:
        found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
        return {
            "parameters": self._parameters,
            "imported_bytes": self._imported_bytes,
            "build_seconds": self._build_seconds,
            "build_peak_bytes": status()["VmHWM"],
            "threads": self._torch.get_num_threads(),
            "python": sys.version.split()[0],
            "versions": {name: found[name] for name in ("torch", "deepspeed", "lowtide") if name in found},
        }

    def begin(self) -> dict[str, Any]:
        """From here on memory counts: for lowtide this is ``shard()``, for DeepSpeed ``initialize()``, else nothing."""
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        start = time.perf_counter()
        facts = self._system.begin()
        self._busy_until = time.process_time()
        return {"seconds": time.perf_counter() - start, **facts}

    def step(self) -> dict[str, Any]:
        # CPU time since the last answer: work that a system leaves for after the step, or a thread that polls.
        idle_cpu = time.process_time() - self._busy_until
        size = (self._shape.batch, self._shape.context)
        batch = self._torch.randint(0, self._shape.tokens, size, generator=self._data)
        start, start_cpu = time.perf_counter(), time.process_time()
        answer = self._system.step(batch)
        answer["seconds"] = time.perf_counter() - start
        answer["cpu_seconds"] = time.process_time() - start_cpu
        answer["idle_cpu_seconds"] = idle_cpu
        self._busy_until = time.process_time()
        return answer

    def memory(self) -> dict[str, Any]:
        now = status()
        return {
            "peak_bytes": now["VmHWM"],
            "peak_without_files_bytes": now["VmHWM"] - now["RssFile"],
            "rest_anonymous_bytes": now["RssAnon"] + now["RssShmem"],
            "rest_file_bytes": now["RssFile"],
        }


def _answer(out: TextIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = json.loads(sys.argv[1])
    try:
        _enter_limits(order)
        worker = Worker(order)
        _answer(out, worker.facts())
        for line in sys.stdin:
            _answer(out, getattr(worker, json.loads(line)["do"])())
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        _answer(out, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # libraries that failed half-way may wait for their threads for ever


if __name__ == "__main__":
    main()
