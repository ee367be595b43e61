"""Which network interface our sockets are bound to: loopback as long as all ranks are on one host, else the one that leads to
the other hosts.

gloo by itself binds to whatever this host's name resolves to, which may be an interface that nobody meant to open. Ranks tell
each other through the store where they are; nothing has to be connected for that.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lowtide.errors import DeadlineExceeded
from lowtide.torch_internals import gloo_options as _gloo_options

_log = logging.getLogger(__name__)

VARIABLE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent there


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this host, or names of interfaces; neither: what gloo chooses."""

    address: str = ""
    names: tuple[str, ...] = ()


LOOPBACK = Interface(address="127.0.0.1")


def choose_interface(
    store: Any, ranks: Sequence[int], here: int, *, environ: Mapping[str, str], timeout: timedelta
) -> Interface:
    """Collective over ``ranks``, of which this is ``here``: where its sockets listen. ``store`` is for this alone."""
    towards_master = _towards(environ.get("MASTER_ADDR") or _host_of(store))
    known = _tell_each_other(store, ranks, here, f"{_network()}\n{towards_master}", timeout)
    if len({network for network, _ in known}) == 1:
        return LOOPBACK
    if names := tuple(name for name in environ.get(VARIABLE, "").split(",") if name):
        return Interface(names=names)
    # The host of the master may know itself under a loopback address only; then it takes the way to one of the others.
    ways = [towards_master, *(_towards(address) for network, address in known if network != _network())]
    address = next((way for way in ways if way), "")
    if not address:
        _log.warning("no address of this host that leads to the others was found, gloo chooses one; set %s to choose", VARIABLE)
    return Interface(address=address)


def gloo_options(interface: Interface, timeout: timedelta) -> Any:
    """What a ``ProcessGroupGloo`` takes instead of a timeout."""
    return _gloo_options(interface.address, interface.names, timeout)


def _tell_each_other(store: Any, ranks: Sequence[int], here: int, mine: str, timeout: timedelta) -> list[tuple[str, str]]:
    """Everybody's network and address."""
    store.set(f"interface/{here}", mine)
    keys = [f"interface/{rank}" for rank in ranks]
    try:
        store.wait(keys, timeout)
        texts = [bytes(store.get(key)).decode() for key in keys]
    except RuntimeError as error:
        raise DeadlineExceeded(f"ranks {list(ranks)} to say where they are", timeout.total_seconds()) from error
    pairs = [text.partition("\n") for text in texts]
    return [(network, address) for network, _, address in pairs]


def _network() -> str:
    """The same text for all processes that share a loopback interface."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()  # not Linux


def _host_of(store: Any) -> str:
    """The host of the store that everybody reaches, if it has one."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return str(getattr(store, "host", ""))


def _towards(host: str) -> str:
    """The address of this host on the way to ``host``; empty if there is none, or if the way does not leave this host."""
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        try:
            # Connecting a datagram socket sends nothing: the kernel only looks up the route.
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                mine = str(probe.getsockname()[0])
        except OSError:
            continue
        if not ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
            return mine
    return ""
