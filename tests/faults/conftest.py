"""A valid checkpoint that tests forge, and find as it was; a folder in memory for tests that save thousands of times."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.forgery import Forger


@pytest.fixture(scope="module")
def _made_once(tmp_path_factory: pytest.TempPathFactory) -> Forger:
    return Forger(tmp_path_factory.mktemp("forged"))


@pytest.fixture
def forger(_made_once: Forger) -> Iterator[Forger]:
    """Whatever a test did to it, the next checkpoint loads as ever."""
    yield _made_once
    shutil.rmtree(_made_once.path)
    _made_once.path.mkdir(0o700)
    _made_once.write(_made_once.files)
    assert _made_once.load() == "loaded"


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """Like ``tmp_path``, but in memory if there is a place: where it does not matter what a disk keeps, syncs cost nothing."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="lowtide-quick-", dir="/dev/shm", ignore_cleanup_errors=True) as name:
        yield Path(name)
