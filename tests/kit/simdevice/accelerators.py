"""Let lowtide run on the simulated device where it refuses accelerators: tests must see what is wrong there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

# the function that refuses, once there is one: "module.name"
REFUSAL: str | None = None


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    if REFUSAL is None:
        yield
        return
    with mock.patch(REFUSAL, return_value=None):
        yield
