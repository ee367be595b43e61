"""Parity: train one model with plain torch, DDP or gradients averaged by hand, and with lowtide, and compare bits.

``Recipe`` says what a training loop does. ``train`` runs it on one of four systems and records a ``Trace``;
``assert_same`` compares two traces tensor by tensor. All of it runs inside a rank: nothing is sent between processes but
what the systems send themselves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.runtime.used_grad import UsedGrad
from tests.kit.dist import run_ranks
from tests.kit.models import MENAGERIE, Specimen
from tests.kit.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Recipe:
    """A training loop. ``no_sync`` adds micro-batches up locally, as DDP does inside its own no_sync()."""

    optimizer: str = "adamw_fused"
    steps: int = 3
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    set_to_none: bool = True

    def __str__(self) -> str:
        parts = [self.optimizer]
        if self.accumulate > 1:
            parts.append(f"{'no_sync' if self.no_sync else 'micro'}{self.accumulate}")
        if self.clip is not None:
            parts.append(f"clip{self.clip:g}")
        if not self.set_to_none:
            parts.append("zeroed")
        return "-".join(parts)


@dataclass
class Trace:
    """Every number a loop made, copied, in the order in which it was made; so the first difference is the cause."""

    entries: list[tuple[str, Tensor | None]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor | None) -> None:
        self.entries.append((name, None if tensor is None else tensor.detach().clone()))

    def add_all(self, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        for name, tensor in tensors:
            self.add(f"{kind} {name}", tensor)


class Plain:
    """Plain torch on one rank; the other systems change what is different about them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.forward: nn.Module = model

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def before_forward(self) -> None:
        """Called before every micro-batch."""

    def after_backward(self, *, synced: bool) -> None:
        """Called after every micro-batch's backward."""

    def before_step(self) -> None:
        """Called when the last micro-batch is done."""

    def record(self, trace: Trace, step: int) -> None:
        """Parameters and buffers after a step."""
        trace.add_all(f"step {step}, parameter", self.model.named_parameters())
        trace.add_all(f"step {step}, buffer", self.model.named_buffers())


class Reduced(Plain):
    """Several ranks whose micro-batches are reduced one by one and added up in order.

    DDP itself reduces the running sum again with every micro-batch, which rounds differently; so each micro-batch starts from
    cleared gradients here, and the sum is made by hand.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self._sums: dict[nn.Parameter, Tensor] = {}

    def reduce(self) -> None:
        """Make every gradient the mean over the ranks."""

    def after_backward(self, *, synced: bool) -> None:
        if not synced:
            return
        self.reduce()
        for p in self.model.parameters():
            if p.grad is not None:
                self._sums[p] = self._sums[p] + p.grad if p in self._sums else p.grad.detach().clone()
                p.grad = None

    def before_step(self) -> None:
        for p, total in self._sums.items():
            p.grad = total
        self._sums = {}


class Ddp(Reduced):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, find_unused: bool) -> None:
        super().__init__(model, optimizer)
        self.forward = DistributedDataParallel(model, find_unused_parameters=find_unused)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.forward.no_sync()  # pyright: ignore


class Hand(Reduced):
    """Gradients times 1/W, added along the binary tree ((0 + 1) + (2 + 3)) + ...; buffers from rank 0. Works for any model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self._sync_buffers = True
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), 0)

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        # as in DDP: the forward pass after one without synchronisation takes buffers as they are
        yield
        self._sync_buffers = False

    def before_forward(self) -> None:
        if self._sync_buffers:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        self._sync_buffers = True

    def reduce(self) -> None:
        world = dist.get_world_size()
        for p in self.model.parameters():
            if not p.requires_grad:
                continue
            present = torch.tensor(int(p.grad is not None))
            dist.all_reduce(present, op=dist.ReduceOp.MAX)
            if not present:
                continue
            mine = torch.zeros_like(p) if p.grad is None else p.grad.detach() * (1.0 / world)
            mine = mine.contiguous()
            parts = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine)
            while len(parts) > 1:
                parts = [sum(pair[1:], start=pair[0]) for pair in (parts[i : i + 2] for i in range(0, len(parts), 2))]
            p.grad = torch.empty_like(p).copy_(parts[0])


class Sharded(Plain):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(*lowtide.shard(model, optimizer, **options))

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync()  # pyright: ignore

    def record(self, trace: Trace, step: int) -> None:
        with lowtide.gathered(self.model):
            super().record(trace, step)


def whole_grad(p: nn.Parameter) -> Tensor | None:
    """A parameter's gradient as a plain tensor, wherever it lives. Every rank must call it."""
    grad: Any = p.grad
    if grad is None:
        return None
    if isinstance(grad, UsedGrad):  # used by an update in backward
        return None
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def train(system: Plain, specimen: Specimen, recipe: Recipe, *, rank: int) -> Trace:
    """Run the loop on this rank's batches and record every step."""
    trace = Trace()
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            number = step * recipe.accumulate + micro
            synced = not recipe.no_sync or micro == recipe.accumulate - 1
            torch.manual_seed(7919 * number + rank)
            with contextlib.nullcontext() if synced else system.no_sync():
                system.before_forward()
                loss = specimen.loss(system.forward, specimen.batch(number, rank)) / recipe.accumulate
                loss.backward()
            system.after_backward(synced=synced)
            trace.add(f"step {step}, loss of micro-batch {micro}", loss)
        system.before_step()
        if recipe.clip is not None:
            trace.add(f"step {step}, norm", lowtide.clip_grad_norm_(system.model, recipe.clip))
        if step == recipe.steps - 1:  # one exchange per parameter; in earlier steps the parameters tell
            named = system.model.named_parameters()
            trace.add_all(f"step {step}, gradient", ((name, whole_grad(p)) for name, p in named))
        system.optimizer.step()
        system.record(trace, step)
        system.optimizer.zero_grad(set_to_none=recipe.set_to_none)
    return trace


