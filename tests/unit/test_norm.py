"""Norms against torch in fp64; tests/property/test_norm.py shows that they do not depend on where gradients are cut."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

import lowtide
from lowtide.runtime.norm import NormCollector, exact_sum, norms, total_norm

ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf]
REL = defaultdict(lambda: 1e-13, {2.0: 1e-7})  # blocks of 64 are added in fp32 where the norm is the usual one
NUMEL = 64 * 4096 + 64 * 5 + 17  # one whole segment and a part of the next


def norms_of(values: list[torch.Tensor], order: float) -> dict[int, float]:
    """The norms of whole gradients, as a rank finds them that has all of them."""
    parts = {}
    for key, whole in enumerate(values):
        collector = NormCollector(whole.numel(), order)
        collector.add(0, whole)
        parts[key] = collector.finish()
    return norms(parts, order, lambda mine: [mine])


@pytest.mark.parametrize("order", ORDERS)
def test_values(order: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(numel, generator=generator) for numel in (1, 63, 64, 65, 1000, NUMEL)]
    found = norms_of(values, order)
    for key, v in enumerate(values):
        assert found[key] == pytest.approx(float(torch.linalg.vector_norm(v.double(), order)), rel=REL[order])
    everything = float(torch.linalg.vector_norm(torch.cat(values).double(), order))
    assert total_norm(found.values(), order) == pytest.approx(everything, rel=REL[order])


@pytest.mark.parametrize("order", ORDERS)
def test_no_elements(order: float) -> None:
    assert total_norm(norms_of([torch.empty(0)], order).values(), order) == 0.0
    assert norms_of([], order) == {}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 64 * 4096, NUMEL - 1])
def test_what_is_not_finite_shows(order: float, bad: float, where: int) -> None:
    values = torch.ones(NUMEL)
    values[where] = bad
    total = total_norm(norms_of([torch.ones(3), values], order).values(), order)
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


def test_large_and_small_values_in_low_precision() -> None:
    """Squares of fp16 and fp32 would overflow or vanish in their own type."""
    assert norms_of([torch.full((4096,), 6e4, dtype=torch.float16)], 2.0)[0] == pytest.approx(6e4 * 64, rel=1e-3)
    assert norms_of([torch.full((64,), 1e30)], 2.0)[0] == pytest.approx(8e30, rel=1e-6)
    assert norms_of([torch.full((64,), 1e-21)], 2.0)[0] == pytest.approx(8e-21, rel=1e-6)
    mixed = torch.zeros(64 * 5)
    mixed[3], mixed[70], mixed[140] = 1e-20, 1e25, 1.0
    assert norms_of([mixed], 2.0)[0] == pytest.approx(1e25, rel=1e-6)


def test_what_is_below_the_squares_of_fp32_counts_as_zero() -> None:
    """As in torch's kernel: a clip factor of 1 follows from either."""
    tiny = torch.full((64,), 1e-30)
    assert norms_of([tiny], 2.0)[0] == float(torch.linalg.vector_norm(tiny)) == 0.0


def test_complex_gradients() -> None:
    values = torch.complex(torch.randn(1000), torch.randn(1000))
    for order in ORDERS:
        expected = float(torch.linalg.vector_norm(values.to(torch.complex128), order))
        assert norms_of([values], order)[0] == pytest.approx(expected, rel=1e-6)


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
    torch.testing.assert_close(clipped[0], clipped[1], rtol=0, atol=0)
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
