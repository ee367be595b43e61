"""What a rank knows about its job: who it is, how it joins the others, and how small facts pass between ranks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lowtide.comm.launched import initialise
from lowtide.errors import PeerFailed
from lowtide.job.failure import FOLDER_VARIABLE, PARENT_VARIABLE, Failure, describe, leave_report
from lowtide.job.launch import launched_by
from lowtide.launchers import Placement
from lowtide.runtime.exchange import Exchange

_PR_SET_PDEATHSIG = 1
_CAUSE_FIRST = 0.5
"""Seconds that a rank which only heard of a failure waits before it ends: torchrun looks every tenth of a second."""


# torch's own annotations are incomplete here.
dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Member:
    """This process among the ranks of a job. ``local_rank`` counts the ranks of this host."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


@contextmanager
def joined() -> Generator[Member, None, None]:
    """Join the process group of the job: ranks started by ``launch`` through a file, ranks of another launcher as it says, or
    alone."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        with _reported(Path(folder)):
            yield from _join_through_file(Path(folder))
        return
    placement = launched_by()
    if placement is not None:
        yield from _join_launched(placement)
    else:
        yield Member(0, 1, 0, 1)


def end_launched_rank(error: BaseException, failure: Failure) -> NoReturn:
    """End this rank of a launcher with a bad exit code; the rank that failed first is the one that torchrun names."""
    if failure.secondary:
        time.sleep(_CAUSE_FIRST)
    else:
        get_error_handler().record_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of this process may be inside a collective that will never end.
    os._exit(failure.exit_code)


def gather_json(value: Any, member: Member) -> list[Any]:
    """The small JSON values of all ranks, in rank order, on every rank. Collective."""
    if member.ranks == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(member.ranks)]
    with _lost_connections_named():
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(member.ranks)]
        dist.all_gather(rows, padded)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def everybody(exchange: Exchange, what: str, value: Any) -> list[Any]:
    """As :func:`gather_json`, once a model is sharded: a rank that fails meanwhile is named with its cause."""
    return [json.loads(text) for text in exchange.texts(what, json.dumps(value))]


def wait_for_all(member: Member) -> None:
    """Return when every rank has come here. Collective."""
    if member.ranks > 1:
        with _lost_connections_named():
            dist.barrier()


@contextmanager
def _lost_connections_named() -> Generator[None, None, None]:
    """A rank that ends closes its connections; the others are not the cause."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailed(-1, f"a connection was lost ({error})", "the start or the end of the job") from error


def _join_launched(placement: Placement) -> Generator[Member, None, None]:
    initialise(placement, os.environ)
    member = Member(placement.rank, placement.size, placement.local_rank, placement.local_size)
    yield member
    _leave(member)


def _join_through_file(folder: Path) -> Generator[Member, None, None]:
    _die_with_parent()
    member = _member_from_environment()
    store = dist.FileStore(str(folder / "store"), member.ranks)
    dist.init_process_group("gloo", store=store, rank=member.rank, world_size=member.ranks)
    yield member
    _leave(member)


@contextmanager
def _reported(folder: Path) -> Generator[None, None, None]:
    """Leave an exception in the folder, where the parent finds it and shows it once, and end this rank."""
    rank = int(os.environ["RANK"])
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:  # whatever ends a rank is reported
        failure = describe(error, rank)
        leave_report(failure, folder)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: threads of this process may be inside a collective that will never end.
        os._exit(failure.exit_code)


def _member_from_environment() -> Member:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Member(rank, ranks, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def _leave(member: Member) -> None:
    wait_for_all(member)
    dist.destroy_process_group()


def _die_with_parent() -> None:
    """Ask the kernel to end this rank when the launcher is gone, however it went. On Linux; elsewhere a rank may outlive it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT_VARIABLE]):
            os._exit(1)
