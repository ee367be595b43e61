"""What is learned of a gradient where it is stored, and what torch's kernel for norms promises that it rests on."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.runtime.grad_summary import (
    _ONE_ORDER,
    GradSummary,
    NormQuery,
    SummaryReader,
    first_not_finite,
    summary_of_whole,
)
from lowtide.runtime.unread import read_together

SIZES = (1, 5, 63, 64, 65, 1000, 32767, 32768, 100_001, 3_000_001)


def in_thread(values: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.linalg.vector_norm(values, 2)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("dtype", _ONE_ORDER)
@pytest.mark.parametrize("numel", SIZES)
def test_the_norm_does_not_depend_on_threads_or_place(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    expected = torch.linalg.vector_norm(values, 2)
    elsewhere = torch.empty(numel + 3, dtype=dtype)[3:].copy_(values)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for same in (values, elsewhere):
                assert torch.equal(torch.linalg.vector_norm(same, 2), expected)
                assert torch.equal(in_thread(same), expected)
            assert torch.equal(torch._foreach_norm([values], 2.0)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_the_norm_of_a_row_does_not_depend_on_other_rows() -> None:
    values = torch.randn(64 * 5000)
    whole = torch.linalg.vector_norm(values.view(-1, 64), 2, dim=1)
    for a, b in itertools.combinations((0, 1, 2, 7, 4096, 4999, 5000), 2):
        assert torch.equal(torch.linalg.vector_norm(values[64 * a : 64 * b].view(-1, 64), 2, dim=1), whole[a:b])


def read(values: Tensor, cuts: list[int], *, alone: bool, factors: tuple[float, ...] = ()) -> GradSummary:
    queries = [NormQuery(order, factor) for order in (2.0, math.inf) for factor in (1.0, *factors)]
    reader = SummaryReader([values.numel()], queries, alone=alone)
    for a, b in itertools.pairwise(cuts):
        reader.read(0, a, values[a:b])
    return read_together([reader.unread()[0]])[0]


CUTS = [([0, 1000], True), ([0, 448, 1000], True), ([0, 1000], False), ([0, 64, 448, 1000], False)]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 500, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_finiteness(dtype: torch.dtype, bad: float | None, at: int) -> None:
    values = torch.randn(1000).to(dtype)
    if bad is not None:
        values[at] = bad
    for cuts, alone in CUTS:
        assert read(values, cuts, alone=alone).finite is (bad is None)
    assert first_not_finite([("a", torch.ones(3)), ("b", values), ("c", values)]) == (None if bad is None else "b")


def test_numbers_whose_squares_overflow_are_finite() -> None:
    values = torch.full((1000,), 3e38)
    for alone in (True, False):
        assert read(values, [0, 1000], alone=alone).finite
    assert first_not_finite([(0, values), (1, torch.full((10,), 1e308, dtype=torch.float64))]) is None


def test_what_has_no_floating_point_is_finite() -> None:
    assert first_not_finite([]) is None
    assert first_not_finite([(0, torch.tensor([1, 2])), (1, torch.empty(0))]) is None
    assert first_not_finite([(0, torch.tensor([1.0, complex(math.nan, 0.0)]))]) == 0


def test_a_whole_gradient_has_torchs_norms() -> None:
    values = torch.randn(1000)
    known = read_together([summary_of_whole(values, [NormQuery(2.0), NormQuery(math.inf), NormQuery(3.0)])])[0]
    assert known.norm(2.0) == float(torch.linalg.vector_norm(values, 2))
    assert known.norm(math.inf) == float(torch.linalg.vector_norm(values, math.inf))
    assert known.norm(3.0) is None
    half = read_together([summary_of_whole(values.half(), [NormQuery(2.0)])])[0]
    assert half.norms == {}, "torch adds fp16 in an order that depends on the number of threads"
    assert half.finite


@pytest.mark.parametrize("factor", [2.0**-16, 0.5, -2.0, 2.0**40])
def test_the_norm_of_a_scaled_gradient_is_that_of_the_products(factor: float) -> None:
    """Small numbers vanish in the products or in their squares: the norm is not the product of the norm."""
    values = torch.randn(1000) * torch.logspace(-45, 3, 1000)
    scaled = values * factor
    for cuts, alone in CUTS[::2]:
        now = read(values, cuts, alone=alone, factors=(factor,)).changed(keeps_finite=True, factor=factor)
        expected = read(scaled, cuts, alone=alone)
        for order in (2.0, math.inf):
            assert now.norm(order) == expected.norm(order)
            assert now.part(order) == expected.part(order)
            assert (now.norm(order) is None) is not alone
        again = now.changed(keeps_finite=True, factor=1 / factor)
        assert again.norm(2.0) is again.part(2.0) is None, "what has vanished does not come back"


def test_a_change_forgets_the_norm() -> None:
    known = read_together([summary_of_whole(torch.ones(3), [NormQuery(2.0)])])[0]
    for factor in (None, 0.3, 3.0, math.inf):
        assert known.changed(keeps_finite=True, factor=factor) == GradSummary(finite=True, factor=None)
        assert known.changed(keeps_finite=False, factor=factor) == GradSummary(finite=False, factor=None)
    unasked = known.changed(keeps_finite=True, factor=0.25)
    assert unasked.finite
    assert unasked.norm(2.0) is None


def test_results_are_read_together() -> None:
    """One wait, however many there are."""
    waits: list[int] = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__):
                waits.append(1)
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out.as_subclass(Tensor) if func is Tensor.cpu else out

    gradients = [torch.randn(n).as_subclass(Watched) for n in (3, 64, 1000)]
    readers = [SummaryReader([g.numel()], [NormQuery(2.0)], alone=True) for g in gradients]
    for reader, gradient in zip(readers, gradients, strict=True):
        reader.read(0, 0, gradient)
    found = read_together([reader.unread()[0] for reader in readers])
    assert len(waits) == 1
    assert [one.norm(2.0) for one in found] == [float(torch.linalg.vector_norm(g.as_subclass(Tensor))) for g in gradients]
