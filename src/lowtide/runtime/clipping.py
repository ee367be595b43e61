"""Clipping over all ranks and tiers: one norm for everybody, then one multiplication, each rank its own part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
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
    how = {"max_norm": float(max_norm), "order": order, "error_if_nonfinite": error_if_nonfinite}
    with _recorded(engine), engine.announcer.doing(Verb.CLIP, _digest(how), norm=how):
        total = norm_of(engine.grad_facts.norms(order), order)
        scale(engine.unit_of, total, max_norm, error_if_nonfinite=error_if_nonfinite)
    return total


def clip_value(engine: Engine, limit: float) -> None:
    """Clamp every element of every gradient to [-limit, limit]."""
    how = {"limit": float(limit)}
    with _recorded(engine), engine.announcer.doing(Verb.CLIP, _digest(how), value=how):
        clamp(engine.unit_of, limit)


def norm_of(parts: dict[int, float], order: float) -> Tensor:
    """The norm of all gradients from the norm of each."""
    return torch.tensor(norm.total_norm(parts.values(), order), dtype=torch.float32)


def scale(params: Iterable[nn.Parameter], total: Tensor, max_norm: float, *, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(total):
        raise Refused(f"the gradient norm is {total.item()}: nothing was clipped. Leave error_if_nonfinite out to go on.")
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))


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
