"""What a training script does besides the plain loop, with everything on disk: the same numbers, or a refusal that says why."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Poisoned, Refused
from tests.kit.dist import run_ranks
from tests.kit.lifetime import collected
from tests.kit.out_of_core import Unseen, Where, comparable, left_over, settle, slowed, undefined_memory
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_bitwise, assert_same
from tests.kit.scenarios import SCENARIOS, adamw, back, batch, loss_of, stack, update

ONE_BACKWARD = "one backward per step"
STILL_NEEDED = "the graph still needs unit"
REFUSED_IN_BACKWARD = {
    "two_forwards_before_backward": STILL_NEEDED,
    "retain_graph": STILL_NEEDED,
    "partial_backward": STILL_NEEDED,
    "abandoned_graphs": ONE_BACKWARD,
    "generator_and_critic": ONE_BACKWARD,
}
"""Loops that need gradients after backward, or more than one backward per step, and what a caller who tries is told."""
DIFFERENT_IN_BACKWARD = ("step_hooks", "optimizer_of_a_part", "grad_scaler", "clip_by_value")
"""Loops that do something between backward and step which an update in backward cannot see: hooks before the step, gradients,
unscaling, clipping."""


def _scenario(rank: int, world: int, name: str, stage: int, where: Where, folder: str) -> str | None:
    expected, got = Trace(), Trace()
    SCENARIOS[name](Plain if world == 1 else Hand, rank, expected)
    engines: list[Any] = []

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Plain:
        system = (Sharded if where.looks else Unseen)(model, optimizer, stage=stage, **where.options(folder))
        engines.append(settle(model, where.resident))
        return system

    with warnings.catch_warnings(), undefined_memory(), slowed(where.slow):
        warnings.simplefilter("error")
        SCENARIOS[name](make, rank, got)
        left = next((text for engine in engines if (text := left_over(engine))), None)
    try:
        assert_same(comparable(got, where), comparable(expected, where))
    except AssertionError as error:
        return str(error)
    return left


def _check_scenario(ranks: int, name: str, stage: int, where: Where, folder: Path) -> None:
    found = run_ranks(ranks, _scenario, name, stage, where, str(folder))
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("looks", [pytest.param(True, marks=pytest.mark.soak), False], ids=["seen", "unseen"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_same_numbers(name: str, looks: bool, tmp_path: Path) -> None:
    _check_scenario(1, name, 3, Where(looks=looks), tmp_path)


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_numbers_on_two_ranks(name: str, tmp_path: Path) -> None:
    _check_scenario(2, name, list(SCENARIOS).index(name) % 4, Where(), tmp_path)


@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in REFUSED_IN_BACKWARD and n not in DIFFERENT_IN_BACKWARD])
def test_same_numbers_in_backward(name: str, tmp_path: Path) -> None:
    ranks = list(SCENARIOS).index(name) % 2 + 1
    _check_scenario(ranks, name, 3, Where("backward"), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "where", [Where(u, c, r, slow=0.002) for u in ("step", "backward") for c in (4096, 8 << 20) for r in (0, 2)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_same_numbers_everywhere(name: str, ranks: int, stage: int, where: Where, tmp_path: Path) -> None:
    if where.update == "backward" and (name in REFUSED_IN_BACKWARD or name in DIFFERENT_IN_BACKWARD):
        return
    _check_scenario(ranks, name, stage, where, tmp_path)


def _refused(rank: int, world: int, name: str, folder: str) -> str:
    with pytest.raises(Refused) as caught:
        SCENARIOS[name](lambda m, o: Sharded(m, o, stage=3, **Where("backward").options(folder)), rank, Trace())
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED_IN_BACKWARD)
def test_refused_in_backward(name: str, tmp_path: Path) -> None:
    for text in run_ranks(1, _refused, name, str(tmp_path)):
        assert REFUSED_IN_BACKWARD[name] in text
        assert "update='step'" in text


# -- in this very process ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainee(folder: Path, where: Where, *, seed: int = 0, optimizer: Any = adamw, **options: Any) -> Sharded:
    model = stack(seed)
    system = Sharded(model, optimizer(model), stage=3, **{**where.options(str(folder)), **options})
    settle(model, where.resident)
    return system


def step(system: Plain, number: int) -> Tensor:
    loss = loss_of(system, number, 0)
    loss.backward()
    system.optimizer.step()
    system.optimizer.zero_grad()
    return loss.detach()


def values(model: nn.Module) -> dict[str, Tensor]:
    with lowtide.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_values(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert_bitwise(got[name], value, name)


def assert_nothing_left(model: nn.Module) -> None:
    assert left_over(engine_of(model)) is None


BOTH = pytest.mark.parametrize("when", ["step", "backward"])


@BOTH
def test_from_plain_to_sharded_and_back(when: str, tmp_path: Path) -> None:
    """State_dicts of model and optimizer pass from a plain job to one on disk and back, and the steps go on as if in one."""
    reference = Plain(model := stack(), adamw(model))
    for number in range(6):
        step(reference, number)

    plain = Plain(model := stack(), adamw(model))
    for number in range(2):
        step(plain, number)
    sharded = trainee(tmp_path, Where(when), seed=9)
    sharded.model.load_state_dict(plain.model.state_dict())
    sharded.optimizer.load_state_dict(plain.optimizer.state_dict())
    for number in range(2, 4):
        step(sharded, number)
    again = Plain(model := stack(7), adamw(model))
    again.model.load_state_dict(sharded.model.state_dict())
    again.optimizer.load_state_dict(sharded.optimizer.state_dict())
    for number in range(4, 6):
        step(again, number)
    assert_same_values(values(again.model), values(reference.model))
    assert_nothing_left(sharded.model)


def _reload(rank: int, world: int, when: str, folder: str) -> None:
    """A state_dict of two ranks, loaded by two ranks, repeats the same steps; counters of states on the other rank too."""
    model = stack()
    system = Sharded(model, adamw(model), stage=3, **Where(when).options(folder))

    def run(numbers: range) -> dict[str, Tensor]:
        for number in numbers:
            loss_of(system, number, rank).backward()
            system.optimizer.step()
            system.optimizer.zero_grad()
        return values(model)

    run(range(2))
    box: list[Any] = [(model.state_dict(), system.optimizer.state_dict())]
    torch.distributed.broadcast_object_list(box, 0)
    weights, states = box[0]
    first = run(range(2, 4))
    model.load_state_dict(weights)
    system.optimizer.load_state_dict(states)
    second = run(range(2, 4))
    assert_same_values(second, first)
    counters = [s["step"] for s in system.optimizer.state_dict().get("state", {}).values()]
    assert all(int(c) == 4 for c in counters), counters


@BOTH
def test_reload_on_two_ranks(when: str, tmp_path: Path) -> None:
    run_ranks(2, _reload, when, str(tmp_path))


@BOTH
def test_an_optimizer_that_comes_later(when: str, tmp_path: Path) -> None:
    plain = Plain(model := stack(), adamw(model))
    model = stack()
    lowtide.shard(model, stage=3, **Where(when).options(str(tmp_path)))
    _, optimizer = lowtide.shard(model, adamw(model))
    for number in range(3):
        step(plain, number)
        loss = model(batch(number, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_values(values(model), values(plain.model))


def test_clipping_with_torch(tmp_path: Path) -> None:
    """One rank has whole gradients: torch's own clipping gives its usual bits."""
    traces = Trace(), Trace()
    for trace, system in zip(traces, (Plain(m := stack(), adamw(m)), trainee(tmp_path, Where())), strict=True):
        for number in range(3):
            back(system, loss_of(system, number, 0))
            norm = torch.nn.utils.clip_grad_norm_(system.model.parameters(), 0.05, foreach=[None, True, False][number])
            trace.add(f"norm {number}", norm)
            update(system, trace, number)
    assert_same(traces[1], traces[0])


