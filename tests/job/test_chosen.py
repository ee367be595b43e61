"""What ``lowtide train`` leaves to the planner: rank 0's answer is everybody's, and no bit depends on it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowtide.api import engine_of
from lowtide.errors import Refused
from lowtide.job import planned as planned_module
from lowtide.job import train as train_module
from lowtide.job.models import Built, build_model
from lowtide.job.options import Options
from lowtide.job.planned import Planned, plan_job
from lowtide.job.progress import Silent
from lowtide.job.ranks import Member
from lowtide.job.show import outlook
from lowtide.job.train import train
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec
from tests.kit.dist import run_ranks

TINY = "tests.job.specimens:tiny_gpt"


class Told(Silent):
    """Remembers what a person would have read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, message: str) -> None:
        self.lines.append(message)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Generator[None]:
    """Ranks live longer than a test, so what is changed in them is put back."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def trained(rank: int, ranks: int, changes: dict[str, Any], disk: str | None, stage: int | str) -> dict[str, Any]:
    """A job whose plan says what ``changes`` says; only rank 0 makes one."""
    facts: dict[str, Any] = {}

    def as_planned(options: Options, built: Built, member: Member) -> Planned:
        plan = plan_job(options, built, member).plan
        assert plan is not None
        return Planned(plan=replace(plan, **changes), text="")

    def remembered(*args: Any) -> Any:
        sharded(*args)
        config = engine_of(args[0]).config
        facts.update(stage=config.stage.number, chunk_bytes=config.update.chunk_bytes)

    sharded = train_module.shard_as_asked
    options = Options(model=TINY, synthetic=True, steps=3, stage=stage, threads=1, disk=(disk,) if disk else (), update="step")
    told = Told()
    threads = torch.get_num_threads()
    with replaced(train_module, "plan_job", as_planned), replaced(train_module, "shard_as_asked", remembered):
        result = train(options, Member(rank, ranks, rank, ranks), told)
    torch.set_num_threads(threads)
    return {**facts, "losses": result.losses, "reported": result.stage, "told": told.lines}


def test_the_stage_of_the_plan_is_used_on_all_ranks_and_said() -> None:
    reference = run_ranks(2, trained, {}, None, 3)
    assert not any("chosen" in line for line in reference[0]["told"])
    for stage in (0, 1, 2):
        found = run_ranks(2, trained, {"stage": stage}, None, "auto")
        assert [rank["stage"] for rank in found] == [stage, stage]
        assert [rank["reported"] for rank in found] == [stage, stage]
        assert [rank["losses"] for rank in found] == [rank["losses"] for rank in reference]
        assert found[0]["told"][0].startswith(f"plan: stage {stage} (chosen), ")


def test_a_stage_that_was_asked_for_is_planned_and_used() -> None:
    assert [rank["stage"] for rank in run_ranks(2, trained, {}, None, 1)] == [1, 1]


def test_chunks_are_as_large_as_the_plan_has_them_where_it_streams(tmp_path: Path) -> None:
    usual = run_ranks(2, trained, {"chunk_bytes": 1 << 20, "placement": "plain"}, str(tmp_path), "auto")
    smaller = run_ranks(2, trained, {"chunk_bytes": 1 << 20, "placement": "streamed"}, str(tmp_path), "auto")
    assert [rank["chunk_bytes"] for rank in usual] == [8 << 20, 8 << 20]
    assert [rank["chunk_bytes"] for rank in smaller] == [1 << 20, 1 << 20]
    assert [rank["losses"] for rank in smaller] == [rank["losses"] for rank in usual]


def asked(rank: int, ranks: int, stage: int | str) -> Any:
    """The stage that the planner is asked for."""
    seen: list[Any] = []

    def noted(_model: Any, _hardware: Any, request: Any) -> Any:
        seen.append(request.stage)
        raise Refused("it is enough to know the question")

    with replaced(planned_module, "make_plan", noted):
        options = Options(model=TINY, synthetic=True, stage=stage)

        assert plan_job(options, build_model(options), Member(rank, ranks, rank, ranks)).plan is None
    return seen


def test_the_planner_is_asked_to_choose() -> None:
    assert asked(0, 2, "auto") == ["auto"]
    assert asked(0, 2, 2) == [2]


def without_a_plan(rank: int, ranks: int) -> int:
    with replaced(train_module, "plan_job", lambda *_: Planned(plan=None, text="")):
        return train(Options(model=TINY, synthetic=True, steps=1, threads=1), Member(rank, ranks, rank, ranks), Silent()).stage


def test_without_a_plan_as_much_is_sharded_as_can_be() -> None:
    assert run_ranks(2, without_a_plan) == [3, 3]


def test_one_rank_has_no_stage_to_tell() -> None:
    options = Options(model=TINY, synthetic=True)

    plan = plan_job(options, build_model(options), Member(0, 1, 0, 1)).plan
    assert plan is not None
    assert "stage" not in outlook(plan, asked_stage="auto")


def test_where_it_is_tight_the_stage_that_needs_least_is_taken() -> None:
    """A plan may be a little wrong, and a stage cannot be changed afterwards."""
    member = Member(rank=0, ranks=2, local_rank=0, local_ranks=2)
    options = Options(preset="gpt-17m", synthetic=True, ranks=2, stage="auto", memory="64GiB")
    built = build_model(options)
    asked: list[int | str] = []

    def planned_for(spec: ModelSpec, hardware: Hardware, request: Request) -> Plan:
        asked.append(request.stage)
        return replace(make_plan(spec, hardware, request), predicted_peak_bytes=peak)

    with replaced(planned_module, "make_plan", planned_for):
        for peak, wanted in ((16 << 30, ["auto"]), (30 << 30, ["auto", 3])):
            asked.clear()
            assert plan_job(options, built, member).plan is not None
            assert asked == wanted, f"{peak} of {32 << 30} bytes that each rank may use"
