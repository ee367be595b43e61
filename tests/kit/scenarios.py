"""What training scripts do besides the plain loop, each as one function that runs with and without lowtide.

``scenario(make, rank, trace)`` builds a model and an optimizer, hands them to ``make`` (which shards them, or does not) and
records its numbers. A scenario knows nothing about sharding; calls that only the oracles need are in ``back`` and ``update``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from tests.kit.models import MENAGERIE, Block, Stack
from tests.kit.parity import Plain, Trace, whole_grad
from tests.kit.specimen import WIDTH, floats

Make = Callable[[nn.Module, torch.optim.Optimizer], Plain]
Scenario = Callable[[Make, int, Trace], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def stack(seed: int = 0, count: int = 3) -> Stack:
    torch.manual_seed(seed)
    return Stack([Block() for _ in range(count)])


def batch(number: int, rank: int) -> Tensor:
    return floats(number, rank, 3, WIDTH)


def loss_of(system: Plain, number: int, rank: int) -> Tensor:
    system.before_forward()
    return system.forward(batch(number, rank)).square().mean()


def back(system: Plain, loss: Tensor, **options: Any) -> None:
    loss.backward(**options)
    system.after_backward(synced=True)


def update(system: Plain, trace: Trace, number: int) -> None:
    system.before_step()
    system.optimizer.step()
    system.record(trace, number)
    system.optimizer.zero_grad()


def step(system: Plain, trace: Trace, number: int, rank: int) -> None:
    loss = loss_of(system, number, rank)
    trace.add(f"loss {number}", loss)
    back(system, loss)
    update(system, trace, number)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, fused=True)


def from_rank_0(value: Any) -> Any:
    """Rank 0's object on every rank; the object itself without ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def record_dict(trace: Trace, what: str, tree: Any) -> None:
    """Every number of a state_dict, in order."""
    if isinstance(tree, Tensor):
        trace.add(what, tree)
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            record_dict(trace, f"{what}/{key}", tree[key])
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            record_dict(trace, f"{what}/{index}", item)
    elif tree is not None:
        trace.add(f"{what} = {tree!r}", None)


# -- optimizers and schedulers ----------------------------------------------------------------------------------------


@scenario
def scheduler_made_before(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    optimizer = adamw(model)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    system = make(model, optimizer)
    for number in range(4):
        step(system, trace, number, rank)
        scheduler.step()
        trace.add("lr", torch.tensor(system.optimizer.param_groups[0]["lr"]))


@scenario
def scheduler_made_after(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    scheduler = OneCycleLR(system.optimizer, max_lr=0.1, total_steps=5)
    for number in range(4):
        step(system, trace, number, rank)
        scheduler.step()
        trace.add("beta", torch.tensor(system.optimizer.param_groups[0]["betas"][0]))


@scenario
def learning_rate_as_tensor(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, AdamW(model.parameters(), lr=torch.tensor(1e-2)))
    scheduler = CosineAnnealingLR(system.optimizer, 3)
    for number in range(3):
        step(system, trace, number, rank)
        scheduler.step()


@scenario
def hyperparameters_changed_by_hand(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(
        model, AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.1}], lr=1e-2)
    )
    for number in range(3):
        step(system, trace, number, rank)
        for group in system.optimizer.param_groups:
            group["lr"] *= 0.5
            group["weight_decay"] += 0.1


@scenario
def step_hooks(make: Make, rank: int, trace: Trace) -> None:
    """Hooks see the caller's optimizer and run once per step, made before or after sharding."""
    model = stack()
    optimizer = adamw(model)
    calls: list[str] = []

    def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        calls.append(f"before {len(opt.param_groups[0]['params'])}")
        opt.param_groups[0]["lr"] *= 0.9

    optimizer.register_step_pre_hook(before)
    system = make(model, optimizer)
    system.optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(f"after {len(opt.param_groups)}"))
    for number in range(2):
        step(system, trace, number, rank)
    trace.add(f"calls {calls}", None)


@scenario
def closure(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, SGD(model.parameters(), lr=1e-2, momentum=0.9))
    for number in range(3):

        def evaluate(number: int = number) -> Tensor:
            system.optimizer.zero_grad()
            loss = loss_of(system, number, rank)
            back(system, loss)
            system.before_step()
            return loss

        trace.add(f"loss {number}", system.optimizer.step(evaluate))
        system.record(trace, number)