@pytest.mark.parametrize("clip", [lowtide.clip_grad_norm_, lowtide.clip_grad_value_])
def test_clipping_is_refused_with_updates_in_backward(clip: Callable[..., Any], tmp_path: Path) -> None:
    """There is nothing left to clip: to do nothing and say so would train with unclipped gradients."""
    system = trainee(tmp_path, Where("backward"))
    loss_of(system, 0, 0).backward()
    with pytest.raises(Refused, match="update='step'"):
        clip(system.model, 1.0)


@BOTH
def test_gathered_for_writing(when: str, tmp_path: Path) -> None:
    """What is written is on disk afterwards: read back after everything was dropped from memory."""
    system = trainee(tmp_path, Where(when))
    step(system, 0)
    with lowtide.gathered(system.model, write=True), torch.no_grad():
        for index, p in enumerate(system.model.parameters()):
            p.fill_(index)
    assert_nothing_left(system.model)
    for index, value in enumerate(values(system.model).values()):
        assert (value == index).all()


# -- gradients that are not finite ------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """Lets numbers pass, and spoils the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * float("nan") if ctx.bad else gradient, None


def spoiled(system: Plain, *, after: int) -> Tensor:
    """A loss in whose backward the gradients of the first ``after`` blocks are not finite, and later ones are."""
    model = system.model

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return Poison.apply(block(x), block is model.blocks[after - 1])  # pyright: ignore

    model.run, before = run, model.run  # pyright: ignore
    try:
        return model(batch(5, 0)).square().mean()
    finally:
        model.run = before  # pyright: ignore


