"""A run that never ran: timelines as a plausible job would have written them, for tests of what reads them.

A GPT of a few units trains out of core: parameters and optimizer states live on disk, and every step waits for some of them.
All numbers follow from a seed, so a test may say exactly what a report must find.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.reporting.format import (
    ArenaFacts,
    EndLine,
    Line,
    MarkLine,
    MemoryLine,
    PlanLine,
    ProcessMemory,
    RunLine,
    Span,
    SpansLine,
    StepLine,
    UnitFacts,
    UnitRow,
    UnitsLine,
    encode,
)

MIB = 1 << 20
GIB = 1 << 30
STARTED = 1_790_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the run is like. Shares are of a step of ``step_seconds``."""

    steps: int = 40
    ranks: int = 1
    units: int = 12
    step_seconds: float = 2.0
    disk_share: float = 0.31
    comm_share: float = 0.0
    update_share: float = 0.1
    rest_share: float = 0.03
    budget: int | None = 4 * GIB
    parked: int = 4 * GIB
    """What lives on disk."""
    unit_bytes: int = 96 * MIB
    host: str = "box"
    pid: int = 4242
    started: float = STARTED
    end: str | None = "done"
    """``None``: it ends without a word."""
    end_text: str = ""
    growth: int = 0
    """Bytes per step that are not lowtide's own and never go away."""
    slow_rank: int | None = None
    """A rank that works half as long again as the others."""
    limit: int | None = None
    """Of the control group."""
    facts: tuple[tuple[str, Any], ...] = ()
    first_step: int = 1
    detailed: tuple[int, ...] = (2, 10, 30)
    skipped: int | None = None
    has_folder: bool = True
    last_unit: str = "head"
    gap: float = 0.002
    """Seconds between two steps."""
    clips: bool = False
    """Whether most of the update is clipping, in steps recorded in detail."""
    cpu_given: float | None = 97.0
    """Percent of the processor time that it asked for."""


def write_run(folder: Path, job: Job | None = None, **changes: Any) -> Path:
    """A run's folder with one timeline per rank; returns it. A second call with the same folder goes on with the run."""
    job = replace(job or Job(), **changes)
    (folder / "timeline").mkdir(parents=True, exist_ok=True)
    for rank in range(job.ranks):
        with open(folder / "timeline" / f"rank-{rank:05}.jsonl", "ab") as file:
            for line in lines(job, rank):
                file.write(encode(line))
    return folder


def write_extras(folder: Path, job: Job, **config: Any) -> None:
    """What `lowtide train` would have put beside it."""
    rng = random.Random(7)
    (folder / "config.json").write_text(
        json.dumps({"steps": job.steps, "preset": "gpt-17m", "batch": 2, "ranks": job.ranks, **config})
    )
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(job.first_step, job.first_step + job.steps):
            loss = 5.5 / step**0.3 + rng.uniform(-0.05, 0.05)
            file.write(json.dumps({"step": step, "loss": loss, "tokens_per_second": 900 + rng.uniform(-40, 40)}) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "validation_loss": loss + 0.1}) + "\n")
    with open(folder / "events.jsonl", "w") as file:
        for event, step, cause in (("start", None, "process 4242"), ("save", 20, "every 20 steps"), ("save", 40, "the end")):
            file.write(json.dumps({"time": "2026-09-21T14:14:00+0000", "event": event, "step": step, "cause": cause}) + "\n")


