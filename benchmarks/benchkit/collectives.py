"""Whether ranks exchange what the schedule of their plan says: the same verbs for the same units, as often, and as many bytes.

A schedule may have gathers in backward that a run does not need: the unit that ended the forward pass is still whole, and the
backward of an embedding does not look at its values. Anything else that differs is a mistake in the schedule or in the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().parent.parent / "workers" / "collectives.py"
DEADLINE_SECONDS = 120.0
PADDING = 0.01
"""The engine cuts units at multiples of 64 elements; formulas do not."""

Note = tuple[str, int, int]
"""Verb, unit, bytes."""


def recorded(preset: str, stage: int, ranks: int) -> list[list[Note]]:
    """What each rank of a real run exchanges in one step."""
    with tempfile.TemporaryDirectory(prefix="lowtide-collectives-") as folder:
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                order = {"preset": preset, "stage": stage, "rank": rank, "world_size": ranks}
                order["rendezvous"] = str(Path(folder) / "rendezvous")
                command = [sys.executable, str(WORKER), json.dumps(order)]
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            answers = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return [[(verb, unit, nbytes) for verb, unit, _, nbytes in json.loads(text.splitlines()[-1])] for text in answers]


def scheduled(preset: str, stage: int, ranks: int) -> list[Note]:
    """What one rank exchanges by the schedule of the plan for such ranks."""
    import torch

    from lowtide.job.models import build_model
    from lowtide.job.options import Options
    from lowtide.job.planned import spec_of
    from lowtide.planning.planner import candidates, make_plan
    from lowtide.planning.request import Request
    from lowtide.planning.schedule import COLLECTIVES, schedule
    from lowtide.spec.catalogue import load

    with torch.device("meta"):
        model = spec_of(build_model(Options(preset=preset)), preset, 2)
    request = Request(world_size=ranks, ranks_per_host=1, stage=stage, disk_bytes=0, activations="keep")
    plan, hardware = make_plan(model, load("cpu-2"), request), load("cpu-2")
    sizes = next(candidates(model, hardware, request)).problem.units
    return [(e.verb.value, e.unit, sizes[e.unit].whole) for e in schedule(plan) if e.verb in COLLECTIVES]


def compare(planned: list[Note], seen: list[list[Note]]) -> dict[str, Any]:
    """Counts and bytes of both, and all that differs and should not."""
    wrong = [f"rank {rank} has other exchanges than rank 0" for rank, notes in enumerate(seen) if notes != seen[0]]
    for verb in sorted({note[0] for note in planned + seen[0]}):
        ours, theirs = ([note for note in notes if note[0] == verb] for notes in (planned, seen[0]))
        wrong += _differences(verb, ours, theirs)
    return {
        "scheduled": _tally(planned),
        "recorded": _tally(seen[0]),
        "gathers_not_needed": len(planned) - len(seen[0]),
        "wrong": wrong,
    }


def _differences(verb: str, planned: list[Note], seen: list[Note]) -> list[str]:
    missing = Counter(unit for _, unit, _ in planned)
    missing.subtract(Counter(unit for _, unit, _ in seen))
    allowed = {0, 1} if verb == "gather" else {0}  # once in forward each unit must come
    wrong = [f"{verb} of unit {unit}: {n} more planned than seen" for unit, n in missing.items() if n not in allowed]
    whole = {unit: nbytes for _, unit, nbytes in planned}
    wrong += [
        f"{verb} of unit {unit}: {nbytes} bytes, planned {whole.get(unit, 0)}"
        for _, unit, nbytes in seen
        if abs(nbytes - whole.get(unit, 0)) > PADDING * nbytes
    ]
    if verb != "reduce" and not _in_order([unit for _, unit, _ in seen], [unit for _, unit, _ in planned]):
        wrong.append(f"{verb}: in another order than planned")
    return wrong


def _in_order(some: list[int], of_all: list[int]) -> bool:
    """Whether ``some`` is what is left of ``of_all`` after leaving some out."""
    rest = iter(of_all)
    return all(unit in rest for unit in some)


def _tally(notes: list[Note]) -> dict[str, dict[str, int]]:
    verbs = dict.fromkeys(verb for verb, _, _ in notes)
    return {
        verb: {"count": sum(n[0] == verb for n in notes), "bytes": sum(n[2] for n in notes if n[0] == verb)} for verb in verbs
    }
