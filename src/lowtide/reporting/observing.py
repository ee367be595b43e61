"""What an engine is and holds, as lines of a timeline. Reads everything, changes nothing."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.planning.options import Tier
from lowtide.reporting.format import (
    ArenaFacts,
    MemoryLine,
    PlanLine,
    RunLine,
    Scalar,
    Span,
    SpansLine,
    StepLine,
    UnitFacts,
    UnitRow,
    UnitsLine,
)
from lowtide.reporting.oom import read_counters
from lowtide.reporting.sampler import Figures
from lowtide.runtime.engine import Engine
from lowtide.runtime.holdings import Holdings, arenas_of
from lowtide.runtime.trace import SpanRow
from lowtide.tiers.arena import Arena
from lowtide.version import __version__

_MOST_ROWS = 8_000  # of spans in one line


def run_line(engine: Engine, facts: Mapping[str, Scalar]) -> RunLine:
    """This process begins."""
    limits = [folder.limit for folder in engine.config.disk]
    whole = sum(n for n in limits if n is not None) if limits and None not in limits else None
    share = None if whole is None else whole // engine.local_ranks
    rank = engine.group.shard.rank
    return RunLine(
        started=time.time(),
        rank=engine.group.rank,
        world_size=engine.group.size,
        local_ranks=engine.local_ranks,
        host=socket.gethostname(),
        pid=os.getpid(),
        stage=engine.config.stage.number,
        update=engine.config.update.when,
        budget_bytes=engine.budget.limit,
        disk_limit_bytes=share,
        folders=tuple(folder.path for folder in engine.config.disk),
        units=tuple(
            UnitFacts(
                name=unit.name,
                numel=sum(p.numel for p in unit.layout.params),
                bytes=unit.layout.nbytes,
                shard_bytes=unit.layout.cuts[rank + 1] - unit.layout.cuts[rank],
            )
            for unit in engine.units
        ),
        facts={
            "lowtide": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "torch threads": torch.get_num_threads(),
            "model": type(engine.model).__name__,
            **read_counters().facts(),
            **facts,
        },
    )


def optimizer_facts(optimizer: Optimizer | None) -> dict[str, Scalar]:
    """Which one it is, and whether it runs fused: ``None`` if it has no such choice."""
    if optimizer is None:
        return {}
    choices = [bool(group["fused"]) for group in optimizer.param_groups if "fused" in group]
    return {"optimizer": type(optimizer).__name__, "fused": all(choices) if choices else None}


def plan_line(engine: Engine, holds: Holdings, *, t: float, step: int, why: str) -> PlanLine:
    """Where bytes live from now on."""
    forecast, placement = engine.placer.forecast, engine.placer.placement
    host: Counter[str] = Counter({k: holds.host.get(k, 0) for k in ("parameters", "gradients", "optimizer")})
    disk: Counter[str] = Counter({k: holds.disk.get(k, 0) for k in ("parameters", "gradients", "optimizer")})
    for unit, place in zip(engine.units, placement.units, strict=True):
        saved = engine.placer.guard.activations[unit.index]
        if place.activations != "recompute":
            (disk if place.activations == "disk" else host)["activations"] += saved
    host["slots"] = placement.slot_bytes or 0
    host["staging"] = placement.buffer_bytes or 0
    return PlanLine(
        t=t,
        step=step,
        predicted_seconds=forecast.seconds if forecast is not None else None,
        predicted_peak_bytes=forecast.peak_bytes if forecast is not None else None,
        tiers={"host": dict(host), "disk": dict(disk)},
        why=why,
    )


def memory_line(engine: Engine, holds: Holdings, figures: Figures, *, t: float, step: int, moment: str) -> MemoryLine:
    """What is held now, beside what the kernel says."""
    return MemoryLine(
        t=t,
        step=step,
        moment=moment,
        host=holds.host,
        device=holds.device,
        disk=holds.disk,
        arenas={name: _arena_facts(arena) for name, arena in arenas_of(engine).items()},
        process=figures.memory,
        not_ours=max(0, figures.memory.total - holds.in_process),
        cgroup_bytes=figures.cgroup_bytes,
        cgroup_limit_bytes=figures.cgroup_limit_bytes,
        cpu_percent=figures.cpu_percent,
        cpu_given_percent=figures.cpu_given_percent,
        disk_busy_percent=figures.disk_busy_percent,
        device_percent=figures.device_percent,
        disk_free_bytes=figures.disk_free_bytes,
        fds=figures.fds,
        threads=figures.threads,
        spool_bytes=engine.store.used_bytes if engine.store is not None else 0,
        shared_saved_bytes=int(getattr(engine, "shared_saved_bytes", 0)),
        children_bytes=figures.children_bytes,
    )


def _arena_facts(arena: Arena) -> ArenaFacts:
    free = arena.free_sizes
    return ArenaFacts(
        reserved=arena.reserved_bytes,
        taken=arena.taken_bytes,
        free_blocks=len(free),
        limbo=arena.limbo_bytes,
        takes=arena.takes,
        fresh=arena.fresh,
        largest_free=max(free, default=0),
    )


@dataclass(slots=True)
class _Tally:
    """What one unit has done and moved so far."""

    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    fetch_bytes: int = 0
    fetches: int = 0
    gather_bytes: int = 0


@dataclass(slots=True)
class UnitTallies:
    """Of all units, over the whole process."""

    by_unit: dict[str, _Tally] = field(default_factory=dict[str, _Tally])

    def add(self, rows: Iterable[SpanRow], thread: int) -> None:
        """The spans of one step; waits are those of ``thread``."""
        for row in rows:
            if not row.unit:
                continue
            tally = self.by_unit.get(row.unit)
            if tally is None:
                tally = self.by_unit[row.unit] = _Tally()
            if row.verb == "forward":
                tally.forward_seconds += row.end - row.begin
            elif row.verb == "fetch":
                tally.fetch_bytes += row.nbytes
                tally.fetches += 1
            elif row.lane == "gather":
                tally.gather_bytes += row.nbytes
            elif row.lane == "wait" and row.thread == thread:
                tally.wait_seconds += row.end - row.begin

    def line(self, engine: Engine, *, t: float, step: int) -> UnitsLine:
        """All units, with where their bytes are."""
        rows: list[UnitRow] = []
        for unit in engine.units:
            tally = self.by_unit.get(unit.name, _Tally())
            rows.append(
                UnitRow(
                    name=unit.name,
                    forward_seconds=round(tally.forward_seconds, 6),
                    fetch_bytes=tally.fetch_bytes,
                    fetches=tally.fetches,
                    gather_bytes=tally.gather_bytes,
                    wait_seconds=round(tally.wait_seconds, 6),
                    tier=tiers_of(engine, unit.index),
                    activations=engine.placer.placement.units[unit.index].activations,
                    activation_bytes=engine.placer.guard.activations[unit.index],
                )
            )
        return UnitsLine(t=t, step=step, rows=tuple(rows))


def tiers_of(engine: Engine, index: int) -> dict[str, str]:
    """Where each kind of bytes of a unit is."""
    unit = engine.units[index]
    in_memory = {"parameters": engine.residency.home(unit).in_memory}
    if unit in engine.grads.shelves:
        in_memory["gradients"] = engine.grads.shelves[unit].shelf.in_memory
    if unit in engine.update.streams:
        stream = engine.update.streams[unit]
        in_memory["optimizer"] = all(stream.shelf(kind)[0].in_memory for kind in stream.kinds())
    return {k: Tier.HOST.value if in_memory.get(k, True) else Tier.DISK.value for k in ("parameters", "gradients", "optimizer")}


def spans_line(rows: list[SpanRow], begin: float, *, t: float, step: int, why: str) -> SpansLine:
    """One step in detail; the longest spans if there are too many."""
    kept = sorted(rows, key=lambda row: row.begin - row.end)[:_MOST_ROWS]
    names = list(dict.fromkeys(["", *(row.unit for row in kept)]))
    index = {name: i for i, name in enumerate(names)}
    return SpansLine(
        t=t,
        step=step,
        why=why,
        names=tuple(names),
        rows=tuple(
            # what was still being written back when the step began counts from there
            Span(max(0.0, row.begin - begin), max(0.0, row.end - begin), row.lane, _verb(row), index[row.unit], row.nbytes)
            for row in sorted(kept)
        ),
        dropped=len(rows) - len(kept),
    )


def _verb(row: SpanRow) -> str:
    return f"wait for {row.verb}" if row.lane == "wait" else row.verb


def losses_in(output: Any) -> list[Tensor]:
    """What a model returned, if that is a loss, or has one: a number that can be walked backward from."""
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    return [found.detach()] if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad else []


def numbers_of(line: StepLine) -> dict[str, float]:
    """The numbers of a step, for loggers."""
    named = {f.name: getattr(line, f.name) for f in fields(line) if f.name not in ("t", "step", "covers")}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
