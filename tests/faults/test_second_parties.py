"""Others at work at the same time: readers beside savers, savers beside each other and beside `gc`, jobs beside jobs.

What is saved carries a digest of its numbers, so that a reader knows what it should have found, whoever wrote it. In every
setting: each save and each load succeeds, and what was loaded are the numbers of one save.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.checkpoint.collect import collect
from lowtide.checkpoint.folder import checkpoints
from lowtide.launchers import LauncherUnclear
from tests.kit.checkpoints import Setup
from tests.kit.crashes import Board, Child, apart, start
from tests.kit.recovery import Job, digest, ranks, reader

# -- one folder of checkpoints ----------------------------------------------------------------------------------------

LOADS, SAVES, GC, ENDED = 1, 2, 3, 4
"""Places on the board."""


IN_MEMORY = Job(Setup())


@dataclass(frozen=True)
class Party:
    """Who is at work in one folder. ``by_name``: the reader asks for one checkpoint and not for the newest."""

    job: Job = IN_MEMORY
    savers: int = 1
    gc: bool = False
    readers: int = 1
    """Ranks of the job that loads."""
    by_name: bool = False


PARTIES = {
    "keep 1": Party(),
    "keep 1 on two ranks": Party(readers=2),
    "keep 2 in the background": Party(Job(Setup(), background=True, keep=2)),
    "the same name again": Party(Job(Setup(), same_name=True)),
    "the same name, asked for": Party(Job(Setup(), same_name=True), by_name=True),
    "linked": Party(Job(Setup(disk=True, chunk_bytes=1 << 16))),
    "two savers": Party(savers=2),
    "two savers of one name": Party(Job(Setup(), same_name=True), savers=2, by_name=True),
    "beside gc": Party(gc=True),
    "linked, beside gc": Party(Job(Setup(disk=True, chunk_bytes=1 << 16)), gc=True),
    "two savers beside gc": Party(Job(Setup(), keep=3), savers=2, gc=True),
}


def saves(folder: Path, party: Party, board: Board, who: int) -> int:
    """Save until the others have had enough; how often."""
    own = folder / f"saver-{who}"
    own.mkdir()
    one, count = party.job.trained(own, seed=who), 0
    while not board[ENDED]:
        one.train(count, 1)
        extra = {"step": count, "digest": digest(one.numbers())}
        name = party.job.name(count) if party.job.same_name else f"job-{who}-{count}"
        options: dict[str, Any] = {"keep": party.job.keep, "background": party.job.background}
        lowtide.save(folder / "run" / name, one.model, one.optimizer, state=one.state(), extra=extra, **options).wait()
        count += 1
        board[SAVES + 8 * (who + 1)] = count
    return count


def collects(folder: Path, board: Board) -> int:
    """Clean, trusting the locks alone."""
    count = 0
    while not board[ENDED]:
        if (folder / "run").is_dir():
            found = collect(folder / "run", minutes=0)
            assert not found.leftovers, "every save that is not there yet is alive"
            count += 1
    return count


def loads(folder: Path, party: Party, count: int, rank: int) -> int:
    """Load ``count`` times; every rank has the numbers of one save."""
    setup = Setup(ranks=party.readers, stage=2 if party.readers > 1 else 0)
    own = folder / f"reader-{rank}"
    own.mkdir()
    two = Job(setup, party.job.specimen).trained(own, rank, seed=9) if party.readers > 1 else reader(own, party.job)
    where = folder / "run" / "last" if party.by_name else folder / "run"
    seen: set[str] = set()
    for _ in range(count):
        extra = lowtide.load(where, two.model, two.optimizer, state=two.state())
        bits = digest(two.numbers())
        assert rank or bits == extra["digest"], f"other numbers than those of step {extra['step']}"
        seen.add(extra["digest"])
    return len(seen)


def together(folder: Path, party: Party, count: int) -> tuple[int, int, int]:
    """``count`` loads or, where nobody loads, saves; how many saves, different checkpoints that were loaded, cleanings."""
    board, seconds = Board(), 3000.0
    others: list[Child] = [start(saves, folder, party, board, who, seconds=seconds) for who in range(party.savers)]
    cleaner = start(collects, folder, board, seconds=seconds) if party.gc else None
    try:
        while not all(board[SAVES + 8 * (who + 1)] for who in range(party.savers)) and all(is_alive(c) for c in others):
            time.sleep(0.002)
        found = [child.wait().result() for child in ranks(folder, party.readers, loads, folder, party, count, seconds=seconds)]
    finally:
        board[ENDED] = 1
    return sum(child.wait().result() for child in others), max(found), cleaner.wait().result() if cleaner is not None else 0


def is_alive(child: Child) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@pytest.mark.parametrize("name", PARTIES)
def test_in_one_folder(name: str, quick_path: Path) -> None:
    saved, seen, cleaned = apart(together, quick_path, PARTIES[name], 12)
    assert min(saved, seen) > 0
    assert cleaned or not PARTIES[name].gc
    assert checkpoints(quick_path / "run")[0]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARTIES)
def test_long_in_one_folder(name: str, quick_path: Path) -> None:
    """In all: more than 4,000 loads."""
    print(name, apart(together, quick_path, PARTIES[name], 400, seconds=3500))


def beside_gc(folder: Path, party: Party, count: int) -> tuple[int, int]:
    """At least ``count`` saves while somebody cleans as often as possible; how many saves, and cleanings."""
    board = Board()
    savers = [start(saves, folder, party, board, who, seconds=3000.0) for who in range(party.savers)]
    cleaner = start(collects, folder, board, seconds=3000.0)
    places = [SAVES + 8 * (who + 1) for who in range(party.savers)]
    while sum(board[place] for place in places) < count and all(map(is_alive, [*savers, cleaner])):
        time.sleep(0.01)
    board[ENDED] = 1
    return sum(child.wait().result() for child in savers), cleaner.wait().result()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["beside gc", "two savers beside gc", "linked, beside gc"])
def test_saves_beside_gc(name: str, quick_path: Path) -> None:
    saved, cleaned = apart(beside_gc, quick_path, PARTIES[name], 400, seconds=3500)
    assert min(saved, cleaned) >= 400


# -- jobs beside jobs -------------------------------------------------------------------------------------------------

STEPS = 3


def by_hand(rank: int, job: int, port: int) -> dict[str, str]:
    """What a loop in a shell sets."""
    return {"RANK": str(rank), "WORLD_SIZE": "2"}


def by_hand_locally(rank: int, job: int, port: int) -> dict[str, str]:
    return {**by_hand(rank, job, port), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}


def with_ports(rank: int, job: int, port: int) -> dict[str, str]:
    """As the refusal says."""
    return {**by_hand(rank, job, port), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def of_open_mpi(rank: int, job: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def of_named_open_mpi(rank: int, job: int, port: int) -> dict[str, str]:
    return {**of_open_mpi(rank, job, port), "PMIX_NAMESPACE": f"prterun-{port}-{job}"}


def of_mpich(rank: int, job: int, port: int) -> dict[str, str]:
    """Two of them in one allocation."""
    numbers = {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2, "SLURM_JOB_ID": 77}
    return {name: str(number) for name, number in numbers.items()}


def of_horovod(rank: int, job: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


LOOPS: dict[str, tuple[Callable[[int, int, int], dict[str, str]], bool]] = {
    "by hand": (by_hand, False),
    "by hand, on this host": (by_hand_locally, False),
    "by hand, with a port for each": (with_ports, True),
    "Open MPI's variables": (of_open_mpi, False),
    "Open MPI's variables and a name": (of_named_open_mpi, True),
    "MPICH's variables in an allocation": (of_mpich, False),
    "Horovod's variables": (of_horovod, False),
}
"""What the loop sets, and whether that tells the jobs apart."""


def trains(environ: dict[str, str], job: int) -> str:
    """One rank of a job: a digest of what it has in the end, or the refusal."""
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        lowtide.shard(model, optimizer, stage=2)
    except LauncherUnclear as error:
        return f"refused: {error}"
    data = torch.Generator().manual_seed(10 * job + dist.get_rank())
    for _ in range(STEPS):
        model(torch.randn(4, 8, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with lowtide.gathered(model):
        return digest(dict(model.named_parameters()))


def pairs(name: str, count: int) -> list[list[str]]:
    """What two jobs of two ranks each, that differ in their data alone, end with: ``count`` times."""
    found: list[list[str]] = []
    for number in range(count):
        free = [port_that_is_free() for _ in range(2)]
        rows = [(job, rank) for job in range(2) for rank in range(2)]
        rows = rows if number % 2 else [rows[0], rows[3], rows[1], rows[2]]  # ranks of both come first
        make = LOOPS[name][0]
        children = [start(trains, make(rank, job, free[job]), job, seconds=100) for job, rank in rows]
        ended = {row: child.wait().result() for row, child in zip(rows, children, strict=True)}
        found.append([ended[row] for row in sorted(ended)])
    return found


def port_that_is_free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def alone(job: int) -> list[str]:
    """What one job has in the end that nobody is beside."""
    port = port_that_is_free()
    return [child.wait().result() for child in [start(trains, with_ports(rank, job, port), job) for rank in range(2)]]


def check_pairs(name: str, count: int) -> None:
    tells_apart = LOOPS[name][1]
    expected = [*apart(alone, 0), *apart(alone, 1)]
    assert len(set(expected)) == 2, "ranks of one job have the same, and jobs do not"
    for ended in apart(pairs, name, count, seconds=3000):
        for what, bits in zip(ended, expected, strict=True):
            assert what == bits if tells_apart else what.startswith("refused") and "MASTER_PORT" in what, ended


@pytest.mark.parametrize("name", LOOPS)
def test_jobs_from_one_loop(name: str) -> None:
    check_pairs(name, 2 if LOOPS[name][1] else 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LOOPS)
def test_many_jobs_from_one_loop(name: str) -> None:
    check_pairs(name, 50)


def same_name(rank: int, job: int, secret: str) -> dict[str, str]:
    return {**of_open_mpi(rank, job, 0), "PMIX_NAMESPACE": secret}


def of_one_name(secret: str) -> list[str]:
    """A whole job, and then another of its name: while the first is there, nobody joins it."""
    board = Board()
    first = [start(lingers, same_name(rank, 0, secret), board, seconds=60) for rank in range(2)]
    while board[1] < 1 or board[2] < 1:
        if not all(map(is_alive, first)):
            break
        time.sleep(0.002)
    later = [start(trains, same_name(rank, 1, secret), 1, seconds=60).wait().result() for rank in range(2)]
    board[0] = 1
    return [*(child.wait().result() for child in first), *later]


def lingers(environ: dict[str, str], board: Board) -> str:
    bits = trains(environ, 0)
    board[1 + dist.get_rank()] = 1
    while not board[0]:
        time.sleep(0.002)
    return bits


def test_a_second_job_of_one_name() -> None:
    *first, zero, one = apart(of_one_name, secrets.token_hex(8))
    assert first == apart(alone, 0)
    assert "is rank 0 of a job of the same name" in zero
    assert "rank 1 of 2 is there already" in one
