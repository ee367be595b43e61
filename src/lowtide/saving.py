"""``lowtide.save`` and ``lowtide.load``: the public side of checkpoint/."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowtide.api import engine_of
from lowtide.checkpoint import load as _load
from lowtide.checkpoint import save as _save
from lowtide.checkpoint.save import Saving, refuse_target
from lowtide.errors import ArgumentError
from lowtide.runtime.optimizer import ShardedOptimizer


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    keep: int | None = None,
    link: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Saving:
    """Write a checkpoint of a sharded model to the new folder ``path``; every rank calls it, between two steps.

    It is there as a whole or not at all. ``state``: objects with ``state_dict()`` (scheduler, scaler, sampler), saved on every
    rank; ``extra``: tensors and plain values, rank 0's. ``background``: return at once and write while training goes on;
    ``.wait()`` on the result waits for it. ``keep``: how many checkpoints stay in the folder around ``path``. ``link``: bytes
    that are on disk already are not copied if they can stay there. ``progress`` is called with the bytes written and in all.
    """
    engine = engine_of(model)
    engine.announcer.refuse_alone("lowtide.save()")
    if keep is not None and keep < 1:
        raise ArgumentError(f"keep={keep}: at least 1 checkpoint stays, or leave it out to keep all.")
    wish = _save.Wish(
        target=refuse_target(path),
        state=dict(state or {}),
        extra=extra,
        step=engine.steps_taken,
        background=background,
        keep=keep,
        progress=progress,
        may_link=link,
    )
    with engine.calling("lowtide.save()"), engine.group.deadlines.relaxed():
        saving = _save.save(engine, _sharded(optimizer), wish)
    if engine.recorder is not None:
        engine.recorder.mark("checkpoint", str(path))
    return saving


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, or the newest one that verifies in the folder ``path``; returns its ``extra``.

    The number of ranks, stage, units, tiers and memory may differ from those it was saved with. ``strict`` as in PyTorch:
    without it, what only one side has is left alone.
    """
    engine = engine_of(model)
    engine.announcer.refuse_alone("lowtide.load()")
    _save.finish(engine)
    wish = _load.Wish(path=Path(os.path.abspath(path)), state=dict(state or {}), strict=strict, progress=progress)
    with engine.calling("lowtide.load()"), engine.group.deadlines.relaxed():
        return _load.load(engine, _sharded(optimizer), wish).extra


def _sharded(optimizer: Optimizer | None) -> Optimizer | None:
    if optimizer is not None and not isinstance(optimizer, ShardedOptimizer):
        raise ArgumentError("the optimizer is not sharded: give it to lowtide.shard together with the model first.")
    return optimizer


__all__ = ["Saving", "load", "save"]
