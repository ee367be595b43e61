"""A run that was killed and started again ends with the bits of one that was never disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli.main import run as run_command
from lowtide.job.events import Events
from lowtide.job.records import ValidationRecord
from lowtide.job.run_folder import RunFolder
from tests.job.jobs import OneRank, assert_same_numbers, events_of, steps_of
from tests.job.specimens import KILL

STEPS = 8
FRAGILE = ["--model", "tests.job.specimens:fragile", "--threads", "1", "--json", "--steps", str(STEPS)]
SETUPS = {
    "text": [],
    "synthetic": ["--synthetic"],  # undisturbed in the fixture below
    "disk": ["--synthetic", "--disk"],
    "disk-step": ["--synthetic", "--update", "step", "--disk"],
    "memory": ["--synthetic", "--memory", "2GiB", "--disk"],
}


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _flags(setup: str, tmp_path: Path, run: str) -> list[str]:
    flags = [*FRAGILE, *SETUPS[setup], "--run", str(tmp_path / run)]
    if flags[-3] == "--disk":
        (tmp_path / "spool").mkdir(exist_ok=True)
        flags.insert(-2, str(tmp_path / "spool"))
    if setup == "text":
        (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
        flags += ["--data", str(tmp_path / "text.txt")]
    return flags


def _job(setup: str, tmp_path: Path, run: str, *more: str, **environment: str) -> OneRank:
    on_disk = setup.startswith("disk")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return OneRank(tmp_path, *_flags(setup, tmp_path, run), *more, all_on_disk=on_disk, **cache, **environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A synthetic run that nobody disturbs, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = _job("synthetic", folder, "whole", "--save-every", "2", "--keep", "9").wait()
    assert ended.code == 0, ended
    return folder / "whole", ended.result


def _assert_same_run(run: Path, result: dict[str, Any], expected: Path, whole: dict[str, Any]) -> None:
    assert result["losses"] == whole["losses"]
    last = f"checkpoints/step-{STEPS:06d}"
    assert_same_numbers(run / last, expected / last)
    ours, theirs = steps_of(run), steps_of(expected)
    for key in ("step", "loss", "lr", "grad_norm"):
        assert [record[key] for record in ours] == [record[key] for record in theirs]


@pytest.mark.parametrize("setup", ["text", "disk", "disk-step", "memory"])
def test_a_killed_run_goes_on_with_the_same_bits(setup: str, tmp_path: Path) -> None:
    """Killed in the fourth and, of the second process, in the third step: one after a checkpoint, one before any new one."""
    whole = _job(setup, tmp_path, "whole").wait()
    assert whole.code == 0, whole
    assert len(set(whole.result["losses"])) == STEPS
    for where, count in (("first", 4), ("second", 3)):
        killed = _job(setup, tmp_path, "cut", "--save-every", "2", **{KILL: f"step 0 {count} {tmp_path / where}"}).wait()
        assert killed.code == -signal.SIGKILL, killed
    assert len(steps_of(tmp_path / "cut")) == 4
    done = _job(setup, tmp_path, "cut", "--save-every", "2").wait()
    assert done.code == 0, done
    assert done.result["resumed_from"] == 4
    assert [Path(path).name for path in done.result["checkpoints"]] == ["step-000006", "step-000008"]
    assert len(done.result["saves_seconds"]) == 2
    for key in ("seconds", "disk_read_bytes", "disk_written_bytes", "disk_wait_seconds"):
        assert len(done.result[key]) == STEPS
    _assert_same_run(tmp_path / "cut", done.result, tmp_path / "whole", whole.result)
    counts = done.result["events"]
    assert (counts["failure"], counts["resume"], counts["save"]) == (2, 2, 4)
    assert "without a word" in events_of(tmp_path / "cut", "failure")[0]["cause"]


@pytest.mark.parametrize(("how", "count"), [([], 1), ([], 14), (["--background-saves"], 5)])
def test_a_kill_in_a_save_loses_nothing(how: list[str], count: int, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """At some of the moments when a save has written something and makes it durable; nothing half-written stays."""
    flags = [*how, "--save-every", "3", "--keep", "1"]
    killed = _job("synthetic", tmp_path, "cut", *flags, **{KILL: f"save 0 {count} {tmp_path / 'marker'}"}).wait()
    assert killed.code == -signal.SIGKILL, killed
    done = _job("synthetic", tmp_path, "cut", *flags).wait()
    assert done.code == 0, done
    _assert_same_run(tmp_path / "cut", done.result, *whole)
    assert sorted(os.listdir(tmp_path / "cut" / "checkpoints")) == ["LATEST", f"step-{STEPS:06d}"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [[], ["--background-saves"]], ids=["waiting", "background"])
@pytest.mark.parametrize("setup", ["text", "disk"])
def test_a_kill_at_every_moment_of_a_save_loses_nothing(setup: str, how: list[str], tmp_path: Path) -> None:
    """One run that is killed at the first, second, ... fsync of each of its processes until one comes through to its end."""
    undisturbed = _job(setup, tmp_path, "whole").wait().result
    for count in range(1, 100):
        flags = ["--save-every", "1", "--keep", "2", *how]
        ended = _job(setup, tmp_path, "cut", *flags, **{KILL: f"save 0 {count} {tmp_path / str(count)}"}).wait()
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended
    _assert_same_run(tmp_path / "cut", ended.result, tmp_path / "whole", undisturbed)
    assert count > STEPS
    assert len(os.listdir(tmp_path / "cut" / "checkpoints")) == 3


def test_a_damaged_checkpoint_is_passed_over(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "cut"
    shutil.copytree(whole[0], run)
    damaged = run / "checkpoints" / "step-000008" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (run / "checkpoints" / "step-000006" / "manifest.json").write_text("{")
    done = _job("synthetic", tmp_path, "cut").wait()
    assert done.code == 0, done
    assert done.result["resumed_from"] == 4
    _assert_same_run(run, done.result, *whole)
    causes = [event["cause"] for event in events_of(run, "passed_over")]
    assert len(causes) == done.result["events"]["passed_over"] == 2
    assert any("step-000006" in cause for cause in causes)
    assert any("step-000008" in cause for cause in causes)


@pytest.mark.parametrize("how", [[], ["--background-saves"]], ids=["waiting", "background"])
def test_a_save_that_fails_on_the_way_does_not_end_the_run(how: list[str], tmp_path: Path) -> None:
    obstacle = tmp_path / "run" / "checkpoints" / "step-000003"
    obstacle.mkdir(parents=True)
    (obstacle / "notes.txt").write_text("of a person")
    done = _job("synthetic", tmp_path, "run", "--save-every", "3", *how).wait()
    assert done.code == 0, done
    assert [Path(path).name for path in done.result["checkpoints"]] == ["step-000006", "step-000008"]
    assert done.result["events"]["save_failed"] == 1
    assert (obstacle / "notes.txt").read_text() == "of a person"


def test_a_run_that_is_done_goes_on_only_with_more_steps(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    again = _job("synthetic", tmp_path, "run").wait()
    assert again.code == 0, again
    assert (again.result["resumed_from"], again.result["checkpoints"]) == (STEPS, [])
    assert again.result["losses"] == whole[1]["losses"]
    more = _job("synthetic", tmp_path, "run", "--steps", "10", "--lr", "5e-4").wait()
    assert more.result["losses"][:STEPS] == whole[1]["losses"]
    assert [record["lr"] for record in steps_of(tmp_path / "run")][-3:] == [1e-3, 5e-4, 5e-4]


def test_a_checkpoint_of_another_run_is_a_start(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    named = str(whole[0] / "checkpoints" / "step-000004")
    done = _job("synthetic", tmp_path, "branch", "--resume", named).wait()
    assert done.code == 0, done
    assert done.result["resumed_from"] == 4
    assert done.result["losses"] == whole[1]["losses"]
    assert [record["step"] for record in steps_of(tmp_path / "branch")] == [5, 6, 7, 8]
    # The same command again does not go back: the branch has checkpoints of its own.
    assert _job("synthetic", tmp_path, "branch", "--resume", named).wait().result["resumed_from"] == STEPS


def test_a_run_may_go_back_to_one_of_its_own_checkpoints(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    done = _job("synthetic", tmp_path, "run", "--resume", str(run / "checkpoints" / "step-000004")).wait()
    assert done.result["resumed_from"] == 4
    _assert_same_run(run, done.result, *whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "never"], "already holds a run"),
        (["--data", __file__], "already holds a run of another job (--data was None)"),
    ],
)
def test_another_job_may_not_touch_a_run(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"preset": None, "model": None, "data": None, "synthetic": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_command(["train", "--run", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err


def test_two_jobs_in_one_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.job.run_folder._PATIENCE", 0.2)
    holder = RunFolder(tmp_path / "run")
    assert run_command(["train", "--run", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"another job uses now (process {os.getpid()} on " in err
    holder.close()
    RunFolder(tmp_path / "run").close()


def test_events_survive_a_torn_line(tmp_path: Path) -> None:
    first = Events(tmp_path)
    first.note("start", "process 1")
    first.note("skip", "infinite", step=3)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "sa')
    again = Events(tmp_path)
    again.note_silent_end()
    assert Events(tmp_path).counts() == {**dict.fromkeys(again.counts(), 0), "skip": 1, "failure": 1}
    assert Events(tmp_path / "elsewhere").counts()["skip"] == 0


def test_a_full_disk_loses_lines_and_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "events.jsonl").symlink_to("/dev/full")  # a link is not written through, whatever it leads to
    folder.events.note("skip", "infinite", step=3)
    assert folder.events.counts()["skip"] == 1
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    folder._metrics = open(tmp_path / "metrics.jsonl", "ab", buffering=0)
    folder.add(ValidationRecord(step=4, validation_loss=1.0))
    folder.close()
    reasons = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert reasons == ["it is not a plain file", "No space left on device"]
