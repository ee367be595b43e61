"""Optimizers for parity tests, as one table: name → how to make it. Learning rates are high, so that steps differ visibly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn, optim

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


class Lion(optim.Optimizer):
    """A caller's own elementwise optimizer: state made on first use, a tensor and a number per parameter."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                beta1, beta2 = group["betas"]
                direction = state["momentum"].mul(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=-group["lr"] / state["count"] ** 0.5)
                state["momentum"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class RowScaled(optim.Optimizer):
    """Not elementwise: every element's step depends on the norm of the whole parameter (as LARS and LAMB do)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (1e-3 + p.grad.norm().item()))


def _groups(params: Iterable[nn.Parameter]) -> optim.Optimizer:
    """As most training scripts do: no weight decay for vectors, and another learning rate."""
    every = list(params)
    matrices, vectors = [p for p in every if p.dim() >= 2], [p for p in every if p.dim() < 2]
    return optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.9)}],
        lr=1e-2,
    )


ELEMENTWISE: dict[str, Make] = {
    "adamw_fused": partial(optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw": partial(optim.AdamW, lr=1e-2, weight_decay=0.1),
    "adamw_amsgrad": partial(optim.AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "adamw_foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "adamw_groups": _groups,
    "adam": partial(optim.Adam, lr=1e-2),
    "adam_fused": partial(optim.Adam, lr=1e-2, weight_decay=0.01, fused=True),
    "sgd": partial(optim.SGD, lr=1e-2),
    "sgd_momentum": partial(optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_fused": partial(optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": partial(optim.Adagrad, lr=1e-2),
    "adagrad_fused": partial(optim.Adagrad, lr=1e-2, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=1e-2),
    "nadam": partial(optim.NAdam, lr=1e-2),
    "radam": partial(optim.RAdam, lr=1e-2),
    "asgd": partial(optim.ASGD, lr=1e-2),
    "rprop": partial(optim.Rprop, lr=1e-3),
    "custom": Lion,
}
WHOLE: dict[str, Make] = {
    "lbfgs": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
    "muon": partial(optim.Muon, lr=1e-2),
    "row_scaled": RowScaled,
}
"""Optimizers that look at a whole parameter (LBFGS: at all of them), so that a cut changes their result."""

OPTIMIZERS: dict[str, Make] = {**ELEMENTWISE, **WHOLE}
