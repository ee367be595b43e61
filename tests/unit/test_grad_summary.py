"""What is learned of a gradient where it is stored, and what torch's kernel for norms promises that it rests on."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from torch import Tensor

from lowtide.runtime.grad_summary import _ONE_ORDER, GradSummary, SummaryReader, all_finite, summary_of_whole

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


def read(values: Tensor, cuts: list[int], *, alone: bool) -> GradSummary:
    reader = SummaryReader([values.numel()], [2.0, math.inf], alone=alone)
    for a, b in itertools.pairwise(cuts):
        reader.read(0, a, values[a:b])
    return reader.finish()[0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_finiteness(bad: float | None, at: int) -> None:
    values = torch.randn(1000)
    if bad is not None:
        values[at] = bad
    for cuts, alone in (([0, 1000], True), ([0, 448, 1000], True), ([0, 1000], False), ([0, 64, 448, 1000], False)):
        assert read(values, cuts, alone=alone).finite is (bad is None)


def test_numbers_whose_squares_overflow_are_finite() -> None:
    for alone in (True, False):
        assert read(torch.full((1000,), 3e38), [0, 1000], alone=alone).finite
    assert read(torch.full((10,), 1e200, dtype=torch.float64), [0, 10], alone=False).finite
    assert all_finite(torch.full((100,), 3e38))
    assert not all_finite(torch.tensor([1.0, complex(math.nan, 0.0)]))
    assert all_finite(torch.tensor([1, 2]))


def test_a_whole_gradient_has_torchs_norms() -> None:
    values = torch.randn(1000)
    known = summary_of_whole(values, [2.0, math.inf, 3.0])
    assert known.norms == {2.0: float(torch.linalg.vector_norm(values, 2)), math.inf: float(values.abs().max())}
    half = summary_of_whole(values.half(), [2.0])
    assert half.norms == {}, "torch adds fp16 in an order that depends on the number of threads"
    assert half.finite


def test_a_change_forgets_the_norm() -> None:
    known = summary_of_whole(torch.ones(3), [2.0])
    assert known.changed(keeps_finite=True) == GradSummary(finite=True)
    assert known.changed(keeps_finite=False) == GradSummary(finite=False)
