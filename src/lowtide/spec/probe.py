"""This machine in numbers: measured in about a quarter of a minute, remembered from an earlier time, or assumed.

``probe_machine`` measures, ``cached_machine`` remembers (``cache_machine`` makes it), ``assumed_machine`` guesses with care.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import date

import torch

from lowtide.errors import DeadlineExceeded, DiskError, PeerFailed
from lowtide.spec.hardware import Compute, Disk, Hardware, Wire
from lowtide.spec.limits import default_budget, memory_left
from lowtide.spec.probe_assumed import assumed_machine
from lowtide.spec.probe_cache import cache_disk, cache_machine, cached_disk, cached_machine
from lowtide.spec.probe_compute import (
    DTYPES,
    copy_bandwidth,
    elementwise_bandwidth,
    fault_seconds,
    kernel_seconds,
    matmul_flops,
    transfer_seconds,
)
from lowtide.spec.probe_disk import measure_disk
from lowtide.spec.probe_limits import processor, usable_cores
from lowtide.spec.probe_step import ReferenceStep, share_reached
from lowtide.spec.probe_wire import measure_wire

__all__ = [
    "FULL",
    "Effort",
    "accelerators",
    "assumed_machine",
    "cache_disk",
    "cache_machine",
    "cached_disk",
    "cached_machine",
    "probe_disk",
    "probe_machine",
]

_CPU = torch.device("cpu")
_SHARE_OF_MEMORY = 16
"""A tensor of the probe is at most this part of what is left: a probe must fit beside a job."""
_SHARE_OF_COPY = 4
"""What two ranks get of the speed of a copy, if it cannot be measured: gloo copies into a socket and out of it."""
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long and how large the probe measures."""

    seconds: float
    """Of each measurement of memory and compute."""
    tensor_bytes: int
    largest_side: int
    """Of a matrix."""
    disk_seconds: float
    """Of each of four passes."""
    disk_bytes: int
    wire_deadline: float
    """For the two processes that talk, most of which they need to start."""
    threads: int | None = None
    """For kernels; ``None``: as many as there are cores."""


FULL = Effort(seconds=0.5, tensor_bytes=128 << 20, largest_side=4096, disk_seconds=0.8, disk_bytes=1 << 30, wire_deadline=12.0)
"""About 20 seconds in all."""


def probe_machine(folder: str | None, *, tell: Callable[[str], None], effort: Effort = FULL) -> Hardware:
    """Measure this machine, and the disk of ``folder`` if one is given. ``tell`` hears each figure as it is found.

    A measurement that fails is told and replaced: no disk, or a cautious guess for the wire between ranks.
    """
    with _threads(effort.threads or usable_cores()):
        nbytes = _tensor_bytes(effort)
        copy = copy_bandwidth(nbytes, effort.seconds)
        tell(f"memory copy: {copy / 1e9:.1f} GB/s")
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        compute = _measure_compute(here or _CPU, nbytes, effort, tell)
        link = None if here is None else _measure_link(here, nbytes, effort, tell)
    count = len(accelerators())
    return Hardware(
        name=f"{compute.name}, {usable_cores()} cores" if here is None else f"{count} × {compute.name}",
        source=f"measured {date.today().isoformat()}",
        compute=compute,
        host_bytes=default_budget(),
        host_bandwidth=copy,
        inside=_measure_inside(copy, nbytes, effort, tell),
        link=link,
        disk=None if folder is None else probe_disk(folder, tell=tell, effort=effort),
        ranks_per_host=max(count, 1),
    )


def probe_disk(folder: str, *, tell: Callable[[str], None], effort: Effort = FULL) -> Disk | None:
    """Measure the disk of ``folder``; ``None``, and why, if it cannot be."""
    try:
        with _threads(effort.threads or usable_cores()):
            beside = (
                None if torch.accelerator.is_available() else functools.partial(ReferenceStep(_CPU).run, 2 * effort.seconds)
            )
            disk = measure_disk(folder, most_bytes=effort.disk_bytes, seconds=effort.disk_seconds, beside=beside)
    except DiskError as error:
        tell(str(error))
        return None
    speeds = f"read {disk.read / 1e9:.2f}, write {disk.write / 1e9:.2f}, mixed {disk.mixed / 1e9:.2f} GB/s"
    tell(f"disk: {speeds}; {disk.busy:.0%} of compute is lost while it works ({folder})")
    return disk