def oracle(specimen: Specimen, recipe: Recipe, *, world: int, rank: int, by_hand: bool = False) -> Trace:
    """What the caller's loop gives without lowtide: plain torch on one rank, DDP (or by hand) on several."""
    model = specimen.build(seed=rank)  # rank 0's numbers must win
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    if world == 1:
        system = Plain(model, optimizer)
    elif by_hand or specimen.ddp == "no":
        system = Hand(model, optimizer)
    else:
        system = Ddp(model, optimizer, find_unused=specimen.ddp == "unused")
    return train(system, specimen, recipe, rank=rank)


def sharded(specimen: Specimen, recipe: Recipe, *, rank: int, **options: Any) -> Trace:
    """The same loop with lowtide.shard added."""
    model = specimen.build(seed=rank)
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    return train(Sharded(model, optimizer, **options), specimen, recipe, rank=rank)


def find_specimen(name: str) -> Specimen:
    if name.startswith("hf_"):
        from tests.kit.models_hf import HUGGING_FACE

        return HUGGING_FACE[name.removeprefix("hf_")]
    return MENAGERIE[name]


@functools.cache
def known_oracle(name: str, recipe: Recipe, world: int, rank: int, by_hand: bool = False) -> Trace:
    """``oracle`` by the model's name, kept: a worker process checks many cases against one oracle."""
    return oracle(find_specimen(name), recipe, world=world, rank=rank, by_hand=by_hand)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.detach().contiguous().view(kinds[flat.element_size()])


def first_difference(a: Tensor, b: Tensor) -> str | None:
    """What differs between two tensors in shape, dtype or bits: index and both values of the first element that does."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
    wrong = (_bits(a) != _bits(b)).nonzero()
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())[: a.dim()]
    x, y = a[at].item(), b[at].item()
    return f"at {list(at)}: {x!r} against {y!r} ({len(wrong)} of {a.numel()} elements differ, by {abs(x - y):.3g} here)"


def assert_bitwise(a: Tensor | None, b: Tensor | None, what: str) -> None:
    """Raise with ``what``, the index and both values unless ``a`` and ``b`` are the same bits (or both None)."""
    if a is None or b is None:
        if a is not b:
            raise AssertionError(f"{what}: {'None' if a is None else 'a tensor'} against {'None' if b is None else 'a tensor'}")
        return
    if difference := first_difference(a, b):
        raise AssertionError(f"{what}: {difference}")


def assert_near(a: Tensor | None, b: Tensor | None, what: str) -> None:
    """For sums that are added in another order: relative to the tensor's largest element."""
    if a is None or b is None:
        return assert_bitwise(a, b, what)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


def assert_same(
    got: Trace, expected: Trace, compare: Callable[[Tensor | None, Tensor | None, str], None] = assert_bitwise
) -> None:
    """Raise at the first entry that differs, with its name."""
    assert [name for name, _ in got.entries] == [name for name, _ in expected.entries], "the loops made different numbers"
    for (name, a), (_, b) in zip(got.entries, expected.entries, strict=True):
        compare(a, b, name)


@dataclass(frozen=True)
class Case:
    """One model, one loop and one way of sharding. ``options`` go to lowtide.shard; units are not joined into buckets unless
    they say so, because everything here would fit into one."""

    model: str
    stage: int
    recipe: Recipe = Recipe()
    options: tuple[tuple[str, Any], ...] = ()
    by_hand: bool = False

    def __str__(self) -> str:
        parts = [self.model, f"stage{self.stage}", str(self.recipe), *(f"{name}={value}" for name, value in self.options)]
        return "-".join(parts)


def difference(rank: int, world: int, case: Case, compare: Any = assert_bitwise) -> str | None:
    """What lowtide does differently in this case, or None. Runs on every rank; a warning from lowtide is an error."""
    expected = known_oracle(case.model, case.recipe, world, rank, case.by_hand)
    options = {"comm": lowtide.Comm(bucket_bytes=0), **dict(case.options)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = sharded(find_specimen(case.model), case.recipe, rank=rank, stage=case.stage, **options)
    try:
        assert_same(got, expected, compare)
    except AssertionError as error:  # told, not raised: the ranks are in step and serve the next case
        return str(error)
    return None


def check(world: int, case: Case, compare: Any = assert_bitwise, *, timeout: float = 60) -> None:
    """Run one case on ``world`` ranks and raise what any of them found."""
    found = run_ranks(world, difference, case, compare, timeout=timeout)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