@scenario
def parameter_group_added(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    model.head.requires_grad_(False)
    system = make(model, AdamW(model.blocks.parameters(), lr=1e-2))
    step(system, trace, 0, rank)
    model.head.requires_grad_(True)
    system.optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3})
    for number in range(1, 4):
        step(system, trace, number, rank)


@scenario
def optimizer_with_history(make: Make, rank: int, trace: Trace) -> None:
    """The optimizer has taken steps before the model is sharded."""
    model = stack()
    optimizer = adamw(model)
    for number in range(2):
        model(batch(number, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    system = make(model, optimizer)
    for number in range(2, 4):
        step(system, trace, number, rank)


@scenario
def optimizer_of_a_part(make: Make, rank: int, trace: Trace) -> None:
    """Parameters that need gradients but belong to no optimizer keep their values and show their gradients."""
    model = stack()
    system = make(model, adamw(model.head))
    for number in range(2):
        loss = loss_of(system, number, rank)
        back(system, loss)
        system.before_step()
        trace.add_all(f"gradient {number}", ((name, whole_grad(p)) for name, p in model.named_parameters()))
        system.optimizer.step()
        system.record(trace, number)
        model.zero_grad()


# -- state_dict -------------------------------------------------------------------------------------------------------


@scenario
def state_dicts(make: Make, rank: int, trace: Trace) -> None:
    """Both state_dicts have the plain keys and tensors; going back to them repeats the same steps."""
    model = stack()
    system = make(model, adamw(model))
    step(system, trace, 0, rank)
    weights = {name: t.clone() for name, t in from_rank_0(system.model.state_dict()).items()}
    states = _copied(from_rank_0(system.optimizer.state_dict()))
    record_dict(trace, "model", weights)
    record_dict(trace, "optimizer", states)
    for round_ in range(2):
        for number in range(1, 3):
            step(system, trace, number, rank)
        if round_ == 0:
            system.model.load_state_dict(weights)
            system.optimizer.load_state_dict(states)
            system.record(trace, 0)


@scenario
def state_dicts_of_strided_parameters(make: Make, rank: int, trace: Trace) -> None:
    """channels_last and transposed parameters: states follow the strides, before sharding and when loaded."""
    for name in ("convolutions", "odd_sizes"):
        specimen = MENAGERIE[name]
        model = specimen.build()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        specimen.loss(model, specimen.batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        system = make(model, optimizer)
        states: Any = None
        for number in range(1, 4):
            system.before_forward()
            back(system, specimen.loss(system.forward, specimen.batch(number, rank)))
            update(system, trace, number)
            if number == 1:
                states = _copied(from_rank_0(system.optimizer.state_dict()))
                record_dict(trace, f"{name} optimizer", states)
            if number == 2:
                system.optimizer.load_state_dict(states)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


@scenario
def loads_what_plain_torch_saved(make: Make, rank: int, trace: Trace) -> None:
    trained = stack(5)
    teacher = adamw(trained)
    for number in range(2):
        trained(batch(number, 0)).square().mean().backward()
        teacher.step()
        teacher.zero_grad()
    model = stack()
    system = make(model, adamw(model))
    system.model.load_state_dict(trained.state_dict())
    system.optimizer.load_state_dict(teacher.state_dict())
    for number in range(2, 4):
        step(system, trace, number, rank)


@scenario
def load_partial(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    values = {"head.weight": torch.ones(5, WIDTH), "stranger": torch.ones(1)}
    result = system.model.load_state_dict(values, strict=False)
    trace.add(f"{sorted(result.missing_keys)[:3]} {result.unexpected_keys}", None)
    step(system, trace, 0, rank)


# -- backward ---------------------------------------------------------------------------------------------------------


@scenario
def two_forwards_before_backward(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        first, second = loss_of(system, 2 * number, rank), loss_of(system, 2 * number + 1, rank)
        if number == 0:
            back(system, first + second)
        else:  # the older graph last
            back(system, second)
            back(system, first)
        update(system, trace, number)


@scenario
def retain_graph(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        loss = loss_of(system, number, rank)
        back(system, loss, retain_graph=True)
        back(system, loss * 0.5)
        update(system, trace, number)


@scenario
def partial_backward(make: Make, rank: int, trace: Trace) -> None:
    """One of two outputs is used, then the other; units that only one of them reaches wait."""
    torch.manual_seed(0)
    model = TwoHeads()
    system = make(model, adamw(model))
    for number in range(4):
        system.before_forward()
        left, right = system.forward(batch(number, rank))
        if number != 1:
            back(system, left.square().mean(), retain_graph=True)
        if number != 2:
            back(system, right.square().mean())
        update(system, trace, number)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Block(), Block())
        self.left, self.right = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@scenario
def gradient_of_the_input(make: Make, rank: int, trace: Trace) -> None:
    """torch.autograd.grad with respect to an input reaches every unit but accumulates no gradient."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        x = batch(number, rank).requires_grad_()
        system.before_forward()
        (gradient,) = torch.autograd.grad(system.forward(x).square().mean(), x)
        trace.add(f"input gradient {number}", gradient)
        step(system, trace, number, rank)


@scenario
def backward_with_a_gradient(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        system.before_forward()
        out = system.forward(batch(number, rank))
        out.backward(torch.ones_like(out))
        system.after_backward(synced=True)
        update(system, trace, number)


@scenario
def abandoned_graphs(make: Make, rank: int, trace: Trace) -> None:
    """Forward passes whose graphs are dropped, or whose gradients are cleared without a step."""
    model = stack()
    system = make(model, adamw(model))
    for number in range(3):
        loss_of(system, 10 + number, rank)
        back(system, loss_of(system, 20 + number, rank))
        system.before_step()
        system.optimizer.zero_grad()
        step(system, trace, number, rank)


@scenario
def detached_part(make: Make, rank: int, trace: Trace) -> None:
    """The first blocks' output is detached in every second step, so they have no gradient then."""
    model = stack()
    flip = [False]
    model.run = lambda block, x: block(x.detach() if flip[0] and block is model.blocks[1] else x)
    system = make(model, adamw(model))
    for number in range(4):
        flip[0] = number % 2 == 1
        step(system, trace, number, rank)


# -- modes ------------------------------------------------------------------------------------------------------------


@scenario
def evaluation_between_steps(make: Make, rank: int, trace: Trace) -> None:
    specimen = MENAGERIE["dropout"]
    model = specimen.build()
    system = make(model, adamw(model))
    for number, mode in enumerate((torch.no_grad, torch.inference_mode, contextlib.nullcontext)):
        torch.manual_seed(number)
        step(system, trace, number, rank)
        system.model.eval()
        with mode():
            out = system.forward(batch(100 + number, rank))
            trace.add(f"evaluation {number}", out)
        del out
        system.model.train()


@scenario
def evaluation_between_forward_and_backward(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        loss = loss_of(system, number, rank)
        with torch.no_grad():
            trace.add(f"evaluation {number}", system.forward(batch(100 + number, rank)))
        back(system, loss)
        update(system, trace, number)


@scenario
def attention_fast_path(make: Make, rank: int, trace: Trace) -> None:
    """In evaluation nn.TransformerEncoderLayer hands its weights to one kernel instead of calling its modules."""
    specimen = MENAGERIE["transformer_encoder"]
    model = specimen.build()
    system = make(model, adamw(model))
    for number in range(2):
        system.model.eval()
        with torch.inference_mode():
            trace.add(f"evaluation {number}", system.forward(*specimen.batch(number, rank)))
        system.model.train()
        back(system, specimen.loss(system.forward, specimen.batch(number, rank)))
        update(system, trace, number)


@scenario
def requires_grad_toggled(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number, frozen in enumerate(([0], [0, 1], [], [2], [])):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index not in frozen)
        step(system, trace, number, rank)


@scenario
def frozen_at_first(make: Make, rank: int, trace: Trace) -> None:
    """Everything but the head is frozen when the model is sharded, and thawed later."""
    model = stack()
    model.blocks.requires_grad_(False)
    system = make(model, adamw(model))
    step(system, trace, 0, rank)
    model.blocks[2].requires_grad_(True)
    step(system, trace, 1, rank)
    model.requires_grad_(True)
    step(system, trace, 2, rank)


@scenario
def model_zero_grad(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, SGD(model.parameters(), lr=1e-2, momentum=0.9))
    for number in range(3):
        loss = loss_of(system, number, rank)
        back(system, loss)
        system.before_step()
        system.optimizer.step()
        system.record(trace, number)
        system.model.zero_grad(set_to_none=number % 2 == 0)


# -- several models ---------------------------------------------------------------------------------------------------


@scenario
def generator_and_critic(make: Make, rank: int, trace: Trace) -> None:
    maker, critic = make_pair(make)
    for number in range(2):
        fake = maker.forward(batch(number, rank))
        loss = critic.forward(F.pad(fake.detach(), (0, WIDTH - 5))).mean() - critic.forward(batch(50 + number, rank)).mean()
        back(critic, loss)
        update(critic, trace, number)
        back(maker, critic.forward(F.pad(fake, (0, WIDTH - 5))).mean())
        update(maker, trace, number)
        critic.model.zero_grad()
        critic.after_backward(synced=True)
        critic.before_step()
        critic.model.zero_grad()


def make_pair(make: Make) -> tuple[Plain, Plain]:
    first, second = stack(1, 2), stack(2, 2)
    return make(first, adamw(first)), make(second, SGD(second.parameters(), lr=1e-2))


@scenario
def teacher_and_student(make: Make, rank: int, trace: Trace) -> None:
    student, teacher = make_pair(make)
    teacher.model.requires_grad_(False).eval()
    for number in range(2):
        with torch.no_grad():
            target = teacher.forward(batch(number, rank))
        back(student, F.mse_loss(student.forward(batch(number, rank)), target))
        update(student, trace, number)


# -- precision --------------------------------------------------------------------------------------------------------


@scenario
def autocast(make: Make, rank: int, trace: Trace) -> None:
    model = stack()
    system = make(model, adamw(model))
    for number in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(system, number, rank)
        trace.add(f"loss {number}", loss)
        back(system, loss)
        update(system, trace, number)


@scenario
def grad_scaler(make: Make, rank: int, trace: Trace) -> None:
    """The scale is a power of two, so scaling and unscaling change no bit; a step with infinite gradients is skipped."""
    model = stack()
    system = make(model, adamw(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number in range(4):
        loss = loss_of(system, number, rank) * (float("inf") if number == 2 and rank == 0 else 1.0)
        back(system, scaler.scale(loss))
        system.before_step()
        scaler.unscale_(system.optimizer)
        scaler.step(system.optimizer)
        scaler.update()
        system.record(trace, number)
        trace.add(f"scale {number}", torch.tensor(scaler.get_scale()))
        system.optimizer.zero_grad()


# -- blocks -----------------------------------------------------------------------------------------------------------


@scenario
def compiled_blocks(make: Make, rank: int, trace: Trace) -> None:
    """torch.compile inside a unit. The eager backend: what is tested is the way in and out, not the compiler."""
    model = stack(count=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    system = make(model, adamw(model))
    for number in range(2):
        step(system, trace, number, rank)


@scenario
def caller_hooks_on_parameters(make: Make, rank: int, trace: Trace) -> None:
    """Tensor hooks see and may change local gradients, as under DDP."""
    model = stack()
    model.head.weight.register_hook(lambda grad: grad * 2)
    system = make(model, adamw(model))
    for number in range(2):
        step(system, trace, number, rank)


@scenario
def clip_by_value(make: Make, rank: int, trace: Trace) -> None:
    import lowtide

    model = stack()
    system = make(model, adamw(model))
    for number in range(3):
        back(system, loss_of(system, number, rank))
        system.before_step()
        if number == 1:
            torch.nn.utils.clip_grad_value_(system.model.parameters(), 1e-3)
        else:
            lowtide.clip_grad_value_(system.model, 1e-3)
        update(system, trace, number)


@scenario
def parameters_written(make: Make, rank: int, trace: Trace) -> None:
    """lowtide.gathered works on plain models too, so weight surgery is one code."""
    import lowtide

    model = stack()
    system = make(model, adamw(model))
    step(system, trace, 0, rank)
    with lowtide.gathered(model.blocks[1], write=True), torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
        model.blocks[1].down.bias.fill_(0.25)
    step(system, trace, 1, rank)
    with lowtide.gathered(model.head):
        trace.add("head", model.head.weight)
