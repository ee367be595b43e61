"""Ranks that are killed at any moment end all of them with one cause, and whoever starts them again gets the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job.jobs import Ranks, assert_same_numbers, events_of, lowtide_train, steps_of, torchrun, wait_until
from tests.job.specimens import KILL, PAUSE, RECORD

FRAGILE = ["--model", "tests.job.specimens:fragile", "--synthetic", "--threads", "1", "--json"]
STEPS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks that nobody disturbs."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = Ranks(lowtide_train(*FRAGILE, "--run", str(run), "--steps", str(STEPS), "--ranks", "2")).wait()
    assert (ended.code, ended.err) == (0, "")
    return run, ended.result


def test_ranks_that_are_killed_in_a_save_are_started_again(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, marker = tmp_path / "run", tmp_path / "marker"
    command = lowtide_train(*FRAGILE, "--run", str(run), "--steps", str(STEPS), "--ranks", "2", "--save-every", "3")
    ended = Ranks([*command, "--background-saves", "--restarts", "2"], **{KILL: f"save 0 14 {marker}"}).wait()
    assert ended.code == 0, ended
    assert marker.exists()
    assert "lowtide: restart 1 of 2: rank 0 was ended by SIGKILL" in ended.err
    result = ended.result
    assert result["resumed_from"] == 3
    assert result["losses"] == whole[1]["losses"]
    assert_same_numbers(run / "checkpoints" / f"step-{STEPS:06d}", whole[0] / "checkpoints" / f"step-{STEPS:06d}")
    counts = result["events"]
    assert (counts["failure"], counts["restart"], counts["resume"]) == (1, 1, 1)
    assert "SIGKILL" in events_of(run, "failure")[0]["cause"]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_rank_that_is_killed_while_it_builds_ends_all(tmp_path: Path) -> None:
    """Without a restart: one cause, a bad exit code, nobody left."""
    command = lowtide_train(*FRAGILE, "--run", str(tmp_path / "run"), "--steps", "3", "--ranks", "2")
    ended = Ranks(command, **{KILL: f"build 1 1 {tmp_path / 'marker'}"}).wait()
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err.splitlines()[-1].startswith("lowtide: rank 1 was ended by SIGKILL, and not by the kernel for memory")


def _used(folder: Path, attempt: int, ranks: int, steps: int) -> list[str]:
    """The samples that the ranks were given in the first ``steps`` steps, in the order of places."""
    rows = [[line.split() for line in (folder / f"{attempt}-{rank}").read_text().splitlines()] for rank in range(ranks)]
    return [rows[rank][step][place] for step in range(steps) for place in range(2) for rank in range(ranks)]


@pytest.mark.timeout(300)
def test_torchrun_goes_on_with_fewer_and_with_more_ranks(tmp_path: Path) -> None:
    """4 ranks, one is killed; 3, one is killed in a save; 4, one is killed, and torchrun itself starts them again.

    In every epoch each sample of the text is used exactly once.
    """
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("".join(f"{number:07d}\n" for number in range(60)))
    flags = ["--model", "tests.job.specimens:recorder", "--data", str(text), "--threads", "1", "--json"]
    flags += ["--run", str(run), "--steps", "24", "--save-every", "2"]
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    around = [{RECORD: str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")} for folder in folders]

    job = Ranks(torchrun(4, *flags), **around[0], **{PAUSE: "0.05"})
    wait_until(lambda: len(steps_of(run)) >= 5, job)
    job.ranks()[2].kill()
    ended = job.wait()
    assert ended.code != 0
    assert "rank 2 failed: ended without a word" in ended.err

    ended = Ranks(torchrun(3, *flags), **around[1], **{KILL: f"save 1 6 {tmp_path / 'one'}"}).wait()
    assert ended.code != 0
    assert (tmp_path / "one").exists()
    assert "rank 1 failed: ended without a word" in ended.err

    ended = Ranks(torchrun(4, *flags, restarts=1), **around[2], **{KILL: f"step 3 4 {tmp_path / 'two'}"}).wait()
    assert ended.code == 0, ended
    assert (tmp_path / "two").exists()
    assert [record["step"] for record in steps_of(run)] == list(range(1, 25))
    assert {kind: len(events_of(run, kind)) for kind in ("resume", "failure", "end")} == {"resume": 3, "failure": 3, "end": 1}
    changes = [("4 -> 3" in event["cause"], "3 -> 4" in event["cause"]) for event in events_of(run, "resume")]
    assert changes == [(True, False), (False, True), (False, False)]
    assert not list((run / "checkpoints").glob(".*"))

    first, second, third = (event["step"] for event in events_of(run, "resume"))
    used = _used(folders[0], 0, 4, first) + _used(folders[1], 0, 3, second - first)
    used += _used(folders[2], 0, 4, third - second) + _used(folders[2], 1, 4, 24 - third)
    windows = (json.loads((run / "config.json").read_text())["train_count"] - 1) // 8
    assert len(used) > 2 * windows
    for begin in range(0, len(used) - windows + 1, windows):
        assert sorted(used[begin : begin + windows]) == [f"{number:07d}" for number in range(windows)]
