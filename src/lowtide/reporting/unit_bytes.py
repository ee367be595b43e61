"""Whose bytes they are: one kind of bytes in host memory, unit by unit, as far as their owners tell them apart.

Counted only when a leak is suspected: it looks at every parameter and every state.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from lowtide.runtime.engine import Engine
from lowtide.runtime.sharded_grad import ShardedGrad
from lowtide.runtime.used_grad import UsedGrad


def held_by_unit(engine: Engine, kind: str) -> dict[str, int]:
    """Bytes of ``kind`` by the name of a unit, in words; empty where nobody tells units apart."""
    match kind:
        case "parameters":
            found = _parameters(engine)
        case "gradients":
            found = _gradients(engine)
        case "optimizer":
            found = _states(engine)
        case "activations":
            kept = engine.activations.saved.kept
            by_unit = kept.by_unit() if kept is not None else {}
            found = Counter({unit.name if unit is not None else "": nbytes for unit, nbytes in by_unit.items()})
        case _:
            found = Counter[str]()
    return {f"unit {name!r}" if name else "what runs outside all units": nbytes for name, nbytes in found.items()}


def _parameters(engine: Engine) -> Counter[str]:
    homes = ((unit.name, engine.residency.home(unit)) for unit in engine.units)
    return Counter({name: home.nbytes for name, home in homes if home.in_memory})


def _gradients(engine: Engine) -> Counter[str]:
    found: Counter[str] = Counter()
    for param, unit in engine.unit_of.items():
        if param.grad is not None and not isinstance(param.grad, ShardedGrad | UsedGrad):
            found[unit.name] += param.grad.nbytes
    for unit, shelved in engine.grads.shelves.items():
        found[unit.name] += shelved.shelf.touched_bytes if shelved.shelf.in_memory else 0
    for unit, pieces in list(engine.grads.reduced.items()):
        found[unit.name] += sum(piece.nbytes for piece in pieces if piece is not None)
    return found


def _states(engine: Engine) -> Counter[str]:
    found: Counter[str] = Counter()
    for optimizer in (reference() for reference in engine.optimizers):
        states: Any = optimizer.state if optimizer is not None else {}
        for param, state in states.items():
            if param in engine.unit_of:
                found[engine.unit_of[param].name] += sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
    for unit, stream in engine.update.streams.items():
        shelves = [stream.shelf(kind)[0] for kind in stream.kinds()]
        found[unit.name] += sum(shelf.touched_bytes for shelf in shelves if shelf.in_memory)
    return found
