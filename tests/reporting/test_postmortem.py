"""Out of memory, three ways: refused by lowtide, a failed allocation, killed by the kernel. Each ends in words and a page."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.main import run as cli
from lowtide.job.events import Events
from lowtide.job.ways import ways_out_of
from lowtide.reporting.findings import find
from lowtide.reporting.oom import Counters, counters_from, how_it_died, oom_killed, read_again, read_counters
from lowtide.reporting.postmortem import PostMortem, examine
from lowtide.reporting.report import POST_MORTEM, leave_post_mortem, open_report
from lowtide.reporting.timeline import read_run
from tests.kit.cgroup import ENTER, memory_group
from tests.kit.synthetic_run import GIB, MIB, Job, write_extras, write_run

BOOT = "a"
REFUSED = "OverBudget: activations (unit 'blocks.3'): 5120.0 MiB needed, 4096.0 MiB allowed. Raise memory=, or ..."


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def examined(folder: Path, **job: Any) -> PostMortem | None:
    return examine(read_run(write_run(folder, **{"detailed": (), **job})))


# -- recorded runs -----------------------------------------------------------------------------------------------------


def test_refused_by_lowtide(tmp_path: Path) -> None:
    post = examined(tmp_path, end="error", end_text=REFUSED)
    assert post is not None
    assert post.cause == "refused"
    assert post.short_bytes == GIB
    assert post.planned_bytes is not None
    assert sum(post.there.values()) > 0
    assert post.changes[-1] == "memory='5.00GiB': 1.00 GiB more"
    assert not any(change.startswith("memory='4") or change.startswith("memory='3") for change in post.changes), (
        "a smaller number does not help a job that needs more than its number"
    )


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
        "OSError: [Errno 12] Cannot allocate memory",
        "MemoryError",
    ],
)
def test_a_failed_allocation(tmp_path: Path, text: str) -> None:
    post = examined(tmp_path, end="error", end_text=text)
    assert post is not None
    assert post.cause == "allocation"
    assert text in post.sentence


@pytest.mark.parametrize("job", [{"end": "done"}, {"end": "error", "end_text": "ValueError: nothing to do with it"}])
def test_other_ends_need_no_post_mortem(tmp_path: Path, job: dict[str, Any]) -> None:
    assert examined(tmp_path, **job) is None
    assert leave_post_mortem(tmp_path) is None
    assert not (tmp_path / POST_MORTEM).exists()


def test_what_grew_is_named(tmp_path: Path) -> None:
    """32 MiB of every step are never given back, and are not lowtide's own."""
    post = examined(tmp_path, end="error", end_text="MemoryError", growth=32 * MIB, steps=21)
    assert post is not None
    assert post.since_step == 2
    assert [(g.kind, g.more_bytes) for g in post.grew] == [("Python and torch", 19 * 32 * MIB)]
    assert "Grew since step 2: Python and torch by 0.59 GiB." in post.text()


def silent(tmp_path: Path, **job: Any) -> PostMortem:
    here = {"host": socket.gethostname(), "pid": dead_process(), "started": time.time(), "end": None}
    post = examined(tmp_path, **{**here, **job})
    assert post is not None
    return post


def test_a_silent_end_at_the_limit_is_probably_memory(tmp_path: Path) -> None:
    post = silent(tmp_path, limit=3 * GIB, budget=3 * GIB, growth=40 * MIB, steps=30)
    assert post.cause == "perhaps killed"
    assert post.changes[0].startswith("memory='2.85GiB', which is below the limit of 3.00 GiB")


def test_a_silent_end_far_below_the_limit_is_not(tmp_path: Path) -> None:
    post = silent(tmp_path, limit=64 * GIB)
    assert post.cause == "other"
    assert "without a word" in post.sentence
    assert post.changes == ()


def test_the_kernel_s_counters_decide(tmp_path: Path) -> None:
    now = read_counters()
    if now.group_kills is None:
        pytest.skip("this kernel does not count kills for a control group here")
    fewer = Counters(group=now.group, boot=now.boot, group_kills=now.group_kills - 1)
    assert silent(tmp_path / "a", facts=tuple(fewer.facts().items())).cause == "killed"
    post = silent(tmp_path / "b", facts=tuple(now.facts().items()), limit=3 * GIB, budget=3 * GIB, growth=40 * MIB, steps=30)
    assert post.cause == "other", "at the limit, but the kernel says that it killed nobody"
    assert "counted no kill for memory" in post.sentence


