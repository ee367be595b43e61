"""Who is named as a straggler: whoever stands out for several steps running, and nobody because of noise."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from lowtide.comm.stragglers import Stragglers
from lowtide.comm.watch import Watch
from lowtide.job.gauges import Limits
from lowtide.job.pace import Pace
from lowtide.job.progress import Bar, Lines, Reporter
from lowtide.job.records import StepRecord


def names(stragglers: Stragglers, *rows: float, cause: str = "disk", step: float = 1.0) -> list[str]:
    return [str(found) for found in stragglers.step([{cause: row} for row in rows], step)]


def test_a_rank_is_named_after_three_steps_and_forgotten_after_three() -> None:
    stragglers = Stragglers()
    assert names(stragglers, 0.1, 0.31, 0.1) == []
    assert names(stragglers, 0.1, 0.31, 0.1) == []
    assert names(stragglers, 0.1, 0.31, 0.1) == ["rank 1: disk 3.1× the median"]
    for _ in range(2):
        assert names(stragglers, 0.1, 0.1, 0.1) == ["rank 1: disk 3.1× the median"], "one good step does not clear it"
    assert names(stragglers, 0.1, 0.1, 0.1) == []


def test_between_the_two_bounds_nothing_changes() -> None:
    stragglers = Stragglers()
    for _ in range(9):
        assert names(stragglers, 0.1, 0.14, step=0.5) == []
    for _ in range(3):
        names(stragglers, 0.1, 0.2, step=0.5)
    for _ in range(9):
        found = names(stragglers, 0.1, 0.14, step=0.5)
        assert len(found) == 1
    assert found == ["rank 1: disk 1.4× the median"]


def test_two_ranks_are_compared_with_each_other() -> None:
    stragglers = Stragglers()
    for _ in range(3):
        found = names(stragglers, 1.0, 1.8, cause="compute", step=2.0)
    assert found == ["rank 1: compute 1.8× the median"]


def test_what_does_not_matter_to_the_step_names_nobody() -> None:
    stragglers = Stragglers()
    for _ in range(5):
        assert names(stragglers, 0.001, 0.009, 0.001) == [], "too short to be anything but noise"
        assert names(stragglers, 0.1, 0.5, 0.1, step=20.0) == [], "too small a share of the step"
    assert names(Stragglers(), 1.0) == [], "alone"


def test_the_worst_comes_first_and_nothing_is_divided_by_zero() -> None:
    stragglers = Stragglers()
    for _ in range(3):
        found = names(stragglers, 0.0, 0.5, 0.0, 0.2)
    assert found == ["rank 1: disk over 100× the median", "rank 3: disk over 100× the median"]


def test_noise_names_nobody() -> None:
    """Steps of eight ranks that differ by a fifth, and every twentieth of them by a factor of three, for a thousand steps."""
    rng = random.Random(0)
    stragglers = Stragglers()
    named = 0
    for _ in range(1000):
        rows = [rng.gauss(1.0, 0.2) * (3.0 if rng.random() < 0.05 else 1.0) for _ in range(8)]
        named += len(names(stragglers, *rows, cause="compute", step=3.0))
    assert named < 50, "three slow steps running by chance, once or twice"


def test_every_rank_hears_the_same_and_news_once() -> None:
    watches = [Watch(None), Watch(None)]
    paces = [Pace(watch) for watch in watches]
    said: list[list[str | None]] = []
    for slow in (0, 0, 1, 1, 1, 1, 0, 0, 0):
        for rank, pace in enumerate(paces):
            pace.begin()
            watches[rank].note_wait(0.5 if slow == 1 != rank else 0.0)
            pace.note(1.0, 0.6 if rank == slow == 1 else 0.1)
        said.append([pace.hear([p.row() for p in paces]) for pace in paces])
    assert all(one == two for one, two in said)
    assert [one for one, _ in said if one] == ["rank 1: disk 6.0× the median", "no rank stands out any more"]
    assert paces[0].straggler is None


def test_time_spent_waiting_for_others_is_not_compute() -> None:
    watches = [Watch(None), Watch(None)]
    paces = [Pace(watch) for watch in watches]
    for _ in range(3):
        for pace in paces:
            pace.begin()
        watches[0].note_wait(0.8)  # rank 0 waits for rank 1
        for pace in paces:
            pace.note(1.0, 0.0)
        news = [pace.hear([p.row() for p in paces]) for pace in paces]
    assert news == ["rank 1: compute 5.0× the median"] * 2


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_a_straggler_is_shown_as_long_as_it_is_one(kind: type[Bar | Lines]) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=kind is Bar)
    reporter: Reporter = kind(console)
    reporter.start(2, Limits())
    base = dict.fromkeys(("peak_bytes", "host_bytes", "disk_bytes", "disk_read_bytes", "disk_written_bytes"), 0)
    numbers = dict.fromkeys(("loss", "seconds", "tokens_per_second", "lr", "disk_wait_seconds"), 1.0)
    for step, straggler in ((1, None), (2, "rank 1: disk 3.1× the median")):
        assert "median" not in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        reporter.step(StepRecord(step=step, grad_norm=None, skipped=False, straggler=straggler, **base, **numbers))  # type: ignore[arg-type]
    reporter.close()
    assert "rank 1: disk 3.1× the median" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
