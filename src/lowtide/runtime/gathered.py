"""Whole parameters for reading or writing outside the model's forward."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from lowtide.errors import Refused
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine
from lowtide.runtime.unit import Unit


@contextmanager
def gathered(engine: Engine, params: Sequence[nn.Parameter], *, write: bool) -> Generator[None]:
    """Pin the units of ``params``; on leaving, make rank 0's values everybody's if ``write``."""
    engine.settle()
    if write:
        engine.announcer.refuse_alone("gathered(write=True)")
    else:
        engine.announcer.say(Verb.LOOK)
    units = sorted({engine.unit_of[p] for p in params}, key=lambda u: u.index)
    pinned: list[Unit] = []
    try:
        for unit in units:
            engine.residency.pin(unit, private=True)
            pinned.append(unit)
        versions = {p: p._version for u in units for p in u.params}
        yield
        changed = [p for p, version in versions.items() if p._version != version]
        for unit in units:
            engine.residency.accept_writes(unit)
        if changed and not write:
            raise Refused(
                f"parameter {engine.name_of[changed[0]]!r} was changed inside gathered(); "
                f"write gathered(..., write=True) to keep changes."
            )
        if write:
            for unit in units:
                engine.residency.write_back(unit)
            engine.parameters_written(units)
    finally:
        for unit in pinned:
            engine.residency.unpin(unit)
        engine.residency.forget(pinned)
