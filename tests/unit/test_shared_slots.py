"""Where the next unit goes in memory that ranks share: the first gap that nobody uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.runtime.shared_slots import Range, first_gap, gaps, merged

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
