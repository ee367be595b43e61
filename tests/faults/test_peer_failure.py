"""A rank that raises or dies ends all ranks soon, with one cause; and the end of a process is always clean."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide.comm import Group, Label, Wire, links
from lowtide.comm import group as group_module
from lowtide.errors import DeadlineExceeded, PeerFailed
from tests.kit.dist import RanksFailed, run_ranks

LIMIT = 9.0  # seconds from the failure of one rank to the error on another: half of one here, and far from any deadline


def meet(wire: Wire, notes: list[bytes]) -> None:
    wire.world.all_gather_small(torch.zeros(1))


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # one clock for all processes


def fail_while_others_wait(rank: int, world_size: int, victim: int, how: str, folder: str, busy: bool) -> tuple[float, str]:
    group = Group.join(None, deadline=60)
    channel = group.channel("one")
    channel.run(Label("gather", 0, "blocks.0"), meet)
    if rank == victim:
        time.sleep(0.3)
        Path(folder, "when").write_text(repr(now()))
        if how == "kill with a child" and os.fork() == 0:
            time.sleep(6)  # as a loader's worker may: it inherits all connections and keeps them open
            os._exit(0)
        if how != "raise":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the disk is on fire")
    try:
        compute_until_told(group) if busy else channel.run(Label("gather", 1, "blocks.1"), meet)
    except PeerFailed as error:
        return now(), str(error)
    raise RuntimeError("nothing was heard")


def compute_until_told(group: Group) -> None:
    end = now() + 10
    while now() < end:
        torch.ones(100).sum()
        group.watch.raise_if_failed("step")


@pytest.mark.parametrize(
    ("victim", "how", "busy"),
    [
        *((victim, how, False) for victim in (0, 1, 2) for how in ("kill", "kill with a child", "raise")),
        (0, "kill", True),
        (1, "raise", True),
    ],
)
def test_all_ranks_hear_of_a_failure(victim: int, how: str, busy: bool, tmp_path: Path) -> None:
    codes = [0, 0, 0]
    codes[victim] = 1 if how == "raise" else -9
    results = run_ranks(3, fail_while_others_wait, victim, how, str(tmp_path), busy, fresh=True, exit_codes=codes)
    when = float((tmp_path / "when").read_text())
    cause = "ValueError: the disk is on fire" if how == "raise" else "ended without a word: killed, or crashed"
    for rank, result in enumerate(results):
        if rank != victim:
            heard, text = result
            assert heard - when < LIMIT
            assert text == f"rank {victim} failed: {cause} (this rank was at {'step' if busy else repr_of(1)})"


def repr_of(unit: int) -> str:
    return f"gather of 'blocks.{unit}'"


def fail_in_the_middle(rank: int, world_size: int, folder: str) -> tuple[float, str]:
    """Rank 1 dies when all are inside the exchange, where only closed connections can end the others' wait."""
    group = Group.join(None, deadline=60)
    channel = group.channel("one")

    def work(wire: Wire, notes: list[bytes]) -> None:
        if rank == 1:
            Path(folder, "when").write_text(repr(now()))
            os.kill(os.getpid(), signal.SIGKILL)
        wire.world.gather(torch.zeros(30_000, dtype=torch.uint8), [0, 10_000, 20_000, 30_000])

    with pytest.raises(PeerFailed) as caught:
        channel.run(Label("gather", 1, "blocks.1"), work)
    assert caught.value.rank == 1
    return now(), str(caught.value)


def test_a_death_inside_an_exchange(tmp_path: Path) -> None:
    results = run_ranks(3, fail_in_the_middle, str(tmp_path), fresh=True, exit_codes=[0, -9, 0])
    when = float((tmp_path / "when").read_text())
    assert all(results[rank][0] - when < LIMIT for rank in (0, 2))


def chain(rank: int, world_size: int) -> None:
    group = Group.join(None, deadline=60)
    channel = group.channel("one")
    if rank == 2:
        raise KeyError("first")
    channel.run(Label("gather", 1, "blocks.1"), meet)


def test_one_cause_is_named_by_all() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, chain, fresh=True)
    assert caught.value.exit_codes == [1, 1, 1, 1]
    for rank, error in enumerate(caught.value.errors):
        assert error is not None
        assert ("KeyError: 'first'" if rank == 2 else "rank 2 failed: KeyError: 'first'") in error


