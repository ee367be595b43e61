"""Let lowtide run on the simulated device where it refuses accelerators: tests must see what is wrong there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from lowtide.runtime import assembly


def allowed() -> AbstractContextManager[Any]:
    return mock.patch.object(assembly, "refuse_unproven", return_value=None)
