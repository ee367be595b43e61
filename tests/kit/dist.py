"""Functions on several ranks, from an ordinary test.

``run_ranks(3, fn, arg)`` calls ``fn(rank, 3, arg)`` in three processes joined by gloo and returns the three results. The
processes stay for later calls with the same number of ranks, because starting and joining them takes time. A call that fails or
hangs ends its processes; the error holds the traceback of every rank, or where each of them hung. ``prepare=(load, 2)`` asks
for processes in which ``load(2)`` has run before anything else, once; they are not shared with calls that ask for others.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_PR_SET_PDEATHSIG = 1
_STACKS_WAIT = 1.0  # seconds a hung rank gets to write its stacks
# Ranks are forked from one process that has imported torch and done nothing else: milliseconds each instead of seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.device_mesh", "torch._dynamo", __name__])


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung."""

    def __init__(self, text: str, exit_codes: list[int | None], errors: list[str | None]) -> None:
        super().__init__(text)
        self.exit_codes = exit_codes  # None: was still alive
        self.errors = errors  # the traceback of each rank that raised


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None


def seed_all(seed: int = 0) -> None:
    """The state in which every call and every test starts."""
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


Prepare = tuple[Any, ...]  # a picklable function and its arguments


def _worker(rank: int, world_size: int, folder: str, pipe: Connection, prepare: Prepare) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    session = multiprocessing.parent_process()
    if session is None or not session.is_alive():
        return  # it ended before the line above
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stacks = open(os.path.join(folder, f"stacks-{rank}"), "w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if prepare:
        prepare[0](*prepare[1:])
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            task = None
        if task is None:
            break
        fn, args, raises = task
        seed_all()
        try:
            outcome = _Outcome(fn(rank, world_size, *args))
        except BaseException as error:
            outcome = _Outcome(error="".join(traceback.format_exception(error)))
            _answer(pipe, outcome)
            if raises:
                raise  # a rank of its own ends the way a user's program would
            continue
        _answer(pipe, outcome)
    dist.destroy_process_group()


def _answer(pipe: Connection, outcome: _Outcome) -> None:
    try:
        pipe.send(outcome)
    except OSError:
        raise
    except Exception as error:  # the result cannot be pickled
        pipe.send(_Outcome(error=f"the result {outcome.value!r} cannot be sent: {error!r}"))


class _Pool:
    def __init__(self, world_size: int, prepare: Prepare = ()) -> None:
        self.world_size = world_size
        self.folder = tempfile.mkdtemp(prefix="lowtide-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_worker, args=(rank, world_size, self.folder, theirs, prepare), name=f"rank-{rank}", daemon=False
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, *, raises: bool) -> list[_Outcome | None]:
        """Outcomes by rank; None for a rank that died or did not answer in time."""
        for pipe in self._pipes:
            try:
                pipe.send((fn, args, raises))
            except OSError:
                continue  # dead already; found out below
        outcomes: list[_Outcome | None] = [None] * self.world_size
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + timeout
        while open_pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                rank = open_pipes.pop(pipe)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    continue
        self.hung = sorted(open_pipes.values())
        return outcomes

    def stacks(self) -> dict[int, str]:
        """Where the ranks that gave no answer stand."""
        for rank in self.hung:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(_STACKS_WAIT if self.hung else 0)
        texts = {}
        for rank in self.hung:
            with open(os.path.join(self.folder, f"stacks-{rank}")) as file:
                texts[rank] = file.read()
        return texts

    def end(self, seconds: float = 10.0) -> list[int | None]:
        """Ask all ranks to end, kill those that do not, and give the exit codes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return codes


_pools: dict[tuple[int, Prepare], _Pool] = {}


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 100,
    fresh: bool = False,
    exit_codes: list[int] | None = None,
    prepare: Prepare = (),
) -> list[Any]:
    """``fn(rank, world_size, *args)`` of every rank, by rank. ``fn`` and its arguments must be picklable.

    ``fresh=True`` starts processes for this call alone and lets them end, each by its own exception if it raised one;
    ``exit_codes`` are then what is expected (all 0 unless given: then errors and deaths do not raise here, and the result
    of a rank that raised is its traceback, of one that died None).
    """
    kind = world_size, prepare
    pool = _Pool(*kind) if fresh else (_pools.get(kind) or _pools.setdefault(kind, _Pool(*kind)))
    outcomes = pool.call(fn, args, timeout, raises=fresh)
    bad = any(outcome is None or outcome.error is not None for outcome in outcomes)
    stacks = pool.stacks()
    codes: list[int | None] = [None] * world_size
    if fresh or bad:
        _pools.pop(kind, None) if not fresh else None
        codes = pool.end(40.0 if fresh and not stacks else 0.2)
    if exit_codes is not None and codes == exit_codes and not stacks:
        return [None if outcome is None else outcome.error or outcome.value for outcome in outcomes]
    if bad or (fresh and codes != (exit_codes or [0] * world_size)):
        raise RanksFailed(_tell(fn, outcomes, codes, stacks, timeout), codes, [o.error if o else None for o in outcomes])
    return [outcome.value for outcome in outcomes if outcome is not None]


def _tell(
    fn: Callable[..., Any], outcomes: list[_Outcome | None], codes: list[int | None], stacks: dict[int, str], timeout: float
) -> str:
    lines = [f"{fn.__name__} on {len(outcomes)} ranks:"]
    for rank, outcome in enumerate(outcomes):
        if rank in stacks:
            lines.append(f"--- rank {rank} gave no answer within {timeout} s and stands at\n{stacks[rank]}")
        elif outcome is None:
            lines.append(f"--- rank {rank} died, exit code {codes[rank]}")
        elif outcome.error is not None:
            lines.append(f"--- rank {rank} raised (exit code {codes[rank]})\n{outcome.error}")
        else:
            lines.append(f"--- rank {rank} returned {outcome.value!r:.200} (exit code {codes[rank]})")
    return "\n".join(lines)


def close_pools() -> None:
    """End all ranks that are kept."""
    while _pools:
        _pools.popitem()[1].end()
