"""The process's figures, against what is known of this process, and control groups of both versions."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import psutil
import pytest

from lowtide.reporting.sampler import Sampler

MIB = 2**20


def test_memory_is_what_the_kernel_says_and_what_was_just_taken(tmp_path: Path) -> None:
    sampler = Sampler([str(tmp_path)])
    before = sampler.sample()
    private, shared = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(-1, 16 * MIB)
    for memory in (private, shared):
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1
    after = sampler.sample()
    assert abs(after.memory.anonymous - before.memory.anonymous - 32 * MIB) < 2 * MIB
    assert abs(after.memory.shared - before.memory.shared - 16 * MIB) < 2 * MIB
    assert after.memory.total == after.memory.anonymous + after.memory.shared + after.memory.file
    assert abs(after.memory.total - psutil.Process().memory_info().rss) < 4 * MIB
    assert after.cpu_percent is not None
    assert before.cpu_percent is None
    assert after.disk_free_bytes is not None
    assert 0 < after.disk_free_bytes <= psutil.disk_usage(str(tmp_path)).total


def test_descriptors_and_threads_are_counted() -> None:
    sampler = Sampler([])
    before = sampler.sample()
    assert before.fds is not None
    assert before.threads is not None
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    after = sampler.sample()
    for fd in fds:
        os.close(fd)
    stop.set()
    thread.join()
    assert after.fds == before.fds + 3
    assert after.threads == before.threads + 1
    assert sampler.sample().fds == before.fds
    assert before.disk_free_bytes is None


@pytest.mark.parametrize("nested", [True, False], ids=["its own folder", "only the root is seen"])
@pytest.mark.parametrize("version", [1, 2])
def test_control_groups(tmp_path: Path, version: int, *, nested: bool) -> None:
    process, top = tmp_path / "proc", tmp_path / "cgroup"
    usage, limit = ("memory.current", "memory.max") if version == 2 else ("memory.usage_in_bytes", "memory.limit_in_bytes")
    root = top if version == 2 else top / "memory"
    here = root / "job" / "task" if nested else root
    here.mkdir(parents=True)
    process.mkdir()
    (process / "cgroup").write_text("0::/job/task\n" if version == 2 else "5:cpu:/x\n4:memory,hugetlb:/job/task\n")
    (here / usage).write_text("123456\n")
    (here / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    if nested:
        (root / "job" / limit).write_text("777777\n")
    sample = Sampler([], root=top, process=process).sample()
    assert sample.cgroup_bytes == 123456
    assert sample.cgroup_limit_bytes == (777777 if nested else None)
    assert sample.fds is None


def test_a_system_that_says_nothing_gives_nothing(tmp_path: Path) -> None:
    sample = Sampler(["/no/such/folder"], root=tmp_path, process=tmp_path).sample()
    assert (sample.cgroup_bytes, sample.fds, sample.threads, sample.disk_free_bytes) == (None, None, None, None)
    assert sample.memory.total == 0
