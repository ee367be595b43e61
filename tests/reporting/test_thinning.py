"""A run of weeks stays small, and every part of it can be seen as finely as its age allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.reporting.thinning import MEMORY, STEPS, Schedule, keeps, stride
from lowtide.reporting.writer import MOST_BYTES

# Bytes of one line of each sort, as long as they get with a model of two hundred units.
STEP, SAMPLE, DETAIL = 500, 2_000, 400_000


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.01, marks=pytest.mark.soak), 0.3, pytest.param(90.0, marks=pytest.mark.soak)]
)
def test_a_million_steps_stay_small(seconds: float) -> None:
    schedule = Schedule()
    steps, samples, details = 0, 0, 0
    now = 0.0
    widest, last = 0.0, 0.0
    for number in range(1_000_000):
        inside = 4 if seconds > 1 else 1  # moments inside a step at which a sample may be taken
        for _ in range(inside):
            now += seconds / inside
            if schedule.sample_is_due(now):
                schedule.sampled(now)
                samples += 1
        if schedule.keeps_memory():
            schedule.sampled(now)
            samples += 2
        if schedule.writes_step():
            steps += 1
            widest, last = max(widest, (number - last) / max(number, STEPS)), number
        slow = schedule.slowest_so_far(seconds * (1 + 0.3 * (number % 1000 == 999)))
        details += schedule.in_detail() or slow
        schedule.step_over()
    assert schedule.count == 1_000_000
    assert steps * STEP + samples * SAMPLE + details * DETAIL < MOST_BYTES
    assert 20_000 < steps < 22_000
    assert samples < 25_000
    assert 20 <= details <= 30
    assert widest < 0.001, "a gap between two lines is never more than a thousandth of the run so far"


@given(number=st.integers(0, 10**9), whole=st.sampled_from([STEPS, MEMORY]))
def test_the_first_are_all_kept_and_later_ones_by_powers(number: int, whole: int) -> None:
    step = stride(number, whole)
    assert step & (step - 1) == 0
    assert (step == 1) == (number < whole)
    assert number < whole or whole * step / 2 <= number < whole * step
    assert keeps(number, whole) == (number % step == 0)


def test_slow_steps_are_few_however_the_clock_runs() -> None:
    schedule = Schedule()
    slow = 0
    for number in range(10_000):
        slow += schedule.slowest_so_far(1.2 ** min(number, 3000))
        schedule.step_over()
    assert 1 < slow <= 64


def test_the_first_slow_step_after_the_warm_up_is_seen() -> None:
    schedule = Schedule()
    seen = []
    for seconds in [9.0, 5.0, 1.0, 1.0, 1.0, 1.05, 1.3, 1.3, 1.0, 2.0]:
        seen.append(schedule.slowest_so_far(seconds))
        schedule.step_over()
    assert [i for i, s in enumerate(seen) if s] == [6, 9]
