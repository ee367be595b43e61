"""How the result of a job is shown: a short summary for a person, one line of JSON for a program."""

from __future__ import annotations

import json
import statistics
import sys

from rich.console import Console

from lowtide.job.options import Options
from lowtide.job.placement import mebibytes
from lowtide.job.records import Result
from lowtide.planning.plan import Plan
from lowtide.planning.text import clean


def show_result(result: Result, options: Options, console: Console, *, output: str) -> None:
    """``output`` is ``json`` for one line on standard output, anything else for a summary."""
    if output == "json":
        sys.stdout.write(json.dumps(result.summary()) + "\n")
        sys.stdout.flush()
        return
    for line in summary_lines(result, options):
        console.print(clean(line), highlight=False, markup=False, soft_wrap=True)


def summary_lines(result: Result, options: Options) -> list[str]:
    """The result in a few lines."""
    steps = len(result.losses)
    ended = f"stopped by {result.stopped_by} after" if result.stopped_by else "done:"
    ranks = f", stage {result.stage}, {result.ranks} ranks" if result.ranks > 1 else ""  # one rank has nothing to cut
    lines = [f"{ended} {steps} steps of {options.model_name} ({result.params:,} parameters){ranks}"]
    lines += [f"loss       {result.losses[0]:.4f} -> {result.losses[-1]:.4f}{_validation(result)}"]
    lines += [f"step       {typical_seconds(result.seconds):.3f} s (median){_against_plan(result)}"]
    lines += [f"memory     {_memory_text(result)}", *_tier_lines(result)]
    if result.skipped:
        lines += [f"skipped    {result.skipped} steps, whose gradients were not finite"]
    if options.run is not None:
        lines += _run_lines(result, options.run)
    return lines


def _run_lines(result: Result, run: str) -> list[str]:
    """Where to find the run, what happened to it, and how to go on."""
    lines: list[str] = []
    if result.resumed_from is not None:
        lines += [f"resumed    from step {result.resumed_from}"]
    if result.checkpoints:
        seconds = sum(result.saves_seconds)
        again = f"; with --run {run} the same command goes on" if result.stopped_by else ""
        count = len(result.checkpoints)
        lines += [f"saved      {result.checkpoints[-1]} ({count} in all, {seconds:.1f} s){again}"]
    happened = [f"{event.replace('_', ' ')} {count}" for event, count in result.events.items() if count]
    if happened:
        lines += [f"events     {', '.join(happened)}"]
    return [*lines, f"files      {run}/ (config.json, plan.txt, plan.json, metrics.jsonl, events.jsonl)"]


def outlook(plan: Plan, *, asked_stage: int | str) -> str:
    """What a plan chose and promises, in one line before the first step."""
    chosen = f"stage {plan.stage} (chosen), " if asked_stage == "auto" and plan.world_size > 1 else ""
    peak = f"{mebibytes(plan.predicted_peak_bytes)} of host memory"
    how = "all of it in memory" if plan.placement == "plain" else "the rest on disk"
    return f"plan: {chosen}{plan.predicted_seconds:.2f} s a step, limited by {plan.limited_by}; {peak}, {how}"


def _against_plan(result: Result) -> str:
    """How wrong the plan was."""
    if not result.predicted_seconds or result.predicted_peak_bytes is None:
        return ""
    off = result.predicted_seconds / typical_seconds(result.seconds) - 1
    peak_off = result.predicted_peak_bytes / max(result.counted_bytes, 1) - 1
    return (
        f"; the plan said {result.predicted_seconds:.3f} s ({_misjudged(off)}) "
        f"and a peak of {mebibytes(result.predicted_peak_bytes)} ({_misjudged(peak_off)})"
    )


def _misjudged(share: float) -> str:
    """How far a plan was from what came out, in words: a bare percentage does not say of what."""
    return f"{abs(share):.0%} too {'high' if share > 0 else 'low'}" if abs(share) >= 0.005 else "as it was"


def _memory_text(result: Result) -> str:
    """One peak, the one that a memory number counts; what the process had on top of it is not more of the same."""
    on_top = result.peak_bytes - result.counted_bytes
    pages = f"; on top {mebibytes(on_top)} of pages of files, which the kernel can drop" if on_top > 0 else ""
    each = ", ".join(mebibytes(peak) for peak in result.peak_bytes_per_rank)
    ranks = f" (ranks with all their pages: {each})" if result.ranks > 1 else ""
    if result.budget_bytes is None:
        return f"peak {mebibytes(result.counted_bytes)}{pages}{ranks}"
    return f"number {budget_text(result.counted_bytes, result.budget_bytes)}{pages}{ranks}"


def _tier_lines(result: Result) -> list[str]:
    """What the job used of its memory number and of the disk, where there is such a thing."""
    lines: list[str] = []
    if any(result.disk_read_bytes) or any(result.disk_written_bytes):
        moved = traffic_text(result.disk_read_bytes, result.disk_written_bytes, result.disk_wait_seconds)
        lines += [f"disk       {mebibytes(result.disk_bytes)} in use; {moved}"]
    if lines or result.budget_bytes is not None:
        lines += [f"policy     activations: {result.activations}; update: in {result.update}"]
    return lines


def budget_text(counted_bytes: int, budget_bytes: int) -> str:
    """The peak against the memory number, honestly."""
    share = f"{mebibytes(counted_bytes)} of {mebibytes(budget_bytes)} ({counted_bytes / budget_bytes:.0%})"
    if counted_bytes > budget_bytes:
        return f"EXCEEDED: peak {share}"
    return f"held: peak {share}"


def traffic_text(read: list[int], written: list[int], waited: list[float]) -> str:
    """The disk traffic of a typical step."""
    middle = [statistics.median(numbers[1:] or numbers) for numbers in (read, written, waited)]
    return f"{mebibytes(int(middle[0]))} read, {mebibytes(int(middle[1]))} written, {middle[2]:.2f} s waited per step"


def typical_seconds(seconds: list[float]) -> float:
    """The median step, without the first (which makes the optimizer's states) if there are others."""
    return statistics.median(seconds[1:] or seconds)


def _validation(result: Result) -> str:
    return f"   held-out text {result.validation[-1].validation_loss:.4f}" if result.validation else ""
