"""Several threads and one model: one trains at a time and is not disturbed, others may look; and two models in two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import Evicted, Refused
from tests.kit.parity import first_difference
from tests.kit.scenarios import adamw, batch, stack

STEPS = 3
KEPT: dict[str, dict[str, Any]] = {
    "whole": {"stage": 0},
    "in memory": {"stage": 3},
    "with a number": {"stage": 3, "memory": "8GiB"},
    "from disk": {"stage": 3, "disk": True},
    "from disk, backward": {"stage": 3, "disk": True, "update": "backward"},
}


def options(name: str, folder: Path) -> dict[str, Any]:
    return {**KEPT[name], **({"disk": str(folder)} if "disk" in KEPT[name] else {})}


@pytest.fixture(autouse=True)
def _one_thread_for_torch() -> Iterator[None]:
    """Tensors are tiny here: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, *, first: int = 0) -> list[Tensor]:
    """The losses of some steps."""
    losses: list[Tensor] = []
    for number in range(first, first + steps):
        loss = model(batch(number, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def expected() -> list[Tensor]:
    model = stack()
    return trained(model, adamw(model))


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert [first_difference(a, b) for a, b in zip(found, wanted, strict=True)] == [None] * len(wanted)


@dataclass
class Other:
    """A thread that does one thing again and again until it is told to stop."""

    do: Callable[[], Any]
    done: int = 0
    errors: list[BaseException] = field(default_factory=list[BaseException])

    def __enter__(self) -> Other:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.do()
                self.done += 1
                time.sleep(0.001)  # or nobody else would come to anything
            except BaseException as error:
                self.errors.append(error)
                return


def elsewhere(do: Callable[[], Any]) -> BaseException | None:
    """What ``do`` raises on a thread of its own."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            do()
            raised.append(None)
        except BaseException as error:
            raised.append(error.with_traceback(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return raised[0]


# -- who looks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", KEPT)
def test_inference_beside_training(name: str, mode: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    model = stack()
    optimizer = adamw(model)
    lowtide.shard(model, optimizer, **options(name, tmp_path))

    def infer() -> None:
        with mode():
            assert bool(torch.isfinite(model(batch(0, 0))).all())

    with Other(infer) as one, Other(infer) as two:
        losses = trained(model, optimizer)
        while not (one.done and two.done) and not (one.errors or two.errors):
            time.sleep(0.001)
    assert not one.errors + two.errors
    assert_same(losses, expected())


@pytest.mark.parametrize("name", KEPT)
def test_inference_in_several_threads(name: str, tmp_path: Path) -> None:
    model = stack()
    with torch.no_grad():
        wanted = model(batch(0, 0))
    lowtide.shard(model, adamw(model), **options(name, tmp_path))
    found: list[Tensor] = []

    def infer() -> None:
        with torch.inference_mode():
            found.append(model(batch(0, 0)).clone())

    with Other(infer) as one, Other(infer) as two:
        while min(one.done, two.done) < 5 and not one.errors + two.errors:
            infer()
    assert not one.errors + two.errors
    assert_same(found, [wanted] * len(found))


@pytest.mark.parametrize("name", ["in memory", "from disk"])
def test_metadata_beside_training(name: str, tmp_path: Path) -> None:
    model = stack()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    optimizer = adamw(model)
    lowtide.shard(model, optimizer, **options(name, tmp_path))

    def look() -> None:
        assert {n: tuple(p.shape) for n, p in model.named_parameters()} == shapes
        assert all(p.dtype is torch.float32 and p.numel() and p.requires_grad for p in model.parameters())

    with Other(look) as other:
        losses = trained(model, optimizer)
    assert not other.errors
    assert_same(losses, expected())


# -- who would train --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEPT)
def test_second_thread_in_between_is_refused(name: str, tmp_path: Path) -> None:
    """In a forward pass, and in a backward pass; the first goes on."""
    model = stack()
    optimizer = adamw(model)
    lowtide.shard(model, optimizer, **options(name, tmp_path))
    graphs = [model(batch(0, 0)).square().mean() for _ in range(2)] if KEPT[name].get("update") != "backward" else []
    attempts: list[Callable[[], Any]] = [
        lambda: model(batch(1, 0)),
        lambda: model.blocks[0](batch(1, 0)),
        lambda: optimizer.step(),
        lambda: model.state_dict(),
        lambda: optimizer.state_dict(),
        lambda: lowtide.clip_grad_norm_(model, 1.0),
        lambda: lowtide.gathered(model).__enter__(),
        lambda: lowtide.save(tmp_path / "run", model, optimizer),
    ]
    if KEPT[name]["stage"] == 0:
        del attempts[1]  # a part that is whole is as in plain PyTorch, and so is its graph
    elif graphs:
        attempts.append(lambda: graphs.pop().backward())
    raised: list[BaseException | None] = []

    def intrude(*_: Any) -> None:
        raised.extend(elsewhere(attempt) for attempt in attempts)

    handles = [model.blocks[1].register_forward_hook(intrude), model.blocks[1].register_full_backward_hook(intrude)]
    losses = trained(model, optimizer, 1)
    for handle in handles:
        handle.remove()
    assert len(raised) == 2 * len(attempts)
    assert [error for error in raised if not (isinstance(error, Refused) and "One thread at a time" in str(error))] == []
    assert_same([*losses, *trained(model, optimizer, STEPS - 1, first=1)], expected())


def test_values_are_not_there_for_another_thread() -> None:
    """Inside a pass parameters come on demand: for the thread that runs it."""
    model = stack()
    lowtide.shard(model, adamw(model), stage=3)
    raised: list[BaseException | None] = []
    later = model.get_parameter("blocks.2.up.weight")
    model.blocks[0].register_forward_hook(lambda *_: raised.append(elsewhere(lambda: later.sum())))
    model(batch(0, 0))
    assert [type(error) for error in raised] == [Evicted]


def test_two_models_in_two_threads(tmp_path: Path) -> None:
    losses: dict[str, list[Tensor]] = {}

    def train(name: str) -> None:
        torch.manual_seed(0)
        folder = tmp_path / name
        folder.mkdir()
        model = models[name]
        optimizer = adamw(model)
        lowtide.shard(model, optimizer, **options(name, folder))
        losses[name] = trained(model, optimizer)

    models = {name: stack() for name in KEPT}  # the seed is global, in plain PyTorch too
    threads = [threading.Thread(target=train, args=(name,)) for name in KEPT]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(losses) == sorted(KEPT)
    for each in losses.values():
        assert_same(each, expected())


# -- autograd's own threads -------------------------------------------------------------------------------------------


class Deep(torch.autograd.Function):
    """A backward inside a backward inside ... : below some depth autograd runs it on a thread of its own, as it does on an
    accelerator, while the one that began it stands still."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, then: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.then = depth, then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            if ctx.depth:
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1, ctx.then).sum().backward()  # type: ignore[union-attr]
            else:
                ctx.then()
        return grads[0], None, None


def deeply(then: Callable[[], None]) -> None:
    Deep.apply(torch.ones(1, requires_grad=True), 80, then).sum().backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", KEPT)
def test_hooks_run_on_a_thread_of_autograd(name: str, tmp_path: Path) -> None:
    """Also for a gradient that is taken inside a forward pass."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            out = self.inner(x)
            (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            return out + slope.mean()

    def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses: list[Tensor] = []
        threads: set[int] = set()

        def step(number: int) -> None:
            loss = model(batch(number, 0)).square().mean()
            loss.register_hook(lambda _: threads.add(threading.get_ident()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())

        for number in range(3):
            deeply(lambda number=number: step(number))
        assert threading.get_ident() not in threads
        return losses

    plain, model = Penalised(), Penalised()
    optimizer = adamw(model)
    lowtide.shard(model, optimizer, **options(name, tmp_path))
    assert_same(losses_of(model, optimizer), losses_of(plain, adamw(plain)))
