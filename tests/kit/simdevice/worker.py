"""Run a test's function where the simulated device is: in processes of its own, which stay for the next test."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.dist import run_ranks
from tests.kit.simdevice import backend, build, groups


def load(devices: int) -> None:
    backend.load(devices)
    groups.register()


def on_sim(function: Callable[..., Any], *args: Any, devices: int = 1, timeout: float = 100, fresh: bool = False) -> Any:
    """``function(*args)`` in a process that has ``devices`` simulated devices; ``fresh``: in one that nothing else has used."""
    return run_ranks(1, _without_rank, function, args, prepare=(load, devices), timeout=timeout, fresh=fresh)[0]


def on_sim_ranks(world: int, function: Callable[..., Any], *args: Any, devices: int = 1, timeout: float = 100) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` such processes, joined by gloo."""
    return run_ranks(world, function, *args, prepare=(load, devices), timeout=timeout)


def _without_rank(_rank: int, _world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _needs_compiler() -> pytest.MarkDecorator:
    missing = build.compiler() is None
    if missing and os.environ.get("CI", "").lower() == "true":
        raise RuntimeError("no C++ compiler, so nothing of the simulated device would be tested")
    return pytest.mark.skipif(missing, reason="the simulated device needs a C++ compiler")


needs_compiler = _needs_compiler()
