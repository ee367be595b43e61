"""Lines of a timeline: what is written is what is read, and nothing that is not a line is ever believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.reporting import format as lines
from lowtide.reporting.format import (
    MAX_LINE_BYTES,
    MAX_TEXT,
    ArenaFacts,
    BadLine,
    EndLine,
    Line,
    MarkLine,
    MemoryLine,
    PlanLine,
    ProcessMemory,
    RunLine,
    Span,
    SpansLine,
    StepLine,
    UnitFacts,
    UnitRow,
    UnitsLine,
    decode,
    encode,
)
from lowtide.reporting.timeline import FOLDER, Follower, NoTimeline, now_path, read_now, read_run

RUN = RunLine(
    started=1_700_000_000.5,
    rank=0,
    world_size=2,
    local_ranks=1,
    host="a",
    pid=7,
    stage=3,
    update="step",
    budget_bytes=2**30,
    folders=("/scratch",),
    units=(UnitFacts(name="blocks.0", numel=10, bytes=40, shard_bytes=20),),
    facts={"torch": "2", "cpus": 2, "ratio": 0.5, "gpu": None, "yes": True},
)
EVERY_KIND: list[Line] = [
    RUN,
    PlanLine(t=0.1, step=0, predicted_seconds=1.5, predicted_peak_bytes=9, tiers={"host": {"slots": 3}, "disk": {}}, why="x"),
    StepLine(t=1.0, step=1, seconds=0.9, loss=2.5, disk_read_bytes=5, total_disk_read_bytes=5, skipped=True, covers=3),
    MemoryLine(
        t=1.1,
        step=1,
        moment="forward",
        host={"parameters": 4},
        arenas={"slots": ArenaFacts(reserved=4, taken=2, free_blocks=1, limbo=0, takes=9, fresh=3, largest_free=2)},
        process=ProcessMemory(anonymous=3, shared=1, file=2, total=6),
        not_ours=2,
        cpu_percent=99.5,
        fds=12,
        threads=3,
    ),
    SpansLine(t=1.2, step=1, why="regular", names=("", "blocks.0"), rows=(Span(0.0, 0.5, "compute", "forward", 1, 0),)),
    UnitsLine(t=1.3, step=1, rows=(UnitRow(name="blocks.0", forward_seconds=0.5, tier={"parameters": "disk"}),)),
    MarkLine(t=1.4, step=1, what="leak", text="of threads"),
    EndLine(t=1.5, why="error", text="boom"),
]


@pytest.mark.parametrize("line", EVERY_KIND, ids=lambda line: line.KIND)
def test_what_is_written_is_what_is_read(line: Line) -> None:
    data = encode(line)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert json.loads(data)["kind"] == line.KIND
    assert decode(data) == line


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    written = encode(StepLine(t=1.0, step=1, seconds=1.0, loss=float("nan")))
    assert b"NaN" not in written
    read = decode(written)
    assert isinstance(read, StepLine)
    assert read.loss is None


def test_a_newer_writer_can_be_read() -> None:
    table = json.loads(encode(EVERY_KIND[2])) | {"invented": [1], "format": 2}
    assert decode(json.dumps(table).encode()) == EVERY_KIND[2]
    assert decode(b'{"kind":"invented","t":1}') is None


def damaged(line: Line, **changes: Any) -> bytes:
    return json.dumps(json.loads(encode(line)) | changes).encode()


HOSTILE = {
    "infinite": b'{"kind":"step","t":1e999,"step":1,"seconds":1}',
    "not a number": b'{"kind":"step","t":NaN,"step":1,"seconds":1}',
    "a huge integer": b'{"kind":"step","t":1,"step":' + b"9" * 400 + b',"seconds":1}',
    "more digits than Python reads": b'{"kind":"step","t":1,"step":' + b"9" * 5000 + b',"seconds":1}',
    "a truth value for a number": b'{"kind":"step","t":1,"step":true,"seconds":1}',
    "half a step": b'{"kind":"step","t":1,"step":1.5,"seconds":1}',
    "a missing field": b'{"kind":"step","t":1,"step":1}',
    "nested without end": b"[" * 200_000,
    "not an object": b"[1]",
    "a kind that is no text": b'{"kind":["step"],"t":1}',
    "not UTF-8": b'{"kind":"mark","t":1,"step":1,"what":"\xff"}',
    "a unit that has no name": damaged(EVERY_KIND[4], rows=[[0, 1, "compute", "forward", 2, 0]]),
    "a unit before the first": damaged(EVERY_KIND[4], rows=[[0, 1, "compute", "forward", -1, 0]]),
    "too many names": damaged(EVERY_KIND[4], names=["x"] * 20_001),
    "a table for a list": damaged(EVERY_KIND[5], rows={"a": 1}),
    "bytes that are text": damaged(EVERY_KIND[3], host={"slots": "many"}),
    "a line that never ends": b'{"kind":"mark","t":1,"step":1,"what":"' + b"x" * MAX_LINE_BYTES + b'"}',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_does_not_hold_is_refused(data: bytes) -> None:
    with pytest.raises(BadLine):
        decode(data)


def test_texts_are_cut_and_harmless() -> None:
    read = decode(json.dumps({"kind": "mark", "t": 1, "step": 1, "what": "a\x1b[2J\ud800b\nc", "text": "x" * 9999}).encode())
    assert isinstance(read, MarkLine)
    assert read.what.encode() == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b\nc".encode()
    assert len(read.text) == MAX_TEXT


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(line=st.sampled_from(EVERY_KIND), key=st.integers(0, 40), value=json_values)
def test_no_value_in_any_field_does_more_than_make_a_line_bad(line: Line, key: int, value: Any) -> None:
    table = json.loads(encode(line))
    name = sorted(table)[key % len(table)]
    try:
        decode(json.dumps(table | {name: value}).encode())
    except BadLine:
        pass


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_do_more_than_make_a_line_bad(data: bytes) -> None:
    try:
        assert decode(data) is None or True
    except BadLine:
        pass


# -- files ------------------------------------------------------------------------------------------------------------


def file_of(run: Path, rank: int = 0) -> Path:
    (run / FOLDER).mkdir(parents=True, exist_ok=True)
    return run / FOLDER / f"rank-{rank:05d}.jsonl"


def step(number: int, t: float = 1.0) -> StepLine:
    return StepLine(t=t, step=number, seconds=1.0)


def test_a_run_is_read_with_all_its_ranks_and_processes(tmp_path: Path) -> None:
    for rank in (1, 0):
        file_of(tmp_path, rank).write_bytes(b"".join(map(encode, EVERY_KIND)))
    with open(file_of(tmp_path), "ab") as file:  # a process goes on from step 0
        file.write(encode(RUN) + encode(step(1, 0.5)) + encode(step(2, 1.5)))
    run = read_run(tmp_path)
    assert [t.rank for t in run.ranks] == [0, 1]
    first, second = run.first.processes
    assert [len(x) for x in (first.plans, first.steps, first.memory, first.spans, first.units, first.marks)] == [1] * 6
    assert first.end is not None
    assert first.end.why == "error"
    assert second.end is None
    assert [(p is second, s.step) for p, s in run.first.steps()] == [(True, 1), (True, 2)], "step 1 was made again"
    assert run.first.at(second, 1.5) == 1.5


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = [encode(RUN), encode(step(1)), b"\x00\xffgarbage\n", encode(step(2))[:9] + b"\n", b"\n", encode(step(3))]
    file_of(tmp_path).write_bytes(b"".join(whole) + encode(step(4))[:-5])
    timeline = read_run(tmp_path).first
    assert [s.step for s in timeline.last.steps] == [1, 3]
    assert timeline.bad_lines == [3, 4]


def test_a_line_without_end_costs_no_memory_and_no_other_line(tmp_path: Path) -> None:
    with open(file_of(tmp_path), "wb") as file:
        file.write(encode(RUN))
        for _ in range(4):
            file.write(b"x" * MAX_LINE_BYTES)
        file.write(b"\n" + encode(step(1)))
    timeline = read_run(tmp_path).first
    assert [s.step for s in timeline.last.steps] == [1]
    assert timeline.bad_lines == [2]


def test_a_follower_reads_what_is_new(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    path.write_bytes(encode(RUN) + encode(step(1))[:10])
    follower = Follower(path, 0)
    assert follower.look()
    assert not follower.timeline.last.steps
    assert not follower.look()
    with open(path, "ab") as file:
        file.write(encode(step(1))[10:])
    assert follower.look()
    assert [s.step for s in follower.timeline.last.steps] == [1]
    assert not follower.timeline.bad_lines


def test_what_is_no_timeline_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NoTimeline, match=r"shard\(\.\.\., run="):
        read_run(tmp_path)
    (file_of(tmp_path)).write_bytes(encode(step(1)))  # no line says whose it is
    with pytest.raises(NoTimeline, match="damaged"):
        read_run(tmp_path)


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    file_of(tmp_path, 0).write_bytes(encode(RUN))
    os.mkfifo(file_of(tmp_path, 1))
    assert [t.rank for t in read_run(tmp_path).ranks] == [0]


def test_the_newest_lines_are_read_from_beside_the_timeline(tmp_path: Path) -> None:
    file_of(tmp_path).write_bytes(encode(RUN))
    timeline = read_run(tmp_path).first
    assert read_now(timeline) == []
    now_path(timeline.path).write_bytes(encode(step(9)) + b"{torn")
    assert read_now(timeline) == [step(9)]


def test_every_field_of_every_line_is_checked_when_it_is_read() -> None:
    import dataclasses

    for cls in (*{type(line) for line in EVERY_KIND}, UnitFacts, UnitRow, ArenaFacts, ProcessMemory):
        assert all("read" in f.metadata for f in dataclasses.fields(cls)), cls
    assert set(lines.VERBS) >= {"forward", "backward", "wait"}
