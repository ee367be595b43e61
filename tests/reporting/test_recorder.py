"""Timelines of real runs: what is in them is what happened, and recording changes nothing else."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import ArgumentError
from lowtide.reporting.format import LANES, VERBS, MemoryLine, StepLine
from lowtide.reporting.sampler import Sampler
from lowtide.reporting.timeline import Process, read_now, read_run
from lowtide.runtime import assembly
from lowtide.runtime.budget import give_back
from lowtide.runtime.holdings import holdings
from tests.kit.dist import run_ranks
from tests.kit.lifetime import collected
from tests.kit.synthetic_run import write_run
from tests.reporting.runs import Scored, finished, recorded, recorder_of, tidy, train

MIB = 2**20


def lanes(process: Process) -> set[tuple[str, str]]:
    return {(row.lane, row.verb) for line in process.spans for row in line.rows}


def test_a_plain_run_on_one_rank(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    losses = train(model, optimizer, 6)
    timeline = finished(model, tmp_path)
    assert timeline.bad_lines == []
    process = timeline.last
    assert (process.run.rank, process.run.world_size, process.run.stage, process.run.pid) == (0, 1, 0, os.getpid())
    assert [unit.name for unit in process.run.units] == [u.name for u in engine_of(model).units]
    assert process.run.facts["torch"] == torch.__version__
    assert [s.step for s in process.steps] == [1, 2, 3, 4, 5, 6]
    assert [s.loss for s in process.steps] == losses, "a model that returns its loss need not tell it"
    for step in process.steps:
        parts = step.compute_seconds + step.update_seconds + step.disk_wait_seconds + step.comm_wait_seconds
        assert 0 < step.compute_seconds
        assert 0 < step.update_seconds
        assert parts <= step.seconds + 1e-4
        assert step.peak_bytes > 0
    regular = [line.step for line in process.spans if line.why == "regular"]
    assert set(regular) >= {1, 2, 3, 4}, "the first few, then powers of two, and slow ones"
    assert lanes(process) >= {("compute", "forward"), ("compute", "backward"), ("update", "update")}
    names = {line.names[row.unit] for line in process.spans for row in line.rows if row.verb == "forward"}
    assert names >= {unit.name for unit in process.run.units if "blocks" in unit.name}
    assert process.plans[0].why == "at the start"
    assert process.end is not None
    assert process.end.why == "done"


def everything_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk and no number means: as much in memory as the machine has room for. Here: nothing."""
    monkeypatch.setattr("lowtide.runtime.assembly.default_budget", lambda: None)


def test_out_of_core(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path), memory="6GiB", update="step")
    train(model, optimizer, 6)
    process = finished(model, tmp_path / "run").last
    assert process.run.budget_bytes == 6 * 2**30
    assert process.run.folders == (str(tmp_path),)
    first = process.steps[0]
    assert first.disk_written_bytes >= 0
    assert process.steps[-1].total_disk_read_bytes == engine_of(model).store.traffic.read_bytes  # type: ignore[union-attr]
    assert sum(s.disk_read_bytes for s in process.steps) <= process.steps[-1].total_disk_read_bytes
    assert process.steps[-1].peak_bytes < 6 * 2**30
    assert process.plans[-1].predicted_seconds is not None
    assert process.plans[-1].predicted_peak_bytes is not None
    assert set(process.plans[-1].tiers) == {"host", "disk"}
    assert any(line.host.get("activations") for line in process.memory), "what autograd keeps is counted"


