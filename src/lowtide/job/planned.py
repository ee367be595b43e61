"""The plan of a job, made before its first step: shown, kept beside the run, and held against what the job then took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lowtide.errors import ArgumentError, DoesNotFit, Refused
from lowtide.job.gpt import GPT
from lowtide.job.models import Built
from lowtide.job.options import Options
from lowtide.job.ranks import Member, gather_json
from lowtide.planning.batch import best_batch
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.question import Machine, find_machine
from lowtide.planning.request import Request
from lowtide.spec.model import ModelSpec

_ROOMY = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan, or why there is none."""

    plan: Plan | None
    text: str

    def predictions(self) -> dict[str, Any]:
        """What a result shows beside its measurements."""
        plan = self.plan
        return {
            "predicted_seconds": plan.predicted_seconds if plan is not None else None,
            "predicted_peak_bytes": plan.predicted_peak_bytes if plan is not None else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the caller left open and rank 0's plan has chosen, the same on all ranks. Neither changes a bit."""

    stage: int | str
    """``auto`` if there is no plan to choose one: then as much is sharded as can be."""
    chunk_bytes: int | None = None
    """Of an update from the disk; None for the usual size."""


def plan_job(options: Options, built: Built, member: Member) -> Planned:
    """What the job will take, by what is known of this machine. A model that cannot be traced has no plan."""
    machine = find_machine("this", list(options.disk) or None)
    request = _request(options, member, machine)
    try:
        spec = spec_of(built, options.model_name, options.batch_size)
        plan = make_plan(spec, machine.hardware, request)
        if options.stage == "auto" and member.ranks > 1 and not _is_roomy(plan, options.memory_bytes, member.local_ranks):
            plan = make_plan(spec, machine.hardware, replace(request, stage=3))
    except (Refused, ArgumentError, DoesNotFit) as error:
        return Planned(plan=None, text=f"There is no plan for {options.model_name}: {error}\n")
    notes = "".join(f"{note}\n" for note in machine.notes)
    return Planned(plan=plan, text=f"{plan}\n{notes}")


def _is_roomy(plan: Plan, memory_bytes: int | None, local_ranks: int) -> bool:
    """Whether the plan would hold if it were a little wrong. A stage cannot be changed once a model is sharded, so where it is
    tight the one that needs least is taken."""
    return memory_bytes is None or plan.predicted_peak_bytes <= _ROOMY * memory_bytes / local_ranks


def agree_choices(planned: Planned, options: Options, member: Member) -> Choices:
    """What to shard with. Collective: ranks see different amounts of free memory, and would plan differently."""
    plan, mine = planned.plan, Choices(stage=options.stage)
    if plan is not None:
        by_chunks = bool(options.disk) and plan.placement == "streamed"
        chosen = plan.stage if member.ranks > 1 else options.stage
        mine = Choices(stage=chosen, chunk_bytes=plan.chunk_bytes if by_chunks else None)
    return Choices(**gather_json(asdict(mine), member)[0])


def choose_batch(options: Options, built: Built, member: Member) -> int:
    """``--batch auto``: the number of sequences per rank with which most are trained per second. The same on all ranks."""
    if options.batch != "auto":
        return options.batch_size
    machine = find_machine("this", list(options.disk) or None)
    mine: dict[str, Any] = {}
    try:
        request = _request(options, member, machine)
        mine["batch"], _ = best_batch(lambda n: spec_of(built, options.model_name, n), machine.hardware, request)
    except Refused as error:
        mine["error"] = f"--batch is 'auto', but the model cannot be planned ({error}); give a number."
    first = gather_json(mine, member)[0]
    if "error" in first:
        raise ArgumentError(first["error"])
    return int(first["batch"])


def spec_of(built: Built, name: str, batch: int, *, length: int | None = None, device: str = "cpu") -> ModelSpec:
    """The facts of a job's model for ``batch`` sequences; nothing is computed."""
    from lowtide.config import Comm
    from lowtide.spec.repetition import trace_alike
    from lowtide.spec.tracing import trace

    tokens = torch.empty(batch, length or built.context, dtype=torch.int64, device="meta")
    arguments: Any = {"input_ids": tokens, "labels": tokens} if built.shifts_itself else (tokens, tokens)
    how: Any = {"bucket_bytes": Comm().bucket_bytes, "name": name, "device": device}
    if type(built.model) is GPT:
        return trace_alike(built.model, arguments, blocks="blocks", **how)
    return trace(built.model, arguments, **how)


def _request(options: Options, member: Member, machine: Machine) -> Request:
    return Request(
        world_size=member.ranks,
        ranks_per_host=member.local_ranks,
        stage=options.stage,
        memory_bytes=options.memory_bytes,
        disk_bytes=machine.disk_bytes,
        activations=options.activations,
        update=options.update_when,
    )
