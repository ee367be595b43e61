"""Ways to take a gradient, wherever parameters live: the bits of plain PyTorch (one rank) or of the mean over ranks, or a
refusal that is listed here with its words. Never another number, never an error that is not ours.

Memory that is given back is filled with NaN, so that whatever a graph still holds of it shows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.api import engine_of
from lowtide.errors import Error
from tests.kit import out_of_core as out_of_core  # without a number: everything on disk
from tests.kit.dist import run_ranks
from tests.kit.parity import Hand, Plain, Sharded, first_difference, whole_grad

WIDTH = 24
STEPS = 2

# -- a model ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Model(nn.Module):
    """With a parameter of the root's own, and one that few ways reach."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.rare = nn.Parameter(torch.ones(WIDTH))
        self.around: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


# -- ways -------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a way works with: a model, its data, and a log that is compared."""

    system: Plain
    rank: int
    number: int = 0
    log: list[Tensor | None] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.system.model

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if name != "rare"]

    def x(self, number: int = 0) -> Tensor:
        return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * self.number + 10 * number + self.rank))

    def loss(self, number: int = 0) -> Tensor:
        loss = self.model(self.x(number)).square().mean()
        self.note(loss)
        return loss

    def note(self, *tensors: Tensor | None) -> None:
        self.log += [None if t is None else t.detach().clone() for t in tensors]

    def back(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        self.reduced()

    def reduced(self) -> None:
        """After a backward pass: the oracle's turn to exchange gradients."""
        self.system.after_backward(synced=True)

    def use(self, grads: Sequence[Tensor | None], params: Sequence[nn.Parameter] | None = None) -> None:
        """Gradients that were asked for are this rank's own: average them, and give them to the optimizer."""
        world = dist.get_world_size()
        for p, grad in zip(params or self.params, grads, strict=True):
            if grad is None:
                continue
            parts = [torch.empty_like(grad) for _ in range(world)]
            dist.all_gather(parts, grad.detach().contiguous())
            p.grad = parts[0] if world == 1 else (parts[0] + parts[1]) / world
            self.note(p.grad)

    def gathered(self, what: Any = None, *, write: bool = False) -> AbstractContextManager[None]:
        return lowtide.gathered(self.model if what is None else what, write=write)


Way = Callable[[Run], None]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def squares(params: Any) -> Tensor:
    return 0.01 * sum((p * p).sum() for p in params)


@way
def backward(run: Run) -> None:
    run.back(run.loss())


@way
def backward_of_two(run: Run) -> None:
    torch.autograd.backward([run.loss(0), run.loss(1)])
    run.reduced()


@way
def backward_again(run: Run) -> None:
    loss = run.loss()
    run.back(loss, retain_graph=True)
    run.back(loss)


@way
def backward_accumulated(run: Run) -> None:
    run.back(run.loss(0))
    run.back(run.loss(1))


@way
def backward_inputs(run: Run) -> None:
    run.back(run.loss(), inputs=run.params)


@way
def backward_inputs_some(run: Run) -> None:
    run.back(run.loss(), inputs=[run.model.head.weight, run.model.blocks[1].first.bias])


@way
def backward_inputs_x(run: Run) -> None:
    x = run.x().requires_grad_()
    run.back(run.model(x).sum(), inputs=[x])
    run.note(x.grad)
    run.back(run.loss())


@way
def backward_inputs_accumulated(run: Run) -> None:
    """A loss of the head alone, added to one of all."""
    run.back(run.loss(0))
    run.back(run.loss(1), inputs=list(run.model.head.parameters()))


@way
def backward_with_create_graph(run: Run) -> None:
    run.back(run.loss(), create_graph=True)


@way
def penalty_through_grad(run: Run) -> None:
    loss = run.loss()
    run.back(loss, create_graph=True)
    penalty = sum(p.grad.square().sum() for p in run.params if p.grad is not None)
    run.model.zero_grad()
    run.back(run.loss(1) + 0.1 * penalty)


@way
def grad(run: Run) -> None:
    run.use(torch.autograd.grad(run.loss(), run.params))


@way
def grad_of_some(run: Run) -> None:
    some = [run.model.gain, run.model.blocks[1].first.weight]
    run.use(torch.autograd.grad(run.loss(), some), some)


@way
def grad_unused(run: Run) -> None:
    every = list(run.model.parameters())
    run.use(torch.autograd.grad(run.loss(), every, allow_unused=True), every)


@way
def grad_materialized(run: Run) -> None:
    every = list(run.model.parameters())
    run.use(torch.autograd.grad(run.loss(), every, materialize_grads=True), every)


@way
def grad_of_a_dict(run: Run) -> None:
    named = {n: p for n, p in run.model.named_parameters() if n != "rare"}
    run.use(list(torch.autograd.grad(run.loss(), named).values()))


@way
def grad_then_backward(run: Run) -> None:
    """The norm of a task's gradient (GradNorm, PCGrad), then the usual pass over the same graph."""
    loss = run.loss()
    run.note(*torch.autograd.grad(loss, run.params, retain_graph=True))
    run.back(loss)


@way
def backward_then_grad(run: Run) -> None:
    loss = run.loss()
    run.back(loss, retain_graph=True)
    run.note(*torch.autograd.grad(loss, run.params))


@way
def grad_of_inputs(run: Run) -> None:
    x = run.x().requires_grad_()
    loss = run.model(x).square().mean()
    run.note(*torch.autograd.grad(loss, x, retain_graph=True))
    run.back(loss)


@way
def grad_of_inputs_and_params(run: Run) -> None:
    x = run.x().requires_grad_()
    g, *grads = torch.autograd.grad(run.model(x).square().mean(), [x, *run.params])
    run.note(g)
    run.use(grads)


@way
def grad_batched(run: Run) -> None:
    y = run.model(run.x()).sum(0)
    rows = torch.autograd.grad(y, run.params, torch.eye(2), is_grads_batched=True)
    run.use([row.sum(0) for row in rows])


@way
def penalty_of_input_gradient(run: Run) -> None:
    x = run.x().requires_grad_()
    loss = run.model(x).square().mean()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    run.back(loss + g.square().sum())


@way
def penalty_of_gradient(run: Run) -> None:
    loss = run.loss()
    grads = torch.autograd.grad(loss, run.params, create_graph=True)
    run.back(loss + 0.1 * sum(g.square().sum() for g in grads))


@way
def hessian_vector_product(run: Run) -> None:
    grads = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    dot = sum((g * torch.full_like(g, 0.5)).sum() for g in grads)
    run.use(torch.autograd.grad(dot, run.params))


@way
def hessian_vector_product_by_backward(run: Run) -> None:
    grads = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    run.back(sum((g * torch.full_like(g, 0.5)).sum() for g in grads))


@way
def hutchinson(run: Run) -> None:
    """The trace of the Hessian beside the step (AdaHessian, Sophia)."""
    loss = run.loss()
    grads = torch.autograd.grad(loss, run.params, create_graph=True)
    run.note(*torch.autograd.grad(grads, run.params, [torch.full_like(g, 0.5) for g in grads], retain_graph=True))
    run.back(loss)


@way
def two_graphs_interleaved(run: Run) -> None:
    grads = torch.autograd.grad(run.loss(0), run.params, create_graph=True)
    run.back(run.loss(1))
    run.note(*torch.autograd.grad(sum(g.sum() for g in grads), run.params, allow_unused=True))


@way
def third_order(run: Run) -> None:
    x = run.x().requires_grad_()
    y = run.model(x).sum()
    for _ in range(2):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.square().sum()
    run.back(y)


@way
def jacobian_of_inputs(run: Run) -> None:
    x = run.x().requires_grad_()
    j = jacobian(run.model, x, create_graph=True)
    run.note(j)
    run.back(j.square().mean())


@way
def jacobian_vectorized(run: Run) -> None:
    j = jacobian(run.model, run.x().requires_grad_(), create_graph=True, vectorize=True)
    run.note(j)
    run.back(j.square().mean())


@way
def jacobian_forward_mode(run: Run) -> None:
    run.note(jacobian(run.model, run.x(), strategy="forward-mode", vectorize=True))
    run.back(run.loss())


@way
def dual_numbers(run: Run) -> None:
    with forward_ad.dual_level():
        y = run.model(forward_ad.make_dual(run.x(), torch.ones(3, WIDTH)))
        tangent = forward_ad.unpack_dual(y).tangent
        run.note(tangent)
        run.back(tangent.square().sum() + y.square().sum())


@way
def jvp_of_inputs(run: Run) -> None:
    run.note(*jvp(run.model, (run.x(),), (torch.ones(3, WIDTH),)))
    run.back(run.loss())


@way
def vmap_over_the_model(run: Run) -> None:
    y = vmap(run.model)(run.x())
    run.note(y)
    run.back(y.square().mean())


@way
def vmap_over_a_block(run: Run) -> None:
    run.model.around = lambda block, x: vmap(block)(x)
    run.back(run.loss())


@way
def grad_of_samples(run: Run) -> None:
    """torch.func on the model itself: its input's gradient, sample by sample."""
    run.note(vmap(torch.func.grad(lambda x: run.model(x).square().mean()))(run.x()))
    run.back(run.loss())


@way
def pullback_called_later(run: Run) -> None:
    y, pullback = vjp(run.model, run.x())
    run.note(y, *pullback(torch.ones_like(y)))
    run.back(run.loss())


@way
def linearized(run: Run) -> None:
    y, tangent = linearize(run.model, run.x())
    run.note(y, tangent(torch.ones(3, WIDTH)))
    run.back(run.loss())


@way
def hessian_of_inputs(run: Run) -> None:
    run.note(torch.func.hessian(lambda x: run.model(x).square().mean())(run.x()))
    run.back(run.loss())


@way
def transform_in_forward(run: Run) -> None:
    """Forces are gradients of an energy, inside the model."""
    run.model.around = lambda block, x: x + torch.func.grad(lambda y: block(y).sum())(x)
    run.back(run.loss())


@way
def transform_in_gathered(run: Run) -> None:
    with run.gathered():
        run.note(torch.func.grad(lambda x: run.model(x).square().mean())(run.x()))
    run.back(run.loss())


@way
def functional_with_scaled(run: Run) -> None:
    """One inner step by hand (MAML), then the loss of the model so changed."""
    with run.gathered():
        fast = {n: p * 0.9 for n, p in run.model.named_parameters()}
    run.back(functional_call(run.model, fast, (run.x(),)).square().mean())


@way
def functional_with_an_inner_step(run: Run) -> None:
    inner = run.loss()
    grads = torch.autograd.grad(inner, run.params, create_graph=True)
    names = [n for n, _ in run.model.named_parameters() if n != "rare"]
    with run.gathered():
        fast = {n: p - 0.1 * g for n, p, g in zip(names, run.params, grads, strict=True)}
    run.back(functional_call(run.model, fast, (run.x(1),)).square().mean())


@way
def functional_with_detached(run: Run) -> None:
    with run.gathered():
        values = {n: p.detach().clone() for n, p in run.model.named_parameters() if n != "rare"}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(run.model, values, (run.x(),)).square().mean()

    run.use(list(torch.func.grad(loss)(values).values()))


@way
def functional_per_sample(run: Run) -> None:
    with run.gathered():
        values = {n: p.detach().clone() for n, p in run.model.named_parameters() if n != "rare"}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(run.model, values, (x[None],)).square().mean()

    per_sample = vmap(torch.func.grad(loss), in_dims=(None, 0))(values, run.x())
    run.use([g.mean(0) for g in per_sample.values()])


@way
def penalty_in_gathered(run: Run) -> None:
    loss = run.loss()
    with run.gathered():
        penalty = squares(run.model.parameters())
    run.note(penalty)
    run.back(loss + penalty)


@way
def penalty_in_gathered_first(run: Run) -> None:
    with run.gathered():
        penalty = squares(run.model.parameters())
    run.back(run.loss() + penalty)


@way
def penalty_in_gathered_alone(run: Run) -> None:
    with run.gathered():
        penalty = squares(run.model.parameters())
    run.back(run.loss())
    run.back(penalty)


@way
def penalty_of_one_unit(run: Run) -> None:
    with run.gathered(run.model.blocks[1]):
        penalty = squares(run.model.blocks[1].parameters())
    run.back(run.loss() + penalty)


@way
def penalty_of_one_parameter(run: Run) -> None:
    with run.gathered(run.model.head.weight):
        penalty = run.model.head.weight.abs().sum()
    run.back(run.loss() + penalty)


@way
def penalty_that_saves_no_parameter(run: Run) -> None:
    """An orthogonality penalty saves a product, not the parameter; a sum saves nothing."""
    w = run.model.blocks[0].first.weight
    with run.gathered():
        penalty = (w @ w.T - torch.eye(WIDTH)).square().sum() + w.sum()
    run.back(run.loss() + penalty)


@way
def penalty_of_norms(run: Run) -> None:
    with run.gathered():
        penalty = sum(torch.linalg.vector_norm(p) for p in run.params)
        penalty = penalty + torch.linalg.matrix_norm(run.model.head.weight, 2)
    run.back(run.loss() + 0.1 * penalty)


@way
def penalty_in_gathered_to_write(run: Run) -> None:
    with run.gathered(write=True):
        penalty = squares(run.model.parameters())
    run.back(run.loss() + penalty)


@way
def penalty_after_a_write(run: Run) -> None:
    with run.gathered(write=True):
        with torch.no_grad():
            run.model.head.weight.mul_(0.9)
        penalty = squares(run.model.parameters())
    run.back(run.loss() + penalty)


@way
def penalty_in_nested_gathered(run: Run) -> None:
    with run.gathered():
        with run.gathered(run.model.blocks[0]):
            inner = squares(run.model.blocks[0].parameters())
        penalty = squares(run.model.blocks[1:].parameters())
    run.back(run.loss() + penalty + inner)


@way
def penalty_with_a_copy(run: Run) -> None:
    """Weight decay towards where training began (L2-SP, EWC)."""
    with run.gathered():
        start = [p.detach().clone() for p in run.params]
    run.use([torch.zeros_like(p) for p in start])
    with run.gathered():
        penalty = sum(((p - 0.9 * s) ** 2).sum() for p, s in zip(run.params, start, strict=True))
    run.model.zero_grad()
    run.back(run.loss() + penalty)


@way
def penalty_in_the_middle(run: Run) -> None:
    """Of a parameter that its unit's forward uses, inside the model's forward."""
    kept: list[Tensor] = []

    def around(block: Any, x: Tensor) -> Tensor:
        kept.append(squares([block.first.weight]))
        return block(x)

    run.model.around = around
    run.back(run.loss() + sum(kept))


@way
def everything_in_gathered(run: Run) -> None:
    with run.gathered():
        loss = run.loss() + squares(run.model.parameters())
        run.back(loss)


@way
def backward_in_gathered(run: Run) -> None:
    loss = run.loss()
    with run.gathered():
        run.back(loss + squares(run.params))


@way
def forward_in_gathered(run: Run) -> None:
    with run.gathered():
        loss = run.loss()
    run.back(loss)


@way
def grad_in_gathered(run: Run) -> None:
    with run.gathered():
        grads = torch.autograd.grad(run.loss() + squares(run.params), run.params)
    run.use(grads)


@way
def not_forward_in_gathered(run: Run) -> None:
    """A method that is not forward, with a parameter of the root."""
    with run.gathered():
        y = F.linear(run.x() * run.model.gain, run.model.head.weight)
    run.back(y.square().mean())


@way
def not_forward_by_units(run: Run) -> None:
    """The same with the root's parameter only: units come by themselves."""
    with run.gathered([run.model.gain]):
        x = run.x() * run.model.gain
        for block in run.model.blocks:
            x = block(x)
        y = run.model.head(x)
    run.back(y.square().mean())


@way
def accumulated_in_no_sync(run: Run) -> None:
    with run.system.no_sync():
        run.loss(0).backward()
        run.loss(1).backward()
    run.back(run.loss(2))


@way
def penalty_accumulated_in_no_sync(run: Run) -> None:
    with run.gathered():
        penalty = squares(run.params)
    with run.system.no_sync():
        (run.loss(0) + penalty).backward()
    run.back(run.loss(1))


@way
def grad_in_no_sync(run: Run) -> None:
    with run.system.no_sync():
        loss = run.loss(0)
        run.note(*torch.autograd.grad(loss, run.params, retain_graph=True))
        loss.backward()
    run.back(run.loss(1))


@way
def checkpointed(run: Run) -> None:
    run.model.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    run.back(run.loss())


@way
def checkpointed_grad(run: Run) -> None:
    run.model.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    run.use(torch.autograd.grad(run.loss(), run.params))


@way
def checkpointed_hessian_vector_product(run: Run) -> None:
    run.model.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    grads = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    run.back(sum(g.square().sum() for g in grads))


@way
def checkpointed_reentrant(run: Run) -> None:
    run.model.around = lambda block, x: checkpoint(block, x, use_reentrant=True)
    run.back(run.model(run.x().requires_grad_()).square().mean())


@way
def checkpointed_around_the_model(run: Run) -> None:
    run.back(checkpoint(run.model, run.x().requires_grad_(), use_reentrant=False).square().mean())


@way
def checkpointed_twice(run: Run) -> None:
    def inner(block: Any, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    run.model.around = lambda block, x: checkpoint(inner, block, x, use_reentrant=False)
    run.back(run.loss())


class WithGradInside(torch.autograd.Function):
    """Runs a pass of its own inside backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, g)[0]


@way
def grad_inside_backward(run: Run) -> None:
    run.model.around = lambda block, x: WithGradInside.apply(block(x))
    run.back(run.loss())


class SecondPass(torch.autograd.Function):
    """Asks a model for gradients of its parameters inside another backward pass (implicit layers, adjoint methods)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any, weight: nn.Parameter) -> Tensor:
        ctx.model, ctx.weight = model, weight
        ctx.save_for_backward(x)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            gx, gw = torch.autograd.grad(ctx.model(x), [x, ctx.weight], g)
        return gx, None, gw


@way
def model_inside_backward(run: Run) -> None:
    x = run.x().requires_grad_()
    run.back(SecondPass.apply(x, run.model, run.model.head.weight).square().mean())
    run.note(x.grad)


@way
def saved_on_cpu_around(run: Run) -> None:
    with save_on_cpu():
        loss = run.loss()
        run.note(*torch.autograd.grad(loss, run.params, retain_graph=True))
        run.back(loss)


@way
def with_anomaly_detection(run: Run) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        run.back(run.loss())


@way
def gradient_edge(run: Run) -> None:
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in run.params]
    run.use(torch.autograd.grad(run.loss(), edges))


