"""How fast bytes pass between two ranks of this host, measured as ranks move them: between two processes, over gloo.

A gather is one broadcast per owner, all under way together, so that is what the two processes time.

``python -m lowtide.spec.probe_wire RANK FOLDER PLAN`` is one of the two.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from lowtide.errors import InternalError
from lowtide.spec.hardware import Wire
from lowtide.spec.probe_ranks import RANKS, answer, ask_two_ranks, be_one_of_two, gloo_of_two, wrong_answer

_REPEATS: dict[int, int] = {4 << 10: 100, 256 << 10: 40, 4 << 20: 10, 32 << 20: 5}
"""How often each number of bytes is sent, each way. Both ranks must agree on it."""
_SHORTEST_LATENCY = 1e-7


def measure_wire(*, deadline: float, repeats: dict[int, int] | None = None) -> Wire:
    """Start two ranks and time them. Raises PeerFailed or DeadlineExceeded, and leaves no process behind."""
    found = ask_two_ranks(
        "lowtide.spec.probe_wire",
        _REPEATS if repeats is None else repeats,
        what="two processes that exchange bytes over gloo",
        deadline=deadline,
    )
    try:
        samples = [(int(nbytes), float(seconds)) for nbytes, seconds in found]
    except (ValueError, TypeError) as error:
        raise wrong_answer(found) from error
    return fit_wire(samples)


def fit_wire(samples: Sequence[tuple[int, float]]) -> Wire:
    """The latency and bandwidth that explain ``(bytes, seconds)`` best, every size weighing the same."""
    if len({nbytes for nbytes, _ in samples}) < 2 or min(seconds for _, seconds in samples) <= 0:
        raise InternalError(f"two sizes with positive times are needed to tell latency from bandwidth, got {list(samples)}")
    # Minimise the sum of ((latency + bytes / bandwidth) / seconds - 1)^2: a 4 KiB message counts as much as one of 32 MiB.
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in _products(rows))
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    latency = (a * bb - b * ab) / determinant
    per_byte = (b * aa - a * ab) / determinant
    return Wire(bandwidth=1 / max(per_byte, 1e-15), latency=max(latency, _SHORTEST_LATENCY))


def _products(rows: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(a, a) for a, _ in rows], list(rows), [(b, b) for _, b in rows]


def _gather_seconds(group: Any, nbytes: int, repeats: int) -> float:
    """Of a gather in which each rank sends ``nbytes``: half of all are faster."""
    import torch
    import torch.distributed as dist

    parts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(RANKS)]

    def gather() -> None:
        works: list[Any] = []
        for root, part in enumerate(parts):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            works.append(group.broadcast([part], options))
        for work in works:
            work.wait()

    gather()
    times: list[float] = []
    for _ in range(repeats):
        before = time.perf_counter()
        gather()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def main(arguments: list[str]) -> None:
    """One of the two ranks; rank 0 answers ``[[bytes, seconds], ...]``."""
    import torch

    torch.set_num_threads(1)
    rank, folder, plan = int(arguments[0]), arguments[1], json.loads(arguments[2])
    group = gloo_of_two(rank, folder)
    samples = [(int(nbytes), _gather_seconds(group, int(nbytes), repeats)) for nbytes, repeats in plan.items()]
    if rank == 0:
        answer(samples)


if __name__ == "__main__":
    be_one_of_two(main)
