"""Hooks that a caller makes: every kind, made at any moment of a loop and removed again, wherever bytes are.

What a hook sees, what it changes and how often it runs are those of plain PyTorch on one rank, and of DDP on two: there a hook
on a gradient sees this rank's own, before ranks are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn.modules.module import register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, left_over, settle, undefined_memory
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_same
from tests.kit.scenarios import adamw, back, batch, loss_of, record_dict, stack, step

Note = Callable[[str, Any], None]
"""What a hook calls to say who it is and what it sees."""
Make = Callable[[Plain, Note], list[Any]]
"""Makes hooks of one kind on a model and its optimizer, and gives their handles."""
KINDS: dict[str, Make] = {}


def kind(make: Make) -> Make:
    KINDS[make.__name__] = make
    return make


def _each(system: Plain) -> list[tuple[str, nn.Parameter]]:
    return list(system.model.named_parameters())


@kind
def gradient_is_there(system: Plain, note: Note) -> list[Any]:
    def hook(name: str, param: Tensor) -> None:
        note(name, param.grad)

    return [p.register_post_accumulate_grad_hook(partial(hook, name)) for name, p in _each(system)]


@kind
def gradient_is_changed(system: Plain, note: Note) -> list[Any]:
    def hook(name: str, param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)
        note(name, param.grad.norm())

    return [p.register_post_accumulate_grad_hook(partial(hook, name)) for name, p in _each(system)]


@kind
def parameter_is_read(system: Plain, note: Note) -> list[Any]:
    """Monitors of the ratio between gradient and weight."""

    def hook(name: str, param: Tensor) -> None:
        assert param.grad is not None
        note(name, param.grad.norm() / param.detach().norm())

    return [p.register_post_accumulate_grad_hook(partial(hook, name)) for name, p in _each(system)]


@kind
def gradient_arrives(system: Plain, note: Note) -> list[Any]:
    return [p.register_hook(partial(note, name)) for name, p in _each(system)]


@kind
def gradient_is_replaced(system: Plain, note: Note) -> list[Any]:
    def hook(name: str, grad: Tensor) -> Tensor:
        note(name, grad)
        return grad.clamp(-0.01, 0.01)

    return [p.register_hook(partial(hook, name)) for name, p in _each(system)]


@kind
def several_gradients(system: Plain, note: Note) -> list[Any]:
    def hook(grads: Any) -> None:
        for number, grad in enumerate(grads):
            note(f"all {number}", grad)

    return [register_multi_grad_hook([p for _, p in _each(system)], hook)]


@kind
def any_gradient(system: Plain, note: Note) -> list[Any]:
    return [register_multi_grad_hook([p for _, p in _each(system)], partial(note, "any"), mode="any")]


@kind
def accumulation_node(system: Plain, note: Note) -> list[Any]:
    nodes = [(name, get_gradient_edge(p).node) for name, p in _each(system)]
    system.model.nodes = nodes  # type: ignore[assignment]  # one that nobody holds is made anew, without its hooks
    return [node.register_prehook(partial(lambda name, grads: note(name, grads[0]), name)) for name, node in nodes]


@kind
def module_backward(system: Plain, note: Note) -> list[Any]:
    def hook(name: str, module: nn.Module, into: Any, out: Any) -> None:
        note(f"{name} out", out[0])
        if into[0] is not None:  # the batch needs no gradient
            note(f"{name} in", into[0])

    return [m.register_full_backward_hook(partial(hook, name)) for name, m in system.model.named_modules()]


@kind
def module_backward_begins(system: Plain, note: Note) -> list[Any]:
    def hook(name: str, module: nn.Module, out: Any) -> None:
        note(name, out[0])

    return [m.register_full_backward_pre_hook(partial(hook, name)) for name, m in system.model.named_modules()]


@kind
def module_gradient_is_changed(system: Plain, note: Note) -> list[Any]:
    def hook(module: nn.Module, into: Any, out: Any) -> Any:
        return tuple(None if grad is None else grad * 0.5 for grad in into)

    return [m.register_full_backward_hook(hook) for m in system.model.blocks]  # type: ignore[union-attr]


@kind
def every_module(system: Plain, note: Note) -> list[Any]:
    def hook(module: nn.Module, into: Any, out: Any) -> None:
        note(type(module).__name__, out[0])

    return [register_module_full_backward_hook(hook)]


@kind
def forward(system: Plain, note: Note) -> list[Any]:
    def before(name: str, module: nn.Module, args: Any) -> None:
        note(f"{name} in", args[0])

    def after(name: str, module: nn.Module, args: Any, out: Tensor) -> None:
        note(f"{name} out", out)
        if out.requires_grad:
            out.register_hook(partial(note, f"{name} gradient"))

    blocks: Any = system.model.blocks
    handles = [b.register_forward_pre_hook(partial(before, str(i))) for i, b in enumerate(blocks)]
    return handles + [b.register_forward_hook(partial(after, str(i))) for i, b in enumerate(blocks)]


@kind
def parameters_in_forward(system: Plain, note: Note) -> list[Any]:
    """Weights are there inside the module that they belong to."""

    def hook(name: str, module: Any, args: Any, out: Tensor) -> None:
        note(f"{name} weight", module.weight)
        module.weight.register_hook(partial(note, f"{name} gradient")) if not hooked.get(name) else None
        hooked[name] = True

    hooked: dict[str, bool] = {}
    linear = [(n, m) for n, m in system.model.named_modules() if isinstance(m, nn.Linear)]
    return [m.register_forward_hook(partial(hook, name)) for name, m in linear]


@kind
def step_begins(system: Plain, note: Note) -> list[Any]:
    return [system.optimizer.register_step_pre_hook(lambda opt, args, kwargs: note("groups", _options(opt)))]


@kind
def step_is_over(system: Plain, note: Note) -> list[Any]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        note("groups", _options(optimizer))
        optimizer.param_groups[0]["lr"] *= 0.9

    return [system.optimizer.register_step_post_hook(hook)]


@kind
def any_step(system: Plain, note: Note) -> list[Any]:
    return [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: note("before", _options(opt))),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: note("after", _options(opt))),
    ]


@kind
def optimizer_state_dicts(system: Plain, note: Note) -> list[Any]:
    def hook(optimizer: torch.optim.Optimizer, state: Any) -> None:
        note("written", torch.tensor(len(state["param_groups"])))

    return [
        system.optimizer.register_state_dict_post_hook(hook),
        system.optimizer.register_state_dict_pre_hook(lambda opt: note("asked", _options(opt))),
    ]


def _options(optimizer: torch.optim.Optimizer) -> Tensor:
    return torch.tensor([[group["lr"], len(group["params"])] for group in optimizer.param_groups], dtype=torch.float64)


MOMENTS = ("before", "after", "between", "in_forward", "in_backward", "in_a_hook")
"""When hooks are made: before and after ``shard``, after the second step, and inside the second step's passes."""
_STEPS = 5


