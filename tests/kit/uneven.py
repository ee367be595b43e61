"""Loops with another number of batches on every rank: with lowtide inside ``model.join()``, with DDP inside torch's ``Join``,
and by hand, where every rank runs every iteration and one without a batch adds zeros.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import ExponentialLR

import lowtide
from tests.kit.dist import run_ranks
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.parity import Ddp, Hand, Plain, Sharded, Trace, assert_same, find_specimen


@dataclass(frozen=True)
class Loop:
    """``counts``: batches of every rank. ``changes``: gradients are scaled and clamped with PyTorch's own functions.
    ``evaluate``: a pass without gradients after every step. ``after``: even steps after the block.
    ``after_step``: whether a rank that follows is told to advance its scheduler."""

    counts: tuple[int, ...]
    optimizer: str = "adamw_fused"
    model: str = "mlp"
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    changes: bool = False
    set_to_none: bool = True
    schedule: bool = False
    after_step: bool = True
    evaluate: bool = False
    divide_by: str = "all"
    after: int = 2


class ByHand(Hand):
    """Buffers come from ``root`` when DDP would send them; gradients are divided by ``divisor``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.root, self.divisor, self.due = 0, dist.get_world_size(), True

    def before_forward(self) -> None:
        if self.due:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, self.root)

    def reduce(self) -> None:
        for p in self.model.parameters():
            present = torch.tensor(int(p.grad is not None))
            dist.all_reduce(present, op=dist.ReduceOp.MAX)
            if not present:
                continue
            mine = torch.zeros_like(p) if p.grad is None else p.grad.detach() * (1.0 / self.divisor)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            while len(parts) > 1:
                parts = [sum(pair[1:], start=pair[0]) for pair in (parts[i : i + 2] for i in range(0, len(parts), 2))]
            p.grad = parts[0]


class Training:
    """One system in one loop on one rank."""

    def __init__(self, system: Plain, loop: Loop, rank: int) -> None:
        self.system, self.loop, self.rank = system, loop, rank
        self.specimen = find_specimen(loop.model)
        self.scheduler = ExponentialLR(system.optimizer, 0.8) if loop.schedule else None

    def steps_after(self, number: int) -> bool:
        return (number + 1) % self.loop.accumulate == 0

    def synced(self, number: int) -> bool:
        return not self.loop.no_sync or self.steps_after(number)

    def batch(self, number: int) -> None:
        """Forward and backward of one micro-batch."""
        torch.manual_seed(7919 * number + self.rank)
        with contextlib.nullcontext() if self.synced(number) else self.system.no_sync():
            loss = self.specimen.loss(self.system.forward, self.specimen.batch(number, self.rank)) / self.loop.accumulate
            loss.backward()

    def step(self) -> None:
        loop, model = self.loop, self.system.model
        self.system.before_step()
        if loop.changes:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        if loop.clip is not None:
            lowtide.clip_grad_norm_(model, loop.clip)
        self.system.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.system.optimizer.zero_grad(set_to_none=loop.set_to_none)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.specimen.loss(self.system.forward, self.specimen.batch(1000, self.rank))

    def iterations(self, numbers: range) -> None:
        """A loop over batches as users write it."""
        for number in numbers:
            self.batch(number)
            self.system.after_backward(synced=self.synced(number))
            if self.steps_after(number):
                self.step()
                if self.loop.evaluate:
                    self.evaluate()

    def record(self, trace: Trace, when: str) -> None:
        model = self.system.model
        for name, param in model.named_parameters():
            with lowtide.gathered(param):
                trace.add(f"{when}, parameter {name}", param)
        trace.add_all(f"{when}, buffer", model.named_buffers())
        if self.scheduler is not None and self.loop.after_step:
            trace.add(f"{when}, scheduler", torch.tensor([self.scheduler.last_epoch, *self.scheduler.get_last_lr()]))
        for number, group in enumerate(self.system.optimizer.param_groups):
            trace.add(f"{when}, learning rate {number}", torch.tensor(group["lr"], dtype=torch.float64))
        sums = self.system._sums if isinstance(self.system, ByHand) else {}  # of micro-batches whose step is still to come
        trace.add(f"{when}, gradients", torch.tensor([p.grad is not None or p in sums for p in model.parameters()]))