def while_connecting(rank: int, world_size: int) -> list[str]:
    """A channel cannot be opened because rank 1 goes; gloo itself says only that something was closed, or late."""

    def refuse(text: str) -> Any:
        def connect(*given: Any) -> None:
            raise RuntimeError(text)

        return connect

    told = []
    for text in ("Connection closed by peer", "Timed out waiting for a connection"):
        group = Group.join(None, deadline=20, transport="torch")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "gloo_options", refuse(text))
            patch.setattr(group_module, "NEWS", 30.0)  # however busy the machine is
            if rank == 1:
                group.watch.report(ValueError("first"))
            with pytest.raises((PeerFailed, DeadlineExceeded)) as caught:
                group.channel("one")
        told.append(str(caught.value))
        group.close()
    return told


def test_a_failure_while_ranks_connect_is_told_as_what_it_is() -> None:
    closed, late = run_ranks(2, while_connecting)[0]
    assert closed == "rank 1 failed: ValueError: first (this rank was at opening 'one/0/world')"
    assert late.startswith("no answer for ranks [0, 1] to open 'one/0/world' within 25 s")


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from lowtide.comm import Group, Label
rank, folder, how, destroy = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
groups = [Group.join(None, deadline=60), Group.join(None, deadline=60)]
channel = groups[0].channel("one")
def meet(wire, notes):
    wire.world.all_gather_small(torch.zeros(1))
channel.run(Label("gather", 0, "blocks.0"), meet)
if how == "pending":
    ticket = channel.submit(Label("gather", 1, "blocks.1"), meet)   # nobody else does
    time.sleep(0.2)
if how == "uneven":
    time.sleep(0.4 * rank)
if destroy == "destroy":
    dist.destroy_process_group()
if how == "raise" and rank == 1:
    raise ValueError("the disk is on fire")
if how == "exit" and rank == 1:
    sys.exit(3)
if how == "raise":
    channel.run(Label("gather", 1, "blocks.1"), meet)
"""


@pytest.mark.parametrize(
    ("how", "destroy"),
    [("nothing", "leave"), ("uneven", "destroy"), ("pending", "leave"), ("raise", "destroy"), ("exit", "leave")],
)
def test_a_process_ends_cleanly(how: str, destroy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), tmp_path, how, destroy], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=40)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    expected = {"raise": [1, 1], "exit": [0, 3]}.get(how, [0, 0])
    assert [rank.returncode for rank in ranks] == expected, texts
    for rank, text in enumerate(texts):
        assert "terminate" not in text
        assert "Fatal" not in text
        if how == "raise":
            assert ("" if rank == 1 else "rank 1 failed: ") + "ValueError: the disk is on fire" in text
        elif how != "pending":
            assert text == ""


def forked_children_are_silent(rank: int, world_size: int) -> int:
    """A loader's worker inherits the group; that it ends must not mean that the rank has left."""
    group = Group.join(None, deadline=20)
    channel = group.channel("one")
    pid = os.fork()
    if pid == 0:
        group.close()
        atexit._run_exitfuncs()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    channel.run(Label("gather", 0, "blocks.0"), meet)
    assert group.watch.left() == {}
    channel.run(Label("gather", 1, "blocks.1"), meet)  # the other rank has looked, too: now both may leave
    group.close()
    return status


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_speak_for_its_rank() -> None:
    assert run_ranks(2, forked_children_are_silent, fresh=True) == [0, 0]


def last_exchange(rank: int, world_size: int) -> float:
    """A rank may leave as soon as it has its own result, while others still receive."""
    size = 6_000_000
    for i in range(5):
        group = Group.join(None, deadline=20)
        channel = group.channel("one")

        def work(wire: Wire, notes: list[bytes], i: int = i) -> float:
            cuts = [0] + [size] * world_size  # all of it comes from rank 0
            whole = torch.full((size,), i if rank == 0 else 77, dtype=torch.uint8)
            wire.world.gather(whole, cuts)
            if rank == 2:
                time.sleep(0.05)
            return float(whole.float().mean())

        assert channel.run(Label("gather", i, "last"), work) == i
        group.close()
    return dist.get_rank()


def test_leaving_after_the_last_exchange_does_not_cut_it_short() -> None:
    assert run_ranks(3, last_exchange) == [0, 1, 2]
