"""Whether an optimizer may run on pieces: tried once, whole against cut, on a few hundred elements."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LargeState:
    """A state of the optimizer that has one value per element of a parameter."""

    name: str
    dtype: torch.dtype


def large_states(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> tuple[LargeState, ...]:
    """Which such states a parameter of ``group`` will have, if it is of ``dtype``: found by one step on a small matrix."""
    values, grads = _trial_numbers(dtype)
    trial, params = _trial(optimizer, group, [values])
    _steps(trial, params, [[grads[0]]])
    state: dict[str, Any] = trial.state[params[0]]
    return tuple(LargeState(k, v.dtype) for k, v in state.items() if isinstance(v, Tensor) and v.shape == values.shape)


def _trial_numbers(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64).to(dtype)
    return start, [torch.randn(_SHAPE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(_STEPS)]


def why_not_elementwise(optimizer: Optimizer, dtype: torch.dtype, *, apart: bool = False) -> str | None:
    """``None`` if the optimizer gives the same bits on pieces as on the whole tensor, else what went wrong.

    ``apart``: the pieces must not even be in one step together.
    """
    for group in optimizer.param_groups:
        start, grads = _trial_numbers(dtype)

        def cut(tensor: Tensor) -> list[Tensor]:
            return [tensor.flatten()[:_CUT].clone(), tensor.flatten()[_CUT:].clone()]

        try:
            whole = _train(optimizer, group, [start.clone()], [[g] for g in grads])
            rows = [cut(g) for g in grads]
            if apart:
                pieces = [_train(optimizer, group, [p], [[r[i]] for r in rows])[0] for i, p in enumerate(cut(start))]
            else:
                pieces = _train(optimizer, group, cut(start), rows)
        except Exception as error:  # the caller's optimizer may raise anything; that is the answer
            return f"it cannot update a flat piece of a matrix ({type(error).__name__}: {error})"
        if torch.equal(whole[0], start):
            return "it changed nothing when it was tried"
        if not torch.equal(whole[0].flatten(), torch.cat([p.flatten() for p in pieces])):
            return "its result for one element depends on the other elements of the tensor"
    return None


def why_not_apart(optimizer: Optimizer, dtype: torch.dtype) -> str | None:
    """``None`` if whole tensors may be updated in calls of their own, else what went wrong."""
    for group in optimizer.param_groups:
        start, grads = _trial_numbers(dtype)
        tensors, rows = [start, start.flip(0) * 3], [[g, g.flip(1) * 5] for g in grads]
        try:
            together = _train(optimizer, group, [t.clone() for t in tensors], [[g.clone() for g in row] for row in rows])
            alone = [
                _train(optimizer, group, [t.clone()], [[row[i].clone()] for row in rows])[0] for i, t in enumerate(tensors)
            ]
        except Exception as error:  # the caller's optimizer may raise anything; that is the answer
            return f"it cannot be tried ({type(error).__name__}: {error})"
        if not all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)):
            return "its result for one tensor depends on the other tensors of the step"
    return None


def _train(optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    trial, params = _trial(optimizer, group, values)
    _steps(trial, params, grads)
    return [p.detach() for p in params]


def _trial(optimizer: Optimizer, group: dict[str, Any], values: list[Tensor]) -> tuple[Optimizer, list[nn.Parameter]]:
    """An optimizer like ``optimizer`` without a past, for a few tensors."""
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    params = [nn.Parameter(v) for v in values]
    trial.state = defaultdict(dict)
    options = {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
    if "lr" in options and not options["lr"]:
        options["lr"] = _TRIAL_RATE  # a warm-up may begin at 0, where every optimizer looks elementwise
    trial.param_groups = [{**options, "params": params}]
    clear_step_hooks(trial)
    return trial, params


def _steps(trial: Optimizer, params: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    step = plain_step(getattr(type(trial), "plain_class", type(trial)))
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad
        step(trial)