def _loop(
    system: Plain, make: Callable[[], list[Any]], moment: str, trace: Trace, rank: int, accumulate: int, earlier: list[Any]
) -> None:
    handles = list(earlier)

    def now(*_: Any) -> None:
        handles.extend(make())

    def once(register: Callable[[Any], Any]) -> None:
        """Make the hooks inside another one, which then goes."""

        def run(*_: Any) -> None:
            handle.remove()
            now()

        handle = register(run)

    if moment == "after":
        now()
    for number in range(_STEPS):
        if number == 2 and moment == "between":
            now()
        if number == 2 and moment == "in_forward":
            once(lambda run: system.model.blocks[1].register_forward_pre_hook(lambda m, a: run()))  # type: ignore
        if number == 2 and moment == "in_a_hook":
            once(_each(system)[-1][1].register_post_accumulate_grad_hook)
        if number == 4:
            for handle in handles:
                handle.remove()
        for micro in range(accumulate):
            loss = loss_of(system, number * accumulate + micro, rank)
            if number == 2 and micro == 0 and moment == "in_backward":
                loss.register_hook(lambda grad: now())
            back(system, loss)
            trace.add(f"loss {number}", loss)
        system.before_step()
        system.optimizer.step()
        system.optimizer.zero_grad()
        states = system.optimizer.state_dict()  # whole on rank 0; every rank takes part
        trace.add_all(f"state {number}", _named_tensors(states) if rank == 0 else ())
    system.record(trace, _STEPS)


def _named_tensors(tree: Any) -> Iterator[tuple[str, Tensor | None]]:
    trace = Trace()
    record_dict(trace, "optimizer", tree)
    yield from ((name, t) for name, t in trace.entries if "step" in name)


def _run(system: Callable[[nn.Module, Any], Plain], name: str, moment: str, rank: int, accumulate: int) -> Trace:
    seen: dict[str, list[Tensor]] = {}

    def note(who: str, what: Tensor | None) -> None:
        assert what is not None, f"a hook of {who} sees nothing"
        seen.setdefault(who, []).append(what.detach().clone())

    trace, made = Trace(), KINDS[name]
    model = stack()
    optimizer = adamw(model)
    earlier = made(Plain(model, optimizer), note) if moment == "before" else []
    system_ = system(model, optimizer)
    _loop(system_, partial(made, system_, note), moment, trace, rank, accumulate, earlier)
    for who in sorted(seen):
        trace.add_all(f"seen by {who}", ((str(i), value) for i, value in enumerate(seen[who])))
    assert seen or name == "module_gradient_is_changed", "no hook has run"
    return trace


COMM = lowtide.Comm(bucket_bytes=0)
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory": {"memory": "4GiB"},
    "recompute": {"activations": "recompute"},
    "backward": {"update": "backward"},
    "disk": {"where": Where()},
    "disk_unseen": {"where": Where(chunk_bytes=8 << 20, prefetch=2)},
    "disk_backward": {"where": Where("backward")},
}
TOGETHER: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage3_disk": {"stage": 3, "where": Where()},
    "stage3_disk_backward": {"stage": 3, "where": Where("backward")},
}


def _sharded(placement: dict[str, Any], folder: str, model: nn.Module, optimizer: Any) -> Plain:
    options = dict(placement)
    where = options.pop("where", None)
    system = Sharded(model, optimizer, **({"comm": COMM} if where is None else where.options(folder)), **options)
    if where is not None:
        settle(model, where.resident)
    return system


