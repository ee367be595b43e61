"""Layouts worked out by hand; tests/property/test_layout.py checks the rules on any."""

from __future__ import annotations

import pytest
import torch

from lowtide.config import Partition
from lowtide.runtime.unit import contiguous_stride, dense_stride, flat_view
from lowtide.spec.layout import ParamShape, lay_out


def param(*shape: int, itemsize: int = 4) -> ParamShape:
    return ParamShape(shape, contiguous_stride(shape), itemsize)


def pieces(layout: object, count: int, ranks: int) -> list[list[tuple[int, int]]]:
    return [[layout.piece(i, r) for r in range(ranks)] for i in range(count)]  # type: ignore[attr-defined]


def test_elements() -> None:
    """100 elements take 128 places, 300 take 320: 448 places, 7 granules of 256 bytes, 4 for each of two ranks."""
    layout = lay_out([param(100), param(10, 30)], Partition("element"), 2)
    assert layout.offsets == (0, 512)
    assert (layout.nbytes, layout.cuts, layout.ranks) == (2048, (0, 1024, 2048), 2)
    assert pieces(layout, 2, 2) == [[(0, 100), (100, 100)], [(0, 128), (128, 300)]]
    assert [layout.shard_bytes(r) for r in (0, 1)] == [1024, 1024]


def test_rows() -> None:
    """Rows of 30: 32 rows are 15 blocks of 64, the least that is whole in both. Half of 100 rows is nearest to 64 rows."""
    layout = lay_out([param(100, 30)], Partition("row"), 2)
    assert pieces(layout, 1, 2) == [[(0, 64 * 30), (64 * 30, 3000)]]
    assert pieces(lay_out([param(20, 30)], Partition("row"), 2), 1, 2) in ([[(0, 0), (0, 600)]], [[(0, 600), (600, 600)]])
    even = lay_out([param(8, 64)], Partition("row"), 4)
    assert pieces(even, 1, 4) == [[(0, 128), (128, 256), (256, 384), (384, 512)]]


def test_tensors() -> None:
    layout = lay_out([param(64), param(640), param(64), param(64)], Partition("tensor"), 2)
    assert pieces(layout, 4, 2) == [[(0, 64), (64, 64)], [(0, 640), (640, 640)], [(0, 0), (0, 64)], [(0, 0), (0, 64)]]


def test_unequal_shares() -> None:
    layout = lay_out([param(640)], Partition("element", (1, 3, 0, 1)), 4)
    assert pieces(layout, 1, 4) == [[(0, 128), (128, 512), (512, 512), (512, 640)]]


def test_the_widest_element_sets_the_granule() -> None:
    """fp64 beside bf16: both start where 64 elements of either may end."""
    layout = lay_out([param(3, itemsize=2), param(65, itemsize=8)], Partition("element"), 2)
    assert layout.offsets == (0, 512)
    assert layout.cuts == (0, 1024, 2048)
    assert pieces(layout, 2, 2) == [[(0, 3), (3, 3)], [(0, 64), (64, 65)]]


def test_more_ranks_than_blocks() -> None:
    layout = lay_out([param(65)], Partition("element"), 4)
    assert pieces(layout, 1, 4) == [[(0, 64), (64, 65), (65, 65), (65, 65)]]


@pytest.mark.parametrize("by", ["element", "row", "tensor"])
def test_nothing_to_lay_out(by: str) -> None:
    empty = lay_out([param(0, 7), param()], Partition(by), 2)
    assert pieces(empty, 1, 2) == [[(0, 0), (0, 0)]]
    assert sorted(empty.piece(1, r) for r in (0, 1)) in ([(0, 0), (0, 1)], [(0, 1), (1, 1)])


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(3, 4), (4, 1)),
        (torch.empty(3, 4).t(), (1, 4)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(6, 4)[::2], (4, 1)),
        (torch.empty(4, 6)[:, :3], (3, 1)),
        (torch.empty(1, 5).expand(3, 5), (5, 1)),
        (torch.empty(1, 5), (5, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 7), (7, 1)),
    ],
    ids=["rows", "columns", "channels_last", "every second row", "left half", "expanded", "one row", "0-dim", "empty"],
)
def test_a_parameter_keeps_dense_strides(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == stride


def test_elements_in_memory_order() -> None:
    whole = torch.arange(12).view(3, 4)
    assert flat_view(whole, (4, 1)).tolist() == list(range(12))
    assert flat_view(whole, (4, 1)).data_ptr() == whole.data_ptr()
    assert flat_view(whole.t(), (1, 4)).tolist() == list(range(12))
    assert flat_view(whole.t(), (3, 1)).tolist() == whole.t().flatten().tolist()
    assert flat_view(torch.tensor(5), ()).tolist() == [5]
