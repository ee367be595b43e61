"""Where the next unit goes in memory that ranks share: the first gap that nobody uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from lowtide.comm.links import Axis, CommonMemory
from lowtide.comm.local import LocalTransport
from lowtide.comm.shared import PAGE, Segment
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.shared_slots import Range, SharedSlots, first_gap, gaps, merged
from lowtide.runtime.unit import Unit
from lowtide.tiers.arena import Block

END = 24
ranges = st.tuples(st.integers(0, END), st.integers(0, 6)).map(lambda r: (r[0], min(r[0] + r[1], END)))
some = st.lists(ranges, max_size=8)


def pages(found: list[Range]) -> set[int]:
    return {page for first, end in found for page in range(first, end)}


@given(some)
def test_used_and_free_make_up_the_whole(held: list[Range]) -> None:
    used = merged(held)
    free = gaps(used, END)
    assert pages(used) == pages(held)
    assert pages(free) == set(range(END)) - pages(held)
    assert used == sorted(used)
    assert sum(end - first for first, end in [*used, *free]) == END, "nothing twice"


@given(some, st.integers(0, END))
def test_the_first_gap_is_free_and_the_first(held: list[Range], needed: int) -> None:
    found = first_gap(merged(held), needed, END)
    fitting = [at for at in range(END - needed + 1) if not pages(held) & set(range(at, at + needed))]
    assert found == (0 if not needed else fitting[0] if fitting else None)


def unit_of(pages_: int) -> Unit:
    return cast("Unit", SimpleNamespace(name=f"{pages_} pages", layout=SimpleNamespace(nbytes=pages_ * PAGE)))


def test_a_large_unit_between_small_ones_finds_room_within_the_limit() -> None:
    """It does not fit any more where it was, and what it leaves there is given back before it comes elsewhere."""
    large, small, other = unit_of(10), unit_of(1), unit_of(1)
    units = [large, small, other]
    memory = CommonMemory(Segment.make(SharedSlots.nbytes(units)), Axis(0, 1), (0,), (0,))
    slots = SharedSlots(units, memory, ledger=Ledger())
    slots.capacity = 12 * PAGE
    alone = LocalTransport(0, 1, share=lambda mine: [mine], timeout=1.0)

    def take(unit: Unit) -> Block:
        slot = slots._take(alone, unit)
        slot.tensor.fill_(1)
        assert slots.taken_bytes <= 13 * PAGE, "and the page with the secret"
        return slot

    first, second = take(large), take(small)
    slots.give(first)
    third = take(other)
    again = take(large)
    assert int(second.tensor.min()) == int(third.tensor.min()) == int(again.tensor.min()) == 1, "nobody's memory went"
