"""The writer: whole lines, a largest size, last words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lowtide.reporting import writer as writing
from lowtide.reporting.format import MarkLine, StepLine, encode
from lowtide.reporting.timeline import Follower, read_run
from lowtide.reporting.writer import Writer
from tests.reporting.test_format import RUN, file_of, step


def mark(text: str) -> MarkLine:
    return MarkLine(t=1.0, step=1, what="warning", text=text)


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    file_of(tmp_path).write_bytes(encode(RUN) + encode(step(1))[:-7])
    writer = Writer(tmp_path, 0)
    writer.write(RUN)
    writer.write(step(2))
    writer.end("done")
    timeline = read_run(tmp_path).first
    assert [[s.step for s in p.steps] for p in timeline.processes] == [[], [2]]
    assert timeline.bad_lines == [2]


def test_a_line_waits_for_its_loss(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    writer.write(RUN)
    writer.hold(step(1))
    assert not read_run(tmp_path).first.last.steps
    assert writer.held is not None
    writer.hold(StepLine(t=1.0, step=1, seconds=1.0, loss=3.0))
    writer.release()
    writer.release()
    writer.hold(step(2))
    writer.end("done")
    assert [(s.step, s.loss) for s in read_run(tmp_path).first.last.steps] == [(1, 3.0), (2, None)]


def test_what_is_more_than_the_largest_size_is_left_out_but_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MOST_BYTES", 4000)
    writer = Writer(tmp_path, 0)
    writer.write(RUN, last_words=True)
    for number in range(100):
        writer.write(mark(f"{number} " + "x" * 50))
    assert writer.path.stat().st_size <= 4000
    writer.end("error", "boom")
    process = read_run(tmp_path).first.last
    assert 10 < len(process.marks) < 100
    assert process.end is not None
    assert process.end.text == "boom"


def test_nothing_follows_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    writer.write(RUN)
    writer.end("done")
    writer.end("error")
    writer.write(step(1))
    writer.write_now([step(1)])
    assert [p.ends[-1].why for p in read_run(tmp_path).first.processes] == ["done"]
    assert len(read_run(tmp_path).first.last.ends) == 1
    assert not read_run(tmp_path).first.last.steps


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0)
    writer.write(RUN)
    child = os.fork()
    if child == 0:
        writer.write(step(1))
        writer.end("error")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write(step(2))
    assert [s.step for s in read_run(tmp_path).first.last.steps] == [2]
    assert not read_run(tmp_path).first.last.ends
    writer.end("done")


def test_a_failed_write_leaves_lines_whole(tmp_path: Path) -> None:
    """The disk is full for a while: what is torn then costs no line before or after it."""
    writer = Writer(tmp_path, 0)
    writer.write(RUN)
    fd = writer._fd
    assert fd is not None
    kept, full = os.dup(fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, fd)
    writer.write(step(1))
    os.dup2(kept, fd)
    os.write(fd, encode(step(1))[:9])  # as much as went in
    writer.write(step(2))
    writer.end("done")
    os.close(kept)
    os.close(full)
    follower = Follower(writer.path, 0)
    follower.look()
    assert [s.step for s in follower.timeline.last.steps] == [2]
    assert all(json.loads(encode(line)) for line in follower.timeline.last.steps)
