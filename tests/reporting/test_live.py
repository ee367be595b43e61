"""``lowtide top``: what a job's files say now, while it writes them and after it has ended or died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowtide.cli.main import run as cli
from lowtide.reporting.format import encode
from lowtide.reporting.live import Live, Snapshot
from lowtide.reporting.live_screen import screen
from lowtide.reporting.timeline import now_path
from tests.kit.synthetic_run import GIB, Job, lines, write_extras, write_run

HERE = {"host": socket.gethostname(), "started": time.time(), "detailed": ()}


def shown(snapshot: Snapshot, width: int = 120) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen(snapshot))
    return out.getvalue()


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    """Only what is new is read, and time left follows from the steps there are."""
    job = Job(steps=40, pid=os.getpid(), end=None, **HERE)
    write_extras(tmp_path, job)
    told = [encode(line) for line in lines(job, 0)]
    (tmp_path / "timeline").mkdir()
    path = tmp_path / "timeline" / "rank-00000.jsonl"
    half = len(told) // 2
    path.write_bytes(b"".join(told[:half]) + told[half][:10])
    live = Live(tmp_path)
    first = live.look()
    assert first.words == "running"
    assert not first.is_over
    assert first.steps == 40
    rank = first.ranks[0]
    assert rank.disk_share == pytest.approx(0.31, abs=0.01)
    assert first.seconds_left == pytest.approx((40 - rank.step) * 2.0, rel=0.15)
    with open(path, "ab") as file:
        file.write(told[half][10:] + b"".join(told[half + 1 :]))
    second = live.look()
    assert second.ranks[0].step == 40 > rank.step
    assert second.seconds_left == 0
    assert second.marks[-1].what == "checkpoint"
    text = shown(second)
    assert "step 40 of 40" in text
    assert "of 4.00 GiB" in text
    assert "waits: disk 31 %" in text


def test_the_newest_figures_stand_beside_the_timeline(tmp_path: Path) -> None:
    job = Job(steps=5, pid=os.getpid(), end=None, **HERE)
    write_run(tmp_path, job)
    newer = [encode(line) for line in lines(job, 0) if getattr(line, "step", 0) == 5 and line.KIND in ("step", "memory")]
    text = b"".join(newer).replace(b'"step":5', b'"step":9')
    now_path(tmp_path / "timeline" / "rank-00000.jsonl").write_bytes(text)
    assert Live(tmp_path).look().ranks[0].step == 9


def test_tiers_against_their_limits(tmp_path: Path) -> None:
    write_run(tmp_path, Job(ranks=2, budget=2 * GIB, parked=3 * GIB, end=None, pid=os.getpid(), **HERE))
    tiers = {tier.tier: tier for tier in Live(tmp_path).look().ranks[1].tiers}
    assert tiers["host"].limit_bytes == 2 * GIB
    assert 0 < tiers["host"].used_bytes < 2 * GIB
    assert tiers["disk"].used_bytes == 3 * GIB
    assert tiers["disk"].limit_bytes == 203 * GIB, "what it has and what is free"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"end": "done"}, "ended"),
        ({"end": "error", "end_text": "ValueError: no"}, "ended with an error"),
        ({"end": None, "host": "elsewhere", "started": time.time() - 3600}, "it runs on another host"),
    ],
)
def test_what_is_said_of_a_run_that_writes_no_more(tmp_path: Path, job: dict[str, Any], words: str) -> None:
    write_run(tmp_path, Job(steps=3, detailed=()), **job)
    old = time.time() - 600
    os.utime(tmp_path / "timeline" / "rank-00000.jsonl", (old, old))
    snapshot = Live(tmp_path).look()
    assert words in snapshot.words
    assert job.get("end_text", "") in shown(snapshot, 200)
    if job["end"] is None:
        assert "silent for 6" in snapshot.words


def test_a_process_that_is_gone_without_a_word(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write_run(tmp_path, Job(steps=3, end=None, pid=child.pid, **HERE))
    snapshot = Live(tmp_path).look()
    assert snapshot.is_over
    assert "gone without a word" in snapshot.words


def test_ranks_that_have_written_nothing_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, Job(ranks=3, steps=3, detailed=()))
    (tmp_path / "timeline" / "rank-00002.jsonl").unlink()
    assert "1 ranks have written nothing" in shown(Live(tmp_path).look())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, Job(ranks=2, steps=5, detailed=()))
    assert cli(["top", str(tmp_path), "--once", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["is_over"]
    assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
    assert seen["ranks"][0]["tiers"][0]["tier"] == "host"
    assert cli(["top", str(tmp_path)]) == 0, "it ends with the run"
    assert "rank 1" in capsys.readouterr().out
    assert cli(["top", str(tmp_path), "--every", "0"]) == 2
