"""Training a model that does not fit: plain PyTorch, lowtide at several memory numbers, DeepSpeed ZeRO-3 with NVMe.

    python benchmarks/out_of_core.py --out benchmarks/results/out_of_core.json --plot benchmarks/results/out_of_core.png
    python benchmarks/out_of_core.py --only lowtide-keep,lowtide-step --out part.json   some of them (plain always runs)
    python benchmarks/out_of_core.py --clip 1.0 --out clipped.json                      all clip in each step, by torch's call
    python benchmarks/out_of_core.py --only largest --out largest.json                  the largest model the disk allows
    python benchmarks/out_of_core.py --merge a.json b.json --out all.json               parts as one result
    python benchmarks/out_of_core.py --quick                                            a tiny model: does the script work here?
    python benchmarks/out_of_core.py --markdown all.json                                the tables for a README

Steps alternate with plain PyTorch's wherever both fit in memory; every ratio is taken within a round. Exit code 1: a loss of
lowtide's differed from plain PyTorch's in some digit, or the run ended early (what was measured is written all the same).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchkit import machine
from benchkit.disk_limits import mixed_limit, write_once
from benchkit.out_of_core_report import entries, markdown, merge, plot, wrong_losses
from benchkit.peers import PeerUnavailable, deepspeed_operations, deepspeed_python
from benchkit.turns import QUIET_SHARE, REFERENCE, SOURCE, THREADS, Pace, Record, Setting, Solo, Turns, in_sequence, say
from workers.gpt import Shape

HERE = Path(__file__).resolve().parent
GIB, MIB = 2**30, 2**20
DEADLINE_SECONDS = 3600.0
DEEPSPEED_CAP_BYTES = 20 * GIB  # what takes more is killed before it takes the machine with it
DISK_TO_SPARE_BYTES = 15 * 10**9
LARGEST_PARAMETERS = 5 * 10**9
BUILDING_BYTES_PER_PARAMETER = 16  # 12 on disk for good, 4 more while the model is built
# In the first three lowtide finds its placement. From the fourth on, update="step" leaves the update to the next step's
# forward: the fourth has no update in it, and is the last that does not count.
WARM_UP_STEPS = 4
BUDGET_WARM_UP_STEPS = 2  # what counts in a control group is that it ends

MODEL_705M = Shape(layers=24, width=1536, heads=12, tokens=8192, context=256, batch=2)
MODEL_QUICK = Shape(layers=6, width=512, heads=8, tokens=1024, context=16, batch=1)
LAYER_LARGEST = Shape(layers=1, width=3072, heads=24, tokens=8192, context=256, batch=2)
LAYER_LARGEST_QUICK = Shape(layers=1, width=768, heads=8, tokens=1024, context=16, batch=1)

# name: memory number of the real and of the quick run, update, activations
LOWTIDE = {
    "lowtide-keep": ("2.4GiB", "520MiB", "backward", "keep"),
    "lowtide-recompute": ("1.3GiB", "480MiB", "backward", "recompute"),
    "lowtide-auto": ("1.3GiB", "480MiB", "backward", "auto"),
    "lowtide-step": ("2.5GiB", "520MiB", "step", "keep"),
    "lowtide-8": ("8GiB", "700MiB", "backward", "auto"),
}
# With --clip, which an update in backward cannot do.
CLIPPING = {"lowtide-clip": ("2.4GiB", "520MiB", "step", "auto")}
DEEPSPEED = {"deepspeed-default": None, "deepspeed-tuned": 50_000_000}
ALL = (REFERENCE, *LOWTIDE, "budgets", *DEEPSPEED)
ALL_CLIPPED = (REFERENCE, *CLIPPING, *DEEPSPEED)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this run will do."""

    names: tuple[str, ...]
    budgets: tuple[float, ...]
    pace: Pace
    budget_rounds: int
    memory_bytes: int
    quick: bool
    clip: float | None

    @property
    def shape(self) -> Shape:
        return MODEL_QUICK if self.quick else MODEL_705M


def parameter_count(shape: Shape) -> int:
    block = 12 * shape.width**2 + 13 * shape.width
    return shape.layers * block + (2 * shape.tokens + shape.context + 2) * shape.width


def size_bytes(text: str) -> int:
    return int(float(text[:-3]) * {"MiB": MIB, "GiB": GIB}[text[-3:]])


