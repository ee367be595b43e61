"""What a caller does after ``loss.backward()`` and before ``optimizer.step()``, where update="backward" has done the update:
the numbers of plain PyTorch, or an error that says why not, and never other numbers without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import lowtide
from lowtide.errors import Error, Evicted, Poisoned, Refused
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, undefined_memory
from tests.kit.parity import Trace, assert_same
from tests.kit.scenarios import adamw, batch, stack

Act = Callable[[nn.Module, Optimizer], Any]


def _halve_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _schedule(model: nn.Module, optimizer: Optimizer) -> None:
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it warns otherwise
    scheduler.step()


def _hook_halves_rate(model: nn.Module, optimizer: Optimizer) -> None:
    handle = optimizer.register_step_pre_hook(lambda opt, args, kwargs: (_halve_rate(model, opt), handle.remove())[1])


def _hook_raises(model: nn.Module, optimizer: Optimizer) -> None:
    def hook(*_: Any) -> None:
        handle.remove()
        raise RuntimeError("not now")

    handle = optimizer.register_step_pre_hook(hook)


def _drop_one(model: nn.Module, optimizer: Optimizer) -> None:
    next(model.parameters()).grad = None


def _replace_one(model: nn.Module, optimizer: Optimizer) -> None:
    param = next(model.parameters())
    param.grad = torch.ones(param.shape)


def _norm_by_hand(model: nn.Module, optimizer: Optimizer) -> Any:
    return sum(p.grad.detach().data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5


def _clip_by_parts(model: nn.Module, optimizer: Optimizer) -> None:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.05, norm)


def _scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))  # which makes its scale
    return scaler


def _write(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad(), lowtide.gathered(model, write=True):
        for param in model.parameters():
            param.mul_(0.5)


def _write_plainly(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def _add_group(model: nn.Module, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    moved = group["params"].pop()
    optimizer.add_param_group({"params": [moved], "lr": 1e-4})


def _twice(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def _accelerates_clip(model: nn.Module, optimizer: Optimizer) -> Any:
    return clip_grad_norm_(list(model.parameters()), 0.05, norm_type=2)  # as Accelerator.clip_grad_norm_ calls it


REFUSED: dict[str, Act] = {
    "norm": lambda m, o: clip_grad_norm_(m.parameters(), 0.05),
    "norm_not_foreach": lambda m, o: clip_grad_norm_(m.parameters(), 0.05, foreach=False),
    "norm_foreach": lambda m, o: clip_grad_norm_(m.parameters(), 0.05, foreach=True),
    "norm_inf": lambda m, o: clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf")),
    "norm_of_one": lambda m, o: clip_grad_norm_(next(m.parameters()), 0.05),
    "norm_accelerate": _accelerates_clip,
    "norm_by_hand": _norm_by_hand,
    "norm_in_parts": _clip_by_parts,
    "value": lambda m, o: clip_grad_value_(m.parameters(), 0.01),
    "value_foreach": lambda m, o: clip_grad_value_(m.parameters(), 0.01, foreach=True),
    "lowtides_norm": lambda m, o: lowtide.clip_grad_norm_(m, 0.05),
    "lowtides_value": lambda m, o: lowtide.clip_grad_value_(m, 0.05),
    "unscale": lambda m, o: _scaler().unscale_(o),
    "scaled_step": lambda m, o: _scaler().step(o),
    "scale_by_hand": lambda m, o: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
    "noise": lambda m, o: [p.grad.add_(0.1) for p in m.parameters() if p.grad is not None],
    "look": lambda m, o: next(m.parameters()).grad.isnan().any(),  # type: ignore[union-attr]
    "copy": lambda m, o: [p.grad.clone() for p in m.parameters() if p.grad is not None],
    "foreach": lambda m, o: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "rate": _halve_rate,
    "schedule": _schedule,
    "rate_in_a_hook": _hook_halves_rate,
    "drop_one": _drop_one,
    "drop_all": lambda m, o: o.zero_grad(),
    "zero_all": lambda m, o: o.zero_grad(set_to_none=False),
    "replace_one": _replace_one,
    "write": _write,
    "write_plainly": _write_plainly,
    "add_group": _add_group,
    "reload_weights": lambda m, o: m.load_state_dict(m.state_dict()),
    "reload_states": lambda m, o: o.load_state_dict(o.state_dict()),
    "twice": _twice,
    "step_with_zeros": lambda m, o: (o.step(), o.zero_grad(set_to_none=False)),
}
"""What changes what the step does, or needs gradients: refused before it changes anything, or at ``step()``."""
ALLOWED: dict[str, Act] = {
    "nothing": lambda m, o: None,
    "freeze": lambda m, o: m.blocks[0].requires_grad_(requires_grad=False),  # type: ignore[union-attr, operator]
    "evaluate": lambda m, o: m(batch(9, 0)),
    "state_dict": lambda m, o: [p.grad is None for p in m.parameters()],
    "mode": lambda m, o: m.eval(),
    "same_rate": lambda m, o: o.param_groups[0].update(lr=float(o.param_groups[0]["lr"])),
}
"""What does not."""


def _train(model: nn.Module, optimizer: Optimizer, act: Act) -> Trace:
    trace = Trace()
    for number in range(4):
        loss = model(batch(number, 0)).square().mean()
        loss.backward()
        trace.add(f"loss {number}", loss)
        if number == 1:
            act(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with lowtide.gathered(model):
        trace.add_all("parameter", model.named_parameters())
    return trace


def _sharded(rank: int, folder: str | None) -> tuple[nn.Module, Optimizer]:
    model = stack()
    where = (
        {"comm": lowtide.Comm(bucket_bytes=0), "update": "backward"} if folder is None else Where("backward").options(folder)
    )
    return lowtide.shard(model, adamw(model), stage=3, **where)


def _refusal(rank: int, world: int, name: str, folder: str | None) -> str:
    model, optimizer = _sharded(rank, folder)
    with undefined_memory(), pytest.raises(Error) as caught:
        _train(model, optimizer, REFUSED[name])
    assert isinstance(caught.value, Refused | Evicted), caught.value
    try:  # what comes after is what has been done in backward, or nothing
        optimizer.step()
    except (Poisoned, Refused) as error:
        return f"{caught.value} Then: {error}"
    return str(caught.value)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_step_is_refused(name: str, disk: bool, tmp_path: Path) -> None:
    text = _refusal(0, 1, name, str(tmp_path) if disk else None)
    assert "update='" in text or "gathered(" in text


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_does_not_change_it_is_not(name: str, disk: bool, tmp_path: Path) -> None:
    model = stack()
    expected = _train(model, adamw(model), ALLOWED[name])
    with undefined_memory():
        got = _train(*_sharded(0, str(tmp_path) if disk else None), ALLOWED[name])
    assert_same(got, expected)


@pytest.mark.parametrize("name", ["norm", "unscale", "rate", "drop_one", "twice", "schedule"])
def test_on_two_ranks(name: str, tmp_path: Path) -> None:
    for text in run_ranks(2, _refusal, name, str(tmp_path)):
        assert "update='" in text


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_a_hook_before_the_step_that_raises(disk: bool, tmp_path: Path) -> None:
    """The update is done by then: going on would be going on with other numbers than plain PyTorch's."""
    model, optimizer = _sharded(0, str(tmp_path) if disk else None)
    with pytest.raises(RuntimeError, match="not now"):
        _train(model, optimizer, _hook_raises)
    with pytest.raises(Poisoned, match="a hook before optimizer"):
        model(batch(0, 0))


def test_a_hook_before_the_step_that_raises_changes_nothing_with_the_usual_update(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> Trace:
        with pytest.raises(RuntimeError, match="not now"):
            _train(model, optimizer, _hook_raises)
        optimizer.zero_grad()
        return _train(model, optimizer, ALLOWED["nothing"])

    expected = train(plain := stack(), adamw(plain))
    model = stack()
    with undefined_memory():
        got = train(*lowtide.shard(model, adamw(model), **Where().options(str(tmp_path))))
    assert_same(got, expected)


def test_two_optimizers_of_one_model() -> None:
    """The one that comes second would take the place of the first."""
    model = stack()
    lowtide.shard(model, adamw(model.blocks), update="backward")
    with pytest.raises(Refused, match="one optimizer for a model"):
        lowtide.shard(model, adamw(model.head))


def test_an_optimizer_that_has_been_replaced() -> None:
    model = stack()
    _, first = lowtide.shard(model, adamw(model), update="backward")
    lowtide.shard(model, adamw(model))
    model(batch(0, 0)).square().mean().backward()
    with pytest.raises(Refused, match="does not update the model any more"):
        first.step()
