"""What limited a run, over cases: the sentence names the right thing, with the right numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.reporting.summary import summarise
from lowtide.reporting.timeline import read_run
from lowtide.reporting.verdict import Verdict, judge, more_memory
from tests.kit.synthetic_run import GIB, write_run


def verdict(folder: Path, **job: Any) -> Verdict:
    return judge(summarise(read_run(write_run(folder, **{"detailed": (), **job}))))


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "disk": ({"disk_share": 0.31}, "disk reads", "Bounded by disk reads: 31 % of the step waits for them; about "),
    "compute": (
        {"disk_share": 0.02, "update_share": 0.05, "has_folder": False},
        "compute",
        "Bounded by compute: 95 % of the step computes, all waiting together costs 2 %.",
    ),
    "update": ({"disk_share": 0.0, "update_share": 0.6, "has_folder": False}, "update", "60 % of the step is the update"),
    "clipping": (
        {"disk_share": 0.0, "update_share": 0.6, "has_folder": False, "clips": True, "detailed": (2, 10)},
        "update",
        "Bounded by clipping and the optimizer: 60 % of the step is the update, and 80 % of that is clipping",
    ),
    "starved": (
        {"disk_share": 0.0, "update_share": 0.6, "has_folder": False, "cpu_given": 40.0},
        "update",
        "only 40 % of the processor time it asked for",
    ),
    "outside": ({"disk_share": 0.02, "rest_share": 0.5}, "outside", "Bounded outside lowtide: 50 %"),
    "ranks": ({"ranks": 4, "comm_share": 0.4, "disk_share": 0.02}, "ranks", "40 % of the step waits for other ranks (64.0 MiB"),
    "one rank": (
        {"ranks": 4, "comm_share": 0.4, "disk_share": 0.02, "slow_rank": 2},
        "one rank",
        "Bounded by rank 2: it works 6",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_names_what_limits(name: str, tmp_path: Path) -> None:
    job, bound, words = CASES[name]
    found = verdict(tmp_path, **job)
    assert found.bound == bound
    assert words in found.sentence


def test_nothing_limits_a_run_without_steps(tmp_path: Path) -> None:
    assert verdict(tmp_path, steps=0).bound == "nothing yet"


def test_more_memory_is_the_share_of_what_lives_on_disk_that_waits(tmp_path: Path) -> None:
    """Without spans the disk is taken to be busy all the time: a third of the step waits, a third of what is parked must go."""
    rank = summarise(read_run(write_run(tmp_path, detailed=(), disk_share=0.31, parked=4 * GIB))).ranks[0]
    assert more_memory(rank) == pytest.approx(0.31 * 4 * GIB, rel=0.02)


def test_more_memory_is_never_more_than_what_lives_on_disk(tmp_path: Path) -> None:
    rank = summarise(read_run(write_run(tmp_path, disk_share=0.9, update_share=0.0, parked=4 * GIB))).ranks[0]
    assert rank.disk_speed is not None
    assert 0 < (more_memory(rank) or 0) <= 4 * GIB


def test_without_anything_on_disk_memory_is_no_answer(tmp_path: Path) -> None:
    found = verdict(tmp_path, has_folder=False, disk_share=0.3)
    assert found.more_memory_bytes is None
    assert "a faster disk would help" in found.sentence


def test_time_between_steps_counts_as_outside(tmp_path: Path) -> None:
    """A loader that is slow is between steps, where no step counts it."""
    run = read_run(write_run(tmp_path, disk_share=0.02, step_seconds=0.02, gap=0.02))
    division = summarise(run).ranks[0].division
    assert division is not None
    assert division.seconds == pytest.approx(0.04, rel=0.1), "20 ms of work, 20 ms until the next"
    assert division.between == pytest.approx(0.02, rel=0.1)
    found = judge(summarise(run))
    assert found.bound == "between steps"
    assert "Loading data is the usual cause" in found.sentence


def test_what_is_lost_inside_a_step_is_not_blamed_on_data(tmp_path: Path) -> None:
    found = verdict(tmp_path, disk_share=0.02, rest_share=0.5)
    assert found.bound == "outside"
    assert "inside the step" in found.sentence
    assert "data" not in found.sentence


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((("fused", False),), "fused=True"),
        ((("fused", True),), "A larger batch"),
        ((("fused", None),), "A larger batch"),
        ((), "A larger batch"),
    ],
)
def test_a_fused_optimizer_is_not_told_to_be_one(tmp_path: Path, facts: Any, words: str) -> None:
    found = verdict(tmp_path, disk_share=0.0, update_share=0.6, has_folder=False, facts=facts)
    assert found.bound == "update"
    assert words in found.sentence


@pytest.mark.parametrize(("given", "said"), [(40.0, True), (96.0, False), (None, False)])
def test_a_processor_that_others_use_is_named(tmp_path: Path, given: float | None, said: bool) -> None:
    found = verdict(tmp_path, disk_share=0.02, update_share=0.05, has_folder=False, cpu_given=given)
    assert ("gave this job only 40 % of the processor time" in found.sentence) is said