@way
def hook_for_all(run: Run) -> None:
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook(run.params, seen.append)
    run.back(run.loss())
    handle.remove()
    run.note(*seen[0])


@way
def hooks_on_parameters(run: Run) -> None:
    handles = [p.register_hook(lambda g: g * 0.5) for p in run.params]
    run.back(run.loss())
    for handle in handles:
        handle.remove()


@way
def frozen_in_between(run: Run) -> None:
    run.model.blocks[1].requires_grad_(False)
    run.back(run.loss())
    run.model.blocks[1].requires_grad_(True)
    run.back(run.loss(1))


@way
def closure(run: Run) -> None:
    """The loss is computed inside the step."""

    def evaluate() -> Tensor:
        run.model.zero_grad()
        loss = run.loss()
        run.back(loss)
        return loss

    evaluate()


@way
def added_by_hand(run: Run) -> None:
    """Gradients of two losses, put together by hand (PCGrad)."""
    first = torch.autograd.grad(run.loss(0), run.params)
    second = torch.autograd.grad(run.loss(1), run.params)
    run.use([a + 0.5 * b for a, b in zip(first, second, strict=True)])


# -- with and without lowtide -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    ranks: int
    stage: int
    disk: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.ranks}-stage{self.stage}{'-disk' if self.disk else ''}{''.join(f'-{v}' for _, v in self.options)}"


