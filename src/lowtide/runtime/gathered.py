"""Whole parameters for reading or writing outside the model's forward."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from lowtide.errors import Refused
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine
from lowtide.runtime.unit import Unit
from lowtide.runtime.writes import differing


@contextmanager
def gathered(engine: Engine, params: Sequence[nn.Parameter], *, write: bool) -> Generator[None]:
    """Pin the units of ``params``; on leaving, make what they hold on rank 0 everybody's if ``write``.

    Graphs that are made inside may be walked backward outside: what autograd saves of parameters are recipes, as in a forward
    pass. If the block ends with an exception, one rank keeps what was written until then, as in plain PyTorch; several keep
    none of it.
    """
    engine.settle()
    if write:
        if engine.backward_update is not None and engine.backward_update.waits_for_step:
            raise Refused(
                "gathered(write=True) between backward and step(): update='backward' has updated the parameters already. "
                "Write after optimizer.step(), or use update='step'."
            )
        engine.announcer.refuse_alone("gathered(write=True)")
    else:
        engine.announcer.say(Verb.LOOK)
    residency = engine.residency
    units = sorted({engine.unit_of[p] for p in params}, key=lambda u: u.index)
    pinned: list[Unit] = []
    keep = write and engine.group.size == 1
    try:
        for unit in units:
            residency.pin(unit, private=True)
            pinned.append(unit)
        before = {unit: residency.prints(unit) for unit in units}
        saved = engine.open_saved()
        try:
            yield
        finally:
            engine.close_saved(saved)
        if write:
            _make_everybodys(engine, before)
            keep = True
        else:
            _refuse_changes(engine, before)
    finally:
        for unit in pinned:
            residency.unpin(unit, keep=keep)
        residency.forget(pinned)


def _make_everybodys(engine: Engine, before: dict[Unit, list[int]]) -> None:
    """Keep what the parameters hold now."""
    for unit in before:
        engine.residency.take_in(unit)
    for unit in before:
        engine.residency.write_back(unit)
    changed = [u for u, prints in before.items() if differing(u, prints, engine.residency.prints(u))]
    for unit in before:
        engine.residency.accept_writes(unit)
    engine.parameters_written(changed)


def _refuse_changes(engine: Engine, before: dict[Unit, list[int]]) -> None:
    for unit, prints in before.items():
        replaced = engine.residency.put_back(unit)
        for index in (*replaced, *differing(unit, prints, engine.residency.prints(unit))):
            raise Refused(
                f"parameter {unit.names[index]!r} was changed inside gathered(); "
                f"write gathered(..., write=True) to keep changes."
            )
