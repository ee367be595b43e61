"""``lowtide doctor``: what this machine is, and what dead jobs left in folders that were given as ``--disk``."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from lowtide.errors import ArgumentError
from lowtide.job.machine import machine_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What dead jobs left in one folder, and what of it was removed."""

    folder: str
    left: list[str]
    removed: list[str]


def doctor(
    folders: Annotated[list[str] | None, typer.Argument(metavar="[DIR]...", help="Folders that jobs used as --disk.")] = None,
    *,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what dead jobs left in the folders; live jobs are never touched.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print nothing but one line of JSON.")] = False,
) -> int:
    """Show this machine, and what dead jobs left behind."""
    named = folders or []
    if clean and not named:
        raise ArgumentError("--clean is given, but no folder to clean; name the folders that jobs used as --disk.")
    for folder in named:
        if not os.path.isdir(folder):
            raise ArgumentError(f"{folder!r} is not a folder; name the folders that jobs used as --disk.")
    findings = [_examine(folder, clean=clean) for folder in named]
    facts = dict(machine_facts())
    if json:
        _write(json_text.dumps({"machine": facts, "folders": [asdict(finding) for finding in findings]}))
        return 0
    for name, value in facts.items():
        _write(f"{name:<10} {value}")
    for finding in findings:
        for line in _lines(finding, clean=clean):
            _write(line)
    return 0


def _examine(folder: str, *, clean: bool) -> Finding:
    from lowtide.tiers import spool  # imports torch

    removed = spool.clean(folder) if clean else []
    return Finding(folder=folder, left=spool.leftovers(folder), removed=removed)


def _lines(finding: Finding, *, clean: bool) -> list[str]:
    if not finding.left and not finding.removed:
        return [f"{finding.folder}: nothing was left by dead jobs"]
    lines = [f"removed {path}, which a dead job left" for path in finding.removed]
    why = "was kept: it holds files that lowtide did not make" if clean else "was left by a dead job (--clean removes it)"
    return lines + [f"{path} {why}" for path in finding.left]


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