def test_everything_on_disk_shows_every_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything_on_disk(monkeypatch)
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path), update=lowtide.Update("step", chunk_bytes=4096))
    train(model, optimizer, 3)
    process = finished(model, tmp_path / "run").last
    assert lanes(process) >= {
        ("compute", "forward"),
        ("compute", "backward"),
        ("disk read", "fetch"),
        ("disk write", "evict"),
        ("update", "update"),
    }
    step = process.steps[-1]
    assert step.disk_read_bytes > 0
    assert step.disk_written_bytes > 0
    assert step.disk_busy_seconds > 0
    fetched = sum(row.bytes for row in process.spans[-1].rows if row.lane == "disk read")
    assert fetched == step.disk_read_bytes, "every byte that was read is in a span"
    assert all(row.lane in LANES and row.verb in VERBS for line in process.spans for row in line.rows)
    assert all(0 <= row.begin <= row.end for line in process.spans for row in line.rows)
    rows = {row.name: row for row in process.units[-1].rows}
    assert all(row.tier["parameters"] == "disk" for row in rows.values())
    assert all(row.fetches > 0 and row.fetch_bytes > 0 and row.forward_seconds > 0 for row in rows.values())
    sample = process.memory[-1]
    assert sample.disk["parameters"] >= sum(u.bytes for u in process.run.units)
    assert sample.disk["optimizer"] >= 2 * sum(u.bytes for u in process.run.units)
    assert sample.spool_bytes >= sum(n for kind, n in sample.disk.items() if kind != "spare")
    assert sample.arenas["slots"].takes > sample.arenas["slots"].fresh > 0


def clipped(by: str, model: Any) -> None:
    if by == "lowtide":
        lowtide.clip_grad_norm_(model, 1e-3, 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, 1.0)