def accelerators() -> list[str]:
    """The names of those that torch can use."""
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    kind = "accelerator" if device is None else device.type
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return [str(name(index)) if callable(name) else kind for index in range(torch.accelerator.device_count())]


def _measure_compute(device: torch.device, nbytes: int, effort: Effort, tell: Callable[[str], None]) -> Compute:
    flops: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        found = matmul_flops(dtype, effort.seconds, device, largest_side=effort.largest_side)
        tell(f"{name} products: " + ("not available" if found is None else f"{found / 1e9:.3g} GFLOPS"))
        if found is not None:
            flops[name] = found
    bandwidth = elementwise_bandwidth(nbytes // 2, effort.seconds, device)
    started = kernel_seconds(device)
    fault = fault_seconds(max(nbytes // 2, _LARGEST_KEPT), effort.seconds) if device == _CPU else 0.0
    tell(
        f"elementwise: {bandwidth / 1e9:.1f} GB/s; {started * 1e6:.1f} µs to start a kernel; "
        f"{fault * 2**30:.2f} s per GiB of fresh memory"
    )
    compute = Compute(
        name=processor() if device == _CPU else accelerators()[0],
        flops=flops,
        bandwidth=bandwidth,
        op_seconds=started,
        fault_seconds=fault,
        memory_bytes=None if device == _CPU else torch.accelerator.get_memory_info()[1],
    )
    step = ReferenceStep(device)
    compute = replace(compute, reached=share_reached(step.best_seconds(compute), step.run(4 * effort.seconds)))
    tell(f"a training step reaches {compute.reached:.0%} of that")
    return compute


_LARGEST_KEPT = 40 << 20
"""The C library keeps freed memory up to 32 MiB; only what is larger is given back, and fresh the next time."""


def _measure_link(device: torch.device, nbytes: int, effort: Effort, tell: Callable[[str], None]) -> Wire:
    """The slower of the two directions."""
    found = [_wire(nbytes, effort, *pair) for pair in ((_CPU, device), (device, _CPU))]
    slower = min(found, key=lambda wire: wire.bandwidth)
    tell(f"host to {device.type}: {slower.bandwidth / 1e9:.1f} GB/s")
    return slower


def _measure_inside(copy: float, nbytes: int, effort: Effort, tell: Callable[[str], None]) -> Wire:
    if torch.accelerator.device_count() > 1 and (kind := torch.accelerator.current_accelerator()) is not None:
        wire = _wire(nbytes, effort, torch.device(kind.type, 0), torch.device(kind.type, 1))
    else:
        try:
            wire = measure_wire(deadline=effort.wire_deadline)
        except (PeerFailed, DeadlineExceeded, OSError) as error:
            wire = Wire(bandwidth=copy / _SHARE_OF_COPY, latency=500e-6)
            tell(f"two ranks could not be timed ({error}); {wire.bandwidth / 1e9:.1f} GB/s is assumed")
            return wire
    tell(f"between two ranks: {wire.bandwidth / 1e9:.2f} GB/s each way, {wire.latency * 1e6:.0f} µs")
    return wire


def _wire(nbytes: int, effort: Effort, source: torch.device, target: torch.device) -> Wire:
    small = transfer_seconds(_SMALL_BYTES, effort.seconds / 4, source, target)
    large = transfer_seconds(nbytes, effort.seconds / 2, source, target)
    return Wire(bandwidth=nbytes / max(large - small, large / 10), latency=small)


def _tensor_bytes(effort: Effort) -> int:
    """As large as asked, unless memory is short; a multiple of a page."""
    return max(min(effort.tensor_bytes, memory_left() // _SHARE_OF_MEMORY) // 8192 * 8192, 8192)


@contextlib.contextmanager
def _threads(count: int) -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
