"""The job's peak: the kernel's own mark per rank, and pages that ranks share counted once."""

from __future__ import annotations

import gc
import mmap
import os
from dataclasses import asdict
from pathlib import Path

import torch

from lowtide.job.memory import (
    RankMemory,
    SharedPages,
    job_peak,
    measure_rank,
    peak_bytes,
    rank_memory_from_json,
    reset_peak,
    shareable_pages,
)
from lowtide.runtime.budget import give_back

MIB = 1 << 20

SMAPS = """\
7f0000000000-7f0000400000 r-xp 00000000 fe:01 77     /usr/lib/libtorch.so
Size:               4096 kB
Rss:                3000 kB
Pss:                1500 kB
Anonymous:             0 kB
7f0000400000-7f0000500000 rw-p 00400000 fe:01 77     /usr/lib/libtorch.so
Size:               1024 kB
Rss:                1000 kB
Pss:                 950 kB
Anonymous:           900 kB
7f1000000000-7f1000100000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1024 kB
Anonymous:          1024 kB
7f2000000000-7f2000100000 rw-s 00000000 00:01 12     /memfd:shards (deleted)
Size:               1024 kB
Rss:                 512 kB
Pss:                 300 kB
Anonymous:             0 kB
"""


def test_shareable_pages_are_those_of_files_and_shared_memory() -> None:
    library, shared = shareable_pages(SMAPS.splitlines())
    assert library == SharedPages("fe:01:77", (3000 + 1000 - 900) * 1024, 2450 * 1024, shared_memory=False)
    assert shared == SharedPages("00:01:12", 512 * 1024, 300 * 1024, shared_memory=True)


def test_pages_that_ranks_share_count_once() -> None:
    library = [SharedPages("lib", size, 400, shared_memory=False) for size in (300, 290)]
    shards = [SharedPages("memfd", 80, 50, shared_memory=True) for _ in range(2)]
    ranks = [RankMemory("here", 1000, (library[i], shards[i])) for i in range(2)]
    # the library: 300 instead of 590; the shared memory: 100 instead of 160
    assert job_peak(ranks) == 2000 - 290 - 60
    assert job_peak([*ranks, RankMemory("another host", 5000, ())]) == job_peak(ranks)
    assert job_peak(ranks[:1]) == 1000


def test_a_report_survives_its_journey() -> None:
    memory = RankMemory("here", 7, (SharedPages("lib", 1, 2, shared_memory=False),))
    assert rank_memory_from_json(asdict(memory)) == memory


def test_the_peak_remembers_what_is_gone_until_it_is_reset() -> None:
    gc.collect()
    give_back()  # what earlier tests left must not go, or be used again, in between
    reset_peak()
    before = peak_bytes()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    assert peak_bytes() - before > 48 * MIB
    give_back()  # the block may have come from the heap, in a hole that earlier tests left there
    reset_peak()
    assert peak_bytes() - before < 32 * MIB


def test_a_mapped_file_is_seen_as_shareable(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"x" * (8 * MIB))
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert sum(mapped[i] for i in range(0, len(mapped), 4096)) == ord("x") * 2048  # every page is read
    inode = str(os.stat(path).st_ino)
    (pages,) = [p for p in measure_rank().shareable if p.file.split(":")[-1] == inode]
    assert pages.resident == 8 * MIB
    mapped.close()