@pytest.mark.parametrize("by", ["lowtide", "torch"])
def test_clipping_and_the_whole_update_are_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A norm other than the usual one reads gradients that are on disk; a streamed update reads and writes between its
    chunks."""
    everything_on_disk(monkeypatch)
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path), update=lowtide.Update("step", chunk_bytes=4096))
    for _ in range(3):
        model(torch.ones(2, 24)).backward()
        clipped(by, model)
        optimizer.step()
        optimizer.zero_grad()
    process = finished(model, tmp_path / "run").last
    for line, step in zip(process.spans, process.steps, strict=False):
        clips = [row for row in line.rows if row.verb == "clip"]
        (whole,) = [row for row in line.rows if row.lane == "update" and row.verb == "update" and not line.names[row.unit]]
        chunks = [row for row in line.rows if row.lane == "update" and line.names[row.unit]]
        assert clips
        assert max(row.end for row in clips) <= whole.begin, "gradients are clipped before the optimizer's step"
        if step.step > 1:  # later an update may be put off, unit by unit, into the next forward pass
            continue
        assert chunks
        assert all(whole.begin <= row.begin and row.end <= whole.end for row in chunks)
        parts = step.compute_seconds + step.update_seconds + step.disk_wait_seconds
        inside = sum(row.end - row.begin for row in (*clips, whole))
        assert parts >= inside - 1e-4, "clip and update count, however much of them is spent between chunks"


def test_samples_are_in_order_and_none_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything_on_disk(monkeypatch)
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path), update=lowtide.Update("step", chunk_bytes=4096))
    recorder_of(model)._schedule.sample_is_due = lambda now: int(now * 1e4) % 2 == 0  # type: ignore[method-assign]
    for _ in range(5):
        model(torch.ones(2, 24)).backward()
        lowtide.clip_grad_norm_(model, 1.0, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    memory = finished(model, tmp_path / "run").last.memory
    times = [line.t for line in memory]
    assert times == sorted(times)
    raw = (tmp_path / "run" / "timeline" / "rank-00000.jsonl").read_text().splitlines()
    written = [line for line in raw if '"kind":"memory"' in line]
    assert len(written) == len(set(written)), "the fullest moment is not written again when the step ends"
    assert len(written) == len(memory)
    assert {"clip", "update"} <= {line.moment for line in memory}
    assert any(line.host.get("staging") for line in memory if line.moment == "update"), "update buffers are seen"


def test_a_fullest_moment_that_is_written_late_stands_where_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=2, detailed=())
    path = folder / "timeline" / "rank-00000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if b'"kind":"memory"' in line]
    lines.insert(at[3] + 1, lines.pop(at[1]))  # a sample of forward, after those of backward and step
    lines.insert(at[3] + 1, lines[at[3]])  # twice
    path.write_bytes(b"".join(lines))
    memory = read_run(folder).first.last.memory
    assert [line.moment for line in memory[:4]] == ["begin", "forward", "backward", "step"]
    assert len(memory) == 8


def on_two_ranks(rank: int, world: int, run: Path, stage: int) -> list[float]:
    model, optimizer = recorded(run, stage=stage)
    losses = train(model, optimizer, 4, rank=rank)
    recorder_of(model).end("done")
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_write_two_files(tmp_path: Path, stage: int) -> None:
    losses = run_ranks(2, on_two_ranks, tmp_path, stage)
    run = read_run(tmp_path)
    assert [t.rank for t in run.ranks] == [0, 1]
    for timeline, own in zip(run.ranks, losses, strict=True):
        assert [s.loss for s in timeline.last.steps] == own
        assert timeline.last.run.world_size == 2
        assert timeline.last.run.local_ranks == 2
        assert ("reduce", "reduce") in lanes(timeline.last)
        assert all(s.wire_bytes > 0 for s in timeline.last.steps)
        assert timeline.last.steps[-1].total_wire_bytes == sum(s.wire_bytes for s in timeline.last.steps)


@pytest.mark.parametrize("options", [{}, {"stage": 3}, {"stage": 3, "disk": True}, {"update": "backward"}], ids=str)
def test_recording_changes_no_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("disk"):
        options = {**options, "disk": str(tmp_path)}
    results = []
    for run in (None, tmp_path / "run"):
        model, optimizer = recorded(run, **options)
        losses = train(model, optimizer, 5)
        results.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
    (plain, weights), (watched, same) = results
    assert plain == watched
    assert all(torch.equal(weights[name], same[name]) for name in weights)


# -- the ledger against the process -----------------------------------------------------------------------------------

WIDE = 768


def wide() -> nn.Module:
    return Scored(nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(12))))


def private(line: MemoryLine) -> int:
    return line.process.anonymous + line.process.shared


WAYS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 3": {"stage": 3, "units": [nn.Linear]},
    "in memory, within a number": {"stage": 3, "units": [nn.Linear], "memory": "6GiB", "disk": True},
    "on disk": {"stage": 3, "units": [nn.Linear], "disk": True, "on disk": True},
    "update in backward": {"stage": 3, "units": [nn.Linear], "update": "backward"},
}


def private_bytes() -> int:
    gc.collect()
    give_back()
    memory = Sampler([]).sample().memory
    return memory.anonymous + memory.shared


def train_and_measure(rank: int, world: int, way: str, folder: Path) -> tuple[int, list[MemoryLine]]:
    """What the process had before there was a model, and the samples of a run."""
    options = dict(WAYS[way])
    if options.pop("on disk", False):
        assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]
    if options.get("disk"):
        options["disk"] = str(folder)
    warm: nn.Module = Scored(nn.Linear(WIDE, WIDE))  # what torch takes when it first computes is not the model's
    by = torch.optim.AdamW(warm.parameters())
    if world > 1:  # nor is what connections between ranks take
        warm, by = lowtide.shard(warm, by)
    train(warm, by, 2, shape=(64, WIDE))
    del warm, by
    before = private_bytes()
    model, optimizer = recorded(folder / "run", model=wide(), **options)

    def tidy(step: int) -> None:
        """What is freed is no longer anybody's: not that of activations, nor that of gradients."""
        engine_of(model).grads.give_back()
        give_back()

    train(model, optimizer, 8, shape=(64, WIDE), each=tidy)
    recorder_of(model).end("done")
    mine = next(timeline for timeline in read_run(folder / "run").ranks if timeline.rank == rank)
    return before, mine.last.memory


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_ledger_and_the_rest_make_up_the_process(tmp_path: Path, way: str, ranks: int) -> None:
    """108 MiB of parameters, gradients and states: a kind that nobody counts shows in the rest. What two ranks share is in both
    processes, and both count it."""
    for before, lines in run_ranks(ranks, train_and_measure, way, tmp_path, fresh=True):
        assert len(lines) >= 8
        for line in lines:
            ours = sum(line.host.values())
            assert abs(ours + line.not_ours - line.process.total) <= 0.03 * line.process.total
        settled = [line for line in lines if line.moment == "begin" and line.step > 4]
        assert settled
        for line in settled:
            rest = private(line) - sum(line.host.values())
            assert abs(rest - before) <= 0.03 * line.process.total, f"{rest / MIB:.1f} MiB are left, {before / MIB:.1f} were"


