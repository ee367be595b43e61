"""``make shake``: requests of the disk and exchanges between ranks start late and end late, by chance, in every process.

A test that passes only because a disk or another rank is fast fails here, and not once in a while on a busy machine. Python
imports a module of this name by itself when its folder is in ``PYTHONPATH``, so ranks and jobs that tests start have it, too.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MOSTLY, SELDOM = 0.002, 0.03
"""Seconds that a pause takes at most."""
_chance = random.Random()  # of its own: tests seed the other one


def pause() -> None:
    """None in six of ten cases, a long one in one of twenty."""
    dice = _chance.random()
    if dice > 0.6:
        time.sleep(_chance.random() * (SELDOM if dice > 0.95 else MOSTLY))


def around(owner: type, name: str, *, before: bool, after: bool) -> None:
    """Pauses around a method."""
    method = getattr(owner, name)

    def paused(*given: Any, **named: Any) -> Any:
        if before:
            pause()
        result = method(*given, **named)
        if after:
            pause()
        return result

    setattr(owner, name, paused)


def shake_queue(queue: ModuleType) -> None:
    around(queue._Line, "take", before=False, after=True)
    around(queue._Line, "finish", before=True, after=False)


def shake_channel(channel: ModuleType) -> None:
    around(channel.Channel, "_perform", before=True, after=False)
    around(channel.Ticket, "finish", before=True, after=False)


SHAKEN: dict[str, Callable[[ModuleType], None]] = {
    "lowtide.tiers.queue": shake_queue,
    "lowtide.comm.channel": shake_channel,
}


class Shaker(MetaPathFinder):
    """Changes the modules of ``SHAKEN`` when they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in SHAKEN else None
        if spec is not None and spec.loader is not None:
            spec.loader = Shaken(spec.loader)
        return spec


class Shaken(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        SHAKEN[module.__name__](module)


sys.meta_path.insert(0, Shaker())
