"""Compile the C++ half once per source and PyTorch version, into a folder of the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas")


def compiler() -> str | None:
    """A C++ compiler, or None; the tests of the simulated device need one."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lowtide-tests" / "simdevice"


def _key() -> str:
    texts = [path.name + path.read_text() for path in sorted(SOURCES.iterdir())]
    facts = (torch.__version__, compiler(), _FLAGS, torch.compiled_with_cxx11_abi(), *texts)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def library() -> Path:
    """The compiled library. Whoever comes first builds it, others wait meanwhile."""
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"{_key()}.so"
    if built.exists():
        return built
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(target: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no C++ compiler: the simulated device cannot be built")
    libraries = Path(torch.__file__).parent / "lib"
    unfinished = target.with_suffix(".part")
    command = [cxx, *_FLAGS, str(SOURCES / "simdevice.cpp"), "-o", str(unfinished)]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-8000:]}")
    os.replace(unfinished, target)
