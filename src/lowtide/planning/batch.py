"""The micro-batch that trains most samples per second, and fits."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.errors import DoesNotFit
from lowtide.planning.plan import Plan
from lowtide.planning.planner import make_plan
from lowtide.planning.request import Request
from lowtide.spec.hardware import Hardware
from lowtide.spec.model import ModelSpec

_LARGEST = 1 << 14
_WORTH_IT = 1.02
"""Twice the batch must bring so much more per second, or the smaller one is better: it makes more updates of the same data."""


def best_batch(model_for: Callable[[int], ModelSpec], hardware: Hardware, request: Request) -> tuple[int, Plan]:
    """Tries 1, 2, 4, ... samples; ``model_for`` describes the model for a batch. Raises DoesNotFit if not even one fits."""
    best = make_plan(model_for(1), hardware, request)
    batch, size = 1, 2
    while size <= _LARGEST:
        try:
            plan = make_plan(model_for(size), hardware, request)
        except DoesNotFit:
            break
        if size / plan.predicted_seconds <= _WORTH_IT * batch / best.predicted_seconds:
            break
        batch, best, size = size, plan, size * 2
    return batch, best
