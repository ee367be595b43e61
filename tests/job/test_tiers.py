"""``lowtide train`` within a memory number and with a disk: the same losses, the numbers beside them, nothing left behind."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lowtide.cli.main import run
from lowtide.job.gauges import Gauge, Limits, gauge_row
from lowtide.job.memory import RankMemory, SharedPages, counted_peak
from lowtide.job.models import build_model
from lowtide.job.options import Options
from lowtide.job.progress import Bar, Lines, Reporter
from lowtide.job.records import SUMMARY, Result, StepRecord
from lowtide.job.show import summary_lines
from lowtide.spec.probe import assumed_machine, cache_machine
from lowtide.tiers.spool import Folder, Spool

ROOT = Path(__file__).resolve().parents[2]
TINY_GPT = ["--model", "tests.job.specimens:tiny_gpt", "--threads", "1"]
MIB = 2**20


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


def _train(capfd: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run(["train", "--synthetic", "--json", *flags]) == 0, capfd.readouterr().err
    return json.loads(capfd.readouterr().out)


def test_a_preset_within_a_memory_number_gives_the_same_losses(spool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In processes of their own: the memory of this one is not the job's."""
    flags = ["train", "--synthetic", "--json", "--steps", "3", "--preset", "gpt-17m"]
    limited = ["--memory", "480MiB", "--disk", f"{spool}:4GiB"]
    results: list[dict[str, Any]] = []
    for extra in ([], limited):
        done = subprocess.run([sys.executable, "-m", "lowtide", *flags, *extra], capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stderr) == (0, "")
        results.append(json.loads(done.stdout))
    plain, ours = results
    assert ours["losses"] == plain["losses"]
    assert list(ours) == list(SUMMARY)
    assert ours["budget_bytes"] == 480 * MIB
    assert ours["update"] == "backward"
    for key in ("disk_read_bytes", "disk_written_bytes"):
        assert len(ours[key]) == 3
        assert min(ours[key]) > 10 * MIB
    assert len(ours["disk_wait_seconds"]) == 3
    assert min(ours["disk_wait_seconds"]) >= 0
    assert plain["disk_read_bytes"] == [0, 0, 0]
    assert (plain["update"], plain["activations"]) == ("step", "keep")
    assert ours["peak_bytes"] < plain["peak_bytes"]
    assert list(spool.iterdir()) == []


