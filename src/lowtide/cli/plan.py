"""``lowtide plan``: will it fit, how fast, and why, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.plan_answer import Output, answer_frontier, answer_plan, answer_short
from lowtide.cli.plan_question import DEFAULT_BATCH, Place, Question, Subject, ask, parse_range
from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.job.presets import PRESETS
from lowtide.planning.request import Request

if TYPE_CHECKING:
    from lowtide.planning.plan import Plan
    from lowtide.spec.model import ModelSpec


def _flag(panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel=panel)


def _switch(name: str, panel: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


_WHAT, _WHERE, _HOW, _ANSWER = "What to plan (one of)", "Where", "How", "Answer"
_Preset = Annotated[str | None, _flag(_WHAT, f"A built-in GPT: {', '.join(PRESETS)}.", "NAME")]
_Model = Annotated[str | None, _flag(_WHAT, "Your own model, as in lowtide train.", "PACKAGE.MODULE:FUNCTION")]
_Arch = Annotated[str | None, _flag(_WHAT, "A published architecture: llama-2-7b, gpt2-xl, ...", "NAME")]
_Params = Annotated[str | None, _flag(_WHAT, "Only a number of parameters: 7.5e9, 7.5B, 7500000000.", "COUNT")]
_Hardware = Annotated[str | None, _flag(_WHERE, "h100-80g, my.json, ... Default: this machine.", "NAME|FILE|this")]
_WorldSize = Annotated[int | None, _flag(_WHERE, "Ranks. Default: 1.", "N")]
_Cluster = Annotated[
    str | None, _flag(_WHERE, "Several hosts: nodes=16,gpus=8,hardware=h100-80g,network=50GB.", "KEY=VALUE,...")
]
_Memory = Annotated[str | None, _flag(_WHERE, "Of one host, all its ranks together: 4GiB.", "SIZE")]
_RankMemory = Annotated[str | None, _flag(_WHERE, "Of each rank, if they differ: 8GiB,4GiB.", "SIZE,SIZE,...")]
_DeviceMemory = Annotated[str | None, _flag(_WHERE, "Of one accelerator (on a CPU: an emulated one).", "SIZE")]
_Disk = Annotated[str | None, _flag(_WHERE, "For what does not fit in memory. Default: no disk.", "DIR|SIZE|all")]
_Batch = Annotated[str | None, _flag(_HOW, f"Samples per step and rank; auto: the best. Default: {DEFAULT_BATCH}.", "N|auto")]
_Sequence = Annotated[int | None, _flag(_HOW, "Tokens per sample. Default: all that the model looks at.", "N")]
_Stage = Annotated[str, _flag(_HOW, "0 nothing sharded, 1 optimizer, 2 + gradients, 3 + parameters, auto.", "0-3|auto")]
_Precision = Annotated[str, _flag(_HOW, "fp32, mixed, bf16, fp16, pure-bf16.", "NAME")]
_Optimizer = Annotated[str, _flag(_HOW, "adam, adamw, sgd, sgd-momentum, adam-amsgrad.", "NAME")]
_Activations = Annotated[str, _flag(_HOW, "auto, keep, recompute, host, disk.", "POLICY")]
_Update = Annotated[str, _flag(_HOW, "When the optimizer runs: step, backward.", "WHEN")]
_Accumulate = Annotated[int, _flag(_HOW, "Backward passes per update.", "N")]
_Objective = Annotated[str, _flag(_HOW, "time, or capacity: fast tiers as full as can be.", "AIM")]
_Explain = Annotated[bool, _switch("--explain", _ANSWER, "Why each choice, and what a change would save.")]
_WhatIf = Annotated[str | None, _flag(_ANSWER, "The same at several sizes: memory=2..16GiB.", "RANGE")]
_Svg = Annotated[str | None, _flag(_ANSWER, "A picture.", "FILE")]
_Html = Annotated[str | None, _flag(_ANSWER, "A page with picture and tables.", "FILE")]
_Save = Annotated[str | None, _flag(_ANSWER, "The plan as JSON.", "FILE")]
_Json = Annotated[bool, _switch("--json", _ANSWER, "Print nothing but one line of JSON.")]


def plan(
    *,
    preset: _Preset = None,
    model: _Model = None,
    arch: _Arch = None,
    params: _Params = None,
    hardware: _Hardware = None,
    world_size: _WorldSize = None,
    cluster: _Cluster = None,
    memory: _Memory = None,
    rank_memory: _RankMemory = None,
    device_memory: _DeviceMemory = None,
    disk: _Disk = None,
    batch: _Batch = None,
    sequence: _Sequence = None,
    stage: _Stage = "auto",
    precision: _Precision = "fp32",
    optimizer: _Optimizer = "adamw",
    activations: _Activations = "auto",
    update: _Update = "step",
    accumulate: _Accumulate = 1,
    objective: _Objective = "time",
    explain: _Explain = False,
    what_if: _WhatIf = None,
    svg: _Svg = None,
    html: _Html = None,
    save: _Save = None,
    json: _Json = False,
) -> int:
    """Plan a training job: what lives where, the peak of every tier, seconds per step. Nothing is run.

    Exit code 1 if it does not fit, with what would help.
    """
    if what_if is not None and (explain or save or batch == "auto" or rank_memory):
        raise ArgumentError("--what-if compares many plans; leave out --explain, --save, --batch auto and --rank-memory.")
    varied = None if what_if is None else parse_range(what_if)
    what = Subject(preset=preset, model=model, arch=arch, params=params, batch=batch, sequence=sequence)
    where = Place(
        hardware=hardware,
        world_size=world_size,
        cluster=cluster,
        memory=memory,
        rank_memory=rank_memory,
        device_memory=device_memory,
        disk=disk,
    )
    how = Request(
        stage=stage,
        precision=precision,
        optimizer=optimizer,
        activations=activations,
        update=update,
        accumulate=accumulate,
        objective=objective,
    )
    output = Output(json=json, svg=svg, html=html, save=save)
    output.refuse_unwritable()
    question = ask(what, where, how)
    if varied is not None:
        return _compare(question, varied, output)
    return _plan_once(question, output, explained=explain, must_fit=params is None or where.is_given)


def _plan_once(question: Question, output: Output, *, explained: bool, must_fit: bool) -> int:
    """Exit code 0 if it fits, or if nobody said where."""
    try:
        model, found = _make(question)
    except DoesNotFit as error:
        answer_short(question, question.model_for(1 if question.batch is None else question.batch), error, output)
        return 1 if must_fit else 0
    if explained:
        from lowtide.planning.explain import explain as why

        found = why(model, question.hardware, question.request, found)
    answer_plan(question, model, found, output)
    return 0


def _make(question: Question) -> tuple[ModelSpec, Plan]:
    if question.batch is None:
        from lowtide.planning.batch import best_batch

        size, found = best_batch(question.model_for, question.hardware, question.request)
        return question.model_for(size), found
    from lowtide.planning.planner import make_plan

    model = question.model_for(question.batch)
    return model, make_plan(model, question.hardware, question.request)


def _compare(question: Question, varied: tuple[str, int, int], output: Output) -> int:
    """Exit code 0 if it fits anywhere in the range."""
    from lowtide.planning.frontier import frontier, sizes_between

    what, low, high = varied
    if what == "disk" and question.hardware.disk is None:
        raise ArgumentError("--what-if disk=...: give --disk too, which says what disk it is.")
    if what == "device-memory" and question.hardware.compute.memory_bytes is None:
        raise ArgumentError("--what-if device-memory=...: this machine has no device with memory of its own.")
    model = question.model_for(question.batch or 0)
    points = frontier(model, question.hardware, question.request, what, sizes_between(low, high))
    answer_frontier(question, points, output)
    return 0 if any(point.plan is not None for point in points) else 1
