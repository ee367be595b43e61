"""One rank that reduces through shared memory and copies, in turns, and says how long each took."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist


class Worker:
    """Both move the same memory: the numbers of this rank, which lie where gradients would."""

    def __init__(self, order: dict[str, Any]) -> None:
        from lowtide.comm import Group, Label

        torch.set_num_threads(1)
        rank, size = order["rank"], order["world_size"]
        dist.init_process_group("gloo", init_method=f"file://{order['rendezvous']}", rank=rank, world_size=size)
        self._group = Group.join(None, deadline=60, transport="shared")
        channel = self._group.channel("benchmark")
        self._over = channel.run(Label("open", -1, "a transport"), lambda wire, notes: wire.world)

    def facts(self) -> dict[str, Any]:
        return {"transport": type(self._over).__name__}

    def measure(self, nbytes: int, repeats: int, warm_up: int) -> dict[str, Any]:
        """Seconds of every copy and of every reduction of ``nbytes``."""
        count = nbytes // 4 // self._over.size
        numbers = torch.ones(count * self._over.size)
        copied = torch.zeros_like(numbers)
        counts = [count] * self._over.size

        def copy() -> None:
            copied.copy_(numbers)

        def reduce() -> None:
            with self._over.reduced(counts, torch.float32, lambda buffer: buffer.copy_(numbers)):
                pass

        seconds: dict[str, list[float]] = {"copy": [], "reduce": []}
        for index in range(warm_up + repeats):
            for name, action in (("copy", copy), ("reduce", reduce)):
                taken = self._timed(action)
                if index >= warm_up:
                    seconds[name].append(taken)
        return seconds

    def _timed(self, action: Callable[[], None]) -> float:
        self._over.all_gather_small(torch.zeros(1))  # all begin together
        start = time.perf_counter()
        action()
        return time.perf_counter() - start


def _answer(out: TextIO, value: dict[str, Any]) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        worker = Worker(json.loads(sys.argv[1]))
        _answer(out, worker.facts())
        for line in sys.stdin:
            order = json.loads(line)
            _answer(out, getattr(worker, order.pop("do"))(**order))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        _answer(out, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)


if __name__ == "__main__":
    main()