def _accumulate(placement: dict[str, Any]) -> int:
    where = placement.get("where")
    return 1 if placement.get("update") == "backward" or (where is not None and where.update == "backward") else 2


def _difference(rank: int, world: int, name: str, moment: str, placement: dict[str, Any], folder: str) -> str | None:
    accumulate = _accumulate(placement)
    expected = _run(Plain if world == 1 else Hand, name, moment, rank, accumulate)
    systems: list[Plain] = []

    def shard(model: nn.Module, optimizer: Any) -> Plain:
        systems.append(_sharded(placement, folder, model, optimizer))
        return systems[0]

    with undefined_memory():
        got = _run(shard, name, moment, rank, accumulate)
        left = left_over(engine_of(systems[0].model)) if "where" in placement else None
    try:
        assert_same(got, expected)
    except AssertionError as error:
        return str(error)
    return left


def _check(ranks: int, name: str, moment: str, placement: dict[str, Any], folder: Path) -> None:
    found = run_ranks(ranks, _difference, name, moment, placement, str(folder))
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


_TWICE = {("memory", "parameters_in_forward"), ("recompute", "parameters_in_forward")}
"""Hooks on a module inside a unit that is computed again run again with it."""
_ON_ONE = [(where, name) for where in ALONE for name in KINDS if (where, name) not in _TWICE]
_ON_TWO = [(where, name) for where in TOGETHER for name in KINDS]


@pytest.mark.thinned(28)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("placement", "name"), _ON_ONE)
def test_on_one_rank(placement: str, name: str, moment: str, tmp_path: Path) -> None:
    _check(1, name, moment, ALONE[placement], tmp_path)


@pytest.mark.thinned(90)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("placement", "name"), _ON_TWO)
def test_on_two_ranks(placement: str, name: str, moment: str, tmp_path: Path) -> None:
    _check(2, name, moment, TOGETHER[placement], tmp_path)


# -- hooks that do more than look -------------------------------------------------------------------------------------


def _step_in_backward(model: nn.Module, numbers: int, losses: Trace, *, drop: bool) -> None:
    """PyTorch's tutorial: an optimizer for each parameter, which steps as soon as the gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def hook(param: Any) -> None:
        losses.add("gradient", param.grad)
        optimizers[param].step()
        optimizers[param].zero_grad(set_to_none=drop)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for number in range(numbers):
        loss = model(batch(number, 0)).square().mean()
        loss.backward()
        losses.add("loss", loss)
    losses.add_all("parameter", model.state_dict().items())


@pytest.mark.parametrize("drop", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize("placement", ALONE)
def test_the_optimizer_steps_in_backward(placement: str, drop: bool, tmp_path: Path) -> None:
    expected, got = Trace(), Trace()
    _step_in_backward(stack(), 4, expected, drop=drop)
    model = stack()
    options = dict(ALONE[placement])
    where = options.pop("where", None)
    with undefined_memory():
        lowtide.shard(model, **(options | {"comm": COMM} if where is None else where.options(str(tmp_path))))
        _step_in_backward(model, 4, got, drop=drop)
    assert_same(got, expected)


def _refused_on_ranks(rank: int, world: int, placement: dict[str, Any], drop: bool, folder: str) -> str:
    options = dict(placement)
    where = options.pop("where", None)
    model = stack()
    lowtide.shard(model, **(({"comm": COMM} if where is None else where.options(folder)) | options))
    with pytest.raises(Error) as caught:
        _step_in_backward(model, 2, Trace(), drop=drop)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("drop", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize("placement", ["stage0", "stage2", "stage3", "stage3_disk"])
def test_it_is_refused_where_ranks_would_part(placement: str, drop: bool, tmp_path: Path) -> None:
    for text in run_ranks(2, _refused_on_ranks, TOGETHER[placement], drop, str(tmp_path)):
        assert "post-accumulate-grad hook has" in text
        assert "update='backward'" in text


@pytest.mark.parametrize("placement", ALONE)
def test_a_hook_made_while_the_gradient_arrives(placement: str, tmp_path: Path) -> None:
    """After our own hooks have begun, and before autograd has accumulated: what is made then runs in this very pass."""

    def run(system: Plain) -> Trace:
        trace = Trace()

        def look(param: Tensor) -> None:
            trace.add("seen", param.grad)

        for number in range(3):
            handles: list[Any] = []

            def make(grad: Tensor) -> None:
                handles.append(weight.register_post_accumulate_grad_hook(look))  # noqa: B023

            weight: Any = system.model.blocks[1].norm.weight  # type: ignore[union-attr, index]
            handles.append(weight.register_hook(make))
            step(system, trace, number, 0)
            for handle in handles:
                handle.remove()
        return trace

    where = ALONE[placement].get("where")
    expected = run(Plain(model := stack(), adamw(model)))
    got = run(_sharded(ALONE[placement], str(tmp_path), model := stack(), adamw(model)))
    assert where is None or left_over(engine_of(model)) is None
    assert_same(got, expected)
