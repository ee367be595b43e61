"""Clipping over all ranks and tiers: one norm for everybody, then one multiplication, each rank its own part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from lowtide.errors import Refused
from lowtide.runtime import norm
from lowtide.runtime.announcer import Verb
from lowtide.runtime.engine import Engine
from lowtide.runtime.unit import dense_stride, flat_view


def clip_norm(engine: Engine, max_norm: float, order: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before. Every rank must call it."""
    if engine.group.size == 1:
        params = list(engine.model.parameters())  # torch adds the norms in this order
        return clip_norm_alone(params, max_norm, order, error_if_nonfinite=error_if_nonfinite)
    how = {"max_norm": float(max_norm), "order": order, "error_if_nonfinite": error_if_nonfinite}
    with _recorded(engine), engine.announcer.doing(Verb.CLIP, _digest(how), norm=how):
        total = _total(engine.grad_facts.norms(order), order)
        _refuse_nonfinite(total, wanted=error_if_nonfinite)
        torch.nn.utils.clip_grads_with_norm_(engine.unit_of, max_norm, total)
    return total


def clip_norm_of_plain(params: Sequence[nn.Parameter], max_norm: float, order: float, *, error_if_nonfinite: bool) -> Tensor:
    """Clip a model that is not sharded. Among several ranks it may be one that DDP keeps alike on all of them: then with the
    norm that a sharded model has there, so that the two can be compared bit for bit."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return clip_norm_alone(params, max_norm, order, error_if_nonfinite=error_if_nonfinite)
    parts: dict[int, norm.PartialNorm] = {}
    for key, grad in enumerate(p.grad for p in params):
        if grad is not None:
            collector = norm.NormCollector(grad.numel(), order)
            collector.add(0, flat_view(grad, dense_stride(params[key])))
            parts[key] = collector.finish()
    total = _total(norm.norms(parts, order, lambda mine: [mine]), order)
    _refuse_nonfinite(total, wanted=error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def _total(parts: dict[int, float], order: float) -> Tensor:
    return torch.tensor(norm.total_norm(parts.values(), order), dtype=torch.float32)


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