def test_what_the_parent_of_the_ranks_saw_counts(tmp_path: Path) -> None:
    write_run(tmp_path, detailed=(), end=None, host=socket.gethostname(), pid=dead_process(), ranks=2)
    Events(tmp_path).note("failure", "rank 1 was ended by the kernel because memory ran out (its control group ...)", rank=1)
    found = find(tmp_path)
    assert found.post_mortem is not None
    assert found.post_mortem.cause == "killed"
    assert open_report(tmp_path).html().index('id="post-mortem"') < open_report(tmp_path).html().index('id="memory"')


def test_a_job_that_lives_is_not_dead(tmp_path: Path) -> None:
    assert examined(tmp_path, end=None, host=socket.gethostname(), pid=os.getpid(), started=time.time()) is None
    assert examined(tmp_path, end=None, host="elsewhere") is None


def test_the_next_start_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process that goes on has written its own first line already when it looks back."""
    here = {"host": socket.gethostname(), "detailed": (), "limit": 3 * GIB, "budget": 3 * GIB}
    write_run(tmp_path, **here, growth=40 * MIB, steps=30, end=None, pid=dead_process(), started=time.time() - 100)
    Events(tmp_path).note("start", "process 1")
    write_run(tmp_path, **here, steps=0, end=None, pid=os.getpid(), started=time.time())
    Events(tmp_path).note_silent_end()
    told = Events(tmp_path)._seen[-1]  # pyright: ignore[reportPrivateUsage]
    assert told["event"] == "failure"
    assert "ran out of memory" in told["cause"]
    assert "The smallest change that fits: memory='2.85GiB'" in told["cause"]
    assert "ran out of memory" in caplog.text
    assert 'id="post-mortem"' in (tmp_path / POST_MORTEM).read_text()


def test_the_planner_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of `lowtide train` without a disk: with one, it would fit."""
    text = "activations (unit 'blocks.3'): 1000.0 MiB needed, 900.0 MiB allowed."
    job = Job(budget=900 * MIB, has_folder=False, end="error", end_text=text, detailed=())
    write_run(tmp_path, job)
    write_extras(tmp_path, job, memory="900MiB", preset="gpt-98m")
    assert cli(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "The smallest change that fits: a disk with " in out
    assert "(disk='/a/folder')" in out


def test_the_page_has_the_planner_s_ways_out(tmp_path: Path) -> None:
    """Not only `lowtide report`: the page that the job itself leaves."""
    text = "activations (unit 'blocks.3'): 1000.0 MiB needed, 900.0 MiB allowed."
    job = Job(budget=900 * MIB, has_folder=False, end="error", end_text=text, detailed=())
    write_run(tmp_path, job)
    write_extras(tmp_path, job, memory="900MiB", preset="gpt-98m")
    told = leave_post_mortem(tmp_path, ways=ways_out_of)
    assert told is not None
    assert "The smallest change that fits: a disk with " in told
    assert "planned peak" in (tmp_path / POST_MORTEM).read_text()


def test_a_model_that_cannot_be_built_again_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own code runs there, and may raise anything; a restart must not fail for it."""

    def build(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr("lowtide.job.models.build_model", build)
    text = "activations (unit 'blocks.3'): 1000.0 MiB needed, 900.0 MiB allowed."
    job = Job(budget=900 * MIB, has_folder=False, end="error", end_text=text, detailed=())
    write_run(tmp_path, job)
    write_extras(tmp_path, job, memory="900MiB", preset="gpt-98m")
    told = leave_post_mortem(tmp_path, ways=ways_out_of)
    assert told is not None
    assert (tmp_path / POST_MORTEM).exists()


# -- exit codes and counters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "before", "after", "words"),
    [
        (7, None, None, "ended with exit code 7 and left no report"),
        (-signal.SIGSEGV, None, None, "was ended by SIGSEGV: a crash in native code"),
        (-signal.SIGBUS, None, None, "/dev/shm is full"),
        (-9, None, None, "was ended by SIGKILL; the kernel does this when memory runs out, and here it does not tell"),
        (-9, Counters(boot=BOOT, group_kills=1), Counters(boot=BOOT, group_kills=2), "by the kernel because memory ran out"),
        (137, Counters(boot=BOOT, group_kills=1), Counters(boot=BOOT, group_kills=2), "by the kernel because memory ran out"),
        (-9, Counters(boot=BOOT, group_kills=2), Counters(boot=BOOT, group_kills=2), "not by the kernel for memory"),
        (-9, Counters(boot=BOOT, group_kills=2), Counters(boot="b", group_kills=2), "here it does not tell"),
        (
            -9,
            Counters(boot=BOOT, machine_kills=2),
            Counters(boot=BOOT, machine_kills=3, limit_bytes=GIB, peak_bytes=GIB),
            "does not tell, but its control group may use 1.00 GiB, which it reached: peak 1.00 GiB",
        ),
        (-9, Counters(boot=BOOT, machine_kills=2), Counters(boot=BOOT, machine_kills=2), "not by the kernel for memory"),
    ],
)
def test_no_bare_exit_status(code: int, before: Counters | None, after: Counters | None, words: str) -> None:
    text = how_it_died(code, before, after)
    assert words in text
    assert "-9" not in text


@pytest.mark.parametrize("version", [1, 2])
def test_counters_of_both_versions_of_control_groups(tmp_path: Path, version: int) -> None:
    top = tmp_path / "memory" if version == 1 else tmp_path
    group = top / "jobs" / "mine"
    group.mkdir(parents=True)
    names = {
        1: (
            "memory.oom_control",
            "under_oom 0\noom_kill 3\n",
            "memory.limit_in_bytes",
            "memory.max_usage_in_bytes",
        ),
        2: ("memory.events", "low 0\noom 5\noom_kill 3\n", "memory.max", "memory.peak"),
    }[version]
    (group / names[0]).write_text(names[1])
    (group / names[2]).write_text("9223372036854771712\n" if version == 1 else "max\n")
    (group.parent / names[2]).write_text("1000000\n")
    (group.parent / names[3]).write_text("990000\n")
    (tmp_path / "cgroup").write_text("5:cpu:/x\n4:memory:/jobs/mine\n0::/\n" if version == 1 else "0::/jobs/mine\n")
    found = read_counters(process=tmp_path, root=tmp_path)
    assert (found.group_kills, found.limit_bytes, found.peak_bytes) == (3, 1_000_000, 990_000), "the limit is the parent's"
    assert counters_from(found.facts()) == found
    (group / names[0]).write_text("oom_kill 4\n")
    assert oom_killed(found, read_again(found, root=tmp_path)) is True
    assert oom_killed(found, found) is False


def test_no_counters_at_all_is_an_answer_too(tmp_path: Path) -> None:
    found = read_counters(process=tmp_path, root=tmp_path)
    assert (found.group, found.group_kills, found.limit_bytes) == ("", None, None)
    assert counters_from({"torch": "2"}) is None


# -- the real thing ----------------------------------------------------------------------------------------------------

EATER = """
import time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from lowtide.reporting.format import MemoryLine, ProcessMemory, RunLine, encode
from lowtide.reporting.oom import read_counters
from tests.kit.synthetic_run import Job, lines
import socket
facts = tuple(read_counters().facts().items())
job = Job(steps=1, detailed=(), host=socket.gethostname(), pid=os.getpid(), started=time.time(), facts=facts)
path = Path(sys.argv[2], "timeline")
path.mkdir()
hoard = []
with open(path / "rank-00000.jsonl", "ab", buffering=0) as file:
    for line in lines(job, 0):
        if line.KIND in ("run", "step"):
            file.write(encode(line))
    for step in range(1, 1000):
        hoard.append(bytearray(os.urandom(1)) * (8 << 20))
        status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
        used = int(status["RssAnon"].split()[0]) << 10
        memory = ProcessMemory(anonymous=used, shared=0, file=0, total=used)
        file.write(encode(MemoryLine(t=step / 100, step=step, host={"parameters": 1 << 20}, process=memory)))
"""


def test_killed_by_the_kernel_for_real(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    with memory_group(160 * MIB) as group:
        command = [sys.executable, "-c", textwrap.dedent(ENTER + EATER), str(group), str(tmp_path), str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == -9, done.stderr
        report = open_report(tmp_path)
    post = report.findings.post_mortem
    assert post is not None
    assert post.cause == "killed"
    assert post.limit_bytes == 160 * MIB
    assert post.grew[0].kind == "Python and torch"
    assert post.grew[0].more_bytes > 64 * MIB
    assert 100 * MIB < sum(post.there.values()) < 200 * MIB
    assert post.changes
    assert "The kernel ended the job because memory ran out (limit: 0.16 GiB)." in report.html()
    assert "The smallest change that fits" in str(report)


LAUNCHER = """
from lowtide.job.launch import start_ranks
hoard = "while os.environ['RANK'] == '1':\\n    hoard.append(bytearray(os.urandom(1)) * (8 << 20))"
program = "import os, time\\nhoard = []\\n" + hoard + "\\ntime.sleep(60)"
failure = start_ranks([sys.executable, "-c", program], 2)
print(failure.message)
"""


def test_the_parent_of_the_ranks_knows_why_one_is_gone(tmp_path: Path) -> None:
    with memory_group(220 * MIB) as group:
        command = [sys.executable, "-c", textwrap.dedent(ENTER + LAUNCHER), str(group)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 1 was ended by the kernel because memory ran out (its control group may use 0.21 GiB")


SHARDED = """
import torch, lowtide
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model, optimizer = lowtide.shard(model, optimizer, memory=480 << 20, disk=sys.argv[2], run=sys.argv[2] + "/run")
hoard = []
for _ in range(100):
    hoard.append(torch.randn(8 << 20))
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


PLAIN = """
import os, resource, signal, sys
import torch, lowtide
torch.set_num_threads(1)
run, what = sys.argv[1:]
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
number = "1MiB" if what == "does not fit" else "6GiB"
model, optimizer = lowtide.shard(model, optimizer, memory=number, run=run)
for step in range(3):
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and what == "over budget":
        lowtide.set_memory(model, "1MiB")
    if step == 1 and what == "allocation":
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), used + (512 << 20)))
        torch.ones(1 << 30)
    if step == 1 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def plain_job(run: Path, what: str) -> subprocess.CompletedProcess[str]:
    """A training script of somebody's own, which knows nothing of `lowtide train`."""
    command = [sys.executable, "-c", PLAIN, str(run), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("does not fit", "it would need more memory than it was given"),
        ("over budget", "it would have needed more memory than it was given"),
        ("allocation", "An allocation failed because memory ran out"),
    ],
)
def test_a_script_that_runs_out_of_memory_leaves_the_page(tmp_path: Path, what: str, sentence: str) -> None:
    done = plain_job(tmp_path, what)
    assert done.returncode == 1, done.stderr
    page = (tmp_path / POST_MORTEM).read_text()
    assert 'id="post-mortem"' in page
    assert sentence in page
    if what != "does not fit":
        assert sentence in done.stderr, "it is said as well"
        assert "The smallest change that fits" in done.stderr


