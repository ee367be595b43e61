"""Any game of taking, keeping views, giving back and letting go: memory that somebody holds is never handed out or written."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from lowtide.tiers.arena import Arena, Block

SIZES = st.sampled_from([0, 8, 100, 4096, 5000, 8192, 12_000, 40_000])


class Game(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(torch.device("cpu"), forked=False)
        self.taken: list[tuple[Block, int]] = []  # with the number that fills it
        self.views: list[tuple[Tensor, int]] = []
        self.number = 0

    @initialize(poison=st.booleans())
    def start(self, poison: bool) -> None:
        self.arena.poison = poison

    @rule(nbytes=SIZES)
    def take(self, nbytes: int) -> None:
        block = self.arena.take(nbytes)
        assert block.nbytes >= nbytes
        assert all(block is not other for other, _ in self.taken)
        start, end = block.tensor.data_ptr(), block.tensor.data_ptr() + block.nbytes
        for other in [b.tensor for b, _ in self.taken] + [v for v, _ in self.views]:
            there = other.data_ptr()
            assert not (other.numel() and block.nbytes and there < end and start < there + other.numel()), "handed out twice"
        self.number = self.number % 250 + 1
        block.tensor.fill_(self.number)
        self.taken.append((block, self.number))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def keep_a_view(self, data: st.DataObject) -> None:
        block, number = data.draw(st.sampled_from(self.taken))
        lo = data.draw(st.integers(0, block.nbytes))
        self.views.append((block.tensor[lo:], number))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.taken) - 1))
        block, _ = self.taken.pop(index)
        self.arena.give(block)

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @rule()
    def trim(self) -> None:
        self.arena.trim()

    @invariant()
    def nothing_was_written_over(self) -> None:
        for tensor, number in [(b.tensor, n) for b, n in self.taken] + self.views:
            assert bool((tensor == number).all())

    @invariant()
    def the_counts_are_right(self) -> None:
        assert self.arena.taken_bytes == sum(block.nbytes for block, _ in self.taken)
        assert self.arena.reserved_bytes >= self.arena.taken_bytes + self.arena.limbo_bytes


Game.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=20)
test_arena = Game.TestCase
