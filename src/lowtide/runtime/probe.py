"""Whether an optimizer may run on pieces: tried once, whole against cut, on a few hundred elements."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.torch_internals import clear_step_hooks

# The cut falls at a multiple of 64 elements, in the middle of the matrix.
_SHAPE, _CUT = (24, 32), 320
_STEPS = 3
_TRIAL_RATE = 1e-3


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without the wrapper that runs step hooks: those belong around the whole update."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether the optimizer evaluates the model inside its step, as LBFGS does."""
    _, *parameters = inspect.signature(plain_step(cls)).parameters.values()
    ordinary = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in ordinary for p in parameters)


def why_not_elementwise(optimizer: Optimizer, dtype: torch.dtype) -> str | None:
    """``None`` if the optimizer gives the same bits on pieces as on the whole tensor, else what went wrong."""
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64).to(dtype)
        grads = [torch.randn(_SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(_STEPS)]

        def cut(tensor: Tensor) -> list[Tensor]:
            return [tensor.flatten()[:_CUT].clone(), tensor.flatten()[_CUT:].clone()]

        try:
            whole = _train(optimizer, group, [start.clone()], [[g] for g in grads])
            pieces = _train(optimizer, group, cut(start), [cut(g) for g in grads])
        except Exception as error:  # the caller's optimizer may raise anything; that is the answer
            return f"it cannot update a flat piece of a matrix ({type(error).__name__}: {error})"
        if torch.equal(whole[0], start):
            return "it changed nothing when it was tried"
        if not torch.equal(whole[0].flatten(), torch.cat([p.flatten() for p in pieces])):
            return "its result for one element depends on the other elements of the tensor"
    return None


def _train(optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    params = [nn.Parameter(v) for v in values]
    trial.state = defaultdict(dict)
    options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    if "lr" in options and not options["lr"]:
        options["lr"] = _TRIAL_RATE  # a warm-up may begin at 0, where every optimizer looks elementwise
    trial.param_groups = [{**options, "params": params}]
    clear_step_hooks(trial)
    step = plain_step(type(optimizer))
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad
        step(trial)
    return [p.detach() for p in params]
