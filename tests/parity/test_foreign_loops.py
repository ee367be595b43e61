"""Loops nobody here chose: what papers, tutorials and frameworks do around a model, with plain PyTorch's bits, or a refusal.

A loop is a function ``loop(make, rank, trace)``: it builds models and optimizers, hands each pair to ``make`` (which shards it,
or does not) and records its numbers. It knows nothing about sharding, but for ``gathered`` where values are looked at outside a
forward pass, and for what the several-rank oracle needs (``before_forward``, ``back``, ``before_step``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error, Evicted, Poisoned, Refused
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, left_over, settle, undefined_memory
from tests.kit.parity import Hand, Plain, Sharded, Trace, assert_same
from tests.kit.scenarios import adamw, back, batch, from_rank_0, record_dict, stack
from tests.kit.specimen import WIDTH

Make = Callable[[nn.Module, Optimizer], Plain]
Loop = Callable[[Make, int, Trace], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def sgd(model: nn.Module) -> SGD:
    return SGD((p for p in model.parameters() if p.requires_grad), lr=1e-2, momentum=0.9)


def wide(x: Tensor) -> Tensor:
    """An output as an input."""
    return F.pad(x, (0, WIDTH - x.shape[-1]))


def forward(system: Plain, x: Tensor) -> Tensor:
    system.before_forward()
    return system.forward(x)


def take_step(system: Plain) -> None:
    system.before_step()
    system.optimizer.step()
    system.optimizer.zero_grad()


def train(system: Plain, trace: Trace, numbers: range, rank: int) -> None:
    for number in numbers:
        loss = forward(system, batch(number, rank)).square().mean()
        trace.add(f"loss {number}", loss)
        back(system, loss)
        take_step(system)


def record(trace: Trace, **systems: Plain) -> None:
    for name, system in systems.items():
        trace.add(name, None)
        system.record(trace, 0)


# -- two models -------------------------------------------------------------------------------------------------------


@loop
def gan(make: Make, rank: int, trace: Trace) -> None:
    """The generator's loss leaves gradients in the critic, which are cleared before the critic's own step."""
    maker, critic = make(m := stack(1, 2), adamw(m)), make(m := stack(2, 2), sgd(m))
    for number in range(3):
        fake = forward(maker, batch(number, rank))
        critic.optimizer.zero_grad()
        real = forward(critic, batch(50 + number, rank))
        loss = F.softplus(-real).mean() + F.softplus(forward(critic, wide(fake.detach()))).mean()
        back(critic, loss)
        take_step(critic)
        cheat = F.softplus(-forward(critic, wide(fake))).mean()
        back(maker, cheat)
        take_step(maker)
        critic.after_backward(synced=True)
        critic.before_step()
        critic.optimizer.zero_grad()
        trace.add(f"critic {number}", loss)
        trace.add(f"maker {number}", cheat)
    record(trace, maker=maker, critic=critic)


@loop
def gan_with_a_frozen_critic(make: Make, rank: int, trace: Trace) -> None:
    """As in CycleGAN: the critic needs no gradients while the generator learns."""
    maker, critic = make(m := stack(1, 2), adamw(m)), make(m := stack(2, 2), adamw(m))
    for number in range(3):
        critic.model.requires_grad_(requires_grad=False)
        fake = forward(maker, batch(number, rank))
        cheat = F.softplus(-forward(critic, wide(fake))).mean()
        back(maker, cheat)
        take_step(maker)
        critic.model.requires_grad_(requires_grad=True)
        loss = forward(critic, wide(fake.detach())).mean() - forward(critic, batch(50 + number, rank)).mean()
        back(critic, loss)
        take_step(critic)
        trace.add(f"critic {number}", loss)
        trace.add(f"maker {number}", cheat)
    record(trace, maker=maker, critic=critic)


@loop
def actor_and_critic(make: Make, rank: int, trace: Trace) -> None:
    actor, critic = make(m := stack(1, 2), adamw(m)), make(m := stack(2, 2), sgd(m))
    for number in range(3):
        state = batch(number, rank)
        logits, value = forward(actor, state), forward(critic, state).mean(-1)
        action = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            advantage = 1.0 + 0.9 * critic.model(batch(number + 1, rank)).mean(-1) - value
        policy_loss = -(logits.log_softmax(-1).gather(-1, action).squeeze(-1) * advantage).mean()
        value_loss = F.mse_loss(value, advantage + value.detach())
        back(actor, policy_loss)
        take_step(actor)
        back(critic, value_loss)
        take_step(critic)
        trace.add(f"actor {number}", policy_loss)
        trace.add(f"critic {number}", value_loss)
    record(trace, actor=actor, critic=critic)


@loop
def one_loss_of_two_models(make: Make, rank: int, trace: Trace) -> None:
    """An encoder and a decoder with an optimizer each, and one backward through both."""
    encoder, decoder = make(m := stack(1, 2), adamw(m)), make(m := stack(2, 2), sgd(m))
    for number in range(3):
        code = forward(encoder, batch(number, rank))
        loss = forward(decoder, wide(code)).square().mean()
        back(encoder, loss)
        decoder.after_backward(synced=True)
        take_step(encoder)
        take_step(decoder)
        trace.add(f"loss {number}", loss)
    record(trace, encoder=encoder, decoder=decoder)


@loop
def distillation(make: Make, rank: int, trace: Trace) -> None:
    """A frozen teacher of the same placement, which has no optimizer of its own to speak of."""
    teacher, student = stack(5), make(m := stack(1, 2), adamw(m))
    teacher.requires_grad_(requires_grad=False).eval()
    guide = make(teacher, SGD(teacher.parameters(), lr=0.1))
    for number in range(3):
        x = batch(number, rank)
        with torch.no_grad():
            soft = guide.model(x).softmax(-1)
        loss = F.kl_div(forward(student, x).log_softmax(-1), soft, reduction="batchmean")
        back(student, loss)
        take_step(student)
        trace.add(f"loss {number}", loss)
    record(trace, student=student, guide=guide)


@loop
def distillation_from_a_plain_teacher(make: Make, rank: int, trace: Trace) -> None:
    """The teacher is kept in memory, plain, and gives its features through hooks under inference mode."""
    teacher, student = stack(5).eval(), make(m := stack(1), adamw(m))
    features: list[Tensor] = []
    teacher.blocks[1].register_forward_hook(lambda module, args, out: features.append(out))
    mine: list[Tensor] = []
    student.model.blocks[1].register_forward_hook(lambda module, args, out: mine.append(out))  # type: ignore[union-attr, index]
    for number in range(3):
        x = batch(number, rank)
        with torch.inference_mode():
            teacher(x)
        out = forward(student, x)
        loss = F.mse_loss(mine.pop(), features.pop().clone()) + out.square().mean()
        mine.clear()
        back(student, loss)
        take_step(student)
        trace.add(f"loss {number}", loss)
    record(trace, student=student)


@loop
def deep_q_learning(make: Make, rank: int, trace: Trace) -> None:
    """The target network is a copy from before, and takes the online network's state_dict every second step."""
    net = stack(1)
    old = copy.deepcopy(net).requires_grad_(requires_grad=False)
    online, target = make(net, adamw(net)), make(old, SGD(old.parameters(), lr=0.1))
    for number in range(4):
        state, following = batch(number, rank), batch(number + 1, rank)
        action = torch.full((len(state), 1), number % 5)
        with torch.no_grad():
            wanted = 0.5 + 0.9 * target.model(following).max(-1, keepdim=True).values
        loss = F.smooth_l1_loss(forward(online, state).gather(-1, action), wanted)
        back(online, loss)
        take_step(online)
        trace.add(f"loss {number}", loss)
        if number % 2:
            target.model.load_state_dict(from_rank_0(online.model.state_dict()))
    record(trace, online=online, target=target)


