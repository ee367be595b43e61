"""Several hosts on one machine: network namespaces that are joined by virtual cables, limited, watched and cut.

``with Network(2, rate="1gbit") as network:`` makes two hosts that see each other and nothing else, not even this machine.
At the end all that runs in them is ended, and they are gone. Needs root, iproute2 and a kernel with these things;
``NetworkUnavailable`` says what is missing. Two hosts have one cable; more of them meet at a switch, in a namespace of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "eth0"  # the name of the cable's end in every host
_PREFIX = "lowtide"
_SUBNET = "198.18.77"  # a range that is set aside for testing networks
_COMMAND_SECONDS = 20
_CLONE_NEWNET = 0x40000000
_QUEUE = ("latency", "50ms")  # how long a packet may wait at a limited cable before it is dropped


class NetworkUnavailable(Exception):
    """This machine does not let us make hosts; the message says why."""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str


@dataclass(frozen=True)
class Traffic:
    """What an interface has sent and received since it was made, in bytes, with all headers below TCP."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkUnavailable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NetworkUnavailable(f"{' '.join(command)}: {done.stderr.strip() or f'code {done.returncode}'}")
    return done.stdout


class Network:
    """Hosts ``0 .. count - 1``. ``rate`` limits what each of them can send, in the words of ``tc``."""

    def __init__(self, count: int = 2, *, rate: str | None = None) -> None:
        if os.geteuid() != 0:
            raise NetworkUnavailable("network namespaces can be made by root only")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NetworkUnavailable(f"{tool} is not installed (Debian: apt-get install iproute2)")
        _remove_what_dead_processes_left()
        stem = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self.hosts = tuple(Host(f"{stem}-{index}", f"{_SUBNET}.{index + 1}") for index in range(count))
        self._switch = f"{stem}-switch" if count > 2 else None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rate: str | None = None
        try:
            self._make()
            if rate is not None:
                self.limit(rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        for name in self._namespaces():
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        if self._switch is not None:
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for index, host in enumerate(self.hosts):
                self._join(host.name, INTERFACE, self._switch, f"port{index}")
                _run("ip", "-n", self._switch, "link", "set", f"port{index}", "master", "switch", "up")
        elif len(self.hosts) == 2:
            self._join(self.hosts[0].name, INTERFACE, self.hosts[1].name, INTERFACE)
        for host in self.hosts if len(self.hosts) > 1 else ():
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _run("ip", "-n", host.name, "link", "set", INTERFACE, "up")

    @staticmethod
    def _join(one: str, interface: str, other: str, peer: str) -> None:
        _run("ip", "-n", one, "link", "add", interface, "type", "veth", "peer", "name", peer, "netns", other)

    def _namespaces(self) -> list[str]:
        return [host.name for host in self.hosts] + ([self._switch] if self._switch is not None else [])

    def limit(self, rate: str | None) -> None:
        """From now on every host sends at most ``rate`` (such as ``"200mbit"``); ``None``: as fast as it can."""
        for host in self.hosts:
            if self._rate is not None:
                _run("tc", "-n", host.name, "qdisc", "del", "dev", INTERFACE, "root")
            if rate is not None:
                # A bucket of a few milliseconds at 1 Gbit/s: enough for the largest packets, too little to matter.
                bucket = ("burst", "256kb", *_QUEUE)
                _run("tc", "-n", host.name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *bucket)
        self._rate = rate

    def cut(self, host: int = 0) -> None:
        """Take the cable of ``host`` down: what is under way is lost, and nobody is told."""
        _run("ip", "-n", self.hosts[host].name, "link", "set", INTERFACE, "down")

    def mend(self, host: int = 0) -> None:
        _run("ip", "-n", self.hosts[host].name, "link", "set", INTERFACE, "up")

    def traffic(self, host: int = 0) -> Traffic:
        """What the cable of ``host`` has carried so far."""
        entry = json.loads(_run("ip", "-j", "-s", "-n", self.hosts[host].name, "link", "show", "dev", INTERFACE))[0]
        stats = entry.get("stats64") or entry["stats"]
        return Traffic(sent=stats["tx"]["bytes"], received=stats["rx"]["bytes"])

    def sent(self) -> int:
        """What all hosts have sent so far."""
        return sum(self.traffic(host).sent for host in range(len(self.hosts)))

    def command(self, host: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on ``host``."""
        return "ip", "netns", "exec", self.hosts[host].name

    def environment(self, host: int, rank: int, ranks_per_host: Sequence[int], port: int) -> dict[str, str]:
        """The variables that torchrun sets, and the interface that gloo cannot find by a host name here."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(ranks_per_host)),
            "LOCAL_RANK": str(rank - sum(ranks_per_host[:host])),
            "LOCAL_WORLD_SIZE": str(ranks_per_host[host]),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def start(self, host: int, command: Sequence[str], *, environment: Mapping[str, str], **options: Any) -> Any:
        """Start a process on ``host``. It is ended with the network, if not before."""
        # `ip netns exec` becomes the command: the process has the id and the exit code of the rank itself.
        process = subprocess.Popen([*self.command(host), *command], env={**os.environ, **environment}, **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what runs on the hosts and remove them. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes = []
        for name in self._namespaces():
            with contextlib.suppress(NetworkUnavailable):
                _end_processes_in(name)
                _run("ip", "netns", "del", name)


def _end_processes_in(name: str) -> None:
    """Children of ranks that outlived them."""
    end = time.monotonic() + _COMMAND_SECONDS
    while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _remove_what_dead_processes_left() -> None:
    """Hosts whose maker was killed, and in which nothing runs."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.is_dir() else ():
        prefix, _, rest = entry.name.partition("-")
        maker = rest.partition("-")[0]
        if prefix == _PREFIX and maker.isdigit() and not Path("/proc", maker).exists():
            with contextlib.suppress(NetworkUnavailable):
                if not _run("ip", "netns", "pids", entry.name).split():
                    _run("ip", "netns", "del", entry.name)


def enter(host: Host) -> None:
    """Move this process to a host. Only before it has made a thread or a connection."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host.name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {host.name}")


def sent_from_here() -> int:
    """What the host that this process is on has sent over its cable so far, in bytes."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise OSError(f"no interface {INTERFACE} here")


def listening_addresses(pid: int | str = "self") -> set[str]:
    """The addresses at which a process listens for TCP connections, as the kernel lists them."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:  # 0A: listening
                    found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    """An address as /proc writes it: 32-bit words in the machine's own order."""
    import ipaddress
    import sys

    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