def lines(job: Job, rank: int) -> list[Line]:
    """All lines of one rank."""
    rng = random.Random(rank + 1)
    names = ["embed", *(f"blocks.{i}" for i in range(job.units - 2)), job.last_unit]
    out: list[Line] = [_run_line(job, rank, names)]
    out.append(_plan_line(job, t=0.4, step=job.first_step - 1, factor=1.15, why="first placement: minimal residency"))
    t, read, written = 1.0, 0, 0
    slow = 1.5 if rank == job.slow_rank else 1.0
    for step in range(job.first_step, job.first_step + job.steps):
        unusual = {job.first_step: 2.2, job.first_step + 17: 1.35}.get(step, 1.0)
        seconds = job.step_seconds * unusual * rng.uniform(0.96, 1.05)
        moved = int(job.parked * 0.5) if job.has_folder else 0
        read, written = read + moved * 3, written + moved // 3
        for moment, share in (("begin", 0.0), ("forward", 0.45), ("backward", 0.8), ("step", 1.0)):
            out.append(_memory_line(job, rank, t=t + seconds * share, step=step, moment=moment))
        comm = job.comm_share if slow == 1.0 else 0.0
        out.append(
            StepLine(
                t=t + seconds,
                step=step,
                seconds=seconds,
                compute_seconds=seconds * (1 - job.disk_share - comm - job.update_share - job.rest_share),
                disk_wait_seconds=seconds * job.disk_share,
                comm_wait_seconds=seconds * comm,
                update_seconds=seconds * job.update_share,
                loss=None if step == job.skipped else 5.5 / step**0.3 + rng.uniform(-0.05, 0.05),
                disk_read_bytes=moved * 3,
                disk_written_bytes=moved // 3,
                wire_bytes=64 * MIB * (job.ranks > 1),
                peak_bytes=_used(job, step, 0.45),
                skipped=step == job.skipped,
                total_disk_read_bytes=read,
                total_disk_written_bytes=written,
            )
        )
        t += seconds
        if step - job.first_step + 1 in job.detailed:
            out.append(
                SpansLine(t=t, step=step, why="regular", names=("", *names), rows=tuple(_spans(job, names, seconds, rng)))
            )
        out += _marks(job, step, t)
        t += job.gap
    out.append(_units_line(job, names, t, step=job.first_step + job.steps - 1))
    if job.end is not None:
        out.append(EndLine(t=t, why=job.end, text=job.end_text))
    return out