PLACEMENTS = [
    Placement(1, 0),
    Placement(1, 0, options=(("memory", "2GiB"),)),
    Placement(1, 3),
    Placement(1, 0, disk=True),
    Placement(1, 3, disk=True, options=(("activations", "recompute"),)),
    Placement(1, 0, disk=True, options=(("update", "backward"),)),
    Placement(2, 0),
    Placement(2, 2),
    Placement(2, 3),
    Placement(2, 3, options=(("transport", "torch"),)),
    Placement(2, 3, options=(("update", "backward"),)),
    Placement(2, 3, disk=True),
    Placement(2, 3, disk=True, options=(("activations", "recompute"),)),
]


def play(system: Plain, name: str, rank: int, *, used_at_once: bool) -> list[Tensor | None]:
    run = Run(system, rank)
    for run.number in range(STEPS):
        WAYS[name](run)
        system.before_step()
        if not used_at_once:
            run.note(*(whole_grad(p) for p in system.model.parameters()))
        system.optimizer.step()
        with lowtide.gathered(system.model):
            run.note(*system.model.parameters())
        system.optimizer.zero_grad()
    return run.log


def outcome(rank: int, world: int, name: str, placement: Placement, folder: str) -> tuple[str, str]:
    options: dict[str, Any] = dict(placement.options)
    used_at_once = options.get("update") == "backward"  # no gradient is there any more when backward has ended
    expected = play(Plain(*build()) if world == 1 else Hand(*build()), name, rank, used_at_once=used_at_once)
    comm = lowtide.Comm(bucket_bytes=0, deadline=20, transport=options.pop("transport", "auto"))
    options |= {"stage": placement.stage, "comm": comm, "disk": folder if placement.disk else None}
    system = Sharded(*build(), **options)
    for arena in (engine_of(system.model).homes, engine_of(system.model).arena, engine_of(system.model).buffers_arena):
        arena.poison = True
    try:
        got = play(system, name, rank, used_at_once=used_at_once)
    except (Error, RuntimeError) as error:
        listed = expected_refusal(name, placement)
        return "refused" if isinstance(error, Error) or (listed and listed in str(error)) else type(error).__name__, str(error)
    different = [f"{i}: {text}" for i, (a, b) in enumerate(zip(got, expected, strict=True)) if (text := differs(a, b))]
    return ("WRONG", different[0]) if different else ("same", "")


