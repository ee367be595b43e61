"""What is wrong with a machine for training, and what to do about it: a pure function of what was found."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.spec.hardware import Compute, Disk, Hardware
from lowtide.spec.probe_limits import SystemLimits

_GIB = 2**30
_SLOW_DISK = 500e6
_LITTLE_DISK = 10 * _GIB
_FEW_FILES = 1024
_FAR_BELOW = 0.5
_BUSY = 0.25


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that makes training slower or smaller than it could be."""

    what: str
    do: str


def advice(hardware: Hardware, limits: SystemLimits, *, disk_is_memory: bool = False) -> list[Advice]:
    """What to change, the most costly first; empty if nothing was found."""
    found = _about_dtypes(hardware.compute)
    if hardware.disk is not None:
        found += _about_disk(hardware.disk, hardware.host_bytes, disk_is_memory=disk_is_memory)
    return found + _about_limits(limits)


def _about_dtypes(compute: Compute) -> list[Advice]:
    fp32 = compute.flops.get("fp32")
    if fp32 is None:
        return []
    slower = {name: fp32 / compute.flops[name] for name in ("bf16", "fp16") if compute.flops.get(name, fp32) < 0.9 * fp32}
    return [
        Advice(
            f"{name} products are {factor:.{0 if factor >= 10 else 1}f} times slower than fp32 here "
            f"({compute.flops[name] / 1e9:.3g} against {fp32 / 1e9:.3g} GFLOPS)",
            f"compute in fp32; use {name} only as a storage format",
        )
        for name, factor in slower.items()
    ]


def _about_disk(disk: Disk, host_bytes: int, *, disk_is_memory: bool) -> list[Advice]:
    if disk_is_memory:
        return [Advice("the folder is memory, not a disk: what is kept there counts as memory", "give a folder on a disk")]
    found: list[Advice] = []
    if not disk.direct:
        found.append(
            Advice(
                "the folder has no direct I/O (O_DIRECT): bytes pass through the page cache, which costs time and memory",
                "give a folder on a local disk with a filesystem such as ext4 or xfs",
            )
        )
    slow = {"reads": disk.read, "writes": disk.write}
    slow = {name: rate for name, rate in slow.items() if rate < _SLOW_DISK}
    if slow:
        rates = " and ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in slow.items())
        found.append(
            Advice(
                f"the disk is slow: it {rates} (less than {_SLOW_DISK / 1e6:.0f})",
                "use an NVMe disk, or several folders on several disks; keep as much as possible in memory",
            )
        )
    enough = max(_LITTLE_DISK, host_bytes)
    if disk.free_bytes < enough:
        found.append(
            Advice(
                f"the disk has little room: {disk.free_bytes / _GIB:.1f} GiB are free",
                f"make room: a model that needs a disk beside {host_bytes / _GIB:.1f} GiB of memory needs more than that",
            )
        )
    return found


def _about_limits(limits: SystemLimits) -> list[Advice]:
    found: list[Advice] = []
    held_by_ulimit = limits.address_space is not None and limits.address_space < limits.memory_bytes
    if held_by_ulimit and limits.address_space is not None:
        found.append(
            Advice(
                f"the address space is limited to {limits.address_space / _GIB:.1f} GiB (ulimit -v)",
                "raise it with `ulimit -v unlimited`: torch maps far more than it uses",
            )
        )
    elif limits.left_bytes < _FAR_BELOW * limits.available_bytes:
        found.append(
            Advice(
                f"a container's limit leaves this process {limits.left_bytes / _GIB:.1f} GiB, while "
                f"{limits.available_bytes / _GIB:.1f} of the machine's {limits.memory_bytes / _GIB:.1f} GiB are free",
                "raise the container's memory limit, or live with it: lowtide holds it by itself",
            )
        )
    if limits.quota is not None and limits.quota < 0.9 * limits.cores:
        found.append(
            Advice(
                f"the container may use {limits.quota:.1f} cores' worth of time, but sees {limits.cores} cores",
                f"use {max(1, int(limits.quota))} threads (--threads, or torch.set_num_threads), or raise the quota",
            )
        )
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        found.append(
            Advice(
                f"only {limits.open_files} files may be open at once (ulimit -n)",
                f"raise it with `ulimit -n {4 * _FEW_FILES}`: loaders, ranks and the disk tier each need some",
            )
        )
    if limits.swap_bytes:
        found.append(
            Advice(
                f"swap is on ({limits.swap_bytes / _GIB:.1f} GiB): the kernel may move a job's memory to disk behind its back",
                "switch it off while training (`swapoff -a`), and give lowtide a folder on disk instead",
            )
        )
    if limits.busy > _BUSY:
        found.append(
            Advice(
                f"other programs use {limits.busy:.0%} of the processors: a job is slow beside them, and figures are too low",
                "run `lowtide doctor` again when nothing else runs",
            )
        )
    return found
