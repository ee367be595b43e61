"""Autograd and parameters that come and go: views it saves, graphs it walks twice or late, exceptions in the middle.

Blocks are called one by one or inside the model's forward; released memory is filled with NaN, so that a view of it that is
still used shows. Gradients must be plain torch's (one rank) or the mean over ranks (two), bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error, Evicted, StaleGraph
from tests.kit.dist import run_ranks
from tests.kit.parity import Hand, Plain, Sharded, first_difference, whole_grad

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x))) * self.gain


@dataclass
class Output:
    y: Tensor


class InDataclass(Layer):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


class Checkpointed(Layer):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class OnCpu(Layer):
    """Hooks that the block opens itself are inside lowtide's."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


class Failing(Layer):
    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails == "forward":
            raise KeyError("in forward")
        if self.fails == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Tensor) -> None:
        raise KeyError("in backward")


class Net(nn.Module):
    """``forward`` takes the function to run, so that a scenario may run inside or outside the model's forward."""

    def __init__(self, layer: type[Layer], count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(count))

    def forward(self, run: Callable[[nn.ModuleList], Any]) -> Any:
        return run(self.blocks)


Back = Callable[..., None]
Run = Callable[[Callable[[nn.ModuleList], Any]], Any]
Scenario = Callable[[Run, Back, Callable[[int], Tensor]], None]
SCENARIOS: dict[str, tuple[Scenario, type[Layer]]] = {}


