"""What this machine is, in the few facts that training depends on."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import psutil

from lowtide.job.options import cores
from lowtide.spec.probe_limits import processor


def machine_facts() -> list[tuple[str, str]]:
    """Name and value, in reading order."""
    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    limited = f", limited to {limit / 2**30:.1f} GiB" if limit is not None and limit < memory.total else ""
    return [
        ("processor", f"{processor()}, {cores()} cores for this job"),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free{limited}"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("software", f"Python {platform.python_version()}, PyTorch {metadata.version('torch')}"),
    ]


def _cgroup_limit() -> int | None:
    """Bytes that the control group of this process may use, if it has such a limit (version 2, then version 1)."""
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            return int(text)
    return None
