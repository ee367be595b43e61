"""``lowtide demo``, which ``make run`` starts, tells its whole story."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_ctrl_c_leaves_nothing_on_disk(tmp_path: Path) -> None:
    code = """if True:
        from pathlib import Path
        from lowtide.job.larger import run_on_disk
        from lowtide.job.options import Options
        run_on_disk(Options(model="tests.job.specimens:tiny_gpt", steps=10**6, synthetic=True), Path("spool"))
    """
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    story = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=surroundings, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("spool/lowtide-demo-*/lowtide-*")):  # the job's own folder: it has come to training
        assert story.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    story.send_signal(signal.SIGINT)
    _, err = story.communicate(timeout=60)
    assert err.endswith("KeyboardInterrupt\n")
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(300)  # eight processes that import torch: half a minute, more on a busy machine
def test_the_story_is_told_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a short text\n" for i in range(5000)))
    command = [sys.executable, "-m", "lowtide", "demo", "--seconds", "1", "--data", "text.txt", "--run", "run"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=surroundings, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("identical bits, lowtide and") == 3
    assert done.stdout.count(": yes") == 3
    assert "memory number held" in done.stdout
    assert list(tmp_path.glob("lowtide-*")) == []
    for part in ("This machine", "17,037,312 parameters", "weights after it", "held-out text", "speed", "Next:"):
        assert part in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80
    assert (tmp_path / "run" / "metrics.jsonl").exists()
