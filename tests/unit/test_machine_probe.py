"""The probe of this machine: real measurements with tiny sizes, what is kept of them, and what follows from them."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lowtide.errors import DeadlineExceeded, DiskFull, InternalError, PeerFailed, SpoolRefused
from lowtide.spec import probe_cache, probe_disk
from lowtide.spec.hardware import Compute, Disk, Hardware, Wire
from lowtide.spec.probe import Effort, accelerators, assumed_machine, cache_machine, cached_disk, cached_machine, probe_machine
from lowtide.spec.probe_advice import Advice, advice
from lowtide.spec.probe_compute import matmul_flops
from lowtide.spec.probe_disk import device_of, is_memory, measure_disk
from lowtide.spec.probe_limits import SystemLimits, system_limits
from lowtide.spec.probe_wire import fit_wire, measure_wire

MIB, GIB = 2**20, 2**30
TINY = Effort(
    seconds=0.01, tensor_bytes=MIB, largest_side=128, disk_seconds=0.02, disk_bytes=16 * MIB, wire_deadline=60.0, threads=1
)
CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowtide" / "hardware"


def made_up(**changes: object) -> Hardware:
    hardware = Hardware(
        name="made up",
        source="measured 2000-01-01",
        compute=Compute(name="cpu", flops={"fp32": 1e11, "bf16": 2e11}, bandwidth=2e10, op_seconds=1e-6, fault_seconds=1e-10),
        host_bytes=8 * GIB,
        host_bandwidth=1e10,
        inside=Wire(bandwidth=1e9, latency=1e-4),
        disk=Disk(read=2e9, write=1e9, mixed=1.5e9, free_bytes=100 * GIB),
    )
    return replace(hardware, **changes)  # type: ignore[arg-type]


# -- measuring ----------------------------------------------------------------------------------------------------------


def test_this_machine_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    heard: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # another number than the probe works with
    try:
        found = probe_machine(str(tmp_path), tell=heard.append, effort=TINY)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert list(tmp_path.iterdir()) == []
    assert found.source.startswith("measured 20")
    assert found.compute.flops["fp32"] > 1e8
    assert found.host_bandwidth > 1e7
    assert found.compute.bandwidth > 1e7
    assert 0 < found.compute.op_seconds < 1
    assert found.compute.fault_seconds >= 0
    assert 0 < found.inside.latency < 10
    assert found.disk is not None
    assert min(found.disk.read, found.disk.write, found.disk.mixed) > 1e5
    assert found.disk.free_bytes > 0
    assert found.host_bytes > 0
    assert (found.link is None) == (not accelerators())
    for word in ("memory copy", "fp32", "bf16", "between two ranks", "disk: read"):
        assert any(word in line for line in heard), word


def test_a_disk_that_cannot_be_measured_is_none_and_said(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(SpoolRefused, match="No such file"):
        measure_disk(gone, most_bytes=16 * MIB, seconds=0.01)
    with pytest.raises(DiskFull, match="too little room"):
        measure_disk(str(tmp_path), most_bytes=MIB, seconds=0.01)


def test_a_disk_in_memory_is_measured_without_direct_transfers(tmp_path: Path) -> None:
    if not (os.path.isdir("/dev/shm") and is_memory("/dev/shm")):
        pytest.skip("no folder in memory here")
    before = os.listdir("/dev/shm")
    found = measure_disk("/dev/shm", most_bytes=8 * MIB, seconds=0.01)
    assert not found.direct
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("lowtide-probe-") and name not in before]
    assert not is_memory(str(tmp_path)) or device_of(str(tmp_path))[1] == "tmpfs"


@pytest.mark.parametrize("reads", [0, 1, 2])
def test_requests_stay_in_the_file_and_are_what_was_asked(reads: int) -> None:
    requests = probe_disk._Requests(held=5, reads=reads)
    asked = [requests[number] for number in range(40)]
    assert sum(is_read for is_read, _ in asked) == 20 * reads
    assert {place for _, place in asked} <= set(range(5))
    if reads == 1:  # never the same place read and written at once
        assert not {p for is_read, p in asked if is_read} & {p for is_read, p in asked if not is_read}


def test_a_dtype_without_a_kernel_has_no_speed() -> None:
    assert matmul_flops(torch.bool, 0.01, CPU, largest_side=128) is None
    assert (matmul_flops(torch.float32, 0.01, CPU, largest_side=128) or 0) > 1e8


# -- between ranks ------------------------------------------------------------------------------------------------------


def test_the_fit_finds_latency_and_bandwidth() -> None:
    wire = fit_wire([(n, 3e-4 + n / 2e9) for n in (4096, 1 << 20, 32 << 20)])
    assert math.isclose(wire.latency, 3e-4, rel_tol=1e-6)
    assert math.isclose(wire.bandwidth, 2e9, rel_tol=1e-6)
    assert fit_wire([(1000, 1e-9), (2000, 2.1e-9)]).latency > 0, "noise must not give a negative latency"
    with pytest.raises(InternalError, match="two sizes"):
        fit_wire([(4096, 1e-3), (4096, 2e-3)])


def test_ranks_that_fail_or_hang_are_ended_with_a_cause() -> None:
    with pytest.raises(DeadlineExceeded, match="over gloo"):
        measure_wire(deadline=0.0)
    with pytest.raises(PeerFailed, match="no median"):
        measure_wire(deadline=60.0, repeats={4096: 0})


def test_without_ranks_the_wire_is_a_cautious_guess() -> None:
    heard: list[str] = []
    found = probe_machine(None, tell=heard.append, effort=replace(TINY, wire_deadline=0.0))
    assert found.disk is None
    assert found.inside.bandwidth == found.host_bandwidth / 4
    assert any("could not be timed" in line for line in heard)


# -- what is kept -------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_there_the_next_time_with_limits_of_today(cache: Path, tmp_path: Path) -> None:
    assert cached_machine(None) is None
    assert cached_disk(str(tmp_path)) is None
    cache_machine(made_up(host_bytes=1), str(tmp_path))
    found = cached_machine(str(tmp_path))
    assert found is not None
    assert found.disk is not None
    assert found.host_bytes > MIB
    assert found.disk.free_bytes != 100 * GIB
    assert replace(found, host_bytes=1, disk=replace(found.disk, free_bytes=100 * GIB)) == made_up(host_bytes=1)
    bare = cached_machine(None)
    assert bare is not None
    assert bare.disk is None
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}
    assert len(list(cache.iterdir())) == 2, "no temporary file is left"


def test_a_disk_that_was_not_measured_is_assumed_and_said(cache: Path, tmp_path: Path) -> None:
    cache_machine(made_up(), None)
    found = cached_machine(str(tmp_path))
    assert found is not None
    assert found.disk is not None
    assert found.source == "measured 2000-01-01; disk assumed"


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def _zero(path: Path) -> None:
    content = json.loads(path.read_text())
    content["hardware"]["host_bandwidth"] = 0
    path.write_text(json.dumps(content))


def _infinite(path: Path) -> None:
    path.write_text(path.read_text().replace('"host_bandwidth": 10000000000.0', '"host_bandwidth": Infinity'))


def _other_machine(path: Path) -> None:
    content = json.loads(path.read_text())
    content["key"]["torch"] = "0.1"
    path.write_text(json.dumps(content))


def _newer(path: Path) -> None:
    content = json.loads(path.read_text())
    content["format_version"] += 1
    path.write_text(json.dumps(content))


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".away"))


def _huge(path: Path) -> None:
    path.write_text(path.read_text() + " " * 100_000)


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("damage", [_cut, _zero, _infinite, _other_machine, _newer, _link, _huge, _binary])
def test_a_damaged_or_foreign_file_is_not_used_and_said(damage: Callable[[Path], None], cache: Path) -> None:
    cache_machine(made_up(), None)
    (path,) = cache.iterdir()
    before = path.read_bytes()
    damage(path)
    assert path.is_symlink() or path.read_bytes() != before
    heard: list[str] = []
    assert cached_machine(None, tell=heard.append) is None
    assert len(heard) == 1
    assert str(path) in heard[0]
    assert "not used" in heard[0]
    cache_machine(made_up(), None)
    assert cached_machine(None) is not None, "measuring again repairs it"


def test_a_failed_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_machine(made_up(), None)

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(probe_cache.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        cache_machine(made_up(name="newer"), None)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    found = cached_machine(None)
    assert found is not None
    assert found.name == "made up"
    assert len(list(cache.iterdir())) == 1


def test_a_machine_nobody_measured_has_its_true_limits(tmp_path: Path) -> None:
    found = assumed_machine(str(tmp_path))
    assert found.source == "assumed"
    assert found.disk is not None
    free = os.statvfs(tmp_path)
    assert abs(found.disk.free_bytes - free.f_bavail * free.f_frsize) < 10 * GIB
    assert 0 < found.host_bytes < system_limits().memory_bytes
    assert assumed_machine().disk is None
    assert probe_cache.impossible_numbers(found) == []


# -- advice -------------------------------------------------------------------------------------------------------------

FINE = SystemLimits(
    memory_bytes=24 * GIB,
    available_bytes=20 * GIB,
    left_bytes=20 * GIB,
    swap_bytes=0,
    cores=8,
    quota=None,
    address_space=None,
    open_files=65536,
    busy=0.1,
)


def _disk(**changes: float | bool | int) -> Hardware:
    disk = made_up().disk
    assert disk is not None
    return made_up(disk=replace(disk, **changes))  # type: ignore[arg-type]


def test_a_good_machine_needs_no_advice() -> None:
    assert advice(made_up(), FINE) == []
    assert advice(made_up(disk=None), FINE) == []


def _flops(**flops: float) -> Hardware:
    return made_up(compute=replace(made_up().compute, flops=flops))


@pytest.mark.parametrize(
    ("hardware", "limits", "what", "do"),
    [
        (
            _flops(fp32=122e9, bf16=0.33e9),
            FINE,
            "bf16 products are 370 times slower",
            "compute in fp32; use bf16 only as a storage",
        ),
        (_flops(fp32=10e9, fp16=5e9), FINE, "fp16 products are 2.0 times slower", "storage format"),
        (_disk(direct=False), FINE, "no direct I/O", "local disk"),
        (_disk(read=1e8), FINE, "it reads 100 MB/s", "NVMe"),
        (_disk(write=4e8, read=3e8), FINE, "it reads 300 MB/s and writes 400 MB/s", "NVMe"),
        (_disk(free_bytes=5 * GIB), FINE, "5.0 GiB are free", "make room"),
        (
            made_up(),
            replace(FINE, left_bytes=2 * GIB),
            "leaves this process 2.0 GiB, while 20.0 of the machine's 24.0",
            "raise",
        ),
        (made_up(), replace(FINE, address_space=4 * GIB), "limited to 4.0 GiB (ulimit -v)", "ulimit -v unlimited"),
        (made_up(), replace(FINE, open_files=256), "only 256 files", "ulimit -n 4096"),
        (made_up(), replace(FINE, swap_bytes=2 * GIB), "swap is on (2.0 GiB)", "swapoff"),
        (made_up(), replace(FINE, busy=0.8), "other programs use 80% of the processors", "when nothing else runs"),
        (made_up(), replace(FINE, quota=1.5), "1.5 cores' worth of time, but sees 8", "use 1 threads"),
    ],
)
def test_each_fault_has_one_advice(hardware: Hardware, limits: SystemLimits, what: str, do: str) -> None:
    (found,) = advice(hardware, limits)
    assert what in found.what
    assert do in found.do


def test_a_folder_in_memory_is_no_disk() -> None:
    assert [item.what for item in advice(_disk(direct=False), FINE, disk_is_memory=True)] == [
        "the folder is memory, not a disk: what is kept there counts as memory"
    ]
    assert hash(Advice("a", "b")) == hash(Advice("a", "b"))


def test_the_limits_of_this_process_are_plausible() -> None:
    found = system_limits()
    assert 0 < found.left_bytes <= found.memory_bytes
    assert found.cores >= 1
    assert 0 <= found.busy <= 1
    assert json.loads(json.dumps(asdict(found)))["cores"] == found.cores
