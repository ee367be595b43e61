"""The tool itself: hosts see each other and nobody else, bytes are counted, limits hold, a cut is a cut, and all goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.netns import INTERFACE, Network, listening_addresses
from tests.network.conftest import MakeNetwork

SEND = """
import socket, sys
address, count = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 5000), timeout=float(sys.argv[3])) as connection:
    connection.sendall(b"x" * count)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 16):
        total += len(data)
    connection.send(b"x")
    print(total, flush=True)
"""


def send(network: Network, count: int, *, sender: int = 1, receiver: int = 0) -> int:
    """How many bytes arrived."""
    address = network.hosts[receiver].address
    server = network.start(
        receiver, [sys.executable, "-c", RECEIVE, address], environment={}, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout.readline().strip() == "ready"
    client = network.start(sender, [sys.executable, "-c", SEND, address, str(count), "20"], environment={})
    assert client.wait(30) == 0
    received = int(server.stdout.readline())
    server.wait(10)
    server.stdout.close()
    return received


def test_bytes_are_counted(two_hosts: Network) -> None:
    before = [two_hosts.traffic(host) for host in (0, 1)]
    assert send(two_hosts, 300_000) == 300_000
    seen = [two_hosts.traffic(host) - earlier for host, earlier in zip((0, 1), before, strict=True)]
    assert 300_000 < seen[1].sent < 330_000
    assert 300_000 < seen[0].received < 330_000
    assert seen[0].sent < 30_000


def limits_of(network: Network) -> list[str]:
    shows = (["tc", "-n", host.name, "qdisc", "show", "dev", INTERFACE] for host in network.hosts)
    return [subprocess.run(show, capture_output=True, text=True, check=True).stdout.lower() for show in shows]


def test_a_limit_is_set_and_lifted(two_hosts: Network) -> None:
    for rate in ("1gbit", "200mbit"):
        two_hosts.limit(rate)
        assert send(two_hosts, 100_000) == 100_000
        assert all(f"rate {rate} " in text for text in limits_of(two_hosts))
    two_hosts.limit(None)
    assert not any("tbf" in text for text in limits_of(two_hosts))


def test_three_hosts_meet_at_a_switch(make_network: MakeNetwork) -> None:
    network = make_network(3)
    for sender, receiver in ((0, 1), (1, 2), (2, 0)):
        assert send(network, 1000, sender=sender, receiver=receiver) == 1000


def test_hosts_see_nobody_else(two_hosts: Network) -> None:
    shown = subprocess.run([*two_hosts.command(0), "ip", "-o", "route"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["198.18.77.0/24"], "only the cable, no way out"


def test_a_cut_cable_carries_nothing(make_network: MakeNetwork) -> None:
    network = make_network()
    assert send(network, 1000) == 1000
    network.cut()
    address = network.hosts[0].address
    client = network.start(1, [sys.executable, "-c", SEND, address, "10", "0.5"], environment={}, stderr=subprocess.DEVNULL)
    assert client.wait(30) != 0
    network.mend()
    assert send(network, 1000) == 1000


def test_everything_goes_away(make_network: MakeNetwork) -> None:
    network = make_network()
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    rank = network.start(
        0, [sys.executable, "-c", child], environment={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    orphan = int(rank.stdout.readline())
    names = [host.name for host in network.hosts]
    assert all(Path("/run/netns", name).exists() for name in names)
    network.close()
    assert rank.returncode == -9
    assert not any(Path("/run/netns", name).exists() for name in names)
    assert not is_running(orphan)
    network.close()  # twice is once
    rank.stdin.close()
    rank.stdout.close()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked how


def test_listening_sockets_are_found() -> None:
    import socket

    before = listening_addresses()
    assert "127.77.0.1" not in before
    with socket.create_server(("127.77.0.1", 0)), socket.socket() as idle:
        idle.bind(("127.77.0.2", 0))  # bound, but not listening
        assert listening_addresses() - before == {"127.77.0.1"}
