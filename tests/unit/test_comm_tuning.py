"""From timings to a choice: pure functions, so that ranks with the same timings choose alike."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.comm.tuning import FEWEST_BUCKET_BYTES, MOST_BUCKET_BYTES, Choice, bucket_bytes, choose, fixed_and_speed

KIB, MIB = 1 << 10, 1 << 20


def test_one_candidate_is_used_for_everything() -> None:
    choice = choose({"usual": {4 * KIB: 1.0, MIB: 2.0}})
    assert choice == Choice.always("usual")
    assert choice.at(0) == choice.at(1 << 40) == "usual"


def test_the_fastest_is_chosen_for_each_size() -> None:
    choice = choose({"usual": {4 * KIB: 1.0, 64 * KIB: 1.0, MIB: 9.0}, "other": {4 * KIB: 0.5, 64 * KIB: 2.0, MIB: 1.0}})
    assert choice.steps == ((16 * KIB, "other"), (256 * KIB, "usual"), (sys.maxsize, "other"))
    # Between two sizes the nearer one decides, as a factor; above the largest the largest.
    assert [choice.at(n) for n in (0, 16 * KIB, 16 * KIB + 1, 256 * KIB, 256 * KIB + 1, 1 << 40)] == [
        "other", "other", "usual", "usual", "other", "other",
    ]  # fmt: skip
    assert choice.names == {"usual", "other"}
    assert str(choice) == "other up to 16384 bytes, usual up to 262144 bytes, then other"


def test_what_is_hardly_faster_is_not_chosen() -> None:
    assert choose({"usual": {KIB: 1.0}, "other": {KIB: 0.85}}) == Choice.always("usual")
    assert choose({"usual": {KIB: 1.0}, "other": {KIB: 0.75}}) == Choice.always("other")
    assert choose({"other": {KIB: 0.85}, "usual": {KIB: 1.0}}) == Choice.always("other")


def test_a_size_that_one_was_not_timed_at_does_not_count() -> None:
    assert choose({"usual": {KIB: 1.0, MIB: 9.0}, "other": {KIB: 0.5}}) == Choice.always("other")
    assert choose({"usual": {KIB: 1.0}, "other": {KIB: 2.0, MIB: 0.1}}) == Choice.always("usual")


def test_nothing_timed_is_the_usual() -> None:
    assert choose({"usual": {}, "other": {}}) == Choice.always("usual")


seconds = st.floats(1e-6, 1.0)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4), st.integers(0, 1 << 32))
def test_every_size_has_an_algorithm_that_is_not_much_slower(rows: list[tuple[float, float, float]], nbytes: int) -> None:
    sizes = [4 * KIB * 8**at for at in range(len(rows))]
    timed = {name: {n: row[at] for n, row in zip(sizes, rows, strict=True)} for at, name in enumerate("abc")}
    choice = choose(timed)
    assert choice.at(nbytes) in timed
    assert [most for most, _ in choice.steps] == sorted({most for most, _ in choice.steps})
    for n in sizes:
        assert timed[choice.at(n)][n] * 0.8 <= min(samples[n] for samples in timed.values())


def test_a_line_through_the_timings() -> None:
    line = {n: 2e-4 + n / 1e9 for n in (16 * KIB, 256 * KIB, 2 * MIB)}
    assert fixed_and_speed(line) == (pytest.approx(2e-4), pytest.approx(1e9))


def test_a_small_one_that_was_disturbed_is_left_out() -> None:
    line = {n: 2e-4 + n / 1e9 for n in (256 * KIB, 2 * MIB)}
    assert fixed_and_speed({16 * KIB: 5e-3, **line}) == (pytest.approx(2.31e-4, rel=0.01), pytest.approx(1e9))


def test_one_size_is_all_fixed() -> None:
    assert fixed_and_speed({16 * KIB: 0.05}) == (0.05, math.inf)


def test_a_speed_that_was_not_seen_is_not_believed() -> None:
    """All of these were fixed cost, and nothing says how fast larger ones are."""
    for small in (1e-3, 0.99e-3, 1.5e-3):
        fixed, speed = fixed_and_speed({16 * KIB: small, 256 * KIB: 1e-3})
        assert speed == pytest.approx(2 * 256 * KIB / 1e-3)
        assert bucket_bytes(fixed, speed) <= 16 * MIB


def test_buckets_grow_with_the_fixed_cost() -> None:
    assert bucket_bytes(100e-6, 1e9) == 4 * MIB  # 3.2 MB of time for the 3 %
    assert bucket_bytes(200e-6, 1e9) == 8 * MIB
    assert bucket_bytes(200e-6, 2e9) == 16 * MIB
    assert bucket_bytes(0.0, math.inf) == bucket_bytes(0.0, 1e9) == bucket_bytes(1e-6, 1e6) == FEWEST_BUCKET_BYTES
    assert bucket_bytes(1.0, math.inf) == bucket_bytes(1.0, 1e9) == MOST_BUCKET_BYTES


@given(st.floats(0, 1), st.floats(1, 1e12))
def test_a_bucket_is_the_smallest_power_of_two_that_will_do(latency: float, bandwidth: float) -> None:
    size = bucket_bytes(latency, bandwidth)
    assert size.bit_count() == 1
    assert FEWEST_BUCKET_BYTES <= size <= MOST_BUCKET_BYTES

    def fixed_share(nbytes: int) -> float:
        return latency / (latency + nbytes / bandwidth)

    assert size == MOST_BUCKET_BYTES or fixed_share(size) <= 0.0300001
    assert size == FEWEST_BUCKET_BYTES or fixed_share(size // 2) > 0.0299999
