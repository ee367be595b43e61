"""No socket of ours listens beyond loopback as long as all ranks are on one host; between hosts it is the chosen interface."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.comm.interface import Interface, choose_interface, gloo_options
from tests.kit.dist import run_ranks
from tests.kit.hosts import run_hosts
from tests.kit.netns import INTERFACE, Network, NetworkUnavailable
from tests.kit.specimen import WIDTH, Stack, blocks

ROOT = Path(__file__).resolve().parents[2]


def listening() -> set[tuple[str, int]]:
    """Where this process listens, for whatever protocol."""
    found = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM}


def beyond_loopback(places: set[tuple[str, int]]) -> list[str]:
    return sorted(ip for ip, _ in places if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback)


def other_interface() -> str | None:
    """An interface of this machine that others may reach."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not ipaddress.ip_address(address.address).is_loopback:
                return name
    return None


def opened_by_shard(
    rank: int, world_size: int, interface: str | None, transport: str, store: str
) -> tuple[list[str], list[str], int]:
    """What listened beyond loopback before, what lowtide added there, and how much it opened in all."""
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # what the caller wants between hosts
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    before = listening()
    model = Stack(blocks(2))
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.shard(model, optimizer, stage=3, comm=lowtide.Comm(transport=transport))
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    opened = listening() - before
    return beyond_loopback(before), beyond_loopback(opened), len(opened)


@pytest.mark.parametrize("transport", ["torch", "auto"])
def test_lowtide_listens_on_loopback_only(transport: str, tmp_path: Path) -> None:
    interface = other_interface()
    for theirs, ours, opened in run_ranks(2, opened_by_shard, interface, transport, str(tmp_path / "store"), fresh=True):
        assert ours == []
        assert opened > 0, "or this test sees nothing"
        if interface is not None:
            assert theirs, "or this test could not fail"


def test_a_device_listens_where_it_is_told() -> None:
    before = listening()
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, gloo_options(Interface(address="127.0.0.1"), timedelta(seconds=5)))
    assert beyond_loopback(listening() - before) == []
    assert group.size() == 1


def choose(rank: int, world_size: int) -> tuple[str, tuple[str, ...], list[str]]:
    environ = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    timeout = timedelta(seconds=30)
    chosen = choose_interface(dist.PrefixStore("a", store), range(world_size), rank, environ=environ, timeout=timeout)
    named = {**environ, "GLOO_SOCKET_IFNAME": INTERFACE}
    by_name = choose_interface(dist.PrefixStore("b", store), range(world_size), rank, environ=named, timeout=timeout)
    # The host of the master knows itself as localhost, as many do.
    wrong = {**environ, "MASTER_ADDR": "localhost"} if rank == 0 else environ
    found = choose_interface(dist.PrefixStore("c", store), range(world_size), rank, environ=wrong, timeout=timeout)
    before = listening()
    group = dist.ProcessGroupGloo(dist.PrefixStore("d", store), rank, world_size, gloo_options(found, timeout))
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert total.item() == world_size
    return chosen.address, by_name.names, beyond_loopback(listening() - before)


def test_between_hosts_the_way_to_the_others_is_taken() -> None:
    try:
        network = Network(2)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        found = run_hosts(network, [1, 1], choose)
        addresses = [host.address for host in network.hosts]
    assert [address for address, _, _ in found] == addresses
    assert [names for _, names, _ in found] == [(INTERFACE,)] * 2
    assert [set(opened) for _, _, opened in found] == [{address} for address in addresses]


LAUNCHED = """
import json, os, sys
import torch, torch.distributed as dist
from lowtide.comm.launched import join_if_launched
from tests.comm.test_sockets import listening
assert join_if_launched(os.environ)
assert not join_if_launched(os.environ), "once is enough"
total = torch.ones(1)
dist.all_reduce(total)
json.dump([total.item(), sorted({ip for ip, _ in listening()})], open(sys.argv[1], "w"))
dist.barrier()
"""


def test_ranks_of_mpirun_on_two_hosts_meet_at_the_master_and_listen_nowhere_else(tmp_path: Path) -> None:
    try:
        network = Network(2)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        running = []
        for rank in range(2):
            numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
            environment = {
                **{f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()},
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": "29731",
                "GLOO_SOCKET_IFNAME": "",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            }
            command = [sys.executable, "-c", LAUNCHED, str(tmp_path / f"{rank}.json")]
            running.append(network.start(rank, command, environment=environment, cwd=ROOT))
        assert [process.wait(90) for process in running] == [0, 0]
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert found == [[2.0, [host.address]] for host in network.hosts]
