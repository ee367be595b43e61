"""Two hosts for the tests of this folder, made once; a skip with the reason where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.kit.netns import Network, NetworkUnavailable
from tests.kit.tools import missing, require_tool

MakeNetwork = Callable[..., Network]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """Networks that end with the test, also if it fails."""
    with ExitStack() as stack:

        def make(count: int = 2, rate: str | None = None) -> Network:
            return stack.enter_context(_made(count, rate))

        yield make


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Network]:
    """A network that the tests of one file share. Who cuts it makes one of their own."""
    with _made(2, None) as network:
        yield network


def _made(count: int, rate: str | None) -> Network:
    require_tool("ip", "iproute2")
    try:
        return Network(count, rate=rate)
    except NetworkUnavailable as error:
        missing("network namespaces", str(error))
        raise  # not reached: `missing` ends the test
