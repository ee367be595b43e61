"""Who this process is in a job that somebody else has started: torchrun, mpirun, srun, horovodrun. Pure; no torch here.

Every launcher tells its processes who they are in variables of its own. The innermost launcher counts: a torchrun that srun has
started on every node knows better than srun. Variables of SLURM that stand in a batch script, or in a shell inside an
allocation, are not those of a rank; a step that srun starts has more of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import ArgumentError

_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that the kernel hands out by itself
_OUTSIDE = re.compile(r",(?![^\[]*\])")
_TIMES = re.compile(r"^(\d+)(?:\(x(\d+)\))?$")

Environment = Mapping[str, str]


class LauncherUnclear(ArgumentError):
    """What a launcher has put into the environment is incomplete or contradicts itself; the message says what to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One process among those that a launcher has started.

    ``master_addr`` is empty if all are on one host and nobody named a port: then they meet through a file (``job`` names it).
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str
    master_port: int
    job: str
    """The same text in all processes of the job and, where the launcher gives one, in no other; may be empty."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size


def discover(environ: Environment) -> Placement | None:
    """What the launcher of this process says, or None if none has started it. Raises if that makes no sense."""
    for read in (_torch, _horovod, _open_mpi, _slurm, _mpich):
        placement = read(environ)
        if placement is not None:
            return placement
    if environ.get("WORLD_SIZE", "1") != "1":
        raise LauncherUnclear(f"WORLD_SIZE is {environ['WORLD_SIZE']!r}, but RANK is not set; set both, or neither.")
    return None


def _torch(environ: Environment) -> Placement | None:
    """torchrun, and all that set the same variables by hand."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None  # one alone may have been set for another launcher's ranks
    found = _Found("torchrun", environ, rank="RANK", size="WORLD_SIZE", local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE")
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    way_out = "start it with torchrun, or set MASTER_ADDR and MASTER_PORT"
    placement = found.placed(job=f"{run}-{restarts}" if run else "", way_out=way_out)
    if placement.size > 1 and not placement.job and not placement.master_addr:
        raise LauncherUnclear(
            f"RANK={placement.rank} and WORLD_SIZE={placement.size} do not say which job this is: of two that are started side "
            f"by side, ranks would meet those of the other. Set MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, another "
            f"one for each job, or start it with torchrun or `lowtide train --ranks`."
        )
    return placement


def _horovod(environ: Environment) -> Placement | None:
    if "HOROVOD_RANK" not in environ and "HOROVOD_SIZE" not in environ:
        return None
    names = {name: f"HOROVOD_{name.upper()}" for name in ("rank", "size", "local_rank", "local_size")}
    meets = [environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT")]
    way_out = "set MASTER_ADDR to the first host and MASTER_PORT to a free port on it"
    return _Found("horovodrun", environ, **names).placed(job="-".join(meets) if all(meets) else "", way_out=way_out)


def _open_mpi(environ: Environment) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    names = {name: f"OMPI_COMM_WORLD_{name.upper()}" for name in ("rank", "size", "local_rank", "local_size")}
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    way_out = "add: -x MASTER_ADDR=<name of the first host> -x MASTER_PORT=<a free port on it>"
    return _Found("Open MPI's mpirun", environ, **names).placed(job=job, way_out=way_out, first_host=_first_host(environ))


def _mpich(environ: Environment) -> Placement | None:
    """MPICH, Intel MPI and others with the process manager Hydra."""
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return None
    names = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
    way_out = "add: -genv MASTER_ADDR <name of the first host> -genv MASTER_PORT <a free port on it>"
    found = _Found("MPICH's mpiexec", environ, **names)
    # Several mpiexec may run in one allocation: its number says which port to take, and not which job this is.
    allocation = environ.get("SLURM_JOB_ID", "")
    return found.placed(job="", way_out=way_out, first_host=_first_host(environ), allocation=allocation)


def _slurm(environ: Environment) -> Placement | None:
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    found = _Found("srun", environ, rank="SLURM_PROCID", size=size, local_rank="SLURM_LOCALID", local_size="")
    ours = (environ["SLURM_PROCID"], environ[size])
    if "PMI_RANK" in environ and (environ["PMI_RANK"], environ.get("PMI_SIZE", "")) != ours:
        return None  # mpiexec uses srun to start its own daemons, one for each host
    job = "-".join(environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    hosts = expand_hosts(_node_list(environ))
    return found.placed(
        job=job,
        way_out="set MASTER_ADDR to the first host and MASTER_PORT to a free port on it",
        first_host=hosts[0] if hosts else "",
        local_size=_slurm_local_size(environ, found.size, len(hosts)),
    )


def _node_list(environ: Environment) -> str:
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")


def _first_host(environ: Environment) -> str:
    """The first host of the allocation that this process is in, where mpirun starts its ranks too."""
    return next(iter(expand_hosts(_node_list(environ))), "")


def _slurm_local_size(environ: Environment, size: int, hosts: int) -> int | None:
    counts = tasks_per_host(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    here = environ.get("SLURM_NODEID", "")
    if here.isdecimal() and int(here) < len(counts) and sum(counts) == size:
        return counts[int(here)]
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    return size if "1" in (nodes, str(hosts)) else None


class _Found:
    """The numbers of one launcher, checked. A ``local_size`` without a name is given later."""

    def __init__(self, launcher: str, environ: Environment, *, rank: str, size: str, local_rank: str, local_size: str) -> None:
        self.launcher, self._environ = launcher, environ
        self.rank = self._number(rank)
        self.size = self._number(size)
        if not 0 <= self.rank < self.size:
            numbers = f"{rank}={self.rank} and {size}={self.size}"
            raise LauncherUnclear(f"{launcher} says {numbers}; a rank is below the number of ranks.")
        self._local_rank = self._number(local_rank) if local_rank in environ else None
        self._local_size = self._number(local_size) if local_size in environ else None

    def placed(
        self, *, job: str, way_out: str, first_host: str = "", local_size: int | None = None, allocation: str = ""
    ) -> Placement:
        """All of it together. Where the ranks meet: as the caller says, on the first host, or, on one host, through a file."""
        local_size = local_size if local_size is not None else self._local_size
        if local_size is None and self.size == 1:
            local_size = 1
        if local_size is None and self.launcher == "torchrun" and self._local_rank is None:
            local_size = self.size  # set by hand, without a word about hosts: as torch's own examples do on one
        addr, port = self._environ.get("MASTER_ADDR", ""), self._environ.get("MASTER_PORT", "")
        if addr and not port and not first_host:
            raise LauncherUnclear("MASTER_ADDR is set, but MASTER_PORT is not; set both, or neither.")
        if not addr and local_size != self.size:
            if not first_host:
                hosts = "on several hosts" if local_size is not None else "maybe on several hosts"
                who = f"{self.launcher} has started {self.size} ranks {hosts}"
                raise LauncherUnclear(f"{who}, which cannot find each other: {way_out}.")
            addr = first_host
        local_rank = self._local_rank if self._local_rank is not None else self.rank
        local_size = local_size if local_size is not None else local_rank + 1
        if not 0 <= local_rank < local_size <= self.size:
            raise LauncherUnclear(
                f"{self.launcher} says that this is local rank {local_rank} of {local_size}, of {self.size} ranks in all; "
                f"that cannot be. Look at its variables in the environment."
            )
        return Placement(
            launcher=self.launcher,
            rank=self.rank,
            size=self.size,
            local_rank=local_rank,
            local_size=local_size,
            master_addr=addr,
            master_port=self._number("MASTER_PORT") if port else _port_of(job or allocation) if addr else 0,
            job=job,
        )

    def _number(self, name: str) -> int:
        text = self._environ.get(name)
        if text is None:
            raise LauncherUnclear(f"{self.launcher} has started this process, but {name} is not set; did a wrapper drop it?")
        if not text.isdecimal():
            raise LauncherUnclear(f"{name} is {text!r}; {self.launcher} sets it to a whole number.")
        return int(text)


def _port_of(job: str) -> int:
    """A port that all processes of a job agree on, and others of this cluster rarely share."""
    numbers = [int(number) for number in re.findall(r"\d+", job)]
    return _FIRST_PORT + sum(number * 101**k for k, number in enumerate(numbers)) % _PORTS


def expand_hosts(text: str) -> list[str]:
    """SLURM's short form: ``node[01-03,07],login`` is node01, node02, node03, node07, login."""
    hosts: list[str] = []
    for part in _apart(text):
        before, opened, rest = part.partition("[")
        inside, _, after = rest.partition("]")
        hosts += (
            [name for number in _numbers_in(inside) for name in expand_hosts(before + number + after)] if opened else [part]
        )
    return hosts


def _apart(text: str) -> list[str]:
    """The parts between commas that stand outside brackets."""
    return [part for part in _OUTSIDE.split(text) if part]


def _numbers_in(text: str) -> list[str]:
    """``01-03,07`` is 01, 02, 03, 07: leading zeros stay."""
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            found.append(part)
    return found


def tasks_per_host(text: str) -> list[int]:
    """SLURM's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TIMES.match(part.strip())
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts
