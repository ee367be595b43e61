"""``lowtide train`` as one rank sees it, in named phases: build, open the data, shard, go on or begin, train, measure."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lowtide.api import engine_of
from lowtide.job.batches import Batches, SyntheticBatches, TextBatches
from lowtide.job.checkpoints import Checkpoints, Trainee
from lowtide.job.corpus import default_cache_folder, open_corpus, prepare_corpus
from lowtide.job.events import Events
from lowtide.job.failure import describe
from lowtide.job.history import History
from lowtide.job.interrupt import stop_on_signals
from lowtide.job.launch import started_by_launch
from lowtide.job.loop import Loop, Recipe
from lowtide.job.memory import counted_peak, job_peak, measure_rank, rank_memory_from_json, reset_peak
from lowtide.job.models import Built, build_model
from lowtide.job.options import Options, cores
from lowtide.job.outlets import Outlets, end_record
from lowtide.job.pace import Pace
from lowtide.job.planned import Planned, agree_choices, choose_batch, plan_job
from lowtide.job.progress import Reporter
from lowtide.job.ranks import Member, everybody, gather_json, wait_for_all
from lowtide.job.records import Result
from lowtide.job.run_folder import RunFolder
from lowtide.job.show import outlook
from lowtide.job.tiers import Meter, limits_of, shard_as_asked


def train(options: Options, member: Member, reporter: Reporter) -> Result:
    """Run the job. Every rank calls this; every rank gets the same result but for its own losses, seconds and events."""
    torch.set_num_threads(options.threads or max(1, cores() // member.local_ranks))
    torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
    options = replace(options, run=gather_json(options.run, member)[0])  # a default has the time in it, which may differ
    outlets = Outlets(options.log if member.rank == 0 else ())
    built = build_model(options)
    params = sum(parameter.numel() for parameter in built.model.parameters())
    options = replace(options, batch=choose_batch(options, built, member))
    batches, data_facts = _open_batches(options, built, member, reporter)
    planned = plan_job(options, built, member) if member.rank == 0 else Planned(plan=None, text="")
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=options.lr, fused=True)
    shard_as_asked(built.model, optimizer, options, agree_choices(planned, options, member))
    outlets.listen(built.model)
    stage = engine_of(built.model).config.stage
    facts: dict[str, Any] = {"params": params, "stage": stage.number, "ranks": member.ranks, **data_facts}
    if planned.plan is not None:
        reporter.tell(outlook(planned.plan, asked_stage=options.stage))
    with _failures_told(built), _run_folder(options, member, facts, planned) as folder:
        torch.manual_seed(options.seed + member.rank)  # pyright: ignore[reportUnknownMemberType]
        try:
            return _run(options, built, optimizer, batches, Surroundings(member, reporter, folder, planned, outlets))
        finally:
            outlets.close()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run has around it."""

    member: Member
    reporter: Reporter
    folder: RunFolder | None
    planned: Planned
    outlets: Outlets


def _run(options: Options, built: Built, optimizer: Optimizer, batches: Batches, around: Surroundings) -> Result:
    """Go on from a checkpoint if there is one, train, and say what came out."""
    member, reporter, folder = around.member, around.reporter, around.folder
    recipe = Recipe.for_synthetic() if options.synthetic else Recipe.for_text(options.steps)
    scheduler = LambdaLR(optimizer, lambda step: recipe.rate(step, options.steps))
    history = History()
    trainee = Trainee(model=built.model, optimizer=optimizer, scheduler=scheduler, batches=batches, history=history)
    events = folder.events if folder is not None else Events(None)
    events.listener = around.outlets.event
    saves = Checkpoints(trainee=trainee, options=options, member=member, reporter=reporter, events=events)
    with stop_on_signals(reporter.tell) as stop:
        resumed_from = saves.resume()
        if folder is not None:
            folder.begin(history.step)
        if history.step >= options.steps:
            reporter.tell(f"nothing is left to do: {history.step} steps are done; give more --steps to go on")
        meter, pace = Meter(built.model), Pace(engine_of(built.model).group.watch)
        loop = Loop(
            trainee=trainee,
            loss=built.loss,
            options=options,
            recipe=recipe,
            meter=meter,
            member=member,
            reporter=reporter,
            folder=folder,
            checkpoints=saves,
            stop=stop,
            pace=pace,
            outlets=around.outlets,
        )
        if options.memory is None:  # a memory number holds from the start, so its peak counts from there
            reset_peak()
        reporter.start(options.steps, limits_of(meter.usage, options), done=history.step)
        try:
            loop.run()
        finally:
            reporter.close()
    end_record(built.model, "done")
    events.note("end", f"stopped by {history.stopped_by}" if history.stopped_by else "done", step=history.step)
    made = {"resumed_from": resumed_from, "checkpoints": saves.paths, "saves_seconds": saves.seconds, "events": events.counts()}
    made |= {"straggler": pace.straggler}
    return _result(history, built, meter, options, member, {**made, **around.planned.predictions()})


