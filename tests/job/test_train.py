"""``lowtide train`` gives the losses of plain PyTorch and DDP, keeps its records, and ends cleanly however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.cli.main import run
from lowtide.job.gpt import GPT
from lowtide.job.loop import Recipe
from lowtide.job.options import Options
from lowtide.job.presets import PRESETS, Shape
from tests.job.specimens import TINY
from tests.kit.dist import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY_GPT = ["--model", "tests.job.specimens:tiny_gpt"]
ONE_THREAD = ["--threads", "1"]
KEYS = [
    *("params", "stage", "ranks", "seconds", "losses", "peak_bytes", "peak_bytes_per_rank", "counted_bytes"),
    *("budget_bytes", "disk_read_bytes", "disk_written_bytes", "disk_wait_seconds", "activations", "update"),
    *("batch", "predicted_seconds", "predicted_peak_bytes"),
    *("skipped", "stopped_by", "resumed_from", "checkpoints", "saves_seconds", "events", "straggler"),
]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, this checkout in the ranks' path, and torch's threads as they were."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text that is easy to learn."""
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six seven eight nine ten\n" * 400)
    return path


def _plain_losses(shape: Shape, steps: int, *, rank: int = 0, ranks: int = 1) -> list[float]:
    """The loop that the job promises to reproduce, without lowtide."""
    torch.manual_seed(0)
    model: nn.Module = GPT(shape)
    if ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)
    losses: list[float] = []
    for _ in range(steps):
        x = torch.randint(0, shape.tokens, (2, shape.context))
        loss = model(x, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _ddp_losses(rank: int, ranks: int, steps: int) -> list[float]:
    return _plain_losses(TINY, steps, rank=rank, ranks=ranks)


def _json_of(text: str) -> dict[str, Any]:
    assert text.count("\n") == 1, text
    return json.loads(text)


@pytest.mark.parametrize(("stage", "threads"), [("auto", []), *((str(stage), ["--threads", "1"]) for stage in range(4))])
def test_one_rank_gives_the_losses_of_plain_pytorch(stage: str, threads: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--synthetic", "--json", "--steps", "5", "--stage", stage, *TINY_GPT, *threads]) == 0
    out, err = capfd.readouterr()
    result = _json_of(out)
    assert result["losses"] == _plain_losses(TINY, 5)
    assert err == ""
    assert list(result) == KEYS
    assert result["params"] == TINY.parameters
    assert result["stage"] == (0 if stage == "auto" else int(stage))
    assert len(result["seconds"]) == 5
    assert all(0 < seconds < 60 for seconds in result["seconds"])
    assert result["peak_bytes_per_rank"] == [result["peak_bytes"]]
    assert 10**8 < result["peak_bytes"] < 10**11


def test_a_preset_gives_the_losses_of_plain_pytorch(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--synthetic", "--json", "--steps", "2", "--preset", "gpt-17m", *ONE_THREAD]) == 0
    assert _json_of(capfd.readouterr().out)["losses"] == _plain_losses(PRESETS["gpt-17m"], 2)


def test_two_ranks_give_the_losses_of_ddp(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--synthetic", "--json", "--steps", "5", "--ranks", "2", *TINY_GPT]) == 0
    result = _json_of(capfd.readouterr().out)
    assert result["losses"] == run_ranks(2, _ddp_losses, 5)[0]
    assert (result["ranks"], result["stage"]) == (2, 3)
    assert len(result["peak_bytes_per_rank"]) == 2
    # torch's libraries are in both ranks and count once
    assert max(result["peak_bytes_per_rank"]) < result["peak_bytes"] < sum(result["peak_bytes_per_rank"]) - 50 * 2**20


def test_text_is_learned_and_recorded(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    flags = [
        "--data",
        str(text),
        "--steps",
        "60",
        "--batch",
        "4",
        "--lr",
        "3e-3",
        "--run",
        str(folder),
        "--stage",
        "3",
        *ONE_THREAD,
    ]
    assert run(["train", *TINY_GPT, *flags]) == 0
    assert "held-out text" in capfd.readouterr().out
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 61))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert validation[-1] < validation[0]
    assert not any(record["skipped"] for record in steps)
    config = json.loads((folder / "config.json").read_text())
    assert (config["params"], config["stage"], config["encoding"]) == (TINY.parameters, 3, "byte pairs")
    assert Path(config["tokens_file"]).is_file()
    assert "optimizer" in (folder / "plan.txt").read_text()


def test_a_model_that_shifts_labels_itself_is_trained(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(text), "--steps", "40", "--lr", "3e-2", "--run", str(tmp_path / "run"), "--json", *ONE_THREAD]
    assert run(["train", "--model", "tests.job.specimens:hugging_face_like", *flags]) == 0
    losses = _json_of(capfd.readouterr().out)["losses"]
    assert losses[-1] < 0.6 * losses[0]


def test_a_step_without_finite_gradients_is_skipped_and_recorded(text: Path, tmp_path: Path) -> None:
    flags = ["--data", str(text), "--steps", "4", "--run", str(tmp_path / "run"), "--json", *ONE_THREAD]
    assert run(["train", "--model", "tests.job.specimens:infinite_once", *flags]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["skipped"] for record in steps] == [False, True, False, False]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events if event["event"] == "skip"] == [("skip", 2)]
    # the schedule waits as well: the step after the skipped one uses its rate
    assert steps[2]["lr"] == steps[1]["lr"] != steps[3]["lr"]


def test_a_step_without_finite_gradients_may_end_the_job(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(text), "--steps", "4", "--run", str(tmp_path / "run"), "--nonfinite", "raise", "--json"]
    assert run(["train", "--model", "tests.job.specimens:infinite_once", *flags, *ONE_THREAD]) == 1
    assert "not finite at step 2, and --nonfinite is 'raise'" in capfd.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "skip", "failure"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_gradients_that_stay_infinite_end_the_job(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(text), "--steps", "30", "--run", str(tmp_path / "run"), "--json", *ONE_THREAD]
    assert run(["train", "--model", "tests.job.specimens:infinite_for_good", *flags]) == 1
    err = capfd.readouterr().err
    assert "not finite for 10 steps, until step 11" in err
    assert "Traceback" not in err


def test_a_failing_rank_ends_the_job_with_its_traceback_once(capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert run(["train", "--synthetic", "--ranks", "2", "--model", "tests.job.specimens:fails_on_rank_1"]) == 1
    out, err = capfd.readouterr()
    assert time.monotonic() - start < 60
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.count("ZeroDivisionError: a mistake on rank 1") == 1
    assert err.endswith("lowtide: rank 1: a mistake on rank 1\n")


def _wait_for_steps(metrics: Path, count: int, deadline: float) -> None:
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= count):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def test_ctrl_c_ends_the_job_after_a_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"

    def press_when_it_runs() -> None:
        _wait_for_steps(metrics, 3, time.monotonic() + 60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_when_it_runs).start()
    flags = ["--synthetic", "--steps", "100000", "--run", str(tmp_path / "run"), "--json"]
    assert run(["train", *TINY_GPT, *flags, *ONE_THREAD]) == 130
    out, err = capfd.readouterr()
    assert err == ""
    assert len(_json_of(out)["losses"]) == metrics.read_text().count("\n") >= 3


def test_ctrl_c_ends_two_ranks_that_learn_text(text: Path, tmp_path: Path) -> None:
    """The signal goes to the command alone, which passes it on; both ranks stop after the same step."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    flags = ["--data", str(text), "--steps", "2000", "--ranks", "2", "--run", str(tmp_path / "run"), "--json"]
    command = [sys.executable, "-m", "lowtide", "train", *TINY_GPT, *flags]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    _wait_for_steps(metrics, 12, time.monotonic() + 60)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=30)
    assert job.returncode == 130, err
    assert err == ""
    assert 2000 > len(_json_of(out)["losses"]) == metrics.read_text().count('"loss"') >= 12
    assert len(list((tmp_path / "cache" / "lowtide" / "corpus").glob("*.tokens"))) == 1


def test_options_travel_as_json() -> None:
    options = Options(preset="gpt-98m", stage=2, ranks=4, threads=3, lr=0.1, steps=7, seed=9, run="somewhere")
    assert Options.from_json(options.to_json()) == options


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = Recipe.for_text(200)
    rates = [recipe.rate(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == rates[19] == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert {Recipe.for_synthetic().rate(step, 200) for step in range(200)} == {1.0}