def plain_setting(plan: Plan) -> Setting:
    """The reference, which clips as the others do."""
    activations = 96 * plan.shape.width * plan.shape.batch * plan.shape.context * plan.shape.layers
    return Setting(
        name=REFERENCE,
        kind="plain",
        warm_up=WARM_UP_STEPS,
        need_bytes=16 * parameter_count(plan.shape) + activations + 300 * MIB,
    )


def lowtide_setting(name: str, memory: str, update: str, activations: str) -> Setting:
    return Setting(
        name=name,
        kind="lowtide",
        options={"memory": memory, "update": update, "activations": activations},
        warm_up=WARM_UP_STEPS,
        need_bytes=size_bytes(memory),
    )


def lowtide_settings(plan: Plan) -> list[Setting]:
    known = LOWTIDE | CLIPPING
    rows = [(name, known[name]) for name in plan.names if name in known]
    return [lowtide_setting(name, quick if plan.quick else real, *how) for name, (real, quick, *how) in rows]


def budget_settings(plan: Plan) -> list[Setting]:
    """lowtide in control groups of exactly its number. A quick run takes MiB that force a small model to disk."""
    if "budgets" not in plan.names:
        return []
    made: list[Setting] = []
    for budget in plan.budgets:
        memory = f"{int(360 + 120 * budget)}MiB" if plan.quick else f"{budget:g}GiB"
        setting = lowtide_setting(f"lowtide-cgroup-{budget:g}", memory, "backward", "auto")
        made.append(replace(setting, cap_bytes=size_bytes(memory)))
    return made


def deepspeed_settings(plan: Plan) -> tuple[list[Setting], list[Record]]:
    """What can be run, and records of what cannot."""
    wanted = [name for name in plan.names if name in DEEPSPEED]
    if not wanted:
        return [], []
    try:
        python = deepspeed_python(HERE / ".peers", say)
        environment = deepspeed_operations(python, HERE / ".peers", say)
    except PeerUnavailable as error:
        say(f"DeepSpeed cannot be run: {error}")
        missing = [Record(name, "deepspeed", "deepspeed", {"sub_group": DEEPSPEED[name]}) for name in wanted]
        return [], [replace(record, failure=f"not installed: {error}") for record in missing]
    common: dict[str, Any] = {
        "kind": "deepspeed",
        "cap_bytes": DEEPSPEED_CAP_BYTES,
        "cap_without_cgroup": True,
        "python": str(python),
        "environment": environment,
    }
    return [Setting(name=name, options={"sub_group": DEEPSPEED[name]}, **common) for name in wanted], []


def clipped(plan: Plan, settings: Sequence[Setting]) -> list[Setting]:
    """The settings, told to clip if that was asked for."""
    return [replace(s, options={**s.options, "clip": plan.clip}) for s in settings] if plan.clip is not None else list(settings)


def groups(plan: Plan, settings: Sequence[Setting]) -> list[list[Setting]]:
    """Systems that are alive together: plain PyTorch and as many others as the memory allows."""
    plain = plain_setting(plan)
    made: list[list[Setting]] = []
    for setting in settings:
        if not made or sum(s.need_bytes for s in made[-1]) + setting.need_bytes > plan.memory_bytes:
            made.append([plain])
        made[-1].append(setting)
    return made


