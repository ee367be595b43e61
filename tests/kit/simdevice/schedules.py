"""Choose when the tasks of the simulated device run, and read what it has noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch

import lowtide

_ops = torch.ops.sim


class Order(IntEnum):
    """Every one is legal for an accelerator. The numbers are those of ``Schedule`` in csrc/engine.h."""

    SYNC = 0
    LATE = 1
    SIDE_EARLY = 2
    SIDE_LATE = 3
    RANDOM = 4


@dataclass(frozen=True)
class Schedule:
    order: Order
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.order.name}-{self.seed}" if self.order is Order.RANDOM else self.order.name


SYNC, LATE, SIDE_EARLY, SIDE_LATE = (Schedule(order) for order in list(Order)[:4])
RANDOM = tuple(Schedule(Order.RANDOM, seed) for seed in range(8))
SCHEDULES = (SYNC, LATE, SIDE_EARLY, SIDE_LATE, RANDOM[0])


@dataclass(frozen=True)
class VirtualTime:
    """Virtual seconds: no noise, the same in every run."""

    makespan: float
    host: float
    compute: float
    copies_in: float
    copies_out: float


@dataclass(frozen=True)
class Report:
    """What happened on the device since ``scheduled`` began."""

    races: list[str] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    host_kernels: dict[str, int] = field(default_factory=dict)  # counted only where configure() was asked to
    host_waits: int = 0
    pageable_in: int = 0  # bytes
    pageable_out: int = 0
    pinned_in: int = 0
    pinned_out: int = 0
    time: VirtualTime = VirtualTime(0, 0, 0, 0, 0)


def configure(schedule: Schedule = SYNC, *, limit: int = 1 << 30, perturbed: bool = False, watch_host: bool = False) -> None:
    """Begin anew: nothing queued, nothing counted, no races, no error. ``limit``: bytes that a device has. ``perturbed``: the
    device's square roots and fused updates come out one ulp too large, so that work done on the host instead is seen.
    ``watch_host``: count operators on the host, too, which slows them."""
    _ops.configure(int(schedule.order), schedule.seed, limit, perturbed)
    _ops.watch_host(watch_host)


def report(device: int = 0) -> Report:
    """Wait for everything and tell what was noticed."""
    time = VirtualTime(*_ops.virtual_seconds(device))
    counts = _ops.counts()
    return Report(_ops.races(), dict(_ops.kernels(device)), dict(_ops.kernels(-1)), *counts, time)


@contextmanager
def scheduled(schedule: Schedule, *, limit: int = 1 << 30) -> Iterator[None]:
    """Raise if the body left a race."""
    configure(schedule, limit=limit)
    yield
    races = _ops.races()
    if races:
        raise AssertionError("\n".join([f"{len(races)} races under {schedule}:", *races[:5]]))


def set_hardware(name: str) -> None:
    """Let the virtual clock run at the rates of a machine in ``lowtide/hardware``. A pageable copy passes through a buffer of
    the driver: first the host copies, then the link."""
    machine = json.loads((Path(lowtide.__file__).parent / "hardware" / f"{name}.json").read_text())
    compute, link = machine["compute"], machine["link"]
    pageable = 1 / (1 / link["bandwidth"] + 1 / machine["host_bandwidth"])
    flops = compute["flops"]
    _ops.set_rates(
        compute["op_seconds"], compute["bandwidth"], flops["fp32"], flops["bf16"], link["bandwidth"], link["latency"], pageable
    )
