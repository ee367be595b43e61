"""Ranks that launchers start, for real: they find each other without configuration, and no port is opened for it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from lowtide.comm import launched
from lowtide.errors import DeadlineExceeded
from lowtide.launchers import LauncherUnclear, Placement
from tests.kit.tools import missing

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "-m lowtide train --synthetic --steps 3 --batch 1 --json --model tests.job.specimens:tiny_gpt".split()

SCRIPT = """
import json, os, sys
import psutil, torch
import lowtide
def listening():
    found = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
before = listening()      # MPICH's processes inherit a socket of mpiexec's
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lowtide.shard(model, optimizer, stage=3)      # nobody has called init_process_group
import torch.distributed as dist
model(torch.full((2, 8), 1.0 + dist.get_rank())).sum().backward()
optimizer.step()
with lowtide.gathered(model):
    total = sum(p.double().sum().item() for p in model.parameters())
places = {ip for ip, port in listening() - before}
facts = {"rank": dist.get_rank(), "size": dist.get_world_size(), "total": total, "listening": sorted(places)}
facts["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
with open(f"{sys.argv[1]}/facts-{dist.get_rank()}", "w") as file:
    json.dump(facts, file)
"""


def environment(**more: str) -> dict[str, str]:
    hidden = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1", **more}


def open_mpi(rank: int, ranks: int, job: str) -> dict[str, str]:
    """What Open MPI's mpirun tells its processes."""
    numbers = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}
    return {"PMIX_NAMESPACE": job} | {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def srun(rank: int, ranks: int, job: str) -> dict[str, str]:
    """What srun tells its processes, on one host."""
    step = {"SLURM_JOB_ID": str(int(job, 16) % 10**6), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "box"}
    tasks = {"SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_STEP_TASKS_PER_NODE": str(ranks), "SLURM_NODEID": "0"}
    return {**step, **tasks, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


def run_all(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        for command, env in zip(commands, environments, strict=True)
    ]
    try:
        ended = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(process.returncode, out, err) for process, (out, err) in zip(running, ended, strict=True)]


def script_in(folder: Path) -> list[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return [str(path), str(folder)]


def facts_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"facts-{rank}").read_text()) for rank in range(2)]


def check_joined(folder: Path) -> None:
    facts = facts_in(folder)
    assert [(f["rank"], f["size"]) for f in facts] == [(0, 2), (1, 2)]
    assert facts[0]["total"] == facts[1]["total"]
    assert all(f["listening"] and set(f["listening"]) <= {"127.0.0.1", "::1"} for f in facts), facts
    loopback = [name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in [a.address for a in found]]
    assert all(f["interface"] in loopback for f in facts), "for torch's own sockets"


def test_a_library_call_joins_what_mpirun_has_started(tmp_path: Path) -> None:
    job = f"prterun-{secrets.token_hex(4)}@1"
    command = [sys.executable, *script_in(tmp_path)]
    ends = run_all([command] * 2, [environment(**open_mpi(rank, 2, job)) for rank in range(2)])
    assert [code for code, _, _ in ends] == [0, 0], ends
    check_joined(tmp_path)
    said = "Open MPI's mpirun has started 2 ranks: torch.distributed is initialised with gloo"
    assert [err.count(said) for _, _, err in ends] == [1, 0], "it is said once"


def test_training_under_srun_is_training_on_ranks(tmp_path: Path) -> None:
    job = secrets.token_hex(4)
    ends = run_all([[sys.executable, *TRAIN]] * 2, [environment(**srun(rank, 2, job)) for rank in range(2)])
    assert [code for code, _, _ in ends] == [0, 0], ends
    result = json.loads(ends[0][1])
    assert ends[1][1] == "", "rank 0 speaks for all"
    assert result["ranks"] == 2
    own = run_all([[sys.executable, *TRAIN, "--ranks", "2"]], [environment()])
    assert json.loads(own[0][1])["losses"] == result["losses"], "the same bits as ranks of our own"
    assert "straggler" in result


