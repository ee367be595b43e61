"""Clipping over all ranks and tiers: one norm for everybody, then one multiplication, each rank its own part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lowtide.errors import Refused
from lowtide.runtime import norm
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine


def clip_norm(engine: Engine, max_norm: float, order: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before. Every rank must call it."""
    if engine.group.size == 1:
        with _recorded(engine):
            return clip_norm_alone(list(engine.model.parameters()), max_norm, order, error_if_nonfinite=error_if_nonfinite)
    how = {"max_norm": float(max_norm), "order": order, "error_if_nonfinite": error_if_nonfinite}
    with _recorded(engine), engine.announcer.doing(Verb.CLIP, _digest(how), norm=how):
        parts = engine.grad_facts.norms(order)
        total = torch.tensor(norm.total_norm(parts.values(), order), dtype=torch.float32)
        _refuse_nonfinite(total, wanted=error_if_nonfinite)
        torch.nn.utils.clip_grads_with_norm_(engine.unit_of, max_norm, total)
    return total


def clip_norm_alone(params: Sequence[nn.Parameter], max_norm: float, order: float, *, error_if_nonfinite: bool) -> Tensor:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` does, bit for bit."""
    total = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], order)
    _refuse_nonfinite(total, wanted=error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def _refuse_nonfinite(total: Tensor, *, wanted: bool) -> None:
    if wanted and not math.isfinite(total):
        raise Refused(f"the gradient norm is {total.item()}: nothing was clipped. Leave error_if_nonfinite out to go on.")


def clip_value(engine: Engine, limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit]."""
    how = {"limit": float(limit)}
    with _recorded(engine), engine.announcer.doing(Verb.CLIP, _digest(how), value=how):
        clamp(engine.unit_of, limit)


def clamp(params: Iterable[nn.Parameter], limit: float) -> None:
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.grad.clamp_(min=-limit, max=limit)


def _recorded(engine: Engine) -> AbstractContextManager[None]:
    """Gradients on disk are read for a norm, which may take as long as the update: a timeline must not lose it."""
    spans = engine.placer.clock.spans
    return nullcontext() if spans is None else spans.during("update", "clip")


def _digest(how: dict[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(how).encode()) >> 1  # a signed number
