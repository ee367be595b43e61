"""Scale on paper: the planner for up to 4096 ranks and 1 T parameters, and its schedules, checked, for up to 64.

    python benchmarks/scale.py --out benchmarks/results/scale.json --plot benchmarks/results/scale.png
    python benchmarks/scale.py --check                 also train on 2 and 4 ranks here, and compare
    python benchmarks/scale.py --collectives           nothing but the collectives of 2 and 4 ranks here: some minutes
    python benchmarks/scale.py --markdown scale.json   the table for a README

For every model, stage and number of ranks: states per rank by the formulas, and where it fits the plan's step, its peak and its
traffic, on the machine named (default: DGX-like hosts of 8 H100). Up to 64 ranks the schedule of a rank is written out, walked
through by the verifier with a store that counts bytes, and held against the plan. With --check or --collectives the schedules
for 2 and 4 ranks are held against real runs: which units are gathered, reduced and published, how often, and with how many
bytes. Nothing here runs on a GPU: these are predictions from data sheets, and they say so. Exit code 1: a run exchanges
something else than its schedule says.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.collectives import compare, recorded, scheduled
from benchkit.scale_report import markdown, plot
from out_of_core import source_digest

from lowtide.errors import DoesNotFit
from lowtide.planning.formulas import from_precision, states_bytes_per_rank
from lowtide.planning.options import Kind
from lowtide.planning.planner import candidates, make_plan
from lowtide.planning.request import Request
from lowtide.planning.schedule import Verb, schedule
from lowtide.planning.verify import verify
from lowtide.spec.architectures import architecture
from lowtide.spec.catalogue import load
from lowtide.spec.counts import bare_count
from lowtide.spec.model import ModelSpec
from lowtide.stages import STAGES

RANKS = (1, 4, 16, 64, 256, 1024, 4096)
VERIFIED_RANKS = 64
HARDWARE = "h100-80g"
CHECKED_RANKS = (2, 4)


def models() -> list[ModelSpec]:
    named = [architecture(name, batch=4, sequence=2048, dtype="bf16") for name in ("gpt3-6.7b", "llama-2-70b", "gpt3-175b")]
    return [*named, bare_count(10**12, dtype="bf16", tokens=4 * 2048)]


class CountingStore:
    """The null store's part that a schedule needs: it counts what would move."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0

    def move(self, unit: int, kind: Kind, nbytes: int, verb: Verb) -> None:
        if verb is Verb.READ:
            self.read_bytes += nbytes
        else:
            self.written_bytes += nbytes


def row_of(model: ModelSpec, stage: int, ranks: int, hardware: str) -> dict[str, Any]:
    """One model on so many ranks."""
    states = states_bytes_per_rank(model.numel, STAGES[stage], ranks, from_precision("mixed"))
    row: dict[str, Any] = {
        "model": model.name,
        "parameters": model.numel,
        "stage": stage,
        "ranks": ranks,
        "states_bytes_per_rank": round(states.total),
    }
    request = Request(world_size=ranks, stage=stage, precision="mixed")
    began = time.perf_counter()
    try:
        plan = make_plan(model, load(hardware), request)
    except DoesNotFit as error:
        return {**row, "fits": False, "short_of": error.needed_bytes - error.budget_bytes, "tier": error.tier}
    row |= {
        "fits": True,
        "placement": plan.placement,
        "plan_seconds": time.perf_counter() - began,
        "predicted_seconds": plan.predicted_seconds,
        "limited_by": plan.limited_by,
        "device_peak_bytes": next(t.peak_bytes for t in plan.tiers if t.tier == "device"),
        "host_peak_bytes": next(t.peak_bytes for t in plan.tiers if t.tier == "host"),
        "traffic_bytes": plan.traffic_bytes,
    }
    if ranks <= VERIFIED_RANKS:
        sizes = next(c for c in candidates(model, load(hardware), request) if c.stage.number == stage).problem.units
        events, store = schedule(plan), CountingStore()
        moved = verify(plan, sizes, events, store.move)
        if (store.read_bytes, store.written_bytes) != (moved.get("disk read", 0), moved.get("disk written", 0)):
            raise SystemExit(f"{model.name}, stage {stage}, {ranks} ranks: the store saw other bytes than the schedule")
        row["verified_events"] = len(events)
    return row


def check_here(preset: str, steps: int) -> list[dict[str, Any]]:
    """The same planner for ranks on this machine, against real runs of them."""
    rows: list[dict[str, Any]] = []
    for ranks in CHECKED_RANKS:
        for stage in STAGES:
            command = [sys.executable, "-m", "lowtide", "train", "--preset", preset, "--synthetic", "--json"]
            command += ["--ranks", str(ranks), "--stage", str(stage), "--steps", str(steps)]
            report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
            seconds = sorted(report["seconds"][2:])[len(report["seconds"][2:]) // 2]
            row = {"preset": preset, "ranks": ranks, "stage": stage, "seconds": seconds}
            row |= {key: report[key] for key in ("predicted_seconds", "predicted_peak_bytes", "counted_bytes")}
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


def check_collectives(preset: str) -> list[dict[str, Any]]:
    """What ranks here exchange in a step, against the schedule."""
    rows: list[dict[str, Any]] = []
    for ranks in CHECKED_RANKS:
        for stage in STAGES:
            found = compare(scheduled(preset, stage, ranks), recorded(preset, stage, ranks))
            rows.append({"preset": preset, "ranks": ranks, "stage": stage, **found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def run(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    began = datetime.now(timezone.utc)
    sizes = [] if chosen.collectives else models()
    rows = [row_of(m, s, r, chosen.hardware) for m in sizes for s in STAGES for r in RANKS]
    return {
        "benchmark": "scale",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "lowtide_source_sha256": source_digest(),
        "machine": machine.facts(),
        "hardware": chosen.hardware,
        "hardware_source": load(chosen.hardware).source,
        "rows": rows,
        "here": check_here(chosen.preset, chosen.steps) if chosen.check else [],
        "collectives": check_collectives(chosen.preset) if chosen.check or chosen.collectives else [],
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default=HARDWARE)
    parser.add_argument("--check", action="store_true", help="train on 2 and 4 ranks here and compare")
    parser.add_argument("--collectives", action="store_true", help="only compare what 2 and 4 ranks here exchange")
    parser.add_argument("--preset", default="gpt-17m", help="what is trained for that")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    chosen = parse(sys.argv[1:])
    if chosen.markdown is not None:
        print(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    result = run(chosen, shlex.join(["python", "benchmarks/scale.py", *sys.argv[1:]]))
    text = json.dumps(result, indent=1)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")
    else:
        print(text)
    if chosen.plot is not None:
        plot(result, chosen.plot)
    return 1 if any(row["wrong"] for row in result["collectives"]) else 0


if __name__ == "__main__":
    sys.exit(main())
