"""``lowtide doctor``: what this machine is and can do, what is wrong with it, and what dead jobs left in ``--disk`` folders."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.cli.output import say
from lowtide.errors import ArgumentError, DeadlineExceeded, PeerFailed
from lowtide.job.interrupt import import_torch
from lowtide.job.machine import machine_facts

if TYPE_CHECKING:
    from lowtide.spec.hardware import Collective, Disk, Hardware
    from lowtide.spec.probe_advice import Advice
    from lowtide.spec.probe_limits import SystemLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What dead jobs left in one folder, and what of it was removed."""

    folder: str
    left: list[str]
    removed: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that the doctor knows about the machine. ``hardware`` is ``None`` if it was not measured, now or before."""

    hardware: Hardware | None
    disks: dict[str, Disk | None]
    limits: SystemLimits
    accelerators: list[str]
    advice: list[Advice]
    notes: list[str]
    """What was said on the way: figures as they were found, files that could not be used."""


def doctor(
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR]...", help="Folders on the disks to measure; they are also searched for what dead jobs left."
        ),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use what an earlier run measured; measure only what is missing.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean", help="Remove what dead jobs left in the folders; live jobs are never touched. Nothing is measured."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON.")] = False,
) -> int:
    """Measure this machine, say what is wrong with it, and what dead jobs left behind."""
    named = folders or []
    if clean and not named:
        raise ArgumentError("--clean is given, but no folder to clean; name the folders that jobs used as --disk.")
    for folder in named:
        if not os.path.isdir(folder):
            raise ArgumentError(f"{folder!r} is not a folder; name one that is there, such as . (the disk of it is measured).")
    import_torch()
    findings = [_look_for_leftovers(folder, clean=clean) for folder in named]
    facts = dict(machine_facts())
    found = _Examiner(shows_progress=not json and sys.stderr.isatty(), remembers=quick or clean, measures=not clean).examine(
        named
    )
    if json:
        whole = {"machine": facts, "folders": [asdict(finding) for finding in findings], **asdict(found)}
        say(json_text.dumps(whole))
        return 0
    for name, value in facts.items():
        say(f"{name:<10} {value}")
    for line in [*_speed_lines(found), *_advice_lines(found)]:
        say(line)
    for finding in findings:
        for line in _lines(finding, clean=clean):
            say(line)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examiner:
    """Looks at the machine: by what is remembered of it if ``remembers``, then afresh if ``measures``."""

    shows_progress: bool
    remembers: bool
    measures: bool
    notes: list[str] = field(default_factory=list[str])

    def examine(self, folders: list[str]) -> Examination:
        from lowtide.spec.probe import accelerators
        from lowtide.spec.probe_limits import system_limits

        limits = system_limits()  # before anything is measured: it also sees what other programs do
        hardware = self._machine()
        disks = {folder: self._disk(folder) for folder in folders}
        if hardware is not None and folders:
            hardware = replace(hardware, disk=disks[folders[0]])
        return Examination(
            hardware=hardware,
            disks=disks,
            limits=limits,
            accelerators=accelerators(),
            advice=[] if hardware is None else _advice(hardware, disks, limits),
            notes=self.notes,
        )

    def _machine(self) -> Hardware | None:
        from lowtide.spec.probe import cache_machine, cached_machine, probe_machine

        hardware = cached_machine(None, tell=self._tell) if self.remembers else None
        if hardware is None and self.measures:
            self._tell("measuring this machine, which takes about half a minute")
            measured = hardware = replace(probe_machine(None, tell=self._tell), collectives=self._collectives())
            self._keep(lambda: cache_machine(measured, None))
        return hardware

    def _collectives(self) -> tuple[Collective, ...]:
        from lowtide.cli.doctor_collectives import collective_lines, measure_collectives

        try:
            found = measure_collectives()
        except (PeerFailed, DeadlineExceeded, OSError) as error:
            self._tell(f"collectives could not be timed ({error})")
            return ()
        for line in collective_lines(found):
            self._tell(line)
        return found

    def _disk(self, folder: str) -> Disk | None:
        from lowtide.spec.probe import cache_disk, cached_disk, probe_disk

        disk = cached_disk(folder, tell=self._tell) if self.remembers else None
        if disk is None and self.measures and (disk := probe_disk(folder, tell=self._tell)) is not None:
            measured = disk
            self._keep(lambda: cache_disk(measured, folder))
        return disk

    def _keep(self, store: Callable[[], None]) -> None:
        try:
            store()
        except OSError as error:
            self._tell(f"the figures cannot be kept for the next time: {error}")

    def _tell(self, line: str) -> None:
        self.notes.append(line)
        if self.shows_progress:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def _advice(hardware: Hardware, disks: dict[str, Disk | None], limits: SystemLimits) -> list[Advice]:
    """On the machine, then on each disk."""
    from lowtide.spec.probe_advice import advice
    from lowtide.spec.probe_disk import is_memory

    found = advice(replace(hardware, disk=None), limits)
    for folder, disk in disks.items():
        about = advice(replace(hardware, disk=disk), limits, disk_is_memory=is_memory(folder))
        found += [replace(item, what=f"{folder}: {item.what}") for item in about if item not in found]
    return found


def _look_for_leftovers(folder: str, *, clean: bool) -> Finding:
    from lowtide.tiers import spool  # imports torch

    removed = spool.clean(folder) if clean else []
    return Finding(folder=folder, left=spool.leftovers(folder), removed=removed)


def _speed_lines(found: Examination) -> list[str]:
    from lowtide.cli.doctor_collectives import collective_lines

    lines = [f"{'accelerator':<10} {name}" for name in found.accelerators]
    if found.hardware is not None:
        compute, inside = found.hardware.compute, found.hardware.inside
        flops = ", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in compute.flops.items())
        lines += [
            f"{'products':<10} {flops} GFLOPS",
            f"{'bytes':<10} {found.hardware.host_bandwidth / 1e9:.1f} GB/s copied, "
            f"{compute.bandwidth / 1e9:.1f} GB/s elementwise, "
            f"{compute.fault_seconds * 2**30:.2f} s per GiB of fresh memory",
            f"{'kernels':<10} {compute.op_seconds * 1e6:.1f} µs to start one",
            f"{'ranks':<10} {inside.bandwidth / 1e9:.2f} GB/s each way between two on this host, {inside.latency * 1e6:.0f} µs",
            *(collective_lines(found.hardware.collectives) or [f"{'collectives':<10} none measured: `lowtide doctor` does"]),
        ]
        if link := found.hardware.link:
            lines.append(f"{'link':<10} {link.bandwidth / 1e9:.1f} GB/s between host and accelerator")
        lines.append(f"{'figures':<10} {found.hardware.source}")
    for folder, disk in found.disks.items():
        if disk is not None:
            rates = f"read {disk.read / 1e9:.2f}, write {disk.write / 1e9:.2f}, mixed {disk.mixed / 1e9:.2f} GB/s"
            lines.append(f"{'disk':<10} {rates}, {disk.free_bytes / 2**30:.1f} GiB free ({folder})")
        elif found.hardware is not None:
            why = next((note for note in found.notes if folder in note), "it was not measured")
            lines.append(f"{'disk':<10} {why}")
    if found.hardware is not None and not found.disks:
        lines.append(f"{'disk':<10} none measured: `lowtide doctor DIR` measures that of a folder")
    return lines


def _advice_lines(found: Examination) -> list[str]:
    if found.hardware is None:
        return []
    if not found.advice:
        return ["nothing is wrong with this machine"]
    return [line for item in found.advice for line in (f"wrong: {item.what}", f"   do: {item.do}")]


def _lines(finding: Finding, *, clean: bool) -> list[str]:
    if not finding.left and not finding.removed:
        return [f"{finding.folder}: nothing was left by dead jobs"]
    lines = [f"removed {path}, which a dead job left" for path in finding.removed]
    why = "was kept: it holds files that lowtide did not make" if clean else "was left by a dead job (--clean removes it)"
    return lines + [f"{path} {why}" for path in finding.left]