def test_a_script_that_was_killed_is_told_of_by_the_next(tmp_path: Path) -> None:
    """The counters of the kernel are made to say that it was for memory."""
    assert plain_job(tmp_path, "killed").returncode == -signal.SIGKILL
    path = tmp_path / "timeline" / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    if first["facts"].get("oom_group_kills") is None:
        pytest.skip("this kernel does not count kills for a control group here")
    first["facts"]["oom_group_kills"] -= 1
    path.write_text("".join([json.dumps(first) + "\n", *lines[1:]]))
    done = plain_job(tmp_path, "to the end")
    assert done.returncode == 0, done.stderr
    assert "the job before this one ran out of memory" in done.stderr
    assert "The kernel ended the job because memory ran out" in (tmp_path / POST_MORTEM).read_text()
    again = plain_job(tmp_path, "to the end")
    assert "ran out of memory" not in again.stderr, "it is said once"


def test_the_command_line_says_what_did_not_fit(tmp_path: Path) -> None:
    """End to end: a number that the job's own model does not fit into."""
    command = [sys.executable, "-m", "lowtide", "train", "--synthetic", "--preset", "gpt-17m", "--steps", "2", "--batch", "1"]
    command += ["--memory", "200MiB", "--run", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "MiB needed" in done.stdout + done.stderr
    assert 'id="post-mortem"' in (tmp_path / "run" / POST_MORTEM).read_text()


@pytest.mark.soak
def test_a_sharded_job_is_killed_for_real(tmp_path: Path) -> None:
    """The caller hoards 32 MiB in every step, which no plan knows of."""
    with memory_group(600 * MIB) as group:
        command = [sys.executable, "-c", textwrap.dedent(ENTER + SHARDED), str(group), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == -9, done.stderr
        told = leave_post_mortem(tmp_path / "run")
    assert told is not None
    assert "The kernel ended the job because memory ran out (limit: 0.59 GiB)." in told
    assert "Python and torch by " in told
    assert "The smallest change that fits: " in told
    assert 'id="post-mortem"' in (tmp_path / "run" / POST_MORTEM).read_text()
