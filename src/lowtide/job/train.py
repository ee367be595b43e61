"""``lowtide train`` as one rank sees it, in named phases: build, open the data, shard, train, measure."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lowtide.api import engine_of
from lowtide.config import parse_stage
from lowtide.job.batches import Batches, SyntheticBatches, TextBatches
from lowtide.job.corpus import default_cache_folder, open_corpus, prepare_corpus
from lowtide.job.interrupt import stop_on_signals
from lowtide.job.loop import History, Loop, Recipe
from lowtide.job.memory import counted_peak, job_peak, measure_rank, rank_memory_from_json, reset_peak
from lowtide.job.models import Built, build_model
from lowtide.job.options import Options, cores
from lowtide.job.planned import Planned, choose_batch, plan_job
from lowtide.job.progress import Reporter
from lowtide.job.ranks import Member, gather_json, wait_for_all
from lowtide.job.records import Result, RunFolder
from lowtide.job.show import outlook
from lowtide.job.tiers import Meter, limits_of, shard_as_asked


def train(options: Options, member: Member, reporter: Reporter) -> Result:
    """Run the job. Every rank calls this; every rank gets the same result but for its own losses and seconds."""
    torch.set_num_threads(options.threads or max(1, cores() // member.local_ranks))
    torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
    built = build_model(options)
    params = sum(parameter.numel() for parameter in built.model.parameters())
    stage = parse_stage(options.stage, member.ranks)
    options = replace(options, batch=choose_batch(options, built, stage, member))
    batches, data_facts = _open_batches(options, built, member, reporter)
    planned = plan_job(options, built, stage, member) if member.rank == 0 else Planned(plan=None, text="")
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=options.lr, fused=True)
    shard_as_asked(built.model, optimizer, options)
    stage = engine_of(built.model).config.stage
    facts: dict[str, Any] = {"params": params, "stage": stage.number, "ranks": member.ranks, **data_facts}
    if planned.plan is not None:
        reporter.tell(outlook(planned.plan))
    with _run_folder(options, member, facts, planned) as folder:
        meter = Meter(built.model)
        torch.manual_seed(options.seed + member.rank)  # pyright: ignore[reportUnknownMemberType]
        with stop_on_signals(reporter.tell) as stop:
            loop = Loop(
                model=built.model,
                optimizer=optimizer,
                loss=built.loss,
                batches=batches,
                steps=options.steps,
                recipe=Recipe.for_synthetic() if options.synthetic else Recipe.for_text(options.steps),
                meter=meter,
                member=member,
                reporter=reporter,
                folder=folder,
                stop=stop,
            )
            if options.memory is None:  # a memory number holds from the start, so its peak counts from there
                reset_peak()
            reporter.start(options.steps, limits_of(meter.usage, options))
            try:
                history = loop.run()
            finally:
                reporter.close()
        return _result(history, built, meter, options, member, planned)


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
    batches = TextBatches.seeded(
        corpus, batch=options.batch_size, context=built.context, rank=member.rank, ranks=member.ranks, seed=options.seed
    )
    return batches, {"context": built.context, "tokens_file": str(path), **asdict(corpus.header)}


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
        folder.write_config(options, facts)
        folder.write_plan(planned.text, planned.plan)
        yield folder
    finally:
        folder.close()


def _result(history: History, built: Built, meter: Meter, options: Options, member: Member, planned: Planned) -> Result:
    facts = {"memory": asdict(measure_rank()), "usage": asdict(meter.usage), "traffic": [asdict(t) for t in history.traffic]}
    ranks = gather_json(facts, member)
    memory = [rank_memory_from_json(rank["memory"]) for rank in ranks]
    steps = list(zip(*(rank["traffic"] for rank in ranks), strict=True))  # per step, the traffic of every rank
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
        disk_read_bytes=[sum(rank["read_bytes"] for rank in step) for step in steps],
        disk_written_bytes=[sum(rank["written_bytes"] for rank in step) for step in steps],
        disk_wait_seconds=[max(rank["wait_seconds"] for rank in step) for step in steps],
        activations=meter.usage.activations,
        update=meter.usage.update,
        skipped=history.skipped,
        interrupted=history.interrupted,
        batch=options.batch_size,
        **planned.predictions(),
    )
