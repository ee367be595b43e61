"""How ``lowtide plan`` answers: text for a person, one line of JSON for a program, pictures as files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.output import say
from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.job.words import in_flags

if TYPE_CHECKING:
    from lowtide.cli.plan_question import Question
    from lowtide.planning.frontier import Point
    from lowtide.planning.plan import Plan
    from lowtide.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where an answer goes."""

    json: bool
    svg: str | None
    html: str | None
    save: str | None

    def refuse_unwritable(self) -> None:
        """Raise before anything is worked out, if a file cannot be made where it is to go."""
        for flag, path in (("--svg", self.svg), ("--html", self.html), ("--save", self.save)):
            if path is not None and (not Path(path).parent.is_dir() or os.path.isdir(path)):
                raise ArgumentError(f"{flag} is {path!r}; give a file, in a folder that is there.")


def answer_plan(question: Question, model: ModelSpec, plan: Plan, output: Output) -> None:
    """It fits."""
    from lowtide.planning.picture import plan_html, plan_svg
    from lowtide.planning.question import states_facts

    _write_file("--svg", output.svg, lambda: plan_svg(plan))
    _write_file("--html", output.html, lambda: plan_html(plan))
    _write_file("--save", output.save, lambda: plan.to_json() + "\n")
    if output.json:
        states = states_facts(model, question.request, plan.stage)
        say(json.dumps({"fits": True, **json.loads(plan.to_json()), **states, "notes": question.notes}))
        return
    say(*str(plan).split("\n"), *_note_lines(question))


def answer_short(question: Question, model: ModelSpec, error: DoesNotFit, output: Output) -> None:
    """It does not fit: which limit, how many bytes, what helps; and the states, which are known anyway."""
    from lowtide.planning.question import states_facts
    from lowtide.planning.ways_out import ways_out

    ways = ways_out(model, question.hardware, question.request)
    states = states_facts(model, question.request)
    short = error.needed_bytes - error.budget_bytes
    if output.json:
        limit: dict[str, Any] = {"tier": error.tier, "needed_bytes": error.needed_bytes, "budget_bytes": error.budget_bytes}
        found = [{"change": w.change, "predicted_seconds": w.plan.predicted_seconds if w.plan.batch else None} for w in ways]
        facts = {"model": model.name, "hardware": question.hardware.name, **states}
        say(json.dumps({"fits": False, **facts, **limit, "short_bytes": short, "ways_out": found, "notes": question.notes}))
        return
    from lowtide.planning.text import count_text, seconds_text, size_text

    needed = f"{size_text(error.needed_bytes)} needed, {size_text(error.budget_bytes)} allowed for one rank"
    count = "" if model.name.endswith("parameters") else f" ({count_text(model.numel)} parameters)"
    lines = [
        f"{model.name}{count} does not fit on {question.hardware.name}:",
        f"{error.tier} memory is {size_text(short)} short ({needed}).",
        "",
        f"parameters, gradients and optimizer at stage {states['stage']} on {_ranks(question)}, {states['precision']}",
        f"  on one rank                       {size_text(int(states['states_bytes_per_rank']))}",
        *(
            f"    {kind:<32}{size_text(int(states[f'{kind}_bytes_per_rank']))}"
            for kind in ("parameters", "gradients", "optimizer")
        ),
        f"  of the whole model                {size_text(int(states['states_bytes']))}",
        "",
        "ways out, the cheapest first"
        if ways
        else "no single change makes it fit: it needs another machine, or several of them",
    ]
    for way in ways:
        seconds = f"{seconds_text(way.plan.predicted_seconds)} a step" if way.plan.batch else ""
        lines.append(f"  - {way.change:<66}{seconds}".rstrip())
    say(*map(in_flags, lines), *_note_lines(question))


def answer_frontier(question: Question, points: Sequence[Point], output: Output) -> None:
    """The same question at several sizes."""
    from lowtide.planning.frontier import frontier_text
    from lowtide.planning.picture import frontier_svg
    from lowtide.planning.picture_page import frontier_page

    _write_file("--svg", output.svg, lambda: frontier_svg(points))
    _write_file("--html", output.html, lambda: frontier_page(points, frontier_svg(points)))
    if output.json:
        say(json.dumps({"model": question.name, "what_if": [p.to_dict() for p in points], "notes": question.notes}))
        return
    head = f"{question.name} on {question.hardware.name}"
    say(head, "", *frontier_text(points).split("\n"), *_note_lines(question))


def _ranks(question: Question) -> str:
    size = question.request.world_size
    return "1 rank" if size == 1 else f"{size} ranks"


def _note_lines(question: Question) -> list[str]:
    return ["", *(f"note: {note}" for note in question.notes)] if question.notes else []


def _write_file(flag: str, path: str | None, text: Any) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text(), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{flag} is {path!r}, which cannot be written: {error.strerror}.") from error
