"""A signal ends a job after a step, on all ranks together, with a checkpoint that the next one goes on from."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lowtide.job.interrupt import exit_code
from tests.job.jobs import OneRank, Ranks, events_of, lowtide_train, steps_of, wait_until
from tests.job.specimens import PAUSE

FRAGILE = ["--model", "tests.job.specimens:fragile", "--synthetic", "--threads", "1", "--json"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGUSR1", "SIGINT"]
)
def test_a_signal_saves_and_the_next_job_goes_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*FRAGILE, "--run", str(run), "--steps", "100"]
    job = OneRank(tmp_path, *flags, **{PAUSE: "0.05"})
    wait_until(lambda: len(steps_of(run)) >= 3, job)
    job.send(number)
    ended = job.wait()
    assert (ended.code, ended.err) == (code, "")
    result = ended.result
    done = len(result["losses"])
    assert 3 <= done < 100
    assert result["stopped_by"] == number.name
    assert [Path(path).name for path in result["checkpoints"]] == [f"step-{done:06d}"]
    assert [event["event"] for event in events_of(run)] == ["start", "signal", "save", "end"]
    assert (events_of(run, "signal")[0]["cause"], result["events"]["signal"]) == (number.name, 1)
    again = OneRank(tmp_path, *flags, "--steps", str(done + 1)).wait()
    assert again.code == 0, again
    assert again.result["resumed_from"] == done
    assert again.result["losses"][:done] == result["losses"]
    assert again.result["stopped_by"] is None


def test_a_signal_without_a_run_folder_says_that_nothing_was_saved(tmp_path: Path) -> None:
    flags = [flag for flag in FRAGILE if flag != "--json"]
    job = OneRank(tmp_path, *flags, "--steps", "1000", **{PAUSE: "0.05"})
    wait_until(lambda: "step " in job.out, job)
    job.send(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143, ended
    assert "stopped by SIGTERM after" in ended.out
    assert "saved" not in ended.out


def test_one_rank_that_gets_a_signal_stops_all_at_one_step(tmp_path: Path) -> None:
    """Also if it comes again, as a scheduler and a launcher may both send it; the checkpoint is complete."""
    run = tmp_path / "run"
    job = Ranks(lowtide_train(*FRAGILE, "--run", str(run), "--steps", "1000", "--ranks", "2"), **{PAUSE: "0.1"})
    wait_until(lambda: len(steps_of(run)) >= 3, job)
    ranks = job.ranks()
    ranks[1].send_signal(signal.SIGTERM)
    for _ in range(3):
        job.process.send_signal(signal.SIGTERM)  # it passes them on to both
        time.sleep(0.01)
    ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert ended.result["stopped_by"] == "SIGTERM"
    done = len(ended.result["losses"])
    assert (run / "checkpoints" / f"step-{done:06d}" / "rank-00001.json").exists()
    assert len(ended.result["checkpoints"]) == 1
    assert not any(rank.is_running() for rank in ranks.values())


def test_exit_codes() -> None:
    assert exit_code(None, saved=True) == exit_code(None, saved=False) == 0
    assert [exit_code(name, saved=True) for name in ("SIGTERM", "SIGUSR1", "SIGINT")] == [0, 0, 130]
    assert [exit_code(name, saved=False) for name in ("SIGTERM", "SIGUSR1", "SIGINT")] == [143, 138, 130]