def test_two_ranks_add_up_what_they_moved(spool: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "gpt-17m", "--synthetic", "--steps", "2", "--ranks", "2"]
    plain = _train(capfd, *flags)
    # a number in which the states do not fit beside what torch takes
    limits = ["--memory", "800MiB", "--disk", str(spool)]
    ours = _train(capfd, *flags, *limits, "--update", "step", "--run", str(tmp_path / "run"))
    assert ours["losses"] == plain["losses"]
    assert ours["update"] == "step"
    own = [json.loads(line)["disk_written_bytes"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = ours["disk_written_bytes"]
    assert all(both >= mine > 0 for both, mine in zip(written, own, strict=True))
    assert sum(written) > 1.2 * sum(own), "what a rank still writes after a step counts for its next one"
    assert list(spool.iterdir()) == []


def test_activations_are_as_asked_and_every_step_is_recorded(
    spool: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.runtime.assembly.default_budget", lambda: None)  # all of it on disk, small as it is
    flags = [*TINY_GPT, "--steps", "3", "--disk", str(spool), "--run", str(tmp_path / "run")]
    ours = _train(capfd, *flags, "--activations", "recompute")
    assert ours["losses"] == _train(capfd, *TINY_GPT, "--steps", "3")["losses"]
    assert ours["activations"] == "recompute"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for key in ("disk_read_bytes", "disk_written_bytes", "disk_wait_seconds"):
        assert [record[key] for record in records] == ours[key]
    assert 0 < records[2]["disk_read_bytes"] < 1.5 * records[1]["disk_read_bytes"]  # of that step, not of all so far
    assert all(record["disk_bytes"] > 0 for record in records)
    assert "optimizer" in (tmp_path / "run" / "plan.txt").read_text()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["disk"] == [str(spool)]


def test_the_batch_may_be_chosen_by_the_planner(capfd: pytest.CaptureFixture[str]) -> None:
    chosen = _train(capfd, *TINY_GPT, "--steps", "1", "--batch", "auto", "--memory", "4GiB")
    assert chosen["batch"] > 2, "a batch of one or two leaves most of this memory and of the processor unused"
    assert chosen["predicted_seconds"] > 0
    again = _train(capfd, *TINY_GPT, "--steps", "1", "--batch", str(chosen["batch"]))
    assert chosen["losses"] == again["losses"]


def test_a_job_with_a_disk_builds_its_model_there(spool: Path) -> None:
    def in_a_file(options: Options) -> bool:
        return any(parameter.untyped_storage().is_shared() for parameter in build_model(options).model.parameters())

    options = Options(model="tests.job.specimens:tiny_gpt", synthetic=True)
    assert not in_a_file(options)
    assert in_a_file(replace(options, disk=(f"{spool}:1GiB",)))


def test_a_memory_number_that_is_too_small_is_one_line(spool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--synthetic", "--memory", "20MiB", "--disk", str(spool), *TINY_GPT]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "20.0 MiB allowed" in err
    gc.collect()  # the model that did not fit stands in a cycle with its engine
    assert list(spool.iterdir()) == []


def test_options_with_folders_travel_as_json(tmp_path: Path) -> None:
    options = Options(
        memory="2GiB", disk=(str(tmp_path), f"{tmp_path}:3GiB"), activations="disk", synthetic=True, update="step"
    )
    back = Options.from_json(options.to_json())
    assert back == options
    assert (back.memory_bytes, back.disk_folders) == (2 << 30, [str(tmp_path)] * 2)


def test_the_update_runs_in_backward_only_where_nothing_is_clipped_and_memory_counts(tmp_path: Path) -> None:
    disk = (str(tmp_path),)
    assert Options(synthetic=True).update_when == "step"
    assert Options(synthetic=True, disk=disk).update_when == "backward"
    assert Options(synthetic=True, memory="1GiB").update_when == "backward"
    assert Options(synthetic=True, disk=disk, update="step").update_when == "step"
    assert Options(disk=disk).update_when == "step"


# -- what a person sees -------------------------------------------------------------------------------------------------


def _record(*, host: int, disk: int) -> StepRecord:
    return StepRecord(
        step=1,
        loss=2.0,
        seconds=0.5,
        tokens_per_second=100.0,
        lr=1e-3,
        grad_norm=None,
        skipped=False,
        peak_bytes=700 * MIB,
        host_bytes=host,
        disk_bytes=disk,
        disk_read_bytes=11 * MIB,
        disk_written_bytes=22 * MIB,
        disk_wait_seconds=0.25,
    )


def _shown(kind: type[Bar | Lines], limits: Limits) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=kind is Bar)
    reporter: Reporter = kind(console)
    reporter.start(1, limits)
    reporter.step(_record(host=600 * MIB, disk=1200 * MIB))
    reporter.close()
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", [Bar, Lines])
def test_what_is_limited_is_shown_against_its_limit(kind: type[Bar | Lines]) -> None:
    both = _shown(kind, Limits(host_bytes=1000 * MIB, disk_bytes=78 << 30))
    assert "600 of 1000 MiB" in both
    assert "1.17 of 78.00 GiB" in both
    assert "host" not in _shown(kind, Limits(disk_bytes=3000 * MIB))
    assert " of " not in _shown(kind, Limits())


def test_a_bar_says_how_far_a_save_is() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    bar = Bar(console)
    bar.start(10, Limits(), done=4)
    bar.saving(30, 100)
    bar.close()
    assert "saving 30%" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "4/10" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_line_says_what_the_step_moved() -> None:
    assert "read 11.0 MiB, written 22.0 MiB" in _shown(Lines, Limits(disk_bytes=1))


def test_a_bar_is_as_long_as_what_is_used() -> None:
    def drawn(used: int) -> int:
        console = Console(file=io.StringIO(), width=60)
        console.print(gauge_row([Gauge("host", used, 100)]))
        return console.file.getvalue().count("━")  # pyright: ignore[reportAttributeAccessIssue]

    assert drawn(0) < drawn(50) < drawn(100) == drawn(200)


def _result(*, counted: int, budget: int | None) -> Result:
    return Result(
        params=10,
        stage=3,
        ranks=1,
        seconds=[1.0, 1.0],
        losses=[2.0, 1.0],
        validation=[],
        peak_bytes=900 * MIB,
        peak_bytes_per_rank=[900 * MIB],
        counted_bytes=counted,
        budget_bytes=budget,
        disk_bytes=30 * MIB,
        disk_read_bytes=[5 * MIB, 10 * MIB],
        disk_written_bytes=[5 * MIB, 20 * MIB],
        disk_wait_seconds=[9.0, 0.5],
        activations="keep 2, recompute 1",
        update="backward",
        skipped=0,
        stopped_by=None,
        resumed_from=7,
        checkpoints=["run/checkpoints/step-000009"],
        saves_seconds=[0.5],
        events={"save": 1, "save_failed": 0, "passed_over": 2},
        batch=2,
        predicted_seconds=1.1,
        predicted_peak_bytes=counted,
    )


def test_the_summary_says_whether_the_memory_number_held() -> None:
    text = "\n".join(summary_lines(_result(counted=800 * MIB, budget=1000 * MIB), Options()))
    assert "held: peak 800.0 MiB of 1,000.0 MiB (80%); on top 100.0 MiB of pages of files" in text
    assert text.count("peak 8") == 1  # a second one, over the number, would read like a broken promise
    assert "stage" not in text  # of one rank, which cuts nothing
    assert "the plan said 1.100 s (10% too high) and a peak of 800.0 MiB (as it was)" in text
    assert "30.0 MiB in use; 10.0 MiB read, 20.0 MiB written, 0.50 s waited per step" in text
    assert "activations: keep 2, recompute 1; update: in backward" in text
    assert "EXCEEDED: peak 800.0 MiB of 700.0 MiB" in "\n".join(
        summary_lines(_result(counted=800 * MIB, budget=700 * MIB), Options())
    )
    lines = "\n".join(summary_lines(_result(counted=1, budget=None), Options(run="run")))
    for part in ("from step 7", "step-000009 (1 in all, 0.5 s)", "save 1, passed over 2", "events.jsonl"):
        assert part in lines
    assert "budget" not in "\n".join(summary_lines(_result(counted=1, budget=None), Options()))


def test_pages_of_files_do_not_count_and_shared_memory_counts_once() -> None:
    library = SharedPages("8:1:7", 100, 400, shared_memory=False)
    segment = SharedPages("0:1:9", 40, 25, shared_memory=True)
    ranks = [RankMemory("here", 1000, (library, segment)), RankMemory("here", 1000, (library, segment))]
    # 2000, less the second count of the library (100) and of shared memory (30), less the library itself
    assert counted_peak(ranks) == 2000 - 100 - 30 - 100


# -- what dead jobs leave -----------------------------------------------------------------------------------------------


@pytest.fixture
def dead_job(spool: Path, tmp_path: Path) -> Path:
    """The folder of a job that was killed while it trained."""
    metrics = tmp_path / "dead" / "metrics.jsonl"
    flags = ["--synthetic", "--steps", "100000", "--disk", str(spool), "--run", str(metrics.parent)]
    job = subprocess.Popen([sys.executable, "-m", "lowtide", "train", *TINY_GPT, *flags], stdout=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.wait()
    (left,) = spool.iterdir()
    return left


@pytest.fixture
def _measured_before(spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor remembers of the machine, so that it measures nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_machine(assumed_machine(str(spool)), str(spool))


@pytest.mark.usefixtures("_measured_before")
def test_doctor_removes_what_a_dead_job_left_and_nothing_else(
    dead_job: Path, spool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (spool / "lowtide-notes.txt").write_text("mine")
    living = Spool(Folder(str(spool)), rank=0)
    try:
        assert run(["doctor", "--quick", str(spool)]) == 0
        out = capsys.readouterr().out
        assert f"{dead_job} was left by a dead job" in out
        assert living.path not in out
        assert dead_job.exists()

        assert run(["doctor", "--clean", "--json", str(spool)]) == 0
        (finding,) = json.loads(capsys.readouterr().out)["folders"]
        assert finding == {"folder": str(spool), "left": [], "removed": [str(dead_job)]}
        assert sorted(spool.iterdir()) == sorted([Path(living.path), spool / "lowtide-notes.txt"])
    finally:
        living.close()


@pytest.mark.usefixtures("_measured_before")
def test_doctor_says_what_it_could_not_remove(dead_job: Path, spool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dead_job / "somebody's file").write_text("mine")
    assert run(["doctor", "--clean", str(spool)]) == 0
    assert f"{dead_job} was kept" in capsys.readouterr().out
    assert (dead_job / "somebody's file").exists()
    (dead_job / "somebody's file").unlink()
    assert run(["doctor", "--clean", str(spool)]) == 0
    assert f"removed {dead_job}" in capsys.readouterr().out
    assert run(["doctor", "--quick", str(spool)]) == 0
    assert "nothing was left" in capsys.readouterr().out


@pytest.mark.usefixtures("_measured_before")
def test_doctor_shows_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["machine"]) == {"processor", "memory", "system", "software"}
    assert report["folders"] == []
