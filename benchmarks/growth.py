"""Peak memory and step time as layers double: under a memory number only activations may grow the peak.

    python benchmarks/growth.py --out benchmarks/results/growth.json --plot benchmarks/results/growth.png
    python benchmarks/growth.py --quick                          tiny layers: does the script work here?
    python benchmarks/growth.py --markdown growth.json           the table for a README

Every depth runs in a fresh process of its own. A series is an activation policy and a memory number ("none": what the machine
leaves). What fits stays in memory, so shallow models use the number and deep ones must not use more.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.growth_report import markdown, plot, rows
from benchkit.turns import QUIET_SHARE, Pace, Record, Setting, in_sequence
from out_of_core import parameter_count, source_digest, spool_folder
from workers.gpt import Shape

HERE = Path(__file__).resolve().parent
LAYERS = (6, 12, 24, 48)
WARM_UP_STEPS = 3  # in which lowtide finds its placement
DEADLINE_SECONDS = 3600.0
SERIES = "recompute:1GiB,keep:3GiB"

MODEL = Shape(layers=1, width=1024, heads=16, tokens=8192, context=256, batch=2)
MODEL_QUICK = Shape(layers=1, width=256, heads=4, tokens=512, context=64, batch=2)
LAYERS_QUICK = (2, 4)


def run(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    """All series, all depths; a depth that fails keeps its place, with the cause."""
    facts, digest, began = machine.facts(), source_digest(), datetime.now(timezone.utc)
    base = MODEL_QUICK if chosen.quick else MODEL
    pace = Pace(rounds=chosen.steps, patience=0, wait_seconds=0.0, deadline_seconds=DEADLINE_SECONDS)
    measured: list[dict[str, Any]] = []
    beside = chosen.out.resolve().parent if chosen.out is not None else HERE / "results"
    with spool_folder((chosen.spool or beside).resolve()) as folder:
        # Depths of one series follow each other closely, so that the machine's speed moves little between them.
        for activations, memory in chosen.pairs:
            for layers in chosen.depths:
                machine.wait_for_quiet(share=QUIET_SHARE, at_most_seconds=chosen.wait)
                setting = Setting(
                    name=f"{activations}-{memory or 'none'}-{layers}",
                    kind="lowtide",
                    options={"memory": memory, "update": "backward", "activations": activations},
                    warm_up=WARM_UP_STEPS,
                )
                shape = replace(base, layers=layers)
                records: list[Record] = []
                in_sequence(setting.name, [setting], shape=shape, folder=folder, pace=pace, records=records)
                measured.append({"layers": layers, "parameters": parameter_count(shape), **asdict(records[0])})
    return {
        "benchmark": "growth",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "took_seconds": round((datetime.now(timezone.utc) - began).total_seconds(), 1),
        "lowtide_source_sha256": digest,
        "machine": facts,
        "model": {**asdict(base), "layers": list(chosen.depths), "dtype": "fp32", "optimizer": "AdamW(fused=True, lr=1e-3)"},
        "quick": chosen.quick,
        "quiet_share": QUIET_SHARE,
        "rows": rows(measured, quiet_share=QUIET_SHARE),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="", help=f"depths, default {','.join(map(str, LAYERS))}")
    parser.add_argument("--series", default=SERIES, help=f"activations:memory, default {SERIES}")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of every depth")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for others before each depth")
    parser.add_argument("--spool", type=Path, metavar="DIR", help="where a folder for the disk tier is made, and removed")
    parser.add_argument("--quick", action="store_true", help="tiny layers: tests the script, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="plot an earlier result, run nothing")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of an earlier result, run nothing")
    chosen = parser.parse_args(arguments)
    default = LAYERS_QUICK if chosen.quick else LAYERS
    chosen.depths = tuple(int(text) for text in chosen.layers.split(",") if text.strip()) or default
    chosen.pairs = []
    for text in chosen.series.split(","):
        activations, _, memory = text.strip().partition(":")
        if activations not in ("keep", "recompute", "auto", "disk") or not memory:
            parser.error(f"a series is activations:memory, like recompute:1GiB or keep:none; got {text!r}")
        chosen.pairs.append((activations, None if memory == "none" else memory))
    if chosen.steps < 1 or min(chosen.depths) < 1:
        parser.error("--steps and --layers must be at least 1")
    return chosen


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if chosen.markdown is not None:
        sys.stdout.write(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    if chosen.source is not None:
        result = json.loads(chosen.source.read_text())
    else:
        result = run(chosen, shlex.join(["python", "benchmarks/growth.py", *arguments]))
        text = json.dumps(result, indent=1) + "\n"
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(text)
            sys.stdout.write(markdown(result))
        else:
            sys.stdout.write(text)
    if chosen.plot is not None:
        plot(result, chosen.plot)
    return 1 if any(row["failure"] is not None for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