@pytest.mark.parametrize("resident", ["disk", "gradients", "mixed"])
def test_a_bad_gradient_changes_nothing(resident: str, tmp_path: Path) -> None:
    system = trainee(tmp_path, Where(resident=resident))
    step(system, 0)
    weights, states = values(system.model), system.optimizer.state_dict()
    spoiled(system, after=2).backward()
    system.optimizer.step()
    assert system.optimizer.step_was_skipped
    system.optimizer.zero_grad()
    assert_same_values(values(system.model), weights)
    for index, state in system.optimizer.state_dict()["state"].items():
        assert_same_values(state, states["state"][index])
    reference = Plain(m := stack(), adamw(m))
    for number in range(2):
        step(reference, number)
    step(system, 1)
    assert_same_values(values(system.model), values(reference.model))
    assert_nothing_left(system.model)


def test_a_bad_gradient_in_the_first_unit_of_backward_changes_nothing(tmp_path: Path) -> None:
    system = trainee(tmp_path, Where("backward"))
    step(system, 0)
    weights = values(system.model)
    (model := system.model)(batch(5, 0)).mul(float("nan")).sum().backward()
    system.optimizer.step()
    assert system.optimizer.step_was_skipped
    assert_same_values(values(model), weights)
    system.optimizer.zero_grad()
    reference = Plain(m := stack(), adamw(m))
    for number in range(2):
        step(reference, number)
    step(system, 1)
    assert_same_values(values(model), values(reference.model))
    assert_nothing_left(model)


def test_a_bad_gradient_after_an_update_in_backward_poisons(tmp_path: Path) -> None:
    """The head is updated by then: neither taken back nor taken on."""
    system = trainee(tmp_path, Where("backward"))
    step(system, 0)
    weights, states = system.model.state_dict(), system.optimizer.state_dict()
    with pytest.raises(Refused, match="not finite"):
        spoiled(system, after=2).backward()
    for call in (system.model.state_dict, system.optimizer.step, system.optimizer.state_dict, lambda: step(system, 1)):
        with pytest.raises(Poisoned):
            call()
    system.model.load_state_dict(weights)
    system.optimizer.load_state_dict(states)
    reference = Plain(m := stack(), adamw(m))
    for number in range(2):
        step(reference, number)
    step(system, 1)
    assert_same_values(values(system.model), values(reference.model))
    assert_nothing_left(system.model)


# -- one backward per step --------------------------------------------------------------------------------------------


def test_a_second_backward_is_refused_and_the_step_still_counts(tmp_path: Path) -> None:
    system = trainee(tmp_path, Where("backward"))
    loss_of(system, 0, 0).backward()
    with pytest.raises(Refused, match=ONE_BACKWARD):
        loss_of(system, 1, 0).backward()
    system.optimizer.step()
    with pytest.raises(Refused, match="zero_grad"):
        loss_of(system, 1, 0).backward()  # plain PyTorch would add to gradients that are gone
    system.optimizer.zero_grad()
    reference = Plain(m := stack(), adamw(m))
    for number in range(2):
        step(reference, number)
    step(system, 1)
    assert_same_values(values(system.model), values(reference.model))
    assert_nothing_left(system.model)


