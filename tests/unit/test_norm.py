"""Norms against torch in fp64; tests/property/test_norm.py shows that they do not depend on where gradients are cut."""

from __future__ import annotations

import math

import pytest
import torch

import lowtide
from lowtide.runtime.norm import GradPiece, alone, exact_sum, norms, total_norm

ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf]
NUMEL = 64 * 4096 + 64 * 5 + 17  # one whole segment and a part of the next


def piece(values: torch.Tensor, key: int = 0) -> GradPiece:
    return GradPiece(key, 0, values.numel(), values)


@pytest.mark.parametrize("order", ORDERS)
def test_values(order: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(numel, generator=generator) for numel in (1, 63, 64, 65, 1000, NUMEL)]
    found = norms((piece(v, key) for key, v in enumerate(values)), order, alone)
    for key, v in enumerate(values):
        assert found[key] == pytest.approx(float(torch.linalg.vector_norm(v.double(), order)), rel=1e-13)
    everything = float(torch.linalg.vector_norm(torch.cat(values).double(), order))
    assert total_norm(found.values(), order) == pytest.approx(everything, rel=1e-13)


@pytest.mark.parametrize("order", ORDERS)
def test_no_elements(order: float) -> None:
    assert total_norm(norms([piece(torch.empty(0))], order, alone).values(), order) == 0.0
    assert norms([], order, alone) == {}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 64 * 4096, NUMEL - 1])
def test_what_is_not_finite_shows(order: float, bad: float, where: int) -> None:
    values = torch.ones(NUMEL)
    values[where] = bad
    total = total_norm(norms([piece(torch.ones(3), 7), piece(values)], order, alone).values(), order)
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


def test_large_and_small_values_in_low_precision() -> None:
    """Squares of fp16 and fp32 would overflow or vanish in their own type."""
    assert norms([piece(torch.full((4096,), 6e4, dtype=torch.float16))], 2.0, alone)[0] == pytest.approx(6e4 * 64, rel=1e-3)
    assert norms([piece(torch.full((64,), 1e30))], 2.0, alone)[0] == pytest.approx(8e30, rel=1e-6)
    assert norms([piece(torch.full((64,), 1e-30))], 2.0, alone)[0] == pytest.approx(8e-30, rel=1e-6)


def test_sums_are_rounded_once() -> None:
    assert exact_sum([1e16, 1.0, -1e16]) == 1.0
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([math.inf, 1.0]) == math.inf


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_clipping_a_plain_model(order: float) -> None:
    """lowtide.clip_grad_norm_ works without sharding, and as torch's does."""
    gradients = [torch.randn(5, 7), torch.randn(3), None]
    clipped = []
    for clip in (torch.nn.utils.clip_grad_norm_, lowtide.clip_grad_norm_):
        params = [torch.nn.Parameter(torch.zeros(5, 7)), torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
        for p, g in zip(params, gradients, strict=True):
            p.grad = None if g is None else g.clone()
        clipped.append((clip(params, 0.3, order), [p.grad for p in params if p.grad is not None]))
    torch.testing.assert_close(clipped[0], clipped[1])
    assert clipped[1][0].dtype is torch.float32


def test_a_small_norm_clips_nothing() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([0.1, 0.2, 0.3])
    lowtide.clip_grad_norm_([p], 10.0)
    assert p.grad.tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()


def test_not_finite_is_an_error_if_asked() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([0.1, math.inf, 0.3])
    with pytest.raises(RuntimeError, match=r"the gradient norm is inf: nothing was clipped"):
        lowtide.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert p.grad.tolist() == torch.tensor([0.1, math.inf, 0.3]).tolist()
