"""The order of additions: one binary tree over the list's indices, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.comm.reduce import nodes_within, sum_of_nodes, tree_sum
from lowtide.errors import ArgumentError


def explicit(blocks: list[Tensor]) -> Tensor:
    """Pair neighbours, carry the odd one, and do the same with what comes out."""
    if len(blocks) == 1:
        return blocks[0]
    pairs = [blocks[i] + blocks[i + 1] for i in range(0, len(blocks) - 1, 2)]
    return explicit(pairs + blocks[len(pairs) * 2 :])


@given(
    count=st.integers(1, 17), seed=st.integers(0, 10_000), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
)
def test_equals_the_explicit_recursion_bit_for_bit(count: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = [(torch.randn(33, generator=generator) * 10.0 ** (i % 7)).to(dtype) for i in range(count)]
    expected = explicit([b.clone() for b in blocks])
    result = tree_sum(blocks)
    assert result is blocks[0]
    assert torch.equal(result, expected)


@given(count=st.integers(2, 9), seed=st.integers(0, 10_000), data=st.data())
def test_what_others_must_not_have_read_is_only_read(count: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(33, generator=generator) * 10.0 ** (i % 7) for i in range(count)]
    for number, block in enumerate(blocks):
        block.view(torch.int32)[seed % 33] = 0x7FC00000 + number  # NaNs that can be told apart
    before = [b.clone() for b in blocks]
    mine = data.draw(st.integers(0, count - 1))
    result = tree_sum(blocks, mine=mine)
    assert torch.equal(blocks[mine].view(torch.int32), before[mine].view(torch.int32))
    assert torch.equal(result.view(torch.int32), explicit(before).view(torch.int32)), "operands have changed places"


def test_the_tree_is_not_a_chain() -> None:
    blocks = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0)]
    chain = ((blocks[0] + blocks[1]) + blocks[2]) + blocks[3]
    assert tree_sum(blocks).item() == 0.0
    assert chain.item() == 1.0


def test_nothing_to_add_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="at least one block"):
        tree_sum([])


@given(size=st.integers(1, 17), seed=st.integers(0, 10_000), data=st.data())
def test_sums_of_nodes_that_hosts_made_give_the_same_bits(size: int, seed: int, data: st.DataObject) -> None:
    host_of = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(33, generator=generator) * 10.0 ** (i % 7) for i in range(size)]
    expected = tree_sum([b.clone() for b in blocks])
    given_nodes = {}
    for host in set(host_of):
        ranks = [rank for rank in range(size) if host_of[rank] == host]
        for first, end in nodes_within(ranks, size):
            given_nodes[first, end] = tree_sum([blocks[r].clone() for r in range(first, end)])
    assert sorted(r for first, end in given_nodes for r in range(first, end)) == list(range(size))
    assert torch.equal(sum_of_nodes(given_nodes, size), expected)


def test_a_host_of_neighbours_sends_one_sum() -> None:
    assert nodes_within([0, 1], 4) == [(0, 2)]
    assert nodes_within([2, 3], 4) == [(2, 4)]
    assert nodes_within([4, 5, 6, 7], 8) == [(4, 8)]
    assert nodes_within([0, 1, 2], 6) == [(0, 2), (2, 3)]
    assert nodes_within([3, 4, 5], 6) == [(3, 4), (4, 6)]
    assert nodes_within([0, 2], 4) == [(0, 1), (2, 3)]
