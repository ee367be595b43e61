"""Inside Ray Train the group that Ray has made is joined: the same bits as two ranks of torchrun.

Ray listens on every interface of its host, so it runs on a host of its own that has only loopback; what Ray leaves running ends
with that host.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.netns import Network, NetworkUnavailable

ROOT = Path(__file__).resolve().parents[2]
JOB = "tests.job.under_ray"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs Ray: .venv/bin/pip install -c constraints.txt -e '.[ray]' (half a gigabyte, so not in the extra dev)",
    ),
    pytest.mark.timeout(240),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Among the temporary files and not pytest's folder, whose name is too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="lt-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        found = Network(1)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with found:
        yield found


def run(network: Network, folder: Path, *command: str) -> tuple[int, str]:
    """Exit code and output of a command on the host that has only loopback."""
    hidden = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "RAY_ADDRESS")
    whole = ["env", *(f"--unset={name}" for name in hidden), sys.executable, *command]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),  # Ray keeps a secret of its own there
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with (folder / "output").open("w+") as output:
        process = network.start(0, whole, environment=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        code = process.wait(110)
        output.seek(0)
        return code, output.read()


def facts_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts-{rank}").read_text()) for rank in range(2)]


def test_ray_train_gives_the_bits_of_torchrun(network: Network, folder: Path) -> None:
    code, output = run(network, folder, "-m", JOB, str(folder))
    assert code == 0, output
    of_ray = facts_in(folder)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, output = run(network, folder, *torchrun, "-m", JOB, str(folder), "plain")
    assert code == 0, output
    of_torchrun = facts_in(folder)
    assert [fact["process"] for fact in of_ray] != [fact["process"] for fact in of_torchrun], "or the facts are the old ones"
    assert [(fact["rank"], fact["size"], fact["joined"]) for fact in of_ray] == [(0, 2, True), (1, 2, True)]
    assert [fact["joined"] for fact in of_torchrun] == [False, False]
    assert of_ray[0]["losses"] != of_ray[1]["losses"], "each rank has batches of its own"
    for name in ("losses", "weights"):
        assert [fact[name] for fact in of_ray] == [fact[name] for fact in of_torchrun], name
    assert of_ray[0]["weights"] == of_ray[1]["weights"]
    assert all(fact["opened"] and set(fact["opened"]) <= {"127.0.0.1", "::1"} for fact in of_ray), of_ray


def test_an_error_in_one_worker_ends_the_job(network: Network, folder: Path) -> None:
    code, output = run(network, folder, "-m", JOB, str(folder), "2")
    assert code == 1, output
    assert "a mistake on rank 1" in output
    assert not list(folder.glob("facts-*"))