# -- copies and averages of weights -----------------------------------------------------------------------------------


@loop
def ema_with_a_warm_up(make: Make, rank: int, trace: Trace) -> None:
    """A plain copy of the weights, which the average joins from the third step on."""
    model = stack()
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    system = make(model, adamw(model))
    for number in range(5):
        train(system, trace, range(number, number + 1), rank)
        if number >= 2:
            with lowtide.gathered(system.model), torch.no_grad():
                for mean, param in zip(average.parameters(), system.model.parameters(), strict=True):
                    mean.lerp_(param, 0.1)
        with torch.no_grad():
            trace.add(f"teacher {number}", average(batch(90, rank)))
    trace.add_all("average", average.state_dict().items())


@loop
def a_teacher_that_follows(make: Make, rank: int, trace: Trace) -> None:
    """As in mean teacher and BYOL: the teacher is sharded, too, and begins to follow its student in the second step."""
    net = stack(1)
    double = copy.deepcopy(net).requires_grad_(requires_grad=False)
    student, teacher = make(net, adamw(net)), make(double, SGD(double.parameters(), lr=0.1))
    for number in range(4):
        x = batch(number, rank)
        with torch.no_grad():
            goal = teacher.model(x)
        loss = F.mse_loss(forward(student, x), goal + 1.0)
        back(student, loss)
        take_step(student)
        trace.add(f"loss {number}", loss)
        if number >= 1:
            with lowtide.gathered(student.model), lowtide.gathered(teacher.model, write=True), torch.no_grad():
                for mine, theirs in zip(teacher.model.parameters(), student.model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
    record(trace, teacher=teacher)


@loop
def averaged_model(make: Make, rank: int, trace: Trace) -> None:
    """torch.optim.swa_utils."""
    model = stack()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    system = make(model, adamw(model))
    for number in range(4):
        train(system, trace, range(number, number + 1), rank)
        if number >= 1:
            with lowtide.gathered(system.model):
                average.update_parameters(system.model)
    trace.add_all("average", average.state_dict().items())


@loop
def lr_finder(make: Make, rank: int, trace: Trace) -> None:
    """Weights and states are kept in memory, the rate grows from step to step, and all is put back."""
    model = stack()
    system = make(model, adamw(model))
    train(system, trace, range(2), rank)
    weights, states = copy.deepcopy((system.model.state_dict(), system.optimizer.state_dict()))
    finder = LambdaLR(system.optimizer, lambda number: 1.5**number)
    for number in range(2, 5):
        train(system, trace, range(number, number + 1), rank)
        finder.step()
    system.model.load_state_dict(from_rank_0(weights))
    system.optimizer.load_state_dict(from_rank_0(states))
    train(system, trace, range(5, 7), rank)
    record(trace, system=system)


# -- parts of a model -------------------------------------------------------------------------------------------------


@loop
def alternating_frozen_parts(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(6):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(requires_grad=number % 3 == index)
        train(system, trace, range(number, number + 1), rank)
    record(trace, system=system)


@loop
def pretrained_then_fine_tuned(make: Make, rank: int, trace: Trace) -> None:
    """The head first, with a rate of its own; then block by block joins."""
    model = stack()
    model.blocks.requires_grad_(requires_grad=False)
    system = make(model, AdamW(model.head.parameters(), lr=1e-2))
    train(system, trace, range(2), rank)
    for number, block in enumerate(reversed(list(model.blocks))):
        block.requires_grad_(requires_grad=True)
        system.optimizer.add_param_group({"params": list(block.parameters()), "lr": 1e-3 / (1 + number)})
        train(system, trace, range(2 + number, 3 + number), rank)
    record(trace, system=system)
    if rank == 0:
        trace.add(f"groups {len(system.optimizer.param_groups)}", None)


@loop
def siamese(make: Make, rank: int, trace: Trace) -> None:
    """One network, several inputs, one contrastive loss."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(3):
        a, b, c = (forward(system, batch(3 * number + i, rank)) for i in range(3))
        loss = F.relu((a - b).square().sum(-1) - (a - c).square().sum(-1) + 1.0).mean()
        back(system, loss)
        take_step(system)
        trace.add(f"loss {number}", loss)
    record(trace, system=system)


@loop
def sharpness_aware(make: Make, rank: int, trace: Trace) -> None:
    """Climb to a worse place nearby, take the gradient there, and step from where the weights were."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(3):
        first = forward(system, batch(number, rank)).square().mean()
        back(system, first)
        system.before_step()
        with torch.no_grad(), lowtide.gathered(system.model, write=True):
            for param in system.model.parameters():
                param.add_(0.01)
        system.optimizer.zero_grad()
        second = forward(system, batch(number, rank)).square().mean()
        back(system, second)
        system.before_step()
        with torch.no_grad(), lowtide.gathered(system.model, write=True):
            for param in system.model.parameters():
                param.sub_(0.01)
        system.optimizer.step()
        system.optimizer.zero_grad()
        trace.add(f"first {number}", first)
        trace.add(f"second {number}", second)
    record(trace, system=system)


@loop
def inner_loop(make: Make, rank: int, trace: Trace) -> None:
    """MAML: fast weights are made with torch.func and walked through."""
    model = stack(count=1)
    system = make(model, adamw(model))
    for number in range(2):
        system.before_forward()
        weights = dict(system.model.named_parameters())
        inner = functional_call(system.model, weights, (batch(number, rank),)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        loss = functional_call(system.model, fast, (batch(10 + number, rank),)).square().mean()
        back(system, loss)
        take_step(system)
        trace.add(f"loss {number}", loss)
    record(trace, system=system)


# -- passes that end early, and moments between them ------------------------------------------------------------------


class _Enough(Exception):
    """Raised inside a forward or backward pass to leave it."""


@loop
def exceptions_while_accumulating(make: Make, rank: int, trace: Trace) -> None:
    """A bad sample is caught and left out, and the step goes on with the others."""
    model = stack()
    system = make(model, adamw(model))
    bad = [False]

    def check(module: nn.Module, args: Any) -> None:
        if bad[0]:
            raise _Enough

    model.blocks[1].register_forward_pre_hook(check)
    for number in range(6):
        bad[0] = number % 3 == 1
        try:
            loss = forward(system, batch(number, rank)).square().mean() / 2
        except _Enough:
            trace.add(f"left out {number}", None)
            continue
        back(system, loss)
        trace.add(f"loss {number}", loss)
        if number % 3 == 2:
            take_step(system)
    record(trace, system=system)


def _failing(make: Make, rank: int, trace: Trace, *, by: str, accumulate: int, clears: bool) -> None:
    """Every third backward pass fails in its middle, is caught, and the loop goes on, with cleared gradients or without."""
    model = stack()
    system = make(model, adamw(model))
    bad = [False]

    def fail(*_: Any) -> None:
        if bad[0]:
            raise _Enough

    if by == "tensor":
        model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    elif by == "accumulated":
        model.blocks[1].norm.weight.register_post_accumulate_grad_hook(fail)  # type: ignore[union-attr]
    else:
        model.blocks[1].norm.weight.register_hook(fail)  # type: ignore[union-attr, operator]
    for number in range(7):
        bad[0] = number % 3 == 1
        loss = forward(system, batch(number, rank)).square().mean()
        try:
            loss.backward()
        except _Enough:
            del loss
            if clears:
                system.before_step()
                system.optimizer.zero_grad()
            continue
        system.after_backward(synced=True)
        trace.add(f"loss {number}", loss)
        if number % 3 != 0 or accumulate == 1:
            take_step(system)
    record(trace, system=system)


for _by, _clears in itertools.product(("tensor", "gradient", "accumulated"), (True, False)):

    def _one(make: Make, rank: int, trace: Trace, by: str = _by, clears: bool = _clears) -> None:
        _failing(make, rank, trace, by=by, accumulate=2, clears=clears)

    LOOPS[f"backward_fails_by_{_by}{'' if _clears else '_and_goes_on'}"] = _one


@loop
def backward_fails_without_accumulating(make: Make, rank: int, trace: Trace) -> None:
    _failing(make, rank, trace, by="tensor", accumulate=1, clears=True)


@loop
def features_of_a_pass_that_ends_early(make: Make, rank: int, trace: Trace) -> None:
    """A hook takes what it wants and ends the forward pass by an exception, without gradients and with them."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(3):
        found: list[Tensor] = []

        def stop(module: nn.Module, args: Any, out: Tensor) -> None:
            found.append(out.detach())  # noqa: B023
            raise _Enough

        for grads in (False, True):
            handle = model.blocks[1].register_forward_hook(stop)
            with torch.set_grad_enabled(grads), contextlib.suppress(_Enough):
                forward(system, batch(number, rank))
            handle.remove()
        trace.add(f"features {number}", found[0])
        train(system, trace, range(number, number + 1), rank)
    record(trace, system=system)


@loop
def passes_without_a_backward(make: Make, rank: int, trace: Trace) -> None:
    """PPO: several epochs over old samples, ended when a measure says so, the graph dropped."""
    model = stack()
    system = make(model, adamw(model))
    with torch.no_grad():
        old = [system.model(batch(number, rank)).log_softmax(-1) for number in range(2)]
    for epoch, number in itertools.product(range(3), range(2)):
        now = forward(system, batch(number, rank)).log_softmax(-1)
        loss = (now - old[number]).exp().clamp(0.9, 1.1).mean() + now.square().mean()
        trace.add(f"loss {epoch} {number}", loss)
        if epoch == 1 and number == 1:
            continue
        back(system, loss)
        take_step(system)
    record(trace, system=system)


@loop
def bad_losses_are_left_out(make: Make, rank: int, trace: Trace) -> None:
    """A loss that is not finite has no backward; one that is large has one, and its gradients are dropped."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(5):
        loss = forward(system, batch(number, rank)).square().mean() * (float("nan") if number == 1 else 1.0)
        trace.add(f"loss {number}", loss)
        if not loss.isfinite():
            system.optimizer.zero_grad()
            continue
        back(system, loss)
        system.before_step()
        if number != 3:
            system.optimizer.step()
        system.optimizer.zero_grad()
    record(trace, system=system)


@loop
def rate_changes_before_the_step(make: Make, rank: int, trace: Trace) -> None:
    """A scheduler that steps between backward and the optimizer's step."""
    model = stack()
    system = make(model, adamw(model))
    scheduler = LambdaLR(system.optimizer, lambda number: 1.0 / (1 + number))
    system.optimizer._opt_called = True  # type: ignore[attr-defined]  # it warns otherwise
    for number in range(3):
        loss = forward(system, batch(number, rank)).square().mean()
        back(system, loss)
        scheduler.step()
        take_step(system)
        trace.add(f"loss {number}", loss)
    record(trace, system=system)


@loop
def evaluated_under_inference_mode(make: Make, rank: int, trace: Trace) -> None:
    """After every step, in the middle of accumulation, and of a part of the model by itself."""
    model = stack()
    system = make(model, adamw(model))

    def evaluate(number: int) -> None:
        system.model.eval()
        with torch.inference_mode():
            trace.add(f"evaluated {number}", system.model(batch(80, rank)))
            trace.add(f"of a block {number}", model.blocks[0](batch(81, rank)))
        system.model.train()

    for number in range(6):
        loss = forward(system, batch(number, rank)).square().mean()
        evaluate(number)
        back(system, loss)
        trace.add(f"loss {number}", loss)
        take_step(system)
        evaluate(10 + number)
    states = from_rank_0(system.optimizer.state_dict())
    record_dict(trace, "optimizer", states)
    record(trace, system=system)


@loop
def accumulated_and_evaluated(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(6):
        back(system, forward(system, batch(number, rank)).square().mean() / 2)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            trace.add(f"evaluated {number}", system.model(batch(80, rank)).float())
        if number % 2:
            take_step(system)
    record(trace, system=system)


@loop
def generation_between_steps(make: Make, rank: int, trace: Trace) -> None:
    """A Hugging Face model writes some text after every step, with its cache."""
    from tests.kit.models_hf import HUGGING_FACE

    specimen = HUGGING_FACE["gpt2"]
    model: Any = specimen.build(seed=0)
    system = make(model, adamw(model))
    for number in range(3):
        system.before_forward()
        loss = specimen.loss(system.forward, specimen.batch(number, rank))
        back(system, loss)
        take_step(system)
        trace.add(f"loss {number}", loss)
        words = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=number == 1, pad_token_id=0)
        trace.add(f"words {number}", words)
    record(trace, system=system)


# -- where they run ---------------------------------------------------------------------------------------------------

PLACEMENTS = ("plain", "memory", "disk", "disk_backward")
REFUSED_IN_BACKWARD: dict[str, str] = {
    "gan": "one backward per step",
    "inner_loop": "is evicted: sub needs its values",
    "sharpness_aware": "between backward and step()",
    "exceptions_while_accumulating": "one backward per step",
    "accumulated_and_evaluated": "one backward per step",
    "bad_losses_are_left_out": "one backward per step",
    "rate_changes_before_the_step": "options of the optimizer",
    "backward_fails_without_accumulating": "a backward pass failed after it had updated some units",
    **{name: "one backward per step" for name in LOOPS if name.startswith("backward_fails_by")},
}
"""Loops that need gradients after backward, or that decide about the step then; and what a caller who tries is told."""


def _options(placement: str, folder: str) -> dict[str, Any]:
    comm = lowtide.Comm(bucket_bytes=0)
    return {
        "plain": {"comm": comm},
        "memory": {"comm": comm, "memory": "6GiB"},
        "disk": Where().options(folder),
        "disk_backward": Where("backward").options(folder),
        "stage3": {"comm": comm, "stage": 3},
        "stage3_disk": {**Where().options(folder), "stage": 3},
    }[placement]


def _difference(rank: int, world: int, name: str, placement: str, folder: str) -> str | None:
    expected, got = Trace(), Trace()
    torch.manual_seed(0)
    LOOPS[name](Plain if world == 1 else Hand, rank, expected)
    engines: list[Any] = []

    def make(model: nn.Module, optimizer: Optimizer) -> Plain:
        system = Sharded(model, optimizer, **_options(placement, folder))
        engines.append(engine_of(model))
        if "disk" in placement:
            settle(model, "disk")
        return system

    torch.manual_seed(0)
    with undefined_memory():
        LOOPS[name](make, rank, got)
        left = next((text for engine in engines if "disk" in placement and (text := left_over(engine))), None)
    try:
        assert_same(got, expected)
    except AssertionError as error:
        return str(error)
    return left


def _check(ranks: int, name: str, placement: str, folder: Path) -> None:
    found = run_ranks(ranks, _difference, name, placement, str(folder))
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)


REFUSED_FROM_DISK = {"inner_loop"}  # fast weights are made of the weights outside the model's forward
_CASES = [
    (p, name)
    for p in PLACEMENTS
    for name in LOOPS
    if not (p == "disk_backward" and name in REFUSED_IN_BACKWARD) and not (p == "disk" and name in REFUSED_FROM_DISK)
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("placement", "name"), _CASES)
def test_on_one_rank(placement: str, name: str, tmp_path: Path) -> None:
    _check(1, name, placement, tmp_path)


_ON_TWO = [name for name in LOOPS if not name.endswith("_and_goes_on") and name != "inner_loop"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("placement", ["stage3", "stage3_disk"])
@pytest.mark.parametrize("name", _ON_TWO)
def test_on_two_ranks(name: str, placement: str, tmp_path: Path) -> None:
    _check(2, name, placement, tmp_path)


def _refused(rank: int, world: int, name: str, folder: str) -> str:
    with pytest.raises(Error) as caught:
        _difference(rank, world, name, "disk_backward", folder)
    assert isinstance(caught.value, Refused | Evicted | Poisoned)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED_IN_BACKWARD)
def test_refused_in_backward(name: str, tmp_path: Path) -> None:
    (text,) = run_ranks(1, _refused, name, str(tmp_path))
    assert REFUSED_IN_BACKWARD[name] in text


def _goes_on(rank: int, world: int, placement: str, then: str, folder: str) -> str:
    model = stack()
    system = Sharded(model, adamw(model), **_options(placement, folder))
    bad = [False]

    def fail(*_: Any) -> None:
        if bad[0]:
            raise _Enough

    model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    system.model(batch(0, rank)).square().mean().backward()
    bad[0] = True
    with contextlib.suppress(_Enough):
        system.model(batch(1, rank)).square().mean().backward()
    bad[0] = False
    uses: dict[str, Callable[[], Any]] = {
        "backward": lambda: system.model(batch(2, rank)).square().mean().backward(),
        "clip": lambda: lowtide.clip_grad_norm_(model, 1.0),
        "step": system.optimizer.step,
    }
    with pytest.raises(Refused) as caught:
        uses[then]()
    system.optimizer.zero_grad()
    loss = system.model(batch(2, rank)).square().mean()
    loss.backward()
    system.optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("then", ["backward", "clip", "step"])
@pytest.mark.parametrize("placement", ["stage3", "stage3_disk"])
def test_several_ranks_do_not_use_what_a_failed_pass_has_added_to(placement: str, then: str, tmp_path: Path) -> None:
    for text in run_ranks(2, _goes_on, placement, then, str(tmp_path)):
        assert "a backward pass failed after it had added to the gradient of" in text
        assert "zero_grad()" in text
