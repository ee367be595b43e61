"""Functions on the ranks of several hosts, from an ordinary test: as ``run_ranks``, across network namespaces.

``run_hosts(network, [2, 2], fn, arg)`` calls ``fn(rank, 4, arg)`` in four processes, two on each host, with the variables that
torchrun sets. They are forked from a process that has imported torch, so a call takes a moment; each call has ranks of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.kit.dist import _CONTEXT as FORKED  # one process that has imported torch serves all
from tests.kit.dist import seed_all
from tests.kit.netns import Host, Network, enter

_PR_SET_PDEATHSIG = 1
_FIRST_PORT = 29500
_STACKS_WAIT = 1.0  # seconds a hung rank gets to write its stacks
_ports: dict[str, int] = {}  # per network: the next free one


class HostsFailed(AssertionError):
    """At least one rank raised, died or hung; the text says which, and where it stood."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: the value that it returned or the traceback of what it raised (None: it died first), and its exit
    code (None: it hung and was killed)."""

    value: Any
    error: str | None
    code: int | None


class Ranks:
    """Processes on the hosts of a network, from the start to their end."""

    def __init__(self, network: Network, ranks_per_host: Sequence[int], fn: Callable[..., Any], *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lowtide-hosts-")
        self.folder = Path(self._folder.name)
        """Where a function can leave files for the test: ranks find it in the variable LOWTIDE_TEST_FOLDER."""
        self.world_size = sum(ranks_per_host)
        port = _ports[network.hosts[0].name] = _ports.get(network.hosts[0].name, _FIRST_PORT) + 1
        self._processes: list[Any] = []
        hosts = [host for host, count in enumerate(ranks_per_host) for _ in range(count)]
        for rank, host in enumerate(hosts):
            environment = {
                **network.environment(host, rank, ranks_per_host, port),
                "LOWTIDE_TEST_FOLDER": str(self.folder),
            }
            process = FORKED.Process(
                target=_rank, args=(network.hosts[host], environment, fn, args), name=f"rank-{rank}", daemon=False
            )
            process.start()
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        self._folder.cleanup()

    def wait_for(self, name: str, timeout: float = 60) -> None:
        """Until every rank has left the file ``name-<rank>``."""
        end = time.monotonic() + timeout
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.world_size)):
            if time.monotonic() > end or any(process.exitcode for process in self._processes):
                raise HostsFailed(f"no rank may fail before {name!r}:\n{self._tell(self.outcomes(0))}")
            time.sleep(0.02)

    def outcomes(self, timeout: float) -> list[Outcome]:
        """How every rank ended. Those that have not after ``timeout`` seconds are killed; their log then has their stacks."""
        end = time.monotonic() + timeout
        while any(process.exitcode is None for process in self._processes) and time.monotonic() < end:
            time.sleep(0.02)
        hung = [process for process in self._processes if process.exitcode is None]
        for process in hung:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_STACKS_WAIT if hung else 0)
        codes = [process.exitcode for process in self._processes]
        for process in hung:
            process.kill()
            process.join()
        return [self._outcome(rank, code) for rank, code in enumerate(codes)]

    def _outcome(self, rank: int, code: int | None) -> Outcome:
        try:
            value, error = pickle.loads((self.folder / f"outcome-{rank}").read_bytes())
        except FileNotFoundError:
            return Outcome(None, None, code)
        return Outcome(value, error, code)

    def values(self, timeout: float = 60) -> list[Any]:
        """What every rank returned; raises if one of them raised, died or hung."""
        found = self.outcomes(timeout)
        if any(outcome.code != 0 or outcome.error is not None for outcome in found):
            raise HostsFailed(self._tell(found))
        return [outcome.value for outcome in found]

    def log(self, rank: int) -> str:
        """What a rank printed."""
        return (self.folder / f"log-{rank}").read_text(errors="replace")

    def _tell(self, found: list[Outcome]) -> str:
        lines = []
        for rank, outcome in enumerate(found):
            ended = "hung and was killed" if outcome.code is None else f"ended with code {outcome.code}"
            lines.append(f"--- rank {rank} {ended}\n{outcome.error or ''}{self.log(rank)[-6000:]}")
        return "\n".join(lines)


def run_hosts(
    network: Network, ranks_per_host: Sequence[int], fn: Callable[..., Any], *args: Any, timeout: float = 90
) -> list[Any]:
    """``fn(rank, world_size, *args)`` of every rank, by rank. ``fn`` is a function of a module, its arguments picklable."""
    with Ranks(network, ranks_per_host, fn, *args) as ranks:
        return ranks.values(timeout)


def leave(name: str, text: str = "") -> None:
    """Called by a rank: a file for the test, see ``Ranks.wait_for``."""
    path = Path(os.environ["LOWTIDE_TEST_FOLDER"], f"{name}-{os.environ['RANK']}")
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


def _join() -> tuple[int, int]:
    """torch.distributed over the test's own network; its store listens at one address, which torch alone would not do."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = -1
    if rank == 0:
        opened = socket.create_server((address, port))
        listener = opened.detach()
    store = dist.TCPStore(address, port, size, is_master=rank == 0, master_listen_fd=listener if rank == 0 else None)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return rank, size


def _rank(host: Host, environment: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    enter(host)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    folder = Path(environment["LOWTIDE_TEST_FOLDER"])
    log = os.open(folder / f"log-{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    rank, size = _join()
    seed_all()
    error: BaseException | None = None
    value: Any = None
    try:
        value = fn(rank, size, *args)
    except BaseException as raised:
        error = raised
    text = None if error is None else "".join(traceback.format_exception(error))
    part = folder / f"outcome-{rank}.part"
    part.write_bytes(pickle.dumps((value, text)))
    part.rename(folder / f"outcome-{rank}")
    if error is not None:
        raise error  # the process ends the way a user's program would
