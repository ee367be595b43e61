"""May an optimizer run on pieces? Asked of torch's optimizers and of a few that only look harmless."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lowtide.runtime.probe import needs_closure, why_not_elementwise

ELEMENTWISE: dict[str, Any] = {
    "adamw": lambda p: AdamW(p),
    "adamw fused": lambda p: AdamW(p, fused=True),
    "adamw foreach": lambda p: AdamW(p, foreach=True, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


class _Custom(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p.grad), alpha=-group["lr"])

    def direction(self, grad: Tensor) -> Tensor:
        return grad.sign()


class NormalisedAll(_Custom):
    def direction(self, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class NormalisedRows(_Custom):
    def direction(self, grad: Tensor) -> Tensor:
        return grad / grad.norm(dim=-1, keepdim=True)


class MatricesOnly(_Custom):
    def direction(self, grad: Tensor) -> Tensor:
        rows, columns = grad.shape
        return grad * (rows / columns)


class LateNorm(_Custom):
    """Elementwise in its first step only: one trial step would not show it."""

    def direction(self, grad: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return grad if self.calls % 5 == 1 else grad / grad.abs().max()


class WithClosure(_Custom):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(24, 32))]


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_pass(name: str, in_chunks: bool) -> None:
    assert why_not_elementwise(ELEMENTWISE[name](params()), in_chunks=in_chunks) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert why_not_elementwise(AdamW(params()), lambda _: dtype, in_chunks=True) is None


def test_a_custom_one_passes() -> None:
    assert why_not_elementwise(_Custom(params()), in_chunks=True) is None


@pytest.mark.parametrize("cls", [NormalisedAll, NormalisedRows, LateNorm])
def test_whole_tensor_ones_do_not(cls: type[Optimizer]) -> None:
    assert why_not_elementwise(cls(params()), in_chunks=False) == (
        "its result for one element depends on the other elements of the tensor (tried on the shape (24, 32))"
    )


def test_muon_and_adafactor_do_not() -> None:
    for optimizer in (torch.optim.Muon(params()), torch.optim.Adafactor(params())):
        assert why_not_elementwise(optimizer, in_chunks=False) is not None


def test_one_that_cannot_take_flat_pieces_is_quoted() -> None:
    reason = why_not_elementwise(MatricesOnly(params()), in_chunks=False)
    assert reason is not None
    assert reason.startswith("it cannot update a flat piece of a tensor (ValueError: not enough values to unpack")


def test_every_parameter_group_is_tried() -> None:
    class Second(_Custom):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad / p.grad.norm() if group["lr"] > 1 else p.grad)

    groups = [{"params": params()}, {"params": params(), "lr": 2.0}]
    assert why_not_elementwise(Second(groups), in_chunks=False) is not None


def test_the_optimizer_is_left_as_it_was() -> None:
    """Its state, groups, parameters, hooks and the random numbers after it."""
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = AdamW([p], lr=torch.tensor(0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    p.grad = torch.ones(3, 3)
    optimizer.step()
    calls.clear()
    before = copy.deepcopy(optimizer.state_dict())
    numbers = torch.get_rng_state()
    assert why_not_elementwise(optimizer, in_chunks=True) is None
    assert calls == []
    assert torch.equal(numbers, torch.get_rng_state())
    assert optimizer.param_groups[0]["params"][0] is p
    assert repr(optimizer.state_dict()) == repr(before)


def test_who_needs_a_closure() -> None:
    assert needs_closure(torch.optim.LBFGS)
    assert needs_closure(WithClosure)
    assert not any(needs_closure(type(make(params()))) for make in ELEMENTWISE.values())
    assert not needs_closure(_Custom)