def test_a_library_call_joins_what_torchrun_has_started(tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ends = run_all([[*agent, *script_in(tmp_path)]], [environment()])
    assert ends[0][0] == 0, ends
    check_joined(tmp_path)


def test_ranks_flag_and_launcher_exclude_each_other() -> None:
    command = [sys.executable, *TRAIN, "--ranks", "2"]
    ends = run_all([command], [environment(**open_mpi(0, 2, "x"))])
    assert ends[0][0] == 2
    assert "another launcher has started this rank; leave --ranks out" in ends[0][2]


def test_what_a_launcher_leaves_unclear_is_one_line() -> None:
    several = open_mpi(0, 4, "x") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    code, out, err = run_all([[sys.executable, *TRAIN]], [environment(**several)])[0]
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "-x MASTER_ADDR" in err


def maker_of(mpirun: str) -> str:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return "Open MPI" if "Open MPI" in said or "OpenRTE" in said else "MPICH" if "HYDRA" in said else "somebody else"


def mpirun_command(maker: str) -> list[str]:
    """``make test`` installs both: Open MPI beside Python; MPICH, whose files have the same names, in a folder of its own."""
    folders = [str(Path(sys.executable).parent), str(Path(sys.prefix, "mpich", "bin")), *os.get_exec_path()]
    found = [path for folder in folders if (path := shutil.which("mpirun", path=folder))]
    path = next((path for path in found if maker_of(path) == maker), None)
    if path is None:
        missing(f"the mpirun of {maker}", "`make test` installs it into .venv")
    options = ["--allow-run-as-root", "--oversubscribe"] if maker == "Open MPI" else []
    return [str(path), *options, "-n", "2", sys.executable]


@pytest.mark.parametrize("maker", ["Open MPI", "MPICH"])
def test_mpirun_itself(maker: str, tmp_path: Path) -> None:
    command = mpirun_command(maker)
    code, _, err = run_all([[*command, *script_in(tmp_path)]], [environment()])[0]
    assert code == 0, err
    assert f"{maker}'s mpi" in err, "lowtide says who has started the ranks"
    check_joined(tmp_path)
    code, out, err = run_all([[*command, *TRAIN]], [environment()])[0]
    assert code == 0, err
    result = json.loads(out)
    assert result["ranks"] == 2
    own = run_all([[sys.executable, *TRAIN, "--ranks", "2"]], [environment()])
    assert json.loads(own[0][1])["losses"] == result["losses"], "the same bits as ranks of our own"


# -- the folder -------------------------------------------------------------------------------------------------------


def placement(**changes: Any) -> Placement:
    base = Placement(
        launcher="a launcher",
        rank=1,
        size=2,
        local_rank=1,
        local_size=2,
        master_addr="",
        master_port=0,
        job=secrets.token_hex(8),
    )
    return replace(base, **changes)


def test_what_a_dead_job_left_is_not_believed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    said = {"store": "store-old", "size": 2, "process": ended.pid, "started": psutil.Process().create_time()}
    (tmp_path / "current.json").write_text(json.dumps(said))
    assert launched._announced(tmp_path, 2) is None
    (tmp_path / "current.json").write_text(json.dumps({**said, "process": os.getpid(), "started": 17.0}))
    assert launched._announced(tmp_path, 2) is None, "another process with the same number"
    (tmp_path / "current.json").write_text("{")
    assert launched._announced(tmp_path, 2) is None
    (tmp_path / "store-old").write_text("")
    path = launched._announce(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["current.json"], "what was left is gone"
    assert launched._announced(tmp_path, 2) == path
    assert launched._announced(tmp_path, 3) is None
    launched._withdraw(tmp_path, os.getpid())
    assert not tmp_path.exists()
    tmp_path.mkdir()


def test_the_folder_must_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = launched._private_folder(placement(job="x"))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert launched._private_folder(placement(job="x", rank=0)) == folder
    assert launched._private_folder(placement(job="y")) != folder
    folder.chmod(0o755)
    with pytest.raises(LauncherUnclear, match="is not a private folder"):
        launched._private_folder(placement(job="x"))
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(LauncherUnclear, match="is not a private folder"):
        launched._private_folder(placement(job="x"))


def test_a_rank_0_that_never_comes_is_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(DeadlineExceeded, match="rank 0 to meet the others"):
        launched._meet_in_folder(placement(), timedelta(seconds=0.2))


def test_a_master_that_is_not_here_is_said(tmp_path: Path) -> None:
    with pytest.raises(LauncherUnclear, match=r"cannot listen at 192\.0\.2\.1:29999"):
        launched._listen("192.0.2.1", 29999, one_host=True)