def _open_batches(options: Options, built: Built, member: Member, reporter: Reporter) -> tuple[Batches, dict[str, Any]]:
    if options.synthetic:
        return SyntheticBatches(vocabulary=built.vocabulary, batch=options.batch_size, context=built.context), {
            "context": built.context
        }

    def prepare() -> Path:
        return prepare_corpus(options.data, vocabulary=built.vocabulary, cache=default_cache_folder(), tell=reporter.tell)

    # One rank per host makes the file while the others wait; then they find it there.
    path = prepare() if member.local_rank == 0 else None
    wait_for_all(member)
    path = path or prepare()
    corpus = open_corpus(path, least_tokens=built.context + 1)
    batches = TextBatches(
        corpus=corpus,
        batch=options.batch_size,
        context=built.context,
        rank=member.rank,
        ranks=member.ranks,
        seed=options.seed,
    )
    return batches, {"context": built.context, "tokens_file": str(path), **asdict(corpus.header)}


@contextmanager
def _failures_told(built: Built) -> Generator[None, None, None]:
    """Whatever ends this rank is known to the others at once, with its cause."""
    try:
        yield
    except BaseException as error:
        engine_of(built.model).group.watch.report(error)
        end_record(built.model, "error", f"{type(error).__name__}: {error}")
        raise


@contextmanager
def _run_folder(
    options: Options, member: Member, facts: dict[str, Any], planned: Planned
) -> Generator[RunFolder | None, None, None]:
    """The run's folder on rank 0; nothing on the others, or if the job keeps none."""
    if options.run is None or member.rank != 0:
        yield None
        return
    folder = RunFolder(Path(options.run))
    try:
        folder.events.note_silent_end()
        folder.events.note("start", f"process {os.getpid()}", ranks=member.ranks, attempt=options.attempt)
        folder.write_config(options, facts)
        folder.write_plan(planned.text, planned.plan)
        yield folder
    except BaseException as error:
        if not started_by_launch():  # the launcher knows the cause better than any rank
            folder.events.note("failure", describe(error, member.rank).message)
        raise
    finally:
        folder.close()


def _result(history: History, built: Built, meter: Meter, options: Options, member: Member, made: Mapping[str, Any]) -> Result:
    exchange = engine_of(built.model).exchange
    history.add_up_traffic(exchange)
    ranks = everybody(exchange, "results", {"memory": asdict(measure_rank()), "usage": asdict(meter.usage)})
    memory = [rank_memory_from_json(rank["memory"]) for rank in ranks]
    return Result(
        params=sum(parameter.numel() for parameter in built.model.parameters()),
        stage=engine_of(built.model).config.stage.number,
        ranks=member.ranks,
        seconds=history.seconds,
        losses=history.losses,
        validation=history.validation,
        peak_bytes=job_peak(memory),
        peak_bytes_per_rank=[rank.peak_bytes for rank in memory],
        counted_bytes=counted_peak(memory),
        budget_bytes=options.memory_bytes,
        disk_bytes=sum(rank["usage"]["disk_bytes"] for rank in ranks),
        disk_read_bytes=[step.read_bytes for step in history.traffic],
        disk_written_bytes=[step.written_bytes for step in history.traffic],
        disk_wait_seconds=[step.wait_seconds for step in history.traffic],
        activations=meter.usage.activations,
        update=meter.usage.update,
        skipped=history.skipped,
        stopped_by=history.stopped_by,
        batch=options.batch_size,
        **made,
    )