def scenario(layer: type[Layer] = Layer) -> Callable[[Scenario], Scenario]:
    """``run`` calls a function with the blocks, ``back`` a backward pass, ``data(n)`` makes this rank's n-th input."""

    def enter(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = (function, layer)
        return function

    return enter


def chain(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def squared(run: Run, x: Tensor) -> Tensor:
    return run(lambda blocks: chain(blocks, x)).square().sum()


@scenario()
def plain(run: Run, back: Back, data: Any) -> None:
    back(squared(run, data(0)))


@scenario(InDataclass)
def dataclass_outputs(run: Run, back: Back, data: Any) -> None:
    def through(blocks: Any) -> Tensor:
        x = data(0)
        for block in blocks:
            x = block(x).y
        return x

    back(run(through).square().sum())


@scenario()
def called_again(run: Run, back: Back, data: Any) -> None:
    order = (0, 1, 2, 0, 4, 0, 3)
    back(run(lambda blocks: chain([blocks[i] for i in order], data(0))).square().sum())


@scenario()
def evaluation_between(run: Run, back: Back, data: Any) -> None:
    loss = squared(run, data(0))
    with torch.no_grad():
        squared(run, data(1))
    with torch.inference_mode():
        squared(run, data(2))
    back(loss)


@scenario()
def two_forwards_one_backward(run: Run, back: Back, data: Any) -> None:
    back(squared(run, data(0)) + run(lambda blocks: chain(blocks, data(1))).abs().sum())


@scenario()
def two_forwards_two_backwards(run: Run, back: Back, data: Any) -> None:
    first, second = squared(run, data(0)), squared(run, data(1))
    back(first)
    back(second)


@scenario()
def last_forward_first(run: Run, back: Back, data: Any) -> None:
    first, second = squared(run, data(0)), squared(run, data(1))
    back(second)
    back(first)


@scenario()
def graph_retained(run: Run, back: Back, data: Any) -> None:
    loss = squared(run, data(0))
    back(loss, retain_graph=True)
    back(loss)


def checkpointed(run: Run, back: Back, data: Any, reentrant: bool) -> None:
    def through(blocks: Any) -> Tensor:
        x = checkpoint(lambda x: chain(blocks[:4], x), data(0).requires_grad_(), use_reentrant=reentrant)
        return blocks[4](x)

    back(run(through).square().sum())


@scenario()
def checkpoint_around_several(run: Run, back: Back, data: Any) -> None:
    checkpointed(run, back, data, reentrant=False)


@scenario()
def checkpoint_around_several_reentrant(run: Run, back: Back, data: Any) -> None:
    checkpointed(run, back, data, reentrant=True)


@scenario()
def checkpoint_around_each(run: Run, back: Back, data: Any) -> None:
    def through(blocks: Any) -> Tensor:
        x = data(0)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    back(run(through).square().sum())


@scenario(Checkpointed)
def checkpoint_inside(run: Run, back: Back, data: Any) -> None:
    back(squared(run, data(0)))


@scenario(CheckpointedReentrant)
def checkpoint_inside_reentrant(run: Run, back: Back, data: Any) -> None:
    back(squared(run, data(0).requires_grad_()))


@scenario(OnCpu)
def hooks_inside_a_block(run: Run, back: Back, data: Any) -> None:
    back(squared(run, data(0)))


@scenario()
def hooks_around_everything(run: Run, back: Back, data: Any) -> None:
    """The caller's hooks see what is not a parameter, and what they packed comes back to them."""
    packed: list[int] = []

    def pack(tensor: Tensor) -> int:
        packed.append(0)
        kept.append(tensor.clone())
        return len(kept) - 1

    kept: list[Tensor] = []
    with saved_tensors_hooks(pack, lambda index: kept[index]):
        loss = squared(run, data(0))
    assert len(packed) > 5
    back(loss)


@scenario()
def frozen_blocks(run: Run, back: Back, data: Any) -> None:
    run(lambda blocks: [blocks[i].requires_grad_(False) for i in (1, 2)])
    back(squared(run, data(0)))


@scenario()
def part_of_the_graph_first(run: Run, back: Back, data: Any) -> None:
    def through(blocks: Any) -> Tensor:
        middle = chain(blocks[:3], data(0))
        y = chain(blocks[3:], middle)
        (g,) = torch.autograd.grad(y.square().sum(), middle, retain_graph=True)
        return y.sum() + (g.detach() * middle).sum()

    back(run(through))


@scenario()
def gradient_penalty(run: Run, back: Back, data: Any) -> None:
    x = data(0).requires_grad_()
    (g,) = torch.autograd.grad(run(lambda blocks: chain(blocks, x)).sum(), x, create_graph=True)
    back(g.square().sum())


def with_kept_feature(blocks: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    kept: list[Tensor] = []
    handle = blocks[1].first.register_forward_hook(lambda _m, _i, out: kept.append(out))
    y = chain(blocks, x)
    handle.remove()
    return y, kept[0]


@scenario()
def inner_tensor_only(run: Run, back: Back, data: Any) -> None:
    """Backward enters a block without passing its output."""
    _, inner = run(lambda blocks: with_kept_feature(blocks, data(0)))
    back(inner.square().sum())


@scenario()
def inner_tensor_then_output(run: Run, back: Back, data: Any) -> None:
    y, inner = run(lambda blocks: with_kept_feature(blocks, data(0)))
    back(inner.square().sum(), retain_graph=True)
    back(y.sum())


@scenario()
def in_place_on_outputs(run: Run, back: Back, data: Any) -> None:
    def through(blocks: Any) -> Tensor:
        x = data(0)
        for block in blocks:
            x = block(x)
            x += 1.0
            x = x.relu_()
        return x

    back(run(through).square().sum())


@scenario()
def weight_used_by_another_block(run: Run, back: Back, data: Any) -> None:
    """Only inside the model's forward: outside of any forward a parameter that is not here must raise."""

    def through(blocks: Any) -> Tensor:
        blocks[4].register_forward_pre_hook(lambda _m, args: (F.linear(args[0], blocks[0].first.weight),))
        return chain(blocks, data(0))

    back(run(through).square().sum())


# -- with and without lowtide -----------------------------------------------------------------------------------------


def net(layer: type[Layer], count: int = 5) -> Net:
    torch.manual_seed(0)
    return Net(layer, count)


def inputs(rank: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * n + rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def sharded(model: nn.Module, stage: int, transport: str = "torch") -> Sharded:
    """With memory that shows when it is used after its release. Over torch.distributed several ranks need slots, too."""
    system = Sharded(model, sgd(model), stage=stage, comm=lowtide.Comm(bucket_bytes=0, transport=transport))
    engine_of(system.model).arena.poison = True
    return system


def oracle(model: nn.Module, world: int) -> Plain:
    return Plain(model, sgd(model)) if world == 1 else Hand(model, sgd(model))


def play(system: Plain, name: str, rank: int, inside: bool) -> dict[str, Tensor | None]:
    def back(loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        system.after_backward(synced=True)

    model: Any = system.model
    SCENARIOS[name][0](model if inside else lambda function: function(model.blocks), back, inputs(rank))
    system.before_step()
    return {n: whole_grad(p) for n, p in model.named_parameters()}


def left_behind(system: Plain) -> list[str]:
    """Everything must go back: nothing is whole, and nobody holds released memory."""
    engine = engine_of(system.model)
    end = time.monotonic() + 20
    while engine.arena.limbo_bytes and time.monotonic() < end:
        time.sleep(0.01)  # gloo's own threads let go of what they sent a moment later
        engine.arena.trim()
    whole, limbo = engine.ledger.live["slots"], engine.arena.limbo_bytes
    return [f"{whole} bytes whole, {limbo} bytes in limbo"] if whole or limbo else []


def differences(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    out: list[str] = []
    for name, b in expected.items():
        a = got[name]
        if a is None or b is None:
            out += [] if a is b else [f"{name}: {'no' if a is None else 'a'} gradient"]
        elif difference := first_difference(a, b):
            out.append(f"{name}: {difference}")
    return out


def all_ways(rank: int, world: int, name: str) -> list[str]:
    problems: list[str] = []
    for inside in (True, False):
        if name == "weight_used_by_another_block" and not inside:
            continue
        layer = SCENARIOS[name][1]
        expected = play(oracle(net(layer), world), name, rank, inside)
        for stage, transport in ((3, "torch"), (3, "shared"), (2, "torch")):
            where = f"stage {stage}, {transport}, {'inside' if inside else 'outside'} the model's forward"
            system = sharded(net(layer), stage, transport)
            found = differences(play(system, name, rank, inside), expected)
            problems += [f"{where}: {text}" for text in found[:3] + left_behind(system)]
    return problems


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_the_same(name: str, ranks: int) -> None:
    found = run_ranks(ranks, all_ways, name)
    assert not any(found), "\n".join(text for texts in found for text in texts)


# -- views that are kept ----------------------------------------------------------------------------------------------


def step(system: Plain, number: int, rank: int) -> Tensor:
    loss = squared(system.model, inputs(rank)(number))
    loss.backward()
    system.after_backward(synced=True)
    system.before_step()
    system.optimizer.step()
    system.optimizer.zero_grad()
    return loss.detach()


def view_kept(rank: int, world: int) -> None:
    system = sharded(net(Layer), 3)
    kept: list[Tensor] = []
    block: Any = system.model.blocks[2]
    handle = block.register_forward_hook(lambda m, _i, _o: kept.append(m.first.weight.detach()))
    squared(system.model, inputs(rank)(0))
    handle.remove()
    before = kept[0].clone()
    for number in range(3):
        step(system, number, rank)
        assert torch.equal(kept[0], before), f"changed in step {number}"
    with lowtide.gathered(block):
        assert not torch.equal(block.first.weight, before)
    assert engine_of(system.model).arena.limbo_bytes > 0
    kept.clear()
    step(system, 3, rank)
    assert left_behind(system) == [], "the memory comes back when the view is gone"


def test_a_view_kept_by_the_caller_keeps_its_values() -> None:
    """Two ranks: the memory of a unit that was gathered is not used again while somebody looks at it."""
    run_ranks(2, view_kept)


def view_of_shared_memory(rank: int, world: int) -> None:
    system = sharded(net(Layer), 3, "shared")
    kept: list[Tensor] = []
    block: Any = system.model.blocks[2]
    handle = block.register_forward_hook(lambda m, _i, _o: kept.append(m.first.weight.detach()))
    squared(system.model, inputs(rank)(0))
    handle.remove()
    before = kept[0].clone()
    step(system, 0, rank)
    with lowtide.gathered(block):
        assert not torch.equal(block.first.weight, before)
        assert torch.equal(block.first.weight, kept[0])


def test_a_view_of_what_ranks_share_shows_the_values_of_now_as_in_plain_torch() -> None:
    run_ranks(2, view_of_shared_memory)


# -- stale graphs -----------------------------------------------------------------------------------------------------


def stale(rank: int, world: int, stage: int) -> str:
    def message(system: Plain) -> str:
        old = squared(system.model, inputs(rank)(5))
        step(system, 0, rank)
        with pytest.raises(RuntimeError) as caught:
            old.backward()
        if isinstance(system, Sharded) and stage == 3:
            assert isinstance(caught.value, StaleGraph)
            assert "Run the forward pass again" in str(caught.value)
        for number in (1, 2):
            losses[system].append(step(system, number, rank))
        return str(caught.value)

    losses: dict[Plain, list[Tensor]] = {oracle(net(Layer), world): [], sharded(net(Layer), stage): []}
    text = [message(system) for system in losses][1]
    expected, got = losses.values()
    assert got == expected, "training goes on as if nothing had happened"
    return text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_on_replaced_values_raises(stage: int, ranks: int) -> None:
    for text in run_ranks(ranks, stale, stage):
        assert ("updated after this graph was built" if stage == 3 else "modified by an inplace operation") in text


# -- exceptions in the middle -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(block: Any, where: str) -> Iterator[None]:
    block.fails = where
    try:
        with pytest.raises(KeyError, match=f"in {where}"):
            yield
    finally:
        block.fails = ""


def survive(rank: int, world: int, stage: int, where: str, first: bool) -> list[str]:
    """An exception in the first pass or in a later one; the steps after it are those of a run without it."""
    problems: list[str] = []
    expected, system = oracle(net(Failing), world), sharded(net(Failing), stage)
    for number in range(3):
        if first or number == 1:
            for index in (0, 2, 4):
                with failing(system.model.blocks[index], where):  # pyright: ignore
                    squared(system.model, inputs(rank)(40 + number)).backward()
                system.optimizer.zero_grad()
        a, b = step(system, number, rank), step(expected, number, rank)
        if not torch.equal(a, b):
            problems.append(f"loss {number}: {a.item()!r} against {b.item()!r}")
    got = play(system, "plain", rank, inside=True)
    problems += differences(got, play(expected, "plain", rank, inside=True))
    return problems + left_behind(system)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_exception_leaves_the_engine_usable(stage: int, where: str, first: bool, ranks: int) -> None:
    found = run_ranks(ranks, survive, stage, where, first)
    assert not any(found), "\n".join(text for texts in found for text in texts)


def another_loss_after_a_failure(rank: int, world: int, stage: int) -> list[str]:
    """Two graphs are there; backward through one fails, backward through the other counts. No forward pass in between."""

    def both(system: Plain) -> dict[str, Tensor | None]:
        bad, good = squared(system.model, inputs(rank)(0)), squared(system.model, inputs(rank)(1))
        blocks: Any = system.model.blocks
        handle = blocks[1].first.weight.register_hook(fail)
        with pytest.raises(KeyError):
            bad.backward()
        handle.remove()
        system.model.zero_grad()
        good.backward()
        system.after_backward(synced=True)
        system.before_step()
        return {n: whole_grad(p) for n, p in system.model.named_parameters()}

    def fail(grad: Tensor) -> None:
        raise KeyError("in backward")

    expected = both(oracle(net(Layer), world))
    try:
        return differences(both(sharded(net(Layer), stage)), expected)[:3]
    except Error:
        return []  # loud is as good


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_another_graph_after_a_failed_backward(stage: int, ranks: int) -> None:
    found = run_ranks(ranks, another_loss_after_a_failure, stage)
    assert not any(found), "\n".join(text for texts in found for text in texts)


def outside(rank: int, world: int) -> None:
    system = sharded(net(Layer), 3)
    blocks: Any = system.model.blocks
    with pytest.raises(Evicted, match=r"'blocks\.0\.first\.weight'.*lowtide\.gathered"):
        F.linear(inputs(rank)(0), blocks[0].first.weight)
    step(system, 0, rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_outside_of_any_forward_raises(ranks: int) -> None:
    run_ranks(ranks, outside)
