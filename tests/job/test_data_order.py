"""Each window of a text is used exactly once per epoch, in one order, however many ranks share it and also if that changes.

Real ranks that are killed, and go on in other numbers, are recorded in test_restarts.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.job.batches import TextBatches
from lowtide.job.corpus import Corpus
from lowtide.job.shuffle import Shuffle
from lowtide.job.tokenfile import Header

CONTEXT = 8


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_a_shuffle_has_every_number_once(count: int) -> None:
    assert sorted(Shuffle(count, 7, 1)[place] for place in range(count)) == list(range(count))


def test_every_seed_and_epoch_has_an_order_of_its_own() -> None:
    orders = [tuple(Shuffle(50, seed, epoch)[place] for place in range(50)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_the_order_is_the_same_on_every_machine() -> None:
    assert [Shuffle(1000, 0, 0)[place] for place in range(8)] == [501, 210, 846, 473, 191, 14, 945, 551]


def test_a_shuffle_mixes_well() -> None:
    """Neighbours land about a third of the length apart, as in a random order, and no place keeps its number often."""
    order = [Shuffle(3000, 3, 0)[place] for place in range(3000)]
    apart = sum(abs(a - b) for a, b in itertools.pairwise(order)) / 2999
    assert 900 < apart < 1100
    assert sum(place == number for place, number in enumerate(order)) < 10


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(IndexError):
        Shuffle(10, 0)[10]


def _corpus(windows: int) -> Corpus:
    """Tokens that number themselves."""
    count = windows * CONTEXT + 3
    header = Header(encoding="bytes", vocabulary=256, count=count + 100, train_count=count, documents=1)
    return Corpus(header, torch.arange(count + 100, dtype=torch.int32).to(torch.uint16), torch.tensor([0, count + 100]))


def _batches(corpus: Corpus, rank: int, ranks: int, *, seed: int = 0) -> TextBatches:
    return TextBatches(corpus=corpus, batch=3, context=CONTEXT, rank=rank, ranks=ranks, seed=seed)


def _used(corpus: Corpus, worlds: list[tuple[int, int]]) -> list[int]:
    """The windows in the order of their use, by jobs of (ranks, steps) that go on from each other's state."""
    used: list[int] = []
    state = _batches(corpus, 0, 1).state_dict()
    for ranks, steps in worlds:
        team = [_batches(corpus, rank, ranks) for rank in range(ranks)]
        for one in team:
            one.load_state_dict(state)
        for _ in range(steps):
            drawn = [one.draw() for one in team]
            for place, (tokens, targets) in itertools.product(range(3), drawn):
                assert torch.equal(tokens[place, 1:], targets[place, :-1])
                used.append(int(tokens[place, 0]) // CONTEXT)
        state = team[-1].state_dict()
        assert all(one.state_dict() == state for one in team)
    return used


def test_the_order_does_not_depend_on_the_number_of_ranks() -> None:
    corpus = _corpus(50)
    alone = _used(corpus, [(1, 60)])
    assert _used(corpus, [(4, 5), (3, 10), (2, 5)]) == alone[: 3 * (20 + 30 + 10)]
    assert len(alone) == 180
    for first in range(0, 150, 50):
        assert sorted(alone[first : first + 50]) == list(range(50))
    assert alone[:50] != alone[50:100]


def test_the_order_stays_that_of_the_seed_it_began_with() -> None:
    corpus = _corpus(50)
    begun, other = _batches(corpus, 0, 1), _batches(corpus, 0, 1, seed=5)
    first = [begun.draw() for _ in range(3)]
    state = begun.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.draw()[0], begun.draw()[0])
    assert "--seed 0" in other.remark
    assert not torch.equal(_batches(corpus, 0, 1, seed=5).draw()[0], first[0][0])


def test_other_data_start_anew_and_say_so() -> None:
    begun, other = _batches(_corpus(50), 0, 1), _batches(_corpus(60), 0, 1)
    begun.draw()
    other.load_state_dict(begun.state_dict())
    assert other.samples == 0
    assert "start anew" in other.remark
