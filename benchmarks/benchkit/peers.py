"""A virtual environment of their own for peers that do not ship with PyTorch, made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

DEEPSPEED = "0.19.8"
PIP_SECONDS = 1800
OPS = "CPUAdamBuilder", "AsyncIOBuilder"


class PeerUnavailable(Exception):
    """A peer that cannot be installed here; the message is the reason that the report gives."""


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=PIP_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        cause = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output")
        raise PeerUnavailable(f"{' '.join(command[2:])}: {cause.strip()}")


def deepspeed_python(folder: Path, say: Callable[[str], None]) -> Path:
    """The interpreter of an environment with DeepSpeed and the PyTorch version that is installed here."""
    torch_version = metadata.version("torch").split("+")[0]
    wanted = f"torch=={torch_version} deepspeed=={DEEPSPEED}"
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    if mark.exists() and mark.read_text() == wanted:
        return python
    say(f"making {folder} with {wanted}")
    # DS_BUILD_OPS=0: DeepSpeed compiles nothing at installation; what it needs here it has in Python.
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    environment.pop("PYTHONPATH", None)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], environment)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # DeepSpeed's setup.py imports torch, so torch comes first and the build is not isolated from it.
    _run([*pip, f"torch=={torch_version}", "numpy", "setuptools", "wheel"], environment)
    _run([*pip, f"deepspeed=={DEEPSPEED}", "--no-build-isolation"], environment)
    mark.write_text(wanted)
    return python


def deepspeed_operations(python: Path, folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """The environment in which DeepSpeed finds its compiled optimizer and disk queue; compiled here, once, before anything
    is measured. Needs a C++ compiler, and the headers of libaio (Debian: libaio-dev)."""
    extra = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    # A run that was ended while it compiled leaves a lock behind, for which the next one would wait for ever.
    for lock in (folder / "extensions").rglob("lock"):
        lock.unlink()
    say("compiling DeepSpeed's operations, if they are not there yet")
    names = ", ".join(OPS)
    program = f"from deepspeed.ops.op_builder import {names}\nfor build in ({names}): build().load(verbose=False)"
    environment = {**os.environ, **extra, "DS_ACCELERATOR": "cpu", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    _run([str(python), "-c", program], environment)
    return {**extra, "PATH": environment["PATH"]}
