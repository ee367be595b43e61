"""Whole parameters for reading or writing outside the model's forward."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from lowtide.errors import Refused
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine, Lent
from lowtide.runtime.unit import Unit
from lowtide.runtime.writes import differing


@contextmanager
def gathered(engine: Engine, params: Sequence[nn.Parameter], *, write: bool) -> Generator[None]:
    """Pin the units of ``params``; on leaving, make what they hold on rank 0 everybody's if ``write``.

    Graphs that are made inside may be walked backward outside: what autograd saves of parameters are recipes, as in a forward
    pass. If the block ends with an exception, one rank keeps what was written until then, as in plain PyTorch; several keep
    none of it.
    """
    residency, lent = engine.residency, Lent()
    with engine.calling("gathered()"):
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
        lent.units = sorted({engine.unit_of[p] for p in params}, key=lambda u: u.index)
        for unit in lent.units:
            residency.pin(unit, private=True)
        before = {unit: residency.prints(unit) for unit in lent.units}
        engine.lent.append(lent)
        lent.is_open = True
    saved = engine.open_saved()
    keep = write and engine.group.size == 1
    try:
        yield
        engine.close_saved(saved)
        with engine.calling("gathered()"):
            if write:
                _make_everybodys(engine, before)
                keep = True
            else:
                _refuse_changes(engine, before)
    finally:
        engine.close_saved(saved)
        engine.give_back(lent, keep=keep)


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
