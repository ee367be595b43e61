"""A machine that nobody measured: cautious speeds, true limits. A plan made from it is slow on paper, and never too large."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lowtide.spec.hardware import Compute, Disk, Hardware, Wire
from lowtide.spec.limits import default_budget
from lowtide.spec.probe_disk import free_bytes, is_memory
from lowtide.spec.probe_limits import processor, usable_cores

_FLOPS_PER_CORE = 50e9
_SLOW_DTYPE = 0.01
"""Of fp32's speed, where a processor has no instructions for a dtype."""
_BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}


def assumed_machine(folder: str | None = None) -> Hardware:
    """This machine, with its memory and free disk as they are, and speeds that nearly every machine exceeds."""
    inside = Wire(bandwidth=1e9, latency=200e-6)
    described = Hardware(
        name=f"{processor()}, {usable_cores()} cores",
        source="assumed",
        compute=_processor(),
        host_bytes=default_budget(),
        host_bandwidth=10e9,
        inside=inside,
        disk=None if folder is None else assumed_disk(folder),
    )
    if not torch.accelerator.is_available():
        return described
    return replace(
        described,
        compute=_accelerator(),
        link=Wire(bandwidth=8e9, latency=20e-6),
        ranks_per_host=torch.accelerator.device_count(),
    )


def assumed_disk(folder: str) -> Disk:
    """The disk of a folder that nobody measured."""
    return Disk(read=1e9, write=1e9, mixed=1e9, free_bytes=free_bytes(folder), direct=not is_memory(folder))


def _processor() -> Compute:
    fp32 = usable_cores() * _FLOPS_PER_CORE
    bf16 = fp32 if _BF16_INSTRUCTIONS & _flags() else _SLOW_DTYPE * fp32
    return Compute(
        name=processor(),
        flops={"fp32": fp32, "fp64": fp32 / 2, "bf16": bf16, "fp16": _SLOW_DTYPE * fp32},
        bandwidth=15e9,
        op_seconds=5e-6,
        fault_seconds=0.25e-9,
    )


def _accelerator() -> Compute:
    _, total = torch.accelerator.get_memory_info()
    return Compute(
        name="an accelerator",
        flops={"fp32": 10e12, "bf16": 40e12, "fp16": 40e12, "fp64": 0.2e12},
        bandwidth=400e9,
        op_seconds=10e-6,
        fault_seconds=0.0,
        memory_bytes=total,
    )


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
