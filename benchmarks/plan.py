"""How far off is the plan? Predicted seconds and bytes of a step against those of the run that the plan was made for.

    python benchmarks/plan.py --out benchmarks/results/plan.json --plot benchmarks/results/plan.png
    python benchmarks/plan.py --only gpt-98m                     one model only (gpt-98m, gpt-705m, ranks)
    python benchmarks/plan.py --quick                            two small runs: does the script work here?
    python benchmarks/plan.py --markdown plan.json               the table for a README

Every case is one ``lowtide train --json``: it makes the plan from a trace of the model and the probe of this machine, runs, and
reports both. The machine is probed before every case (``--probe group``: before each group of cases; ``never``: what
``lowtide doctor`` has measured some time ago), because a shared machine is another one after an hour; the row has what was
found. The figures that ``lowtide doctor`` keeps are left alone. Nothing is fitted between cases.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.plan_report import markdown, plot
from out_of_core import source_digest

HERE = Path(__file__).resolve().parent
WARM_UP_STEPS = 4  # in which lowtide finds its placement
QUIET_SHARE = 0.08


@dataclass(frozen=True)
class Case:
    """One run."""

    group: str
    preset: str
    memory: str | None = None
    update: str | None = None
    activations: str = "auto"
    ranks: int = 1
    stage: int | None = None

    @property
    def name(self) -> str:
        words = [self.preset, self.memory or "", self.update or "", self.activations if self.memory else ""]
        words += [f"{self.ranks} ranks, stage {self.stage}"] if self.ranks > 1 else []
        return " ".join(word for word in words if word)

    def flags(self, disk: str) -> list[str]:
        out = ["--preset", self.preset, "--synthetic", "--activations", self.activations]
        if self.memory is not None:
            out += ["--memory", self.memory, "--disk", disk]
        if self.update is not None:
            out += ["--update", self.update]
        if self.ranks > 1:
            out += ["--ranks", str(self.ranks), "--stage", str(self.stage)]
        return out


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return [Case("gpt-17m", "gpt-17m", "2GiB", "step"), Case("gpt-17m", "gpt-17m")]
    out = [Case("gpt-98m", "gpt-98m"), Case("gpt-98m", "gpt-98m", activations="keep", update="backward", memory="4GiB")]
    for memory in ("768MiB", "1GiB", "1.5GiB", "2GiB", "3GiB"):
        for update in ("backward", "step"):
            policies = ("recompute",) if memory == "768MiB" else ("keep", "recompute")
            out += [Case("gpt-98m", "gpt-98m", memory, update, activations) for activations in policies]
    for memory, update, activations in (
        ("1.5GiB", "backward", "recompute"),
        ("2.4GiB", "backward", "keep"),
        ("2.4GiB", "step", "keep"),
        ("4GiB", "backward", "keep"),
        ("4GiB", "step", "recompute"),
        ("8GiB", "backward", "recompute"),
        ("8GiB", "step", "keep"),
        ("14GiB", "step", "keep"),
    ):
        out.append(Case("gpt-705m", "gpt-705m", memory, update, activations))
    out += [Case("ranks", "gpt-98m", ranks=2, stage=stage) for stage in range(4)]
    return out


def run_case(case: Case, disk: str, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    """The run's own report, and the errors of its plan."""
    command = [sys.executable, "-m", "lowtide", "train", *case.flags(disk), "--steps", str(WARM_UP_STEPS + steps), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"}
    report = json.loads(done.stdout.splitlines()[-1])
    seconds = statistics.median(report["seconds"][WARM_UP_STEPS:])
    return {
        "seconds": seconds,
        "predicted_seconds": report["predicted_seconds"],
        "seconds_ratio": report["predicted_seconds"] / seconds if report["predicted_seconds"] else None,
        "peak_bytes": report["counted_bytes"],
        "predicted_peak_bytes": report["predicted_peak_bytes"],
        "peak_ratio": report["predicted_peak_bytes"] / report["counted_bytes"] if report["predicted_peak_bytes"] else None,
        "step_seconds": report["seconds"],
        "activations": report["activations"],
        "disk_wait_seconds": report["disk_wait_seconds"],
    }


PROBE = """
import dataclasses, json, sys
from lowtide.spec.probe import cache_machine, probe_machine
hardware = probe_machine(sys.argv[1], tell=lambda line: None)
cache_machine(hardware, sys.argv[1])
print(json.dumps(dataclasses.asdict(hardware)))
"""
"""What ``lowtide doctor`` does, but for its collectives, which no plan is made with: about 20 seconds."""


def probe_here(folder: str, environment: dict[str, str]) -> Any:
    """Measure, and keep it where the runs of this benchmark look for it."""
    command = [sys.executable, "-c", PROBE, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def run(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    began = datetime.now(timezone.utc)
    folder = tempfile.mkdtemp(prefix="lowtide-plan-", dir=chosen.spool)
    result: dict[str, Any] = {
        "benchmark": "plan",
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "lowtide_source_sha256": source_digest(),
        "machine": machine.facts(),
        "probe": chosen.probe,
        "quick": chosen.quick,
        "rows": [],
    }
    environment = dict(os.environ)
    if chosen.probe != "never":
        environment["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    group, hardware = None, None
    try:
        for case in cases(quick=chosen.quick):
            if (chosen.only and case.group not in chosen.only.split(",")) or chosen.match not in case.name:
                continue
            machine.wait_for_quiet(share=QUIET_SHARE, at_most_seconds=chosen.wait)
            if chosen.probe == "case" or (chosen.probe == "group" and case.group != group):
                group, hardware = case.group, probe_here(folder, environment)
            row = {"name": case.name, **asdict(case), **run_case(case, folder, chosen.steps, environment)}
            row["hardware"] = hardware
            result["rows"].append(row)
            result["took_seconds"] = round((datetime.now(timezone.utc) - began).total_seconds(), 1)
            if chosen.out is not None:  # a run that is stopped keeps what it has
                chosen.out.write_text(json.dumps(result, indent=1) + "\n")
            said = (
                f"{row['seconds_ratio']:.3f} of the seconds, {row['peak_ratio']:.3f} of the peak"
                if row.get("peak_ratio")
                else row
            )
            print(f"{case.name}: predicted {said}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups, comma separated: gpt-98m, gpt-705m, ranks")
    parser.add_argument("--match", default="", help="only cases whose name has this in it: '2GiB step'")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of every case")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for a quiet machine before each case")
    parser.add_argument("--probe", default="case", choices=("case", "group", "never"), help="when this machine is measured")
    parser.add_argument("--spool", type=Path, default=None, help="where a folder for the disk tier is made")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    chosen = parse(sys.argv[1:])
    if chosen.markdown is not None:
        print(markdown(json.loads(chosen.markdown.read_text())))
        return
    result = run(chosen, shlex.join(["python", "benchmarks/plan.py", *sys.argv[1:]]))
    if chosen.out is None:
        print(json.dumps(result, indent=1))
    if chosen.plot is not None:
        plot(result, chosen.plot)


if __name__ == "__main__":
    main()
