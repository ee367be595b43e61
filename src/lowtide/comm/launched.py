"""Ranks that a launcher has started become a torch.distributed job, if nobody has made them one.

Where the launcher, or the caller, names a master, rank 0 listens there, on that address alone. On one host nobody needs a port:
the ranks meet through a file in a private folder.

[Note: meeting in a folder] The folder's name comes from what all ranks of the job know and no other job has: the launcher's own
name for the job, and the launcher's process that has started them. The parent alone is none: a shell may have started two jobs.
A job before this one may have had the same name and may have been killed, so what lies in the folder is believed only if the
process that wrote it is alive: rank 0 puts a new store there and says so last. If that process is alive, and another one, there
are two jobs where there should be one. So there are if two processes are the same rank: every rank marks its place.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import torch.distributed

from lowtide.comm.interface import LOOPBACK, VARIABLE, Interface, choose_interface
from lowtide.errors import DeadlineExceeded
from lowtide.launchers import LauncherUnclear, Placement, discover

_log = logging.getLogger("lowtide")

dist: Any = torch.distributed  # its own annotations are incomplete

_TIMEOUT = timedelta(minutes=5)  # for all ranks to be there
_POLL = 0.05
_CLOCK_SECONDS = 3.0
_CURRENT = "current.json"
_DAEMONS = ("mpirun", "mpiexec", "prterun", "prted", "orted", "orterun", "hydra_pmi_proxy", "slurmstepd", "horovodrun")


def join_if_launched(environ: MutableMapping[str, str]) -> bool:
    """Initialise torch.distributed, with gloo, if a launcher has started several ranks and nobody has yet. Whether it did."""
    if not dist.is_available() or dist.is_initialized():
        return False
    placement = discover(environ)
    if placement is None or placement.size == 1:
        return False
    initialise(placement, environ)
    atexit.register(_leave)
    if placement.rank == 0:
        _log.warning("%s has started %d ranks: torch.distributed is initialised with gloo", placement.launcher, placement.size)
    return True


def initialise(placement: Placement, environ: MutableMapping[str, str], *, timeout: timedelta = _TIMEOUT) -> None:
    """Collective over all ranks of ``placement``: make torch's default group, whose sockets are open to the others only."""
    store = _store_of(placement, environ, timeout)
    _refuse_second(store, placement)
    if not environ.get(VARIABLE):
        chosen = LOOPBACK
        if not placement.one_host:
            where = dist.PrefixStore("lowtide/launched", store)
            chosen = choose_interface(where, range(placement.size), placement.rank, environ=environ, timeout=timeout)
        if (name := _name_of(chosen)) is not None:
            environ[VARIABLE] = name  # torch takes it from there, for this group and those that the caller makes
    dist.init_process_group("gloo", store=store, rank=placement.rank, world_size=placement.size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _name_of(interface: Interface) -> str | None:
    """The interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == interface.address for found in addresses):
            return name
    return None


def _store_of(placement: Placement, environ: MutableMapping[str, str], timeout: timedelta) -> Any:
    if "TORCHELASTIC_RUN_ID" in environ:
        # torchrun keeps one store for all attempts, in which the addresses of ranks that died still stand.
        store, _, _ = next(dist.rendezvous("env://"))
        return dist.PrefixStore(f"lowtide/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{placement.size}", store)
    if placement.master_addr:
        return _listening_store(placement, timeout)
    return _meet_in_folder(placement, timeout)


def _refuse_second(store: Any, placement: Placement) -> None:
    """Raise if another process is this rank already."""
    me = psutil.Process()
    mine = f"{socket.gethostname()} {me.pid} {me.create_time():.0f}"
    found = store.compare_set(f"lowtide/rank/{placement.rank}", "", mine).decode()
    if found != mine:
        raise LauncherUnclear(
            f"rank {placement.rank} of {placement.size} is there already (host, process and start: {found}): two jobs meet in "
            f"one place. Give each of them a MASTER_PORT of its own."
        )


# -- at an address ----------------------------------------------------------------------------------------------------


def _listening_store(placement: Placement, timeout: timedelta) -> Any:
    host, port, first = placement.master_addr, placement.master_port, placement.rank == 0
    listening = _listen(host, port, one_host=placement.one_host) if first else None
    try:
        return dist.TCPStore(
            host,
            port,
            placement.size,
            is_master=first,
            timeout=timeout,
            multi_tenant=False,
            master_listen_fd=listening.detach() if listening is not None else None,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        _log.error("rank %d did not reach %s:%d: %s", placement.rank, host, port, error)
        raise DeadlineExceeded(f"rank 0 at {host}:{port}", timeout.total_seconds()) from error


def _listen(host: str, port: int, *, one_host: bool) -> socket.socket:
    """A socket on the address that the others were given. If that is a loopback name of this host, they mean another one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LauncherUnclear(f"MASTER_ADDR is {host!r}, which is unknown here ({error.strerror or error}).") from error
    if not one_host and str(address[0]).startswith(("127.", "::1")):
        _log.warning("%s is a loopback address on its own host; the store of the ranks listens on all interfaces", host)
        address = ("", port, *address[2:])
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise LauncherUnclear(
            f"rank 0 cannot listen at {host}:{port} ({error.strerror or error}); MASTER_ADDR must be an address of its host, "
            f"and MASTER_PORT must be free there."
        ) from error
    return listening


# -- in a folder ------------------------------------------------------------------------------------------------------


def _meet_in_folder(placement: Placement, timeout: timedelta) -> Any:
    """See [Note: meeting in a folder]."""
    folder = _private_folder(placement)
    if placement.rank == 0:
        return dist.FileStore(str(_announce(folder, placement.size)), placement.size)
    end = time.monotonic() + timeout.total_seconds()
    while (path := _announced(folder, placement.size)) is None:
        if time.monotonic() > end:
            raise DeadlineExceeded(f"rank 0 to meet the others in {folder}", timeout.total_seconds())
        time.sleep(_POLL)
    return dist.FileStore(str(path), placement.size)


def _private_folder(placement: Placement) -> Path:
    base = Path(tempfile.gettempdir(), f"lowtide-{os.geteuid()}")
    daemon = _launcher_process()
    if not daemon and not placement.job:
        raise LauncherUnclear(
            f"{placement.launcher} gives its ranks no name for their job, and none of its processes is seen from here; set "
            f"MASTER_ADDR=127.0.0.1 and MASTER_PORT to a free port, another one for each job."
        )
    name = hashlib.sha256(f"{placement.launcher} {placement.job} {daemon}".encode()).hexdigest()[:16]
    for folder in (base, base / f"ranks-{name}"):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LauncherUnclear(
                f"{folder} is not a private folder of this user, so the ranks cannot meet there; remove it, or set MASTER_ADDR "
                f"and MASTER_PORT."
            )
    return base / f"ranks-{name}"


def _announce(folder: Path, size: int) -> Path:
    said = _current(folder)
    if said is not None and said["process"] != os.getpid():
        raise LauncherUnclear(
            f"process {said['process']} is rank 0 of a job of the same name; set MASTER_ADDR=127.0.0.1 and, for each job, a "
            f"MASTER_PORT of its own."
        )
    for old in folder.iterdir():
        old.unlink(missing_ok=True)  # of a job with our name, which is over
    path = folder / f"store-{secrets.token_hex(8)}"
    me = psutil.Process()
    part = folder / "part"
    part.write_text(json.dumps({"store": path.name, "size": size, "process": me.pid, "started": me.create_time()}))
    part.rename(folder / _CURRENT)
    atexit.register(_withdraw, folder, os.getpid())
    return path


def _withdraw(folder: Path, process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            (folder / _CURRENT).unlink()
            folder.rmdir()  # unless ranks still have their store there


def _announced(folder: Path, size: int) -> Path | None:
    """The store that rank 0 of this job has made, once it has."""
    said = _current(folder)
    return folder / Path(said["store"]).name if said is not None and said["size"] == size else None


def _current(folder: Path) -> dict[str, Any] | None:
    """What a rank 0 that is alive says of its store."""
    try:
        said = cast("dict[str, Any]", json.loads((folder / _CURRENT).read_text()))
        # Two processes may see a third one's start a moment apart, as the clock is corrected.
        same = abs(psutil.Process(said["process"]).create_time() - said["started"]) < _CLOCK_SECONDS
        return said if same and isinstance(said["store"], str) and isinstance(said["size"], int) else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None


def _launcher_process() -> str:
    """The nearest process above us that is a launcher's: where, and when it began; empty if there is none."""
    for process in psutil.Process().parents():
        with contextlib.suppress(OSError, IndexError, psutil.Error):
            if process.name() in _DAEMONS:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                # clock ticks since the machine began, which every process reads alike; containers count processes anew
                return f"{os.readlink('/proc/self/ns/pid')} {process.pid} {fields[19]}"
    return ""