def differs(a: Tensor | None, b: Tensor | None) -> str | None:
    if a is None or b is None:
        return None if a is b else f"{'no' if a is None else 'a'} tensor"
    return first_difference(a, b)


# -- what is refused --------------------------------------------------------------------------------------------------


def _in_backward(placement: Placement) -> bool:
    return dict(placement.options).get("update") == "backward"


def _passes_gradients_on(placement: Placement) -> bool:
    return (placement.ranks, placement.stage, placement.disk) != (1, 0, False)


def _sends_parameters_away(placement: Placement) -> bool:
    return placement.stage == 3 or placement.disk


def _opens_hooks(placement: Placement) -> bool:
    return _sends_parameters_away(placement) or "memory" in dict(placement.options)


@dataclass(frozen=True)
class Refusal:
    """Ways that are refused in some placements, and the words that say so."""

    words: str
    where: Callable[[Placement], bool]
    ways: tuple[str, ...]


REFUSALS = [
    Refusal(
        "torch.autograd.grad(loss, parameters, create_graph=True)",
        _passes_gradients_on,
        ("backward_with_create_graph", "penalty_through_grad"),
    ),
    Refusal("Run the forward pass again", lambda p: p.ranks > 1 and _sends_parameters_away(p), ("penalty_after_a_write",)),
    Refusal("is evicted", _sends_parameters_away, ("linearized",)),  # its second function is a recording of all operators
    Refusal(  # by torch itself
        "don't yet support saved tensor hooks", _opens_hooks, ("transform_in_forward", "transform_in_gathered")
    ),
    Refusal(  # every row of it holds the parameters that its pass has used
        "slots for units in use", lambda p: p.ranks > 1 and p.disk, ("jacobian_of_inputs",)
    ),
    Refusal(
        "one backward per step",
        _in_backward,
        ("backward_accumulated", "backward_inputs_accumulated", "frozen_in_between"),
    ),
    Refusal(
        "one backward per step",
        lambda p: _in_backward(p) and p.ranks == 1,
        ("accumulated_in_no_sync", "penalty_accumulated_in_no_sync", "grad_in_no_sync"),
    ),
    Refusal(
        "the graph still needs unit",
        _in_backward,
        ("two_graphs_interleaved", "backward_again", "backward_inputs_some", "backward_then_grad", "penalty_in_gathered_alone"),
    ),
    Refusal(
        "was set outside of loss.backward()",
        _in_backward,
        (
            *("grad", "grad_of_some", "grad_unused", "grad_materialized", "grad_of_a_dict", "grad_of_inputs_and_params"),
            *("grad_batched", "hessian_vector_product", "functional_with_detached", "functional_per_sample"),
            *("checkpointed_grad", "gradient_edge", "added_by_hand"),
        ),
    ),
    Refusal("inside gathered()", _in_backward, ("everything_in_gathered", "backward_in_gathered", "grad_in_gathered")),
]