def _begin(loop: Loop, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = find_specimen(loop.model).build(seed=rank)  # rank 0's numbers must win
    return model, OPTIMIZERS[loop.optimizer](model.parameters())


def _even(loop: Loop) -> range:
    first = -(-max(loop.counts) // loop.accumulate) * loop.accumulate
    return range(first, first + loop.after * loop.accumulate)


def _all_together(system: ByHand, training: Training, number: int, *, takes_part: bool) -> None:
    """One iteration that all ranks run, whether they have a batch or not."""
    system.before_forward()
    if takes_part:
        training.batch(number)
    system.due = training.synced(number)
    system.after_backward(synced=training.synced(number))
    if training.steps_after(number):
        training.step()
        if training.loop.evaluate:
            system.before_forward()
            if takes_part:
                training.evaluate()
            system.due = False


def by_hand(loop: Loop, rank: int) -> Trace:
    """A rank without a batch adds nothing, and updates as the others do."""
    system = ByHand(*_begin(loop, rank))
    training, trace = Training(system, loop, rank), Trace()
    for number in range(max(loop.counts)):
        active = [r for r, count in enumerate(loop.counts) if number < count]
        system.root = max(active)
        system.divisor = len(active) if loop.divide_by == "active" else len(loop.counts)
        _all_together(system, training, number, takes_part=rank in active)
    last = [r for r, count in enumerate(loop.counts) if count == max(loop.counts)]
    due, system.due = system.due, True
    system.root, system.divisor = max(last), len(loop.counts)
    system.before_forward()
    training.record(trace, "after the block")
    system.root, system.due = 0, due
    for number in _even(loop):
        _all_together(system, training, number, takes_part=True)
    training.record(trace, "at the end")
    return trace


def with_ddp(loop: Loop, rank: int) -> Trace:
    """Parameters and buffers after torch's own context, on every rank those of the last one that had batches."""
    system = Ddp(*_begin(loop, rank), find_unused=False)
    training, trace = Training(system, loop, rank), Trace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Join([system.forward], divide_by_initial_world_size=loop.divide_by == "all"):  # type: ignore[list-item]
            training.iterations(range(loop.counts[rank]))
    training.record(trace, "after the block")
    return trace


def with_lowtide(loop: Loop, rank: int, **options: Any) -> Trace:
    """The same loop inside ``model.join()``."""
    system = Sharded(*_begin(loop, rank), **options)
    training, trace = Training(system, loop, rank), Trace()
    step = training.scheduler.step if training.scheduler is not None and loop.after_step else None
    with system.model.join(divide_by=loop.divide_by, after_step=step):  # type: ignore[operator]
        training.iterations(range(loop.counts[rank]))
    training.record(trace, "after the block")
    training.iterations(_even(loop))
    training.record(trace, "at the end")
    return trace


def only(trace: Trace, *kinds: str) -> Trace:
    """The entries of some kinds after the block."""
    wanted = tuple(f"after the block, {kind}" for kind in kinds)
    return Trace([(name, tensor) for name, tensor in trace.entries if name.startswith(wanted)])


def difference(rank: int, world: int, loop: Loop, options: dict[str, Any]) -> str | None:
    """What lowtide does differently from the loop by hand, or None."""
    expected = by_hand(loop, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = with_lowtide(loop, rank, **options)
    return _told(got, expected)


def difference_of_oracles(rank: int, world: int, loop: Loop) -> str | None:
    return _told(only(by_hand(loop, rank), "parameter", "buffer"), only(with_ddp(loop, rank), "parameter", "buffer"))


def _told(got: Trace, expected: Trace) -> str | None:
    try:
        assert_same(got, expected)
    except AssertionError as error:  # told, not raised: the ranks are in step and serve the next case
        return str(error)
    return None


def check(loop: Loop, function: Any = difference, *args: Any, timeout: float = 60) -> None:
    """Run one loop on as many ranks as it has counts, and raise what any of them found."""
    found = run_ranks(len(loop.counts), function, loop, *args, timeout=timeout)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
