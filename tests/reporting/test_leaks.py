"""Leaks: every planted one is found, with its kind named; none is invented."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.api import engine_of
from lowtide.reporting.leaks import FILE_DESCRIPTORS, NOT_OURS, SPOOL, THREADS, Leak, LeakWatch
from lowtide.tiers.store import Key
from tests.kit.specimen import WIDTH
from tests.reporting.runs import finished, recorded, tidy, train

MIB = 2**20
GIB = 2**30
STEPS = 1000


def watched(series: dict[str, Callable[[int], float]], steps: int = STEPS, every: int = 1) -> list[tuple[int, Leak]]:
    watch = LeakWatch()
    found: list[tuple[int, Leak]] = []
    for step in range(0, steps, every):
        found += [(step, leak) for leak in watch.observe(step, {n: f(step) for n, f in series.items()}, 1 * GIB)]
    return found


# -- healthy series ---------------------------------------------------------------------------------------------------

# Chance can make any healthy series look like a line, and hide a line: of 1,500 counters that settle slowly beside noise that
# wanders, 11 were told. So these examples are the same in every run, in `make shake`, too.
seeds = st.integers(0, 2**32)
noises = st.sampled_from(["none", "uniform", "heavy", "spikes", "wander"])


def noise(kind: str, size: float, seed: int) -> Callable[[int], float]:
    """Numbers around nothing: the same for the same step."""
    rng = random.Random(seed)
    if kind == "none":
        return lambda step: 0.0
    if kind == "uniform":
        values = [rng.uniform(-size, size) for _ in range(2 * STEPS)]
    elif kind == "heavy":
        values = [max(-8.0, min(8.0, rng.gauss(0, 1) / max(abs(rng.gauss(0, 1)), 0.1))) * size for _ in range(2 * STEPS)]
    elif kind == "spikes":
        values = [size * 20 if rng.random() < 0.03 else 0.0 for _ in range(2 * STEPS)]
    else:  # an allocator that keeps some and gives some back: pulled home again and again
        at, values = 0.0, []
        for _ in range(2 * STEPS):
            at = 0.98 * at + rng.uniform(-1, 1) * size / 3
            values.append(at)
    return lambda step: values[step % (2 * STEPS)]


SHAPES: dict[str, Callable[[int], float]] = {
    "level": lambda step: 0.0,
    "settles": lambda step: 1 - math.exp(-step / 40),
    "settles slowly": lambda step: 1 - math.exp(-step / 150),
    "jumps": lambda step: float(step > 300),
    "jumps and falls": lambda step: float(200 < step < 700),
    "three jumps": lambda step: (step > 100) + (step > 150) + (step > 420),
    "swings": lambda step: math.sin(step / 60),
    "saw teeth": lambda step: (step % 97) / 97,
    "falls": lambda step: -step / STEPS,
}


@settings(max_examples=150, derandomize=True)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    kind=noises,
    seed=seeds,
    size=st.floats(0, 8),
    height=st.floats(0, 400),
    every=st.integers(1, 9),
)
def test_a_healthy_process_is_left_alone(shape: str, kind: str, seed: int, size: float, height: float, every: int) -> None:
    wobble, form = noise(kind, size * MIB, seed), SHAPES[shape]
    assert not watched({NOT_OURS: lambda step: 500 * MIB + height * MIB * form(step) + wobble(step)}, every=every)


@settings(max_examples=60, derandomize=True)
@given(shape=st.sampled_from(sorted(SHAPES)), kind=noises, seed=seeds)
def test_healthy_counters_and_kinds_are_left_alone(shape: str, kind: str, seed: int) -> None:
    form, few, some = SHAPES[shape], noise(kind, 1.5, seed), noise(kind, 0.3 * MIB, seed + 1)
    series: dict[str, Callable[[int], float]] = {
        FILE_DESCRIPTORS: lambda step: round(40 + 12 * form(step) + few(step)),
        THREADS: lambda step: round(12 + 6 * form(step) + few(step)),
        SPOOL: lambda step: 900 * MIB + 300 * MIB * form(step),
        "host unused": lambda step: 90 * MIB + 30 * MIB * form(step) + some(step),
    }
    assert not watched(series)


# -- leaking series ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True)
@given(kind=noises.filter(lambda kind: kind != "wander"), seed=seeds, rate=st.floats(0.08, 4), start=st.integers(0, 400))
def test_a_leak_is_found_through_noise(kind: str, seed: int, rate: float, start: int) -> None:
    """From 80 KiB a step on, beside a wobble of 2 MiB, whenever it begins."""
    wobble = noise(kind, 2 * MIB, seed)
    found = watched({NOT_OURS: lambda step: 500 * MIB + rate * MIB * max(0, step - start) + wobble(step)})
    assert [leak.series for _, leak in found] == [NOT_OURS], "once"
    _, leak = found[0]
    assert leak.per_step == pytest.approx(rate * MIB, rel=0.35)


@pytest.mark.parametrize(
    ("series", "rate", "base"),
    [
        (FILE_DESCRIPTORS, 1, 30),
        (FILE_DESCRIPTORS, 0.1, 30),
        (THREADS, 0.5, 9),
        (SPOOL, 65536, 10**9),
        ("host slots", 4096, 10**8),
    ],
)
def test_exact_series_need_little(series: str, rate: float, base: float) -> None:
    found = watched({series: lambda step: base + int(rate * step), "host parameters": lambda step: 5e8})
    assert [leak.series for _, leak in found] == [series]
    assert found[0][1].per_step == pytest.approx(rate, rel=0.2)
    assert str(series).split(" ")[-1] in found[0][1].text


def test_bytes_that_were_moved_on_purpose_are_no_leak() -> None:
    watch = LeakWatch()
    for step in range(400):
        if step % 30 == 0:
            watch.restart()
        assert not watch.observe(step, {"host optimizer": (step // 30 + (step % 30) / 30) * 100 * MIB}, GIB)


# -- real runs --------------------------------------------------------------------------------------------------------


@contextmanager
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    found: list[str] = []
    with caplog.at_level(logging.WARNING, "lowtide"):
        yield found
    found += [record.getMessage() for record in caplog.records if record.getMessage().startswith("leak of")]


def plant_tensor(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    return lambda step: hoard.append(torch.ones(130_000, dtype=torch.float32))


def plant_ledger(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    return lambda step: engine_of(model).ledger.add("buffers in flight", 20_000)


def plant_slot(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    """Views of blocks that never go: the arena cannot use them again."""
    arena = engine_of(model).homes

    def each(step: int) -> None:
        block = arena.take(40_000)
        block.tensor.fill_(1)
        hoard.append(block.tensor[:1])
        arena.give(block)

    return each


def plant_descriptor(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    return lambda step: hoard.append(os.open("/dev/zero", os.O_RDONLY))


def plant_thread(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    stop = threading.Event()
    hoard.append(stop)

    def each(step: int) -> None:
        if step % 4 == 0:
            thread = threading.Thread(target=stop.wait, name=f"planted-{step}", daemon=True)
            thread.start()
            hoard.append(thread)

    return each


def plant_extent(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    store = engine_of(model).store
    assert store is not None
    return lambda step: hoard.append(store.reserve(Key("blocks.1", f"planted {step}"), (0, 16_384)))


def plant_graph(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    """A loss that is kept without a backward pass keeps all that autograd saved for it."""
    return lambda step: hoard.append(model(torch.ones(32, WIDTH)))


def plant_state(model: Any, hoard: list[Any]) -> Callable[[int], Any]:
    """An optimizer that remembers more with every step."""
    optimizer = engine_of(model).optimizers[0]()
    assert optimizer is not None
    param = next(iter(model.inner.blocks[1].parameters()))
    return lambda step: optimizer.state[param].update({f"seen {step}": torch.ones(5_000)})


def plant_kind(kind: str) -> Callable[[Any, list[Any]], Callable[[int], Any]]:
    return lambda model, hoard: lambda step: engine_of(model).ledger.add(kind, 20_000)


PLANTED: dict[str, tuple[Callable[[Any, list[Any]], Callable[[int], Any]], str]] = {
    "a tensor kept in a list": (plant_tensor, r"leak of not ours: .* tensors float32 \[130000\]"),
    "a kind of the ledger that is never removed": (plant_ledger, r"leak of host buffers in flight: "),
    "a graph kept in a list": (plant_graph, r"leak of host activations: .* more for unit '"),
    "a state that grows": (plant_state, r"leak of host optimizer: .* more for unit '.*1'"),
    "parameters that are never let go": (plant_kind("parameters"), r"leak of host parameters: "),
    "gradients that are never let go": (plant_kind("gradients"), r"leak of host gradients: "),
    "a view of a block": (plant_slot, r"leak of host unused: "),
    "a file descriptor": (plant_descriptor, r"leak of file descriptors: .* open /dev/zero"),
    "a thread": (plant_thread, r"leak of threads: .* threads named planted-N"),
    "room in a spool": (plant_extent, r"leak of spool: .* extents for planted N of 'blocks.1'"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_leak_is_found(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    plant, expected = PLANTED[what]
    tidy()
    disk = {"disk": str(tmp_path)} if plant is plant_extent else {}
    model, optimizer = recorded(tmp_path / "run", stage=3, blocks=2, **disk)
    hoard: list[Any] = []
    with told(caplog) as messages:
        train(model, optimizer, 260, each=plant(model, hoard))
    for thing in hoard:
        if isinstance(thing, int):
            os.close(thing)
        elif isinstance(thing, threading.Event):
            thing.set()
    process = finished(model, tmp_path / "run").last
    assert len(messages) == 1, messages
    assert re.match(expected, messages[0]), messages[0]
    assert [mark.text for mark in process.marks if mark.what == "leak"] == messages, "and it is on the time axis"


def test_the_line_of_code_is_named_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tidy()
    model, optimizer = recorded(tmp_path, blocks=1)
    hoard: list[Any] = []
    tracemalloc.start()
    try:
        with told(caplog) as messages:
            train(model, optimizer, 260, each=lambda step: hoard.append(bytearray(300_000)))
    finally:
        tracemalloc.stop()
    assert len(messages) == 1
    assert "test_leaks.py:" in messages[0]


@pytest.mark.parametrize("stage", [pytest.param(0), pytest.param(3, marks=pytest.mark.soak)])
def test_a_healthy_run_of_a_thousand_steps_is_left_alone(tmp_path: Path, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    disk = {"disk": str(tmp_path)} if stage == 3 else {}
    model, optimizer = recorded(tmp_path / "run", stage=stage, blocks=2, **disk)
    with told(caplog) as messages:
        train(model, optimizer, STEPS)
    assert messages == []
    assert finished(model, tmp_path / "run").last.steps[-1].step == STEPS
