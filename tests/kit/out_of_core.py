"""Parity with everything, or a part, on disk: how a model is spread over the tiers for a test, and what must hold afterwards.

Memory that an arena hands out or takes back is filled with NaN, so that a use of bytes which were never read, or are no longer
theirs, shows in the numbers. A slow store makes what is only right by luck of timing wrong.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.runtime import assembly
from lowtide.runtime.engine import Engine
from lowtide.tiers.arena import Arena, Block
from lowtide.tiers.store import Store
from tests.kit.dist import run_ranks
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.parity import (
    Case,
    Sharded,
    Trace,
    assert_same,
    find_specimen,
    known_oracle,
    sharded,
    train,
)
from tests.kit.stores import SlowStore

# Without a number these tests mean: everything on disk, however much memory the machine has.
assembly.default_budget = lambda: None  # type: ignore[assignment, return-value]

RESIDENCIES = ("disk", "mixed", "kinds", "parameters", "states", "gradients")
"""What is brought into memory after ``shard``: nothing; every second unit whole; one kind of each unit in turn; or one kind."""


@dataclass(frozen=True)
class Where:
    """How a model is kept. ``slow``: seconds that every request to the disk is delayed. ``looks``: whether parameters are
    looked at after every step; else after every second one, so that an update which is put off meets the next forward pass."""

    update: str = "step"
    chunk_bytes: int = 4096
    prefetch: int = 1
    resident: str = "disk"
    slow: float = 0.0
    looks: bool = True

    def __str__(self) -> str:
        more = ("-slow" if self.slow else "") + ("" if self.looks else "-unseen")
        return f"{self.update}-chunk{self.chunk_bytes}-ahead{self.prefetch}-{self.resident}{more}"

    def options(self, folder: str) -> dict[str, Any]:
        """For lowtide.shard."""
        return {
            "disk": folder,
            "update": lowtide.Update(self.update, chunk_bytes=self.chunk_bytes),
            "comm": lowtide.Comm(bucket_bytes=0, prefetch=self.prefetch, deadline=30),
        }


@contextlib.contextmanager
def undefined_memory() -> Iterator[None]:
    """Every block that an arena hands out holds NaN."""
    take = Arena.take

    def take_nan(self: Arena, nbytes: int) -> Block:
        block = take(self, nbytes)
        block.tensor.fill_(255)
        return block

    Arena.take = take_nan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arena.take = take  # type: ignore[method-assign]


@contextlib.contextmanager
def opened_by(open_disk: Callable[[Any, int], Store | None]) -> Iterator[None]:
    """Models that are sharded inside get their store from ``open_disk``."""
    before = assembly._open_disk
    assembly._open_disk = open_disk  # type: ignore[assignment]
    try:
        yield
    finally:
        assembly._open_disk = before


def slowed(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Models that are sharded inside have a disk on which every request takes so long."""
    if not seconds:
        return contextlib.nullcontext()
    plain = assembly._open_disk

    def open_disk(config: Any, rank: int) -> Store | None:
        store = plain(config, rank)
        return None if store is None else SlowStore(store, seconds)

    return opened_by(open_disk)


def settle(model: nn.Module, resident: str) -> Engine:
    """Fill released memory of a sharded model with NaN, and bring what ``resident`` says into memory."""
    engine = engine_of(model)
    for arena in (engine.homes, engine.arena, engine.buffers_arena):
        arena.poison = True
    for number, unit in enumerate(engine.units):
        stream = engine.update.streams[unit]
        bring = {name: kind.shelf.bring for name, kind in stream._kinds.items()}
        if stream.shelved is not None:
            bring["gradients"] = functools.partial(stream.shelved.move, None)
        if not engine.residency.home(unit).in_memory:
            bring["parameters"] = functools.partial(engine.residency.move_home, unit, None)
        names = list(bring)
        chosen = {
            "disk": [],
            "mixed": names if number % 2 else [],
            "kinds": names[number % max(len(names), 1) :][:1],
            "parameters": [n for n in names if n == "parameters"],
            "gradients": [n for n in names if n == "gradients"],
            "states": [n for n in names if n not in ("parameters", "gradients")],
        }[resident]
        for name in chosen:
            bring[name]()
    return engine


def left_over(engine: Engine) -> str | None:
    """What a model between two steps still has of the memory that is only lent, or None."""
    engine.settle()  # an update that was put off may be reading ahead
    engine.residency.forget()
    if engine.store is not None:
        engine.store.drain()
    engine.buffers_arena.trim()
    if engine.buffers_arena.taken_bytes:
        return f"{engine.buffers_arena.taken_bytes} bytes of buffers were not given back"
    if engine.buffers_arena.limbo_bytes:
        return f"{engine.buffers_arena.limbo_bytes} bytes of buffers are still looked at"
    if engine.arena.taken_bytes:
        return f"{engine.arena.taken_bytes} bytes of slots were not given back"
    if engine.ledger.live["slots"]:
        return f"the ledger knows of {engine.ledger.live['slots']} bytes of slots"
    return None


class Unseen(Sharded):
    """Parameters are looked at after every second step only."""

    def record(self, trace: Trace, step: int) -> None:
        if step % 2:
            super().record(trace, step)


_STATE = re.compile(r"step (\d+), (parameter|buffer) ")


def comparable(trace: Trace, where: Where) -> Trace:
    """What can be seen: with updates in backward no gradient, and no parameters where nobody looks."""

    def seen(name: str) -> bool:
        state = _STATE.match(name)
        hidden = state is not None and not where.looks and int(state[1]) % 2 == 0
        return not hidden and not (where.update == "backward" and ", gradient " in name)

    return Trace([(name, tensor) for name, tensor in trace.entries if seen(name)])


def difference(rank: int, world: int, case: Case, where: Where, folder: str) -> str | None:
    """What a model on disk does differently from plain torch, DDP or the tree, or None. Runs on every rank.

    Other precisions have no oracle outside; they are compared with the same model in memory."""
    specimen, options = find_specimen(case.model), dict(case.options)
    if "precision" in options:
        in_memory = {"comm": lowtide.Comm(bucket_bytes=0), **options}
        expected = sharded(specimen, case.recipe, rank=rank, stage=case.stage, **in_memory)
    else:
        expected = known_oracle(case.model, case.recipe, world, rank, case.by_hand)
    with warnings.catch_warnings(), undefined_memory(), slowed(where.slow):
        warnings.simplefilter("error")
        model = specimen.build(seed=rank)
        optimizer = OPTIMIZERS[case.recipe.optimizer](model.parameters())
        kind = Sharded if where.looks else Unseen
        system = kind(model, optimizer, stage=case.stage, **{**where.options(folder), **options})
        engine = settle(model, where.resident)
        got = train(system, specimen, case.recipe, rank=rank)
        left = left_over(engine)
    try:
        assert_same(comparable(got, where), comparable(expected, where))
    except AssertionError as error:  # told, not raised: the ranks are in step and serve the next case
        return str(error)
    return left


def check(world: int, case: Case, where: Where, folder: Any, *, timeout: float = 60) -> None:
    """Run one case on ``world`` ranks and raise what any of them found."""
    found = run_ranks(world, difference, case, where, str(folder), timeout=timeout)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


def count_threads() -> int:
    """Threads of this process that serve a disk."""
    import threading

    return sum("lowtide-io" in thread.name for thread in threading.enumerate())


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors of a state_dict."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]
