"""Every test starts from the same random numbers; ranks that tests share end with the session."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from tests.kit.dist import close_pools, seed_all

# The same examples in every run, so that what fails was broken by the change; `make shake` looks for new ones.
# Without a deadline: a machine may be busy with something else.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    seed_all()


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``@pytest.mark.thinned(n)``: about every n-th case of a large product is in `make test`, always the same ones; all of
    them are in `make soak`."""
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is not None and zlib.crc32(item.nodeid.encode()) % mark.args[0]:
            item.add_marker("soak")
