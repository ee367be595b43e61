"""Numbers for other tools."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lowtide.errors import ArgumentError, Error
from lowtide.job.outlets import Outlets
from lowtide.reporting.loggers import JsonLines, MissingPackage, TensorBoard, open_logger
from tests.reporting.runs import finished, recorded, recorder_of, train


class Notes:
    """A logger of somebody's own: three methods."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[str, str]] = []
        self.closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def event(self, what: str, text: str) -> None:
        self.events.append((what, text))

    def close(self) -> None:
        self.closed += 1


def test_any_three_methods_are_a_logger(tmp_path: Path) -> None:
    model, optimizer = recorded(tmp_path)
    notes = Notes()
    recorder_of(model).loggers.append(notes)
    losses = train(model, optimizer, 3)
    recorder_of(model).mark("checkpoint", "somewhere")
    steps = finished(model, tmp_path).last.steps
    assert [step for step, _ in notes.rows] == [1, 2, 3]
    assert [values["loss"] for _, values in notes.rows] == losses
    assert [values["seconds"] for _, values in notes.rows] == [s.seconds for s in steps]
    assert notes.events == [("checkpoint", "somewhere")]
    assert notes.closed == 1


class Raises(Notes):
    def event(self, what: str, text: str) -> None:
        raise ConnectionError("its server has gone")


def test_a_logger_that_raises_is_dropped_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = recorded(tmp_path)
    recorder, notes = recorder_of(model), Notes()
    recorder.loggers += [Raises(), notes]
    recorder.mark("replan", "one")
    recorder.mark("replan", "two")
    train(model, optimizer, 1)
    assert [event for event in notes.events if event[0] == "replan"] == [("replan", "one"), ("replan", "two")]
    assert recorder.loggers == [notes]
    assert [r.getMessage() for r in caplog.records] == [
        "Raises is told of nothing more: ConnectionError('its server has gone')"
    ]
    assert len(finished(model, tmp_path).last.steps) == 1


def test_what_only_the_record_finds_reaches_what_log_names(tmp_path: Path) -> None:
    """Marks that the job itself knows of, such as checkpoints, would come twice."""
    model, _ = recorded(tmp_path / "run")
    outlets = Outlets([f"jsonl:{tmp_path / 'log.jsonl'}"])
    outlets.listen(model)
    for what in ("leak", "checkpoint", "replan", "skip", "over budget", "warning"):
        recorder_of(model).mark(what, f"a {what}")
    recorder_of(model).end("done")
    outlets.event("end", "done")
    outlets.close()
    heard = [json.loads(line)["event"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert heard == ["leak", "replan", "over budget", "end"], "the outlets stay open until the job ends"


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    logger = open_logger(f"jsonl:{path}")
    logger.log(1, {"loss": 2.5, "grad_norm": float("inf")})
    logger.event("skip", "not finite")
    logger.close()
    logger.close()
    logger.log(2, {"loss": 1.0})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "time"} for row in rows] == [
        {"step": 1, "loss": 2.5, "grad_norm": None},
        {"event": "skip", "text": "not finite"},
    ]
    assert all(row["time"] > 1e9 for row in rows)


def test_a_full_disk_is_told_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger = JsonLines("/dev/full")
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 1.0})
    logger.close()
    assert [r.getMessage() for r in caplog.records] == ["/dev/full is not complete: No space left on device"]


@pytest.mark.parametrize("where", ["", "jsonl", "jsonl:", "csv:a", "runs/a"])
def test_what_is_no_logger_is_said_to_be_none(where: str) -> None:
    with pytest.raises(ArgumentError, match=r"the logger is .*; give jsonl:FILE or tensorboard:FOLDER"):
        open_logger(where)


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written to"):
        open_logger(f"jsonl:{tmp_path}/a/b.jsonl")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackage, match="pip install tensorboard") as caught:
        open_logger(f"tensorboard:{tmp_path}")
    assert isinstance(caught.value, Error)
    assert isinstance(caught.value, ImportError)
    assert caught.value.package == "tensorboard"


def test_tensorboard_is_called_as_torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which need not be installed."""
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            calls.append(folder)

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((tag, scalar_value, global_step))

        def add_text(self, tag: str, text_string: str, global_step: int) -> None:
            calls.append((tag, text_string, global_step))

        def close(self) -> None:
            calls.append("closed")

    stand_in = ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    logger = open_logger(f"tensorboard:{tmp_path / 'board'}")
    logger.log(3, {"loss": 2.5, "seconds": 1.0})
    logger.event("skip", "not finite")
    logger.close()
    logger.close()
    logger.log(4, {"loss": 1.0})
    assert calls == [str(tmp_path / "board"), ("loss", 2.5, 3), ("seconds", 1.0, 3), ("skip", "not finite", 3), "closed"]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the package tensorboard is not installed")
def test_tensorboard_gets_scalars_and_texts(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path / "board")
    logger.log(1, {"loss": 2.5})
    logger.event("skip", "not finite")
    logger.close()
    logger.close()
    data = b"".join(path.read_bytes() for path in (tmp_path / "board").iterdir())
    assert b"loss" in data
    assert b"not finite" in data