def test_what_the_caller_holds_is_not_ours(tmp_path: Path) -> None:
    tidy()
    model, optimizer = recorded(tmp_path)
    hoard: list[torch.Tensor] = []
    train(model, optimizer, 6, each=lambda step: hoard.append(torch.ones(8 * MIB, dtype=torch.uint8)))
    begins = [line for line in finished(model, tmp_path).last.memory if line.moment == "begin"]
    grown = begins[-1].not_ours - begins[0].not_ours
    assert abs(grown - 5 * 8 * MIB) < 8 * MIB
    assert sum(begins[-1].host.values()) == sum(begins[2].host.values())


def test_what_autograd_keeps_is_counted_once_and_no_longer_than_it_lives(tmp_path: Path) -> None:
    model, _ = recorded(tmp_path, model=wide(), stage=3, units=[nn.Linear])
    engine = engine_of(model)
    x = torch.ones(256, WIDE)
    model(x).backward()  # now the recorder counts
    at_rest = holdings(engine).host.get("activations", 0)
    loss = model(x)
    kept = holdings(engine).host["activations"]
    expected = 13 * x.nbytes  # the inputs of twelve layers, and of the square
    assert expected * 0.9 <= kept - at_rest <= expected * 1.15
    loss.backward()
    del loss
    assert holdings(engine).host.get("activations", 0) == at_rest == 0


# -- steps ------------------------------------------------------------------------------------------------------------


