"""A control group with a memory limit, version 1 or 2, for tests that must really run out."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.kit.tools import missing

_numbers = itertools.count()

ENTER = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as _file:
    _file.write(str(os.getpid()))
"""
"""The first lines of a program whose first argument is the group."""


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A group of this many bytes; a skip that says why where none can be made."""
    root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.is_dir():
        root, name = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"lowtide-kit-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError as error:
        missing("a memory cgroup", f"{root} does not let us make one: {error.strerror}")
    try:
        if not (group / name).exists():
            missing("a memory cgroup", f"{root} has no memory controller for its children")
        (group / name).write_text(str(limit))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            with contextlib.suppress(OSError):
                (group / swap).write_text("0" if swap == "memory.swap.max" else str(limit))
        yield group
    finally:
        with contextlib.suppress(OSError):
            (group / "memory.force_empty").write_text("0")
        _remove(group)


def _remove(group: Path) -> None:
    """What was killed in it may take a moment to be gone."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
