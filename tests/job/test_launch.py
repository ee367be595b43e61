"""Ranks on this host: they meet in private, fail together with one cause, and end when they are told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.cli.output import say_failure
from lowtide.job.failure import Failure, first_cause
from lowtide.job.launch import start_ranks

ROOT = Path(__file__).resolve().parents[2]


def _script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rank.py"
    path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return [sys.executable, str(path), str(tmp_path)]


def test_every_rank_runs_with_its_own_number(tmp_path: Path) -> None:
    command = _script(tmp_path, "open(f'{sys.argv[1]}/saw-{rank}', 'w').write(os.environ['WORLD_SIZE'])")
    assert start_ranks(command, 3) is None
    assert {path.name: path.read_text() for path in tmp_path.glob("saw-*")} == {f"saw-{k}": "3" for k in range(3)}


def test_a_rank_that_leaves_with_an_error_ends_all(tmp_path: Path) -> None:
    command = _script(tmp_path, "sys.exit(print('last words', file=sys.stderr) or 7) if rank == 1 else time.sleep(60)")
    start = time.monotonic()
    failure = start_ranks(command, 3)
    assert time.monotonic() - start < 10
    assert failure is not None
    assert (failure.rank, failure.kind, failure.exit_code) == (1, "died", 1)
    assert "exit code 7" in failure.message
    assert "last words" in failure.traceback


def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    failure = start_ranks(_script(tmp_path, "os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)"), 3)
    assert failure is not None
    assert failure.message.startswith("rank 2 was ended by SIGKILL")


def test_a_report_of_a_rank_is_the_cause_and_gives_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = _script(
        tmp_path,
        """
        from pathlib import Path
        from lowtide.errors import ArgumentError, PeerFailed
        from lowtide.job.failure import describe, leave_report
        error = ArgumentError("--model returned a str") if rank == 1 else PeerFailed(1, "gone", "")
        leave_report(describe(error, rank), Path(os.environ["LOWTIDE_RANKS_FOLDER"]))
        time.sleep(60)
        """,
    )
    failure = start_ranks(command, 2)
    assert failure is not None
    assert say_failure(failure, ranks=2) == 2
    assert capsys.readouterr().err == "lowtide: --model returned a str\n"


def test_a_rank_0_that_hangs_is_spoken_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the others write is kept from the terminal as long as rank 0 can speak."""
    command = _script(
        tmp_path,
        """
        import signal
        from pathlib import Path
        from lowtide.errors import DeadlineExceeded
        from lowtide.job.failure import describe, leave_report
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        print("where everybody stood", file=sys.stderr, flush=True)
        error = DeadlineExceeded("gather of 'blocks.1'", 3.0, "rank 0 does not answer")
        leave_report(describe(error, rank), Path(os.environ["LOWTIDE_RANKS_FOLDER"]))
        sys.exit(1)
        """,
    )
    failure = start_ranks(command, 2)
    assert failure is not None
    assert failure.rank == 1
    assert "rank 0 does not answer" in failure.message
    assert capfd.readouterr().err == "where everybody stood\n"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    command = _script(
        tmp_path,
        """
        open(f"{sys.argv[1]}/folder-{rank}", "w").write(os.environ["LOWTIDE_RANKS_FOLDER"] + f" {os.getpid()}")
        sys.exit(rank)
        """,
    )
    start_ranks(command, 2)
    for path in tmp_path.glob("folder-*"):
        folder, pid = path.read_text().split()
        assert not Path(folder).exists()
        assert not Path("/proc", pid).exists()


def test_ranks_meet_in_private_and_end_with_their_launcher(tmp_path: Path) -> None:
    """One run for four facts, because starting torch takes seconds: the folder is private, no socket listens beyond the
    loopback interface, gathering works, and ranks are gone soon after their launcher was killed."""
    command = _script(
        tmp_path,
        """
        import json, stat
        from lowtide.job.ranks import gather_json, joined

        def listening():
            inodes = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")}
            for table in ("tcp", "tcp6"):
                for line in open(f"/proc/self/net/{table}").readlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and fields[9] in inodes:
                        yield fields[1].split(":")[0]

        with joined() as member:
            facts = {
                "mode": stat.S_IMODE(os.stat(os.environ["LOWTIDE_RANKS_FOLDER"]).st_mode),
                "listening": sorted(set(listening())),
                "gathered": gather_json({"rank": rank, "long": "x" * rank * 100}, member),
                "pid": os.getpid(),
            }
            json.dump(facts, open(f"{sys.argv[1]}/part-{rank}", "w"))
            os.rename(f"{sys.argv[1]}/part-{rank}", f"{sys.argv[1]}/facts-{rank}")
            time.sleep(100)
        """,
    )
    code = f"from lowtide.job.launch import start_ranks; start_ranks({command!r}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    _wait_until(lambda: len(list(tmp_path.glob("facts-*"))) == 2 or launcher.poll() is not None, seconds=60)
    launcher.kill()
    launcher.wait()
    everything = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    assert _wait_until(lambda: not any(Path("/proc", str(facts["pid"])).exists() for facts in everything), seconds=10)
    for facts in everything:
        assert facts["mode"] == 0o700
        assert set(facts["listening"]) <= {"0100007F"}  # 127.0.0.1 in the kernel's byte order
        assert facts["gathered"] == [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]


def test_the_cause_is_the_rank_that_failed_first_and_not_one_that_points_at_it() -> None:
    def failure(rank: int, *, kind: str = "bug", when: float = 0.0, secondary: bool = False) -> Failure:
        return Failure(rank=rank, kind=kind, message="", traceback="", time=when, secondary=secondary)

    pointing = failure(0, when=1.0, secondary=True)
    assert first_cause([]) is None
    assert first_cause([pointing, failure(1, when=2.0)]) == failure(1, when=2.0)
    assert first_cause([failure(0, when=3.0), failure(1, when=2.0)]) == failure(1, when=2.0)
    assert first_cause([failure(0, when=1.0), failure(1, kind="died", when=2.0)]) == failure(1, kind="died", when=2.0)
    asked = failure(1, kind="SIGTERM", when=2.0)
    assert first_cause([failure(0, when=1.0), asked]) == asked
    assert asked.exit_code == 143
    assert [failure(0, kind=kind).may_be_retried for kind in ("died", "bug", "error")] == [True] * 3
    assert [failure(0, kind=kind).may_be_retried for kind in ("argument", "interrupted", "SIGTERM")] == [False] * 3


def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    command = _script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, lambda number, frame: None)
        open(f'{sys.argv[1]}/ready-{rank}', 'w').close()
        time.sleep(60)
        """,
    )

    def interrupt_twice() -> None:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)  # two at once would be one

    threading.Thread(target=interrupt_twice).start()
    start = time.monotonic()
    failure = start_ranks(command, 2)
    assert time.monotonic() - start < 25
    assert failure is not None
    assert failure.kind == "interrupted"
    assert failure.exit_code == 130


def _wait_until(condition: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(autouse=True)
def _lowtide_is_importable_in_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
