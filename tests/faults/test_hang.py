"""A rank that is stopped, or that never comes, ends all ranks with one report each that names it, soon after the deadline."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.comm import Group, Label, Wire
from lowtide.comm import watch as watch_module
from lowtide.errors import DeadlineExceeded, PeerFailed
from tests.kit.dist import run_ranks
from tests.kit.specimen import WIDTH, Stack, blocks

DEADLINE = 3.0
LIMIT = 30.0  # generous: a busy machine is not what this is about
HEADING = "lowtide: rank "


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # one clock for all processes


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code, what stood on its standard error, and what it noted about its exception."""

    code: int | None
    err: str
    noted: dict[str, Any]


class Job:
    """Ranks that may be stopped, forked from a server that has imported torch."""

    def __init__(self, folder: Path, size: int, *, transport: str, victim: int, how: str) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        self._processes = [
            context.Process(target=_rank, args=(rank, size, str(folder), transport, victim, how)) for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def wait(self, ranks: list[int]) -> list[Ended]:
        """The ends of these ranks; all ranks are killed afterwards."""
        end = time.monotonic() + 90
        for rank in ranks:
            self._processes[rank].join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            process.kill()
            process.join()
        return [self._ended(rank, codes[rank]) for rank in ranks]

    def _ended(self, rank: int, code: int | None) -> Ended:
        noted = self.folder / f"noted-{rank}.json"
        err = (self.folder / f"err-{rank}.txt").read_text()
        return Ended(code, err, json.loads(noted.read_text()) if noted.exists() else {})


def _rank(rank: int, size: int, folder: str, transport: str, victim: int, how: str) -> None:
    os.dup2(os.open(f"{folder}/err-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stderr = open(2, "w", closefd=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if how == "sleep" and rank == victim:
        watch_module._LAST_RESORT = 1.0  # type: ignore[misc]
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    model = Stack(blocks(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comm = lowtide.Comm(deadline=DEADLINE, transport=transport)
    lowtide.shard(model, optimizer, stage=3, comm=comm)
    if rank == victim:
        _stop_in_third_step(model, Path(folder), how)
    try:
        for _ in range(5):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        report = getattr(error, "report", None)
        noted = {"when": now(), "type": type(error).__name__, "text": str(error), "report": report}
        Path(folder, f"noted-{rank}.json").write_text(json.dumps(noted))
        raise


def _stop_in_third_step(model: nn.Module, folder: Path, how: str) -> None:
    calls = []

    def stop(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            (folder / "when").write_text(repr(now()))
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stop" else time.sleep(60)

    model.blocks[1].register_forward_pre_hook(stop)  # type: ignore[index, union-attr]


def check_report(ended: Ended, names: str) -> None:
    """One report, which is the one that the error has; it says who waits for whom, for which unit, and where everybody is."""
    assert ended.code == 1, ended.err
    assert ended.noted["type"] in ("DeadlineExceeded", "PeerFailed"), ended
    assert ended.err.count(HEADING) == 1, ended.err
    report = ended.noted["report"]
    assert report.strip()
    assert report in ended.err
    heading = report.splitlines()[0]
    assert " has waited " in heading
    assert names in heading
    assert names.split(" (")[0] in ended.noted["text"]
    assert " of 'blocks." in report
    assert "loss = model(" in report or "loss.backward()" in report, "the stack of the program"
    assert "lowtide-watch-" in report
    assert ", in forward" in report or ", in backward" in report, "the phase of a rank that answered"


@pytest.mark.parametrize(
    ("size", "victim", "transport"),
    [
        (3, 0, "torch"),
        (3, 1, "auto"),
        (2, 0, "auto"),
        pytest.param(3, 2, "auto", marks=pytest.mark.soak),
        pytest.param(2, 1, "torch", marks=pytest.mark.soak),
    ],
)
def test_a_stopped_rank_is_named_by_all_others(size: int, victim: int, transport: str, tmp_path: Path) -> None:
    others = [rank for rank in range(size) if rank != victim]
    job = Job(tmp_path, size, transport=transport, victim=victim, how="stop")
    ends = job.wait(others)
    stopped = float((tmp_path / "when").read_text())
    for rank, ended in zip(others, ends, strict=True):
        check_report(ended, f"rank {victim} does not answer")
        assert f"rank {victim}: does not answer" in ended.noted["report"]
        assert all(f"rank {other}: process " in ended.noted["report"] for other in others), "all others were asked"
        took = ended.noted["when"] - stopped
        print(f"rank {rank}: {took:.2f} s from the stop of rank {victim} to the error, deadline {DEADLINE:.0f} s")
        assert DEADLINE < took < LIMIT


def test_a_rank_that_is_elsewhere_is_shown_there_and_ended(tmp_path: Path) -> None:
    """It answers, but its program does not come back: it is ended as well, and nothing lasts."""
    job = Job(tmp_path, 3, transport="torch", victim=1, how="sleep")
    first, sleeping, last = job.wait([0, 1, 2])
    for ended in (first, last):
        check_report(ended, "rank 1 is not there")
        assert "time.sleep(60)" in ended.noted["report"]
        assert "ranks 0, 2 wait for rank 1" in ended.noted["report"]
    assert sleeping.code == 1
    assert sleeping.noted == {}
    assert sleeping.err.count(HEADING) == 1
    assert "does not end by itself" in sleeping.err


def only_looks(rank: int, world_size: int) -> tuple[float, float]:
    model = Stack(blocks(2))
    lowtide.shard(model, None, stage=3, comm=lowtide.Comm(deadline=7.0, first_deadline=70.0))
    deadlines = engine_of(model).group.deadlines
    first = deadlines.seconds
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    return first, deadlines.seconds


def test_a_model_that_is_only_run_has_the_short_deadline_after_its_first_pass() -> None:
    assert run_ranks(2, only_looks) == [(70.0, 7.0)] * 2


# -- channels ---------------------------------------------------------------------------------------------------------


def meet(wire: Wire, notes: list[bytes]) -> None:
    wire.world.all_gather_small(torch.zeros(1))


class Counting(logging.Handler):
    """Keeps the reports that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.ERROR and record.getMessage().startswith(HEADING):
            self.texts.append(record.getMessage())


def late(rank: int, world_size: int, who: int) -> tuple[str, str, list[str]]:
    """All but one wait on two channels at once, from two threads."""
    counting = Counting()
    logging.getLogger("lowtide").addHandler(counting)
    group = Group.join(None, deadline=1.0, first_deadline=60)  # a rank may be slow to begin
    group.watch.phase = f"forward of rank {rank}"
    one, two = group.channel("one"), group.channel("two")
    one.run(Label("gather", 0, "blocks.0"), meet)
    group.deadlines.settled()
    error: Exception
    try:
        if rank == who:
            while True:
                group.watch.raise_if_failed("its own affairs")
                time.sleep(0.01)
        second = two.submit(Label("reduce", 3, "blocks.3"), meet)
        one.run(Label("gather", 1, "blocks.1"), meet)
        second.wait()
        raise AssertionError("nobody was missing")
    except (DeadlineExceeded, PeerFailed) as raised:
        error = raised
    for channel in (one, two):
        with pytest.raises((DeadlineExceeded, PeerFailed)) as again:
            channel.run(Label("gather", 2, "blocks.2"), meet)
        assert again.value.report == error.report
    started = time.monotonic()
    group.close()
    assert time.monotonic() - started < 10
    logging.getLogger("lowtide").removeHandler(counting)
    return type(error).__name__, error.report, counting.texts


@pytest.mark.parametrize(("world_size", "who"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_a_rank_that_does_not_come_is_reported_once_by_everybody(world_size: int, who: int) -> None:
    results = run_ranks(world_size, late, who)
    for rank, (name, report, texts) in enumerate(results):
        assert name == ("PeerFailed" if rank == who else name)
        assert texts == [report]
        assert f"rank {who} is not there" in report.splitlines()[0]
        for other in range(world_size):
            assert f"forward of rank {other}" in report
        assert "channel 'two': at reduce of 'blocks.3'" in report
        assert "    channel 'one': last did gather of 'blocks.0' (exchange 0)" in report
        assert "in late: " in report, "stacks"
    assert "DeadlineExceeded" in [name for name, _, _ in results]


def waits_outside_channels(rank: int, world_size: int) -> str:
    """As the generations of shared memory do."""
    group = Group.join(None, deadline=20)
    error: Exception | None = None
    try:
        with group.watch.waiting("generation 3 of 'blocks.1'", deadline=0.5 if rank == 0 else 20, awaited=1 - rank) as look_up:
            end = time.monotonic() + 15
            while time.monotonic() < end:
                look_up()
                time.sleep(0.02)
    except (DeadlineExceeded, PeerFailed) as raised:
        error = raised
    assert error is not None
    assert isinstance(error, DeadlineExceeded if rank == 0 else PeerFailed)
    assert group.watch.waited_seconds > (0.4 if rank == 0 else 0)
    group.close()
    return error.report


def test_waits_outside_channels_have_deadlines_too() -> None:
    one, two = run_ranks(2, waits_outside_channels)
    assert one == two
    assert "rank 1 has not done its part" in one
    assert "generation 3 of 'blocks.1'" in one