def test_a_retained_graph_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    system = trainee(tmp_path, Where("backward"))
    weights = values(system.model)
    loss = loss_of(system, 0, 0)
    with pytest.raises(Refused, match=STILL_NEEDED):
        loss.backward(retain_graph=True)
    del loss
    assert_same_values(values(system.model), weights)
    reference = Plain(m := stack(), adamw(m))
    assert_bitwise(step(system, 0), step(reference, 0), "loss")
    assert_same_values(values(system.model), values(reference.model))
    assert_nothing_left(system.model)


# -- exceptions -------------------------------------------------------------------------------------------------------


class Stop(RuntimeError):
    """Raised by a caller's code in the middle of a pass."""


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Stop


@BOTH
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_forward_leaves_nothing_behind(at: int, when: str, tmp_path: Path) -> None:
    system, reference = trainee(tmp_path, Where(when)), Plain(m := stack(), adamw(m))
    for number in range(3):
        assert_bitwise(step(system, number), step(reference, number), f"loss {number}")

        def fail(*_: Any) -> None:
            raise Stop

        handle = system.model.blocks[at].down.register_forward_pre_hook(fail)
        with pytest.raises(Stop):
            loss_of(system, 10, 0)
        handle.remove()
        assert_nothing_left(system.model)
    assert_same_values(values(system.model), values(reference.model))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_backward_leaves_nothing_behind(at: int, tmp_path: Path) -> None:
    system, reference = trainee(tmp_path, Where()), Plain(m := stack(), adamw(m))
    plain_run = system.model.run
    for number in range(3):
        step(system, number)
        step(reference, number)
        system.model.run = lambda block, x: Raises.apply(block(x)) if block is system.model.blocks[at] else block(x)
        with pytest.raises(Stop):
            loss_of(system, 10, 0).backward()
        system.model.run = plain_run
        system.optimizer.zero_grad()
        engine_of(system.model).check()
        assert_nothing_left(system.model)
    assert_same_values(values(system.model), values(reference.model))


def test_an_exception_in_backward_before_the_first_update_changes_nothing(tmp_path: Path) -> None:
    system, reference = trainee(tmp_path, Where("backward")), Plain(m := stack(), adamw(m))
    with pytest.raises(Stop):
        Raises.apply(loss_of(system, 10, 0)).backward()
    assert_nothing_left(system.model)
    for number in range(2):
        assert_bitwise(step(system, number), step(reference, number), f"loss {number}")
    assert_same_values(values(system.model), values(reference.model))


@pytest.mark.parametrize("look", ["forward", "state_dict", "step", "gathered"])
def test_an_exception_in_backward_after_an_update_poisons(look: str, tmp_path: Path) -> None:
    """Some units are new, some old: whatever is called next raises."""
    system = trainee(tmp_path, Where("backward"))
    plain_run = system.model.run
    system.model.run = lambda block, x: Raises.apply(block(x)) if block is system.model.blocks[0] else block(x)
    with pytest.raises(Stop):
        loss_of(system, 0, 0).backward()
    system.model.run = plain_run
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss_of(system, 0, 0),
        "state_dict": system.model.state_dict,
        "step": system.optimizer.step,
        "gathered": lambda: values(system.model),
    }
    with pytest.raises(Poisoned):
        calls[look]()
    engine = engine_of(system.model)
    assert engine.store is not None
    engine.store.drain()
    assert engine.buffers_arena.taken_bytes == 0


# -- the end ----------------------------------------------------------------------------------------------------------


def _left_behind(folder: str, when: str) -> tuple[int, int, list[str]]:
    def use() -> weakref.ref[nn.Module]:
        system = trainee(Path(folder), Where(when))
        step(system, 0)
        step(system, 1)
        return weakref.ref(system.model)

    def held(*models: weakref.ref[nn.Module]) -> tuple[int, int]:
        collected(*models)
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = held(use())
    after = held(*[use() for _ in range(3)])
    return after[0] - before[0], after[1] - before[1], os.listdir(folder)


@BOTH
def test_a_dropped_model_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    threads, files, names = _left_behind(str(tmp_path), when)
    assert threads <= 0, f"{threads} threads more after 3 models"
    assert files <= 0, f"{files} open files more after 3 models"
    assert names == [], "the folder is not empty"
