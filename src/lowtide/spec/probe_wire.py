"""How fast bytes pass between two ranks of this host, measured as ranks move them: between two processes, over gloo.

A gather is one broadcast per owner, all under way together, so that is what the two processes time. They are started for it,
because a mistake in gloo ends the process it happens in, and they meet through a file in a private folder.

``python -m lowtide.spec.probe_wire RANK FOLDER`` is one of the two.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lowtide.errors import DeadlineExceeded, InternalError, PeerFailed
from lowtide.spec.hardware import Wire

_RANKS = 2
_REPEATS: dict[int, int] = {4 << 10: 100, 256 << 10: 40, 4 << 20: 10, 32 << 20: 5}
"""How often each number of bytes is sent, each way. Both ranks must agree on it."""
_STORE = "store"
_POLL_SECONDS = 0.02
_SHORTEST_LATENCY = 1e-7


def measure_wire(*, deadline: float, repeats: dict[int, int] | None = None) -> Wire:
    """Start two ranks and time them. Raises PeerFailed or DeadlineExceeded, and leaves no process behind."""
    plan = json.dumps(_REPEATS if repeats is None else repeats)
    with tempfile.TemporaryDirectory(prefix="lowtide-wire-") as folder:  # mode 0700
        command = [sys.executable, "-m", "lowtide.spec.probe_wire"]
        ranks: list[subprocess.Popen[str]] = []
        try:
            for rank in range(_RANKS):
                ranks.append(
                    subprocess.Popen(
                        [*command, str(rank), folder, plan],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            return fit_wire(_answer(ranks, time.monotonic() + deadline, deadline))
        finally:
            for process in ranks:
                _end(process)


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


def _answer(ranks: list[subprocess.Popen[str]], end: float, deadline: float) -> list[tuple[int, float]]:
    """What rank 0 printed, when both have ended well."""
    while any(process.poll() is None for process in ranks):
        failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
        if failed is not None:
            raise _failure(ranks, failed)
        if time.monotonic() > end:
            raise DeadlineExceeded("two processes that exchange bytes over gloo", deadline)
        time.sleep(_POLL_SECONDS)
    failed = next((rank for rank, process in enumerate(ranks) if process.returncode), None)
    if failed is not None:
        raise _failure(ranks, failed)
    out, _ = ranks[0].communicate()
    try:
        return [(int(nbytes), float(seconds)) for nbytes, seconds in json.loads(out.splitlines()[-1])]
    except (ValueError, IndexError, TypeError) as error:
        raise PeerFailed(0, f"it answered {out[-200:]!r}", "the probe") from error


def _failure(ranks: list[subprocess.Popen[str]], rank: int) -> PeerFailed:
    _, err = ranks[rank].communicate()
    lines = err.strip().splitlines()
    return PeerFailed(rank, lines[-1] if lines else f"it ended with code {ranks[rank].returncode}", "the probe")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(ValueError):  # closed already
        process.communicate()


def _gather_seconds(group: Any, nbytes: int, repeats: int) -> float:
    """Of a gather in which each rank sends ``nbytes``: half of all are faster."""
    import torch
    import torch.distributed as dist

    parts = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(_RANKS)]

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
    """One of the two ranks; rank 0 prints ``[[bytes, seconds], ...]``."""
    import torch
    import torch.distributed as dist

    from lowtide.torch_internals import gloo_options

    torch.set_num_threads(1)
    rank, folder, plan = int(arguments[0]), Path(arguments[1]), json.loads(arguments[2])
    make_store: Any = getattr(dist, "FileStore")  # noqa: B009 - it has no types
    store = make_store(str(folder / _STORE), _RANKS)
    options = gloo_options("127.0.0.1", (), timedelta(seconds=10))
    group = dist.ProcessGroupGloo(store, rank, _RANKS, options)
    samples = [(int(nbytes), _gather_seconds(group, int(nbytes), repeats)) for nbytes, repeats in plan.items()]
    if rank == 0:
        sys.stdout.write(json.dumps(samples) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