class Run:
    """One run of the plan; every part adds its records."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._limit_bytes = 64 * MIB if plan.quick else 4 * GIB
        self.disk: list[dict[str, Any]] = []
        self.records: list[Record] = []

    def all_parts(self) -> None:
        plan = self._plan
        together = groups(plan, lowtide_settings(plan))
        if not together and plan.names == (REFERENCE,):
            together = [[plain_setting(plan)]]
        for number, settings in enumerate(together):
            self._turns(f"together-{number}", settings, plan.pace)
        self._budgets()
        self._deepspeed()
        if "largest" in plan.names:
            self._largest()

    def _budgets(self) -> None:
        """One after the other: what counts is that they end; beside plain PyTorch the large ones would not fit."""
        settings = budget_settings(self._plan)
        if settings:
            pace = replace(self._plan.pace, rounds=self._plan.budget_rounds)
            plain = plain_setting(self._plan)
            few = [replace(s, warm_up=BUDGET_WARM_UP_STEPS) for s in (plain, *settings)]
            self._in_sequence("cgroups", few, self._plan.shape, pace)

    def _turns(self, group: str, settings: list[Setting], pace: Pace) -> None:
        turns = Turns(group, clipped(self._plan, settings), shape=self._plan.shape, folder=self._folder, pace=pace)
        wants_limit = any(s.options.get("update") == "step" for s in settings)
        try:
            turns.measure(self._write_once, lambda: self._measure_disk(group) if wants_limit else None)
        finally:
            self.records += turns.records

    def _write_once(self, solo: Solo) -> None:
        """What ``shard()`` wrote, written once more by a plain loop while everything else is idle."""
        if solo.record.begin.get("written_bytes"):
            solo.record.write_once = measured = write_once(self._folder, solo.record.begin["written_bytes"])
            say(f"  {'':22} the bytes that shard() wrote take a plain loop {measured['seconds']:.2f} s")

    def _measure_disk(self, group: str) -> None:
        limit = mixed_limit(self._folder, self._limit_bytes)
        self.disk.append({"group": group, **limit})
        say(f"  {'':22} the disk gives {limit['bytes_per_second'] / 1e9:.2f} GB/s, half reads ({limit['tool']})")

    def _deepspeed(self) -> None:
        settings, missing = deepspeed_settings(self._plan)
        self.records += missing
        if settings:
            plain = plain_setting(self._plan)
            self._in_sequence("deepspeed", [plain, *settings, plain], self._plan.shape, self._plan.pace)

    def _in_sequence(self, group: str, settings: list[Setting], shape: Shape, pace: Pace) -> None:
        in_sequence(group, clipped(self._plan, settings), shape=shape, folder=self._folder, pace=pace, records=self.records)

    def _largest(self) -> None:
        layer = LAYER_LARGEST_QUICK if self._plan.quick else LAYER_LARGEST
        free = shutil.disk_usage(self._folder).free - DISK_TO_SPARE_BYTES
        most = 40_000_000 if self._plan.quick else LARGEST_PARAMETERS
        parameters = min(most, free // BUILDING_BYTES_PER_PARAMETER)
        one, two = parameter_count(layer), parameter_count(replace(layer, layers=2))
        shape = replace(layer, layers=max(1, 1 + (parameters - one) // (two - one)))
        memory = "800MiB" if self._plan.quick else "8GiB"
        say(f"largest: {parameter_count(shape) / 1e9:.2f} B parameters in {shape.layers} layers, {free / 1e9:.0f} GB to use")
        setting = replace(lowtide_setting("largest", memory, "backward", "auto"), warm_up=0)
        setting.options["layers"] = shape.layers
        pace = replace(self._plan.pace, rounds=2, deadline_seconds=4 * DEADLINE_SECONDS)
        self._in_sequence("largest", [setting], shape, pace)


def source_digest() -> str:
    """Which lowtide was measured, also between two commits."""
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "lowtide").rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def spool_folder(beside: Path) -> Generator[Path]:
    """A new folder in ``beside``, gone afterwards, and so is ``beside`` if it was not there before."""
    new = not beside.exists()
    beside.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="out-of-core-", dir=beside, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        if new:
            with contextlib.suppress(OSError):  # others have put something there
                beside.rmdir()


def run(plan: Plan, command: str, spool: Path) -> dict[str, Any]:
    facts, digest, began = machine.facts(), source_digest(), datetime.now(timezone.utc)
    with spool_folder(spool) as folder:
        job = Run(plan, folder)
        ended_early = None
        try:
            job.all_parts()
        except (SystemExit, KeyboardInterrupt) as error:
            # What took an hour to measure is kept.
            ended_early = f"{type(error).__name__}: {error}"
            say(f"ended early: {ended_early}")
            for record in job.records:
                record.failure = record.failure or (None if record.memory else "the run ended early")
    about = {
        "date": began.isoformat(timespec="seconds"),
        "command": command,
        "took_seconds": round((datetime.now(timezone.utc) - began).total_seconds(), 1),
        "lowtide_source_sha256": digest,
        "machine": facts,
        "disk_limits": job.disk,
        "rounds": plan.pace.rounds,
        "quick": plan.quick,
        "ended_early": ended_early,
    }
    return {
        "benchmark": "out_of_core",
        "model": {
            **asdict(plan.shape),
            "clip": plan.clip,
            "parameters": parameter_count(plan.shape),
            "dtype": "fp32",
            "optimizer": "AdamW(fused=True, lr=1e-3)",
            "threads": THREADS,
        },
        "quiet_share": QUIET_SHARE,
        "runs": [about],
        "systems": entries([asdict(r) for r in job.records], job.disk, reference=REFERENCE, quiet_share=QUIET_SHARE),
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join([*ALL, *CLIPPING])}, largest (plain runs where needed)")
    parser.add_argument("--budgets", default="1.5,2,3,4,8", help="GiB of the control groups that lowtide is put into")
    parser.add_argument("--largest", action="store_true", help="also the largest model that the free disk allows")
    parser.add_argument("--rounds", type=int, help="measured steps of every system, default 5")
    parser.add_argument("--budget-rounds", type=int, help="the same for those in control groups, default 3")
    parser.add_argument("--patience", type=int, default=3, help="rounds to repeat when other processes keep the machine busy")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for others before each round")
    parser.add_argument("--memory", type=float, default=21.0, metavar="GiB", help="what all systems alive together may need")
    parser.add_argument("--spool", type=Path, metavar="DIR", help="where a folder for the disk tiers is made, and removed")
    parser.add_argument("--clip", type=float, metavar="NORM", help="every system clips gradients to this norm in each step")
    parser.add_argument("--quick", action="store_true", help="a tiny model, every path: tests the script, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="join results, run nothing; later ones win")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="plot an earlier result, run nothing")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the tables of an earlier result, run nothing")
    chosen = parser.parse_args(arguments)
    every = ALL if chosen.clip is None else ALL_CLIPPED
    names = list(every) if chosen.only is None else [name.strip() for name in chosen.only.split(",") if name.strip()]
    unknown = [name for name in names if name not in (*ALL, *CLIPPING, "largest")]
    if unknown:
        parser.error(f"unknown system {unknown[0]!r}; allowed: {', '.join([*ALL, *CLIPPING])}, largest")
    chosen.rounds = (2 if chosen.quick else 5) if chosen.rounds is None else chosen.rounds
    chosen.budget_rounds = (1 if chosen.quick else 3) if chosen.budget_rounds is None else chosen.budget_rounds
    if min(chosen.rounds, chosen.budget_rounds) < 1:
        parser.error("--rounds and --budget-rounds must be at least 1")
    chosen.names = tuple(dict.fromkeys([*names, *(["largest"] if chosen.largest or chosen.quick else [])]))
    chosen.budget_numbers = tuple(float(text) for text in chosen.budgets.split(",") if text.strip())
    return chosen


def measured(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    plan = Plan(
        names=chosen.names,
        budgets=chosen.budget_numbers,
        pace=Pace(
            rounds=chosen.rounds,
            patience=0 if chosen.quick else chosen.patience,
            wait_seconds=chosen.wait,
            deadline_seconds=DEADLINE_SECONDS,
        ),
        budget_rounds=chosen.budget_rounds,
        memory_bytes=int(chosen.memory * GIB),
        quick=chosen.quick,
        clip=chosen.clip,
    )
    beside = chosen.out.resolve().parent if chosen.out is not None else HERE / "results"
    return run(plan, command, (chosen.spool or beside).resolve())


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    # So that the processes, groups and files of a run that is told to end go with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if chosen.markdown is not None:
        sys.stdout.write(markdown(json.loads(chosen.markdown.read_text())))
        return 0
    if chosen.source is not None:
        result = json.loads(chosen.source.read_text())
    else:
        if chosen.merge is not None:
            result = merge([json.loads(path.read_text()) for path in chosen.merge])
        else:
            result = measured(chosen, shlex.join(["python", "benchmarks/out_of_core.py", *arguments]))
        text = json.dumps(result, indent=1) + "\n"
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(text)
            sys.stdout.write(markdown(result))
        else:
            sys.stdout.write(text)
    if chosen.plot is not None:
        plot(result, chosen.plot)
    wrong = wrong_losses(result)
    for sentence in wrong:
        say(f"WRONG: {sentence}")
    return 1 if wrong or any(run.get("ended_early") for run in result["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
