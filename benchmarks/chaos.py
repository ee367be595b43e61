"""Checkpoints under attack: kills, power cuts, flipped bits and hostile files, counted.

    python benchmarks/chaos.py --out benchmarks/results/chaos.json      all four, about 20 minutes on two cores
    python benchmarks/chaos.py --kills 50 --seconds 120                 one of them, for at most so long
    python benchmarks/chaos.py --quick                                  a few of each: does the script work here?
    python benchmarks/chaos.py --again kills:17                         one case again, by the seed that a result gives
    python benchmarks/chaos.py --markdown chaos.json                    the table for a README

This process imports torch once and starts no thread; everything that is killed is forked from it. Power cuts need root. The
exit code is 1 if anything differed from an undisturbed run, was missed, or ended in anything but a typed error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the kit that the tests use

import torch  # noqa: E402
from benchkit import chaos_flips, chaos_hostile, chaos_kills, chaos_power, machine  # noqa: E402
from benchkit.chaos_report import markdown  # noqa: E402
from benchkit.chaos_tally import Tally  # noqa: E402
from out_of_core import source_digest  # noqa: E402

from tests.kit.crashes import Child, start  # noqa: E402
from tests.kit.recovery import warm_up  # noqa: E402

RUN = {"kills": chaos_kills.run, "power": chaos_power.run, "flips": chaos_flips.run, "hostile": chaos_hostile.run}
FULL = {"kills": 500, "power": 1000, "flips": 100_000, "hostile": 1_000_000}
QUICK = {"kills": 6, "power": 6, "flips": 300, "hostile": 2000}
LANES = (("kills",), ("hostile", "flips", "power"))
"""What runs beside what: two lanes for two cores; in a lane one after the other."""


def lane(
    kinds: tuple[str, ...], planned: dict[str, int], folder: Path, seed: int, deadline: float, once: bool
) -> dict[str, Any]:
    """The results of some kinds, by kind."""
    out: dict[str, Any] = {}
    for kind in kinds:
        tally = Tally(kind, planned[kind], deadline)
        try:
            RUN[kind](folder / kind, tally, seed, once=once)
        except Exception:  # a fault of this program must not hide what the other kinds found
            tally.differs(seed, traceback.format_exc())
        out[kind] = tally.result()
    return out


def run(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    began = datetime.now(timezone.utc)
    deadline = time.monotonic() + chosen.seconds
    result: dict[str, Any] = {
        "benchmark": "chaos",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "lowtide_source_sha256": source_digest(),
        "machine": machine.facts(),
        "torch": str(torch.__version__),
        "seed": chosen.seed,
    }
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=chosen.folder, ignore_cleanup_errors=True) as name:
        for kind in RUN:
            os.mkdir(os.path.join(name, kind))
        planned = chosen.planned
        lanes = [tuple(kind for kind in kinds if planned.get(kind)) for kinds in LANES]
        children: list[tuple[tuple[str, ...], Child]] = [
            (kinds, start(lane, kinds, planned, Path(name), chosen.seed, deadline, chosen.once, seconds=chosen.seconds + 600))
            for kinds in lanes
            if kinds
        ]
        for kinds, child in children:
            ended = child.wait()
            failed = {"planned": 0, "done": 0, "differences": 1, "failure": f"exit status {ended.status}\n{ended.error}"}
            result |= ended.value if ended.status == 0 else {kinds[0]: failed}
    result["took_seconds"] = round((datetime.now(timezone.utc) - began).total_seconds(), 1)
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, count in FULL.items():
        parser.add_argument(f"--{kind}", type=int, metavar="N", help=f"default {count}, or 0 if another kind is given")
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin nothing new after so long (default 1800)")
    parser.add_argument("--seed", type=int, default=1, help="of the first case of each kind; the next have the next ones")
    parser.add_argument("--again", metavar="KIND:SEED", help="one case again")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where jobs that are killed live, and are removed")
    parser.add_argument("--quick", action="store_true", help="a few of each: tests the script, shows nothing")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of an earlier result, run nothing")
    chosen = parser.parse_args(arguments)
    given = {kind: getattr(chosen, kind) for kind in FULL if getattr(chosen, kind) is not None}
    chosen.planned, chosen.once = given or (QUICK if chosen.quick else FULL), False
    if chosen.again is not None:
        kind, _, seed = chosen.again.partition(":")
        if kind not in FULL or not seed.lstrip("-").isdigit():
            parser.error(f"--again is one of {', '.join(FULL)}, a colon and a seed; got {chosen.again!r}")
        chosen.planned, chosen.seed, chosen.once = {kind: 1_000_000}, int(seed), True
    if min(chosen.planned.values()) < 0 or chosen.seconds <= 0:
        parser.error("counts and --seconds must not be negative")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    if chosen.markdown is not None:
        sys.stdout.write(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    logging.getLogger("lowtide").setLevel(logging.CRITICAL)  # what is passed over is what this is about
    warm_up()
    result = run(chosen, shlex.join(["python", "benchmarks/chaos.py", *arguments]))
    text = json.dumps(result, indent=1) + "\n"
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(text)
        sys.stdout.write(markdown(result))
    else:
        sys.stdout.write(text)
    return 1 if any(result[kind]["differences"] for kind in RUN if kind in result) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
