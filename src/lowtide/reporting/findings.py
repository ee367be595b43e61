"""All that a report says, found once: the page, the pictures, the terminal and ``--json`` show the same. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.planning.text import clean, count_text, percent_text, seconds_text, size_text
from lowtide.reporting.ending import Ending, ending_of
from lowtide.reporting.extras import Extras, read_extras
from lowtide.reporting.postmortem import PostMortem, examine
from lowtide.reporting.predictions import Prediction, off_text, predictions
from lowtide.reporting.step_view import StepDetail, step_details
from lowtide.reporting.summary import Summary, summarise
from lowtide.reporting.timeline import Run, read_run
from lowtide.reporting.verdict import Verdict, judge
from lowtide.reporting.views import Entry, entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """See the module's docstring."""

    run: Run
    extras: Extras
    summary: Summary
    verdict: Verdict
    ending: Ending
    post_mortem: PostMortem | None
    entries: tuple[Entry, ...]
    details: tuple[StepDetail, ...]
    predictions: tuple[Prediction, ...]

    @property
    def name(self) -> str:
        """The run's folder, by its last part."""
        return self.run.path.resolve().name

    @property
    def subject(self) -> str:
        """What was trained: a folder may be called anything, such as "run"."""
        run, config = self.run.first.last.run, self.extras.config
        named = next((name for name in (config.get("model"), config.get("preset"), run.facts.get("model")) if name), "a model")
        numel = sum(unit.numel for unit in run.units)
        return clean(f"{named}, {count_text(numel)} parameters" if numel else str(named))

    def facts(self) -> list[tuple[str, str]]:
        """The few numbers that one looks for first."""
        summary, fullest = self.summary, self.summary.fullest
        timed = [rank.median_seconds for rank in summary.ranks if rank.median_seconds is not None]
        rows = [("steps", f"{summary.steps:,}"), ("whole run", seconds_text(summary.seconds))]
        if timed:
            rows.append(("a step takes (median)", seconds_text(max(timed))))
        if self.extras.tokens_per_second:
            newest = self.extras.tokens_per_second[max(self.extras.tokens_per_second)]
            rows.append(("tokens per second, last step", f"{newest:,.0f}" if newest >= 10 else f"{newest:.1f}"))
        if (ends := self._losses()) is not None:
            rows.append(("loss", f"{ends[0]:.4g} → {ends[1]:.4g}"))
        budget = fullest.run.budget_bytes
        share = f" of {size_text(budget)} ({percent_text(fullest.peak_bytes, budget)})" if budget else ""
        rows.append(("peak of host memory", f"{size_text(fullest.peak_bytes)}{share}"))
        if summary.total_read_bytes or summary.total_written_bytes:
            moved = f"{size_text(sum(r.read_bytes for r in summary.ranks))} read, "
            moved += f"{size_text(sum(r.written_bytes for r in summary.ranks))} written"
            rows.append(("disk, per step", moved))
        wire = sum(r.wire_bytes for r in summary.ranks)
        if wire:
            rows.append(("between ranks, per step", size_text(wire)))
        errors = [p.error for p in self.predictions if p.error is not None and p.unit == "seconds"]
        if errors:
            rows.append(("newest prediction of a step's seconds", off_text(errors[-1])))
        return rows

    def with_ways_out(self, changes: Sequence[str]) -> Findings:
        """The same, with changes that a planner has found; they go before those that follow from the samples alone."""
        if self.post_mortem is None or not changes:
            return self
        known = [change for change in self.post_mortem.changes if change not in changes]
        return replace(self, post_mortem=replace(self.post_mortem, changes=(*changes, *known)))

    def to_dict(self) -> dict[str, Any]:
        """For programs: ``lowtide report --json``."""
        return {
            "run": str(self.run.path),
            "verdict": asdict(self.verdict),
            "ending": {**asdict(self.ending), "words": self.ending.words},
            "post_mortem": None if self.post_mortem is None else asdict(self.post_mortem),
            "steps": self.summary.steps,
            "seconds": self.summary.seconds,
            "started": self.summary.started,
            "processes": self.summary.processes,
            "bad_lines": self.summary.bad_lines,
            "total_read_bytes": self.summary.total_read_bytes,
            "total_written_bytes": self.summary.total_written_bytes,
            "ranks": [
                {
                    "rank": rank.rank,
                    "host": rank.run.host,
                    "budget_bytes": rank.run.budget_bytes,
                    "peak_bytes": rank.peak_bytes,
                    "median_seconds": rank.median_seconds,
                    "division": None if rank.division is None else asdict(rank.division),
                    "disk_read_bytes": rank.read_bytes,
                    "disk_written_bytes": rank.written_bytes,
                    "wire_bytes": rank.wire_bytes,
                    "parked_bytes": rank.parked,
                }
                for rank in self.summary.ranks
            ],
            "predictions": [{**asdict(p), "error": p.error} for p in self.predictions],
            "marks": [asdict(entry) for entry in self.entries],
        }

    def _losses(self) -> tuple[float, float] | None:
        own = {step.step: step.loss for _, step in self.run.first.steps() if step.loss is not None}
        losses = {**own, **self.extras.losses}
        return (losses[min(losses)], losses[max(losses)]) if losses else None


def find(path: Path) -> Findings:
    """Everything about the run in this folder. Raises ``NoTimeline`` if it has none."""
    run = read_run(path)
    extras = read_extras(path)
    summary = summarise(run)
    begun = run.first.last.run.started - 2  # events have whole seconds
    failures = [h for h in extras.happenings if h.what == "failure" and (h.wall is None or h.wall >= begun)]
    hints = [h.text for h in failures if not h.text.startswith("the job before this one")]
    return Findings(
        run=run,
        extras=extras,
        summary=summary,
        verdict=judge(summary),
        ending=_ending(run),
        post_mortem=examine(run, hints=hints),
        entries=tuple(entries(run, extras)),
        details=tuple(step_details(run)),
        predictions=tuple(predictions(run, summary, extras)),
    )


def _ending(run: Run) -> Ending:
    """Of the rank that says most about how the run ended."""
    order = ("error", "killed", "silent", "running", "done")
    return min((ending_of(timeline) for timeline in run.ranks), key=lambda ending: order.index(ending.state))