def test_micro_batches_are_one_step_and_validation_is_none(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    x = torch.ones(2, 24)
    for _ in range(3):
        for _ in range(2):
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
    assert [s.step for s in finished(model, tmp_path).last.steps] == [1, 2, 3]


def test_a_skipped_step_is_a_step_with_a_mark(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path, stage=3)
    for value in (1.0, float("nan"), 1.0):
        model(torch.full((2, 24), value)).backward()
        optimizer.step()
        optimizer.zero_grad()
    process = finished(model, tmp_path).last
    assert [(s.step, s.skipped, s.loss is None) for s in process.steps] == [
        (1, False, False),
        (2, True, True),
        (3, False, False),
    ]
    assert "skip" in {mark.what for mark in process.marks}


def test_a_loss_can_be_told(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    train(model, optimizer, 2, each=lambda step: recorder_of(model).note(loss=float(step)))
    assert [s.loss for s in finished(model, tmp_path).last.steps] == [0.0, 1.0]


def test_the_newest_lines_are_beside_the_file(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    train(model, optimizer, 2)
    kinds = {type(line) for line in read_now(read_run(tmp_path).first)}
    assert MemoryLine in kinds
    recorder_of(model)._watch._now_at = None  # a second has passed
    model(torch.ones(2, 24))
    newest = [line for line in read_now(read_run(tmp_path).first) if isinstance(line, StepLine)]
    assert [line.step for line in newest] == [2]


def test_thinned_steps_lose_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.reporting.thinning.STEPS", 4)
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path))
    train(model, optimizer, 16)
    steps = finished(model, tmp_path / "run").last.steps
    assert [s.step for s in steps] == [1, 2, 3, 4, 5, 7, 9, 13]
    assert [s.covers for s in steps] == [1, 1, 1, 1, 1, 2, 2, 4]


def test_where_samples_would_cost_too_much_there_are_none(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    del recorder_of(model)._watch._may_spend  # the real one
    recorder_of(model)._watch.spent = 1e6  # seconds: it has been far too slow
    train(model, optimizer, 3)
    process = finished(model, tmp_path).last
    assert process.memory == []
    assert [s.step for s in process.steps] == [1, 2, 3]


def test_a_process_that_goes_on_appends(tmp_path: Path) -> None:
    for steps in (3, 2):
        model, optimizer = recorded(tmp_path / "run", stage=3)
        if steps == 2:
            lowtide.load(tmp_path / "saved", model, optimizer)
        train(model, optimizer, steps)
        lowtide.save(tmp_path / "saved" / f"a{steps}", model, optimizer)
        recorder_of(model).end("done")
    timeline = read_run(tmp_path / "run").first
    assert len(timeline.processes) == 2
    assert [s.step for s in timeline.last.steps] == [4, 5], "the checkpoint knows how many steps there were"
    assert [s.step for _, s in timeline.steps()] == [1, 2, 3, 4, 5]


# -- nothing depends on it --------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written to"):
        recorded(tmp_path / "file")


def test_two_models_cannot_record_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.reporting.writer._PATIENCE", 0.0)
    model, _ = recorded(tmp_path)
    with pytest.raises(ArgumentError, match="another model or job"):
        recorded(tmp_path)
    recorder_of(model).end("done")
    recorded(tmp_path)


def test_a_full_disk_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = recorded(tmp_path)
    recorder = recorder_of(model)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._writer._fd)  # type: ignore[arg-type]
    os.close(full)
    assert len(train(model, optimizer, 3)) == 3
    assert [r.message for r in caplog.records if "not complete" in r.message] == [
        f"{recorder._writer.path} is not complete: No space left on device"
    ]


def test_a_fault_in_the_recorder_ends_the_recording_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = recorded(tmp_path)
    monkeypatch.setattr("lowtide.reporting.watching.holdings", lambda _: 1 / 0)
    assert len(train(model, optimizer, 3)) == 3
    assert sum("recording has stopped" in r.message for r in caplog.records) == 1


def test_a_dropped_model_is_collected_and_its_timeline_ends(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path / "run", stage=3, disk=str(tmp_path))
    train(model, optimizer, 2)
    engine = weakref.ref(engine_of(model))
    del model, optimizer
    collected(engine)
    process = read_run(tmp_path / "run").first.last
    assert [s.step for s in process.steps] == [1, 2]
    assert process.end is not None


SCRIPT = """
import sys, torch
sys.path.insert(0, ".")
from tests.kit.synthetic_run import write_run
from tests.reporting.runs import recorded, train
from pathlib import Path
model, optimizer = recorded(Path(sys.argv[1]))
def each(step):
    if step == 2:
        {what}
train(model, optimizer, 4, each=each)
"""


@pytest.mark.parametrize(
    ("what", "code", "why"),
    [
        ("pass", 0, "done"),
        ("raise ValueError('boom')", 1, "error"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, None),
        ("import os; os.fork() or os._exit(0)", 0, "done"),
    ],
    ids=["to the end", "raises", "killed", "forks"],
)
def test_how_a_process_ended(tmp_path: Path, what: str, code: int, why: str | None) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(what=what), str(tmp_path)], capture_output=True, timeout=100)
    assert done.returncode == code, done.stderr.decode()
    process = read_run(tmp_path).first.last
    steps = 4 if code == 0 else 3 if why else 2  # one line waits for its loss when a process is killed
    assert [s.step for s in process.steps] == list(range(1, steps + 1))
    assert len(process.ends) == (why is not None)
    if process.end is not None:
        assert process.end.why == why
        assert process.end.text == ("ValueError: boom" if why == "error" else "")
    raw = (tmp_path / "timeline" / "rank-00000.jsonl").read_bytes()
    assert all(json.loads(line) for line in raw.splitlines())
