"""What launchers put into the environment, as their documentation and their own runs show it, and what becomes of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import pytest

from lowtide.errors import Error
from lowtide.launchers import LauncherUnclear, Placement, discover, expand_hosts, tasks_per_host

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-box-4711@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}
BATCH = {  # what a batch script sees, also outside of srun
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[03-04],login",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NNODES": "3",
}
STEP = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "node[03-04],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def facts(environ: dict[str, str]) -> dict[str, Any]:
    placement = discover(environ)
    assert placement is not None
    return asdict(placement)


def test_nobody_has_started_this() -> None:
    assert discover({}) is None
    assert discover({"RANK": "7", "MASTER_PORT": "1"}) is None, "one word alone may mean anything"
    assert discover(BATCH) is None, "a batch script, or a shell in an allocation, is no rank"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            TORCH | MASTER | {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2"},
            ("torchrun", 3, 4, 1, 2, "node1", 29500, "r-2"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"} | MASTER, ("torchrun", 0, 2, 0, 2, "node1", 29500, "")),
        (OPEN_MPI, ("Open MPI's mpirun", 1, 2, 1, 2, "", 0, "prterun-box-4711@1")),
        (OPEN_MPI | MASTER, ("Open MPI's mpirun", 1, 2, 1, 2, "node1", 29500, "prterun-box-4711@1")),
        (MPICH, ("MPICH's mpiexec", 1, 2, 1, 2, "", 0, "")),
        (HOROVOD, ("horovodrun", 1, 2, 1, 2, "", 0, "10.0.0.1-4242")),
        (STEP | MASTER, ("srun", 3, 5, 1, 2, "node1", 29500, "77-2-0")),
        (STEP | {"MASTER_PORT": "1234"}, ("srun", 3, 5, 1, 2, "node03", 1234, "77-2-0")),
        ({"WORLD_SIZE": "5"} | STEP | MASTER, ("srun", 3, 5, 1, 2, "node1", 29500, "77-2-0")),
        (STEP | MASTER | {"PMI_RANK": "3", "PMI_SIZE": "5"}, ("srun", 3, 5, 1, 2, "node1", 29500, "77-2-0")),
        (STEP | TORCH | MASTER, ("torchrun", 3, 4, 1, 2, "node1", 29500, "")),
        (STEP | OPEN_MPI, ("Open MPI's mpirun", 1, 2, 1, 2, "", 0, "prterun-box-4711@1")),
        (OPEN_MPI | HOROVOD, ("horovodrun", 1, 2, 1, 2, "", 0, "10.0.0.1-4242")),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("MPICH's mpiexec", 0, 1, 0, 1, "", 0, "")),
    ],
)
def test_who_this_process_is(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    launcher, rank, size, local_rank, local_size, addr, port, job = expected
    assert facts(environ) == {
        "launcher": launcher,
        "rank": rank,
        "size": size,
        "local_rank": local_rank,
        "local_size": local_size,
        "master_addr": addr,
        "master_port": port,
        "job": job,
    }


def test_srun_names_the_first_host_and_a_port_that_all_ranks_agree_on() -> None:
    tasks = [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"), ("4", "0", "2")]
    found = [facts(STEP | {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}) for rank, local, node in tasks]
    assert [f["local_size"] for f in found] == [2, 2, 2, 2, 1]
    assert {f["master_addr"] for f in found} == {"node03"}
    (port,) = {f["master_port"] for f in found}
    assert 1024 < port < 32768
    assert facts(STEP | {"SLURM_JOB_ID": "78"})["master_port"] != port
    assert facts(STEP | {"SLURM_STEP_ID": "3"})["master_port"] != port
    one = facts(
        STEP
        | {"SLURM_STEP_NODELIST": "node03", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5"}
        | {"SLURM_NODEID": "0"}
    )
    assert (one["local_size"], one["master_addr"]) == (5, "")


def test_mpiexec_that_srun_helps_to_start_its_daemons() -> None:
    """Then SLURM's variables are those of the daemon, one for each host."""
    placement = discover(STEP | MPICH)
    assert placement is not None
    assert (placement.launcher, placement.rank, placement.size) == ("MPICH's mpiexec", 1, 2)
    several = discover(STEP | MPICH | {"PMI_SIZE": "6"})
    assert several is not None
    assert several.master_addr == "node03"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            ["2 ranks on several hosts", "-x MASTER_ADDR"],
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["maybe on several hosts", "-genv MASTER_ADDR"]),
        (HOROVOD | {"HOROVOD_SIZE": "4"}, ["4 ranks on several hosts", "set MASTER_ADDR"]),
        (TORCH, ["4 ranks on several hosts", "MASTER_ADDR and MASTER_PORT"]),
        (TORCH | {"MASTER_ADDR": "node1"}, ["MASTER_ADDR is set, but MASTER_PORT is not"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["which job this is", "MASTER_PORT to a free port, another one for each job"]),
        (TORCH | {"LOCAL_WORLD_SIZE": "4"}, ["which job this is", "MASTER_ADDR=127.0.0.1"]),
        (TORCH | MASTER | {"MASTER_PORT": "x"}, ["MASTER_PORT is 'x'"]),
        (TORCH | MASTER | {"RANK": "4"}, ["RANK=4 and WORLD_SIZE=4"]),
        (TORCH | MASTER | {"RANK": "-1"}, ["RANK is '-1'"]),
        (TORCH | MASTER | {"LOCAL_RANK": "2"}, ["local rank 2 of 2"]),
        (TORCH | MASTER | {"LOCAL_WORLD_SIZE": "5"}, ["local rank 1 of 5, of 4 ranks"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_SIZE is not set"]),
        ({"PMI_SIZE": "2"}, ["PMI_RANK is not set"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is '2', but RANK is not set"]),
        ({**STEP, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, ["5 ranks on several hosts"]),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_said_with_the_way_out(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LauncherUnclear) as caught:
        discover(environ)
    assert isinstance(caught.value, Error)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node7", ["node7"]),
        ("a,b,c-1", ["a", "b", "c-1"]),
        ("node[01-04,07]", ["node01", "node02", "node03", "node04", "node07"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("x[1,3],y,z[2-3].cluster", ["x1", "x3", "y", "z2.cluster", "z3.cluster"]),
        ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_numbers_of_tasks() -> None:
    assert tasks_per_host("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_host("4") == [4]
    assert tasks_per_host("") == []


def test_one_host_is_known() -> None:
    def placement(local: int) -> Placement:
        return Placement(launcher="x", rank=0, size=4, local_rank=0, local_size=local, master_addr="", master_port=0, job="")

    assert placement(4).one_host
    assert not placement(2).one_host


def test_asking_imports_no_torch() -> None:
    code = "import sys, lowtide.launchers, lowtide.job.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
