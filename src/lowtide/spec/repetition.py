"""The facts of a deep model from a shallow one: of blocks that are alike, a few are traced and stand for the others.

Only for models of which that is known. Two blocks of one class may compute different things (a window of attention in every
other one), and no look at their parameters would tell.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from lowtide.spec.model import ModelSpec
from lowtide.spec.tracing import trace
from lowtide.spec.units import find_units

_TRACED = 4
"""The first, two of the middle and the last: what lies before and behind a block shows in what it holds for a moment."""


def _alike(blocks: nn.ModuleList) -> bool:
    """Whether nothing that can be seen makes one of them another thing (a part that was frozen, a layer that was replaced)."""
    first, *others = ([(type(m), m.training) for m in b.modules()] + [_kind(p) for p in b.parameters()] for b in blocks)
    return all(other == first for other in others)


def _kind(p: nn.Parameter) -> tuple[Any, ...]:
    return p.shape, p.dtype, p.requires_grad


def trace_alike(model: nn.Module, batch: Any, *, blocks: str, bucket_bytes: int, **options: Any) -> ModelSpec:
    """What ``trace`` says of ``model``, whose child ``blocks`` is a list of modules that differ in their values only."""
    every = getattr(model, blocks)
    deep = {f"{blocks}.{i}" for i in range(len(every))}
    names = [spec.name for spec in find_units(model, None, bucket_bytes=bucket_bytes)]
    if len(every) <= _TRACED or not deep.issubset(names) or not _alike(every):  # few, or several of them are one unit
        return trace(model, batch, bucket_bytes=bucket_bytes, **options)
    shallow = copy.copy(model)
    vars(shallow)["_modules"] = dict(vars(model)["_modules"])
    setattr(shallow, blocks, nn.ModuleList([*every[: _TRACED - 1], every[-1]]))
    spec = trace(shallow, batch, bucket_bytes=bucket_bytes, **options)
    first, *_ = (i for i, unit in enumerate(spec.units) if unit.name == f"{blocks}.0")
    middle = spec.units[first + 1]
    last = spec.units[first + _TRACED - 1]
    repeated = [replace(middle, name=f"{blocks}.{i}") for i in range(1, len(every) - 1)]
    return replace(
        spec,
        units=(
            *spec.units[: first + 1],
            *repeated,
            replace(last, name=f"{blocks}.{len(every) - 1}"),
            *spec.units[first + _TRACED :],
        ),
    )