def _run_line(job: Job, rank: int, names: list[str]) -> RunLine:
    return RunLine(
        started=job.started,
        rank=rank,
        world_size=job.ranks,
        local_ranks=job.ranks,
        host=job.host,
        pid=job.pid + rank,
        stage=3,
        update="backward",
        budget_bytes=job.budget,
        folders=("/scratch",) if job.has_folder else (),
        units=tuple(
            UnitFacts(name=n, numel=job.unit_bytes // 4, bytes=job.unit_bytes, shard_bytes=job.unit_bytes // job.ranks)
            for n in names
        ),
        facts={"lowtide": "0.1", "torch": "2.13", "cores": 2, **dict(job.facts)},
    )


def _plan_line(job: Job, *, t: float, step: int, factor: float, why: str) -> PlanLine:
    return PlanLine(
        t=t,
        step=step,
        predicted_seconds=job.step_seconds * factor,
        predicted_peak_bytes=int(_used(job, job.first_step, 0.45) * 1.03),
        tiers={"host": _kinds(job, 0.8), "disk": _parked(job)},
        why=why,
    )


def _kinds(job: Job, share: float) -> dict[str, int]:
    """Bytes of the ledger at a moment of a step."""
    room = (job.budget or 4 * GIB) - 700 * MIB
    return {
        "parameters": int(room * 0.18),
        "gradients": int(room * 0.1 * share),
        "optimizer": int(room * 0.16),
        "activations": int(room * 0.30 * max(0.0, 1 - abs(share - 0.45) * 2)),
        "slots": 3 * job.unit_bytes,
        "buffers in flight": 48 * MIB,
    }


def _parked(job: Job) -> dict[str, int]:
    if not job.has_folder:
        return {}
    return {
        "parameters": job.parked // 4,
        "gradients": job.parked // 8,
        "optimizer": job.parked - job.parked // 4 - job.parked // 8,
    }


def _used(job: Job, step: int, share: float) -> int:
    return sum(_kinds(job, share).values()) + 420 * MIB + job.growth * (step - job.first_step)


def _memory_line(job: Job, rank: int, *, t: float, step: int, moment: str) -> MemoryLine:
    share = {"begin": 0.0, "forward": 0.45, "backward": 0.8, "step": 1.0}[moment]
    anonymous, file = _used(job, step, share), 180 * MIB
    kinds = _kinds(job, share)
    return MemoryLine(
        t=t,
        step=step,
        moment=moment,
        host=kinds,
        disk=_parked(job),
        arenas={
            "slots": ArenaFacts(
                reserved=4 * job.unit_bytes, taken=3 * job.unit_bytes, free_blocks=2, takes=step * 40, fresh=9, limbo=2 * MIB
            ),
            "staging": ArenaFacts(reserved=64 * MIB, taken=16 * MIB, free_blocks=6, takes=step * 200, fresh=14),
        },
        process=ProcessMemory(anonymous=anonymous, shared=0, file=file, total=anonymous + file),
        not_ours=anonymous + file - sum(kinds.values()),
        cgroup_bytes=anonymous * job.ranks + 30 * MIB if job.limit else None,
        cgroup_limit_bytes=job.limit,
        cpu_percent=172.0,
        cpu_given_percent=job.cpu_given,
        disk_busy_percent=60.0 if job.has_folder else None,
        disk_free_bytes=200 * GIB,
        fds=40,
        threads=22,
        spool_bytes=job.parked,
        shared_saved_bytes=256 * MIB if rank and job.ranks > 1 else 0,
    )


def _spans(job: Job, names: list[str], seconds: float, rng: random.Random) -> list[Span]:
    """Forward through all units, backward through them again, with fetches before and writes behind."""
    rows: list[Span] = []
    if job.clips:
        rows.append(Span(seconds * 0.5, seconds * 0.9, "update", "clip", 0, 0))
        rows.append(Span(seconds * 0.9, seconds, "update", "update", 0, 0))
    each = seconds / (len(names) * 3)
    at = 0.0
    for phase, order in (("forward", range(1, len(names) + 1)), ("backward", range(len(names), 0, -1))):
        for unit in order:
            long = each * (1.0 if phase == "forward" else 2.0)
            wait = long * job.disk_share * rng.uniform(0.6, 1.4)
            rows.append(Span(max(0.0, at - each * 0.7), at + wait, "disk read", "fetch", unit, job.unit_bytes))
            rows.append(Span(at, at + wait, "wait", "wait for disk", unit, 0))
            if job.ranks > 1:
                rows.append(Span(at + wait * 0.5, at + wait, "gather", "gather", unit, job.unit_bytes))
            rows.append(Span(at + wait, at + long, "compute", phase, unit, 0))
            if phase == "backward":
                if job.ranks > 1:
                    rows.append(Span(at + long, at + long + each * 0.3, "reduce", "reduce", unit, job.unit_bytes))
                rows.append(Span(at + long, min(seconds, at + long + each * 0.5), "update", "update", unit, 0))
                rows.append(Span(at + long, min(seconds, at + long + each), "disk write", "evict", unit, job.unit_bytes * 2))
            at += long
    return rows


def _marks(job: Job, step: int, t: float) -> list[Line]:
    out: list[Line] = []
    if step % 20 == 0:
        out.append(MarkLine(t=t, step=step, what="checkpoint", text=f"checkpoints/step-{step:06}"))
    if step == job.first_step + 1:
        out.append(_plan_line(job, t=t, step=step, factor=0.97, why="measured: 4 more units stay in memory"))
        out.append(MarkLine(t=t, step=step, what="replan", text="4 more units stay in memory"))
    if step == job.first_step + 17:
        out.append(MarkLine(t=t, step=step, what="straggler", text="the disk was slow: 1.1 GiB/s instead of 2.0"))
    if step == job.skipped:
        out.append(MarkLine(t=t, step=step, what="skip", text="gradients are not finite"))
    return out


def _units_line(job: Job, names: list[str], t: float, step: int) -> UnitsLine:
    rows = tuple(
        UnitRow(
            name=name,
            forward_seconds=0.02 * step * (1 + i % 3),
            fetch_bytes=job.unit_bytes * step * 2 if i > 3 else 0,
            fetches=step * 2 if i > 3 else 0,
            gather_bytes=0,
            wait_seconds=0.01 * step * ((i * 7) % 5),
            tier={"parameters": "disk" if i > 3 else "host", "gradients": "host", "optimizer": "disk"},
            activations="recompute" if i % 4 == 0 else "keep",
            activation_bytes=(20 + i) * MIB,
        )
        for i, name in enumerate(names)
    )
    return UnitsLine(t=t, step=step, rows=rows)
