"""Tools that a test needs from the system: installed where that is possible, a skip that names them where it is not.

In CI (``CI=true``) such a skip is a failure: a check that silently stopped running is worse than a red one.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def missing(what: str, why: str) -> None:
    """Skip this test because ``what`` is not here; fail in CI."""
    text = f"needs {what}: {why}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def require_tool(name: str, debian_package: str) -> str:
    """The path of a program. As root it is installed with apt-get if it is not there."""
    if path := shutil.which(name):
        return path
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        missing(name, f"install it (Debian: apt-get install {debian_package})")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "timeout": 90}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", debian_package]):
        result = subprocess.run(["apt-get", "-q", *command], env=environment, check=False, **quiet)
        if result.returncode:
            missing(name, f"apt-get {command[0]} failed: {result.stderr.strip()[-300:]}")
    path = shutil.which(name)
    if path is None:
        missing(name, f"the package {debian_package} does not contain it")
    return str(path)