def expected_refusal(name: str, placement: Placement) -> str | None:
    return next((r.words for r in REFUSALS if name in r.ways and r.where(placement)), None)


# -- tests ------------------------------------------------------------------------------------------------------------


def problem(rank: int, world: int, name: str, placement: Placement, folder: str) -> str | None:
    kind, text = outcome(rank, world, name, placement, folder)
    words = expected_refusal(name, placement)
    if words is None:
        return None if kind == "same" else f"{name}: {kind}: {text}"
    return None if kind == "refused" and words in text else f"{name}: {kind}: {text}, but it is listed as refused: {words}"


def problems(rank: int, world: int, names: Sequence[str], placement: Placement, folder: str) -> list[str]:
    warnings.simplefilter("ignore")  # of anomaly detection, and torch's own about create_graph
    return [text for name in names if (text := problem(rank, world, name, placement, folder)) is not None]


_PARTS = 16


@pytest.mark.thinned(20)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_gradients(placement: Placement, part: int, tmp_path: Path) -> None:
    found = run_ranks(placement.ranks, problems, list(WAYS)[part::_PARTS], placement, str(tmp_path), timeout=200)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts)


def test_what_is_listed_as_refused_exists() -> None:
    assert {name for refusal in REFUSALS for name in refusal.ways} <= set(WAYS)
