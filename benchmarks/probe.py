"""Are the probe's figures right? What `lowtide doctor` measures of disk and memory, beside fio and a plain loop, in turns.

    python benchmarks/probe.py . --out benchmarks/results/probe.json      about a minute; needs fio
    python benchmarks/probe.py . --rounds 1                               does the script work here?

A disk's speed moves from minute to minute, so both measure in every round, one directly after the other, and who goes first
changes; the ratio is taken within a round. fio gets the same work: requests of 4 MiB past the page cache, from 8 threads, over
a file of 1 GiB that was written before, and random bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchkit import machine

from lowtide.spec.probe_compute import copy_bandwidth
from lowtide.spec.probe_disk import measure_disk

MIB = 1 << 20
THREADS = 8
FILE_BYTES = 1 << 30
PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
COPY_BYTES = 256 * MIB


def fio(folder: Path, kind: str, seconds: float) -> float:
    """Bytes per second, of reads and writes together."""
    options = {
        "name": "lowtide",
        "filename": str(folder / "fio"),
        "rw": PATTERNS[kind],
        "rwmixread": 50,
        "bs": "4M",
        "direct": 1,
        "ioengine": "psync",
        "numjobs": THREADS,
        "size": FILE_BYTES // THREADS,
        "offset_increment": FILE_BYTES // THREADS,
        "runtime": seconds,
        "output-format": "json",
    }
    flags = ["--thread", "--time_based", "--group_reporting", "--refill_buffers"]
    command = ["fio", *(f"--{name}={value}" for name, value in options.items()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def copy_loop(seconds: float) -> float:
    """Bytes per second of a plain copy, each byte counted once; like the probe's, of the copy that was held up least."""
    source, target = torch.ones(COPY_BYTES, dtype=torch.uint8), torch.ones(COPY_BYTES, dtype=torch.uint8)
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - start)
    return COPY_BYTES / min(took)


def one_round(folder: Path, seconds: float, *, ours_first: bool) -> dict[str, tuple[float, float]]:
    """For every figure what the probe says, and what the other says."""
    ours: dict[str, float] = {}
    others: dict[str, float] = {}

    def probe() -> None:
        disk = measure_disk(str(folder), most_bytes=FILE_BYTES, seconds=seconds)
        ours.update(read=disk.read, write=disk.write, mixed=disk.mixed, copy=copy_bandwidth(COPY_BYTES, seconds / 2))

    def other() -> None:
        others.update({kind: fio(folder, kind, seconds) for kind in PATTERNS}, copy=copy_loop(seconds / 2))

    for measure in (probe, other) if ours_first else (other, probe):
        measure()
    return {kind: (ours[kind], others[kind]) for kind in ours}


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="lowtide-probe-", dir=chosen.folder))
    try:
        fio(folder, "write", 2 * chosen.seconds)  # so that the file is there, as the probe's is
        rounds = [one_round(folder, chosen.seconds, ours_first=bool(n % 2)) for n in range(chosen.rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, Any] = {}
    for kind in rounds[0]:
        ratios = sorted(r[kind][0] / r[kind][1] for r in rounds)
        figures[kind] = {
            "probe_bytes_per_second": statistics.median(r[kind][0] for r in rounds),
            "other_bytes_per_second": statistics.median(r[kind][1] for r in rounds),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    command = f"python benchmarks/probe.py FOLDER --rounds {chosen.rounds} --seconds {chosen.seconds:g}"
    return {"benchmark": "probe", "command": command, "machine": machine.facts(), "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure in each round")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian and Ubuntu: apt-get install fio)")
    text = json.dumps(run(chosen), indent=2)
    sys.stdout.write(text + "\n")
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
