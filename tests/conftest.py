"""Every test starts from the same random numbers; ranks that tests share end with the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.kit.dist import close_pools, seed_all


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    seed_all()


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
