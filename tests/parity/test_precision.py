"""Low precision: against references written by hand, bit for bit, and steps that are skipped because a gradient is not finite.

On a CPU without bf16 units such products take long, so everything here is tiny.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from tests.kit.dist import run_ranks
from tests.kit.parity import Hand, Plain, Sharded, assert_bitwise

WIDTH = 16
COMM = lowtide.Comm(bucket_bytes=0)
BF16 = lowtide.Precision(param="bf16", master="fp32", reduce="fp32")
FP16 = lowtide.Precision(param="fp16")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [sum(pair[1:], start=pair[0]) for pair in (parts[i : i + 2] for i in range(0, len(parts), 2))]
    return parts[0]


class ByHand:
    """fp32 masters beside a 16-bit model, gradients of all ranks computed here, one rank after the other."""

    def __init__(self, dtype: torch.dtype, world: int, scale: float) -> None:
        self.model, self.dtype, self.world, self.scale = net(), dtype, world, scale
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.model.to(dtype)
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)

    def step(self, number: int) -> list[float]:
        losses, gradients = [], []
        for rank in range(self.world):
            self.model.zero_grad()
            out = self.model(batch(number, rank).to(self.dtype))
            if self.scale != 1:
                out.register_hook(lambda g: g * self.scale)
            loss = out.float().square().mean()
            loss.backward()
            losses.append(loss.item())
            gradients.append([p.grad.float() * (1 / (self.world * self.scale)) for p in self.model.parameters()])
        for k, master in enumerate(self.masters):
            master.grad = tree([row[k] for row in gradients])
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)
        return losses


def low_precision(rank: int, world: int, precision: lowtide.Precision, stage: int) -> None:
    dtype = torch.bfloat16 if precision.param == "bf16" else torch.float16
    model = net()
    model, optimizer = lowtide.shard(model, adamw(model), stage=stage, precision=precision, comm=COMM)
    reference = ByHand(dtype, world, engine_of(model).scale.value)
    for number in range(3):
        out = model(batch(number, rank))
        assert out.dtype is dtype
        loss = out.float().square().mean()
        loss.backward()
        assert loss.item() == reference.step(number)[rank]
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        with lowtide.gathered(model):
            for (name, p), q in zip(model.named_parameters(), reference.model.parameters(), strict=True):
                assert p.dtype is dtype
                assert_bitwise(p, q, f"step {number}, {name}")
    pieces = engine_of(model).update.pieces
    for p, master in zip(model.parameters(), reference.masters, strict=True):
        piece = pieces[p]
        assert_bitwise(piece.target.detach().flatten(), master.detach().flatten()[piece.lo : piece.hi], "masters")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_sixteen_bits_with_masters(precision: lowtide.Precision, stage: int, ranks: int) -> None:
    """With fp16 the loss scale is lowtide's own; at 65536 it leaves no trace in the result."""
    run_ranks(ranks, low_precision, precision, stage)


# -- steps that are skipped -------------------------------------------------------------------------------------------


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of everything that a step may change on this rank."""
    engine = engine_of(model)
    out = {f"target {k}": piece.target.detach().clone() for k, piece in enumerate(engine.update.pieces.values())}
    with lowtide.gathered(model):
        out |= {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    for k, p in enumerate(q for group in optimizer.param_groups for q in group["params"]):
        out |= {f"state {k} {name}": copy.deepcopy(value) for name, value in optimizer.state.get(p, {}).items()}
    return out


def skipped(rank: int, world: int, stage: int, precision: lowtide.Precision | None, bad: float) -> list[str]:
    model = net()
    model, optimizer = lowtide.shard(model, adamw(model), stage=stage, precision=precision, comm=COMM)
    engine = engine_of(model)
    logger, records = logging.getLogger("lowtide"), _Records()
    logger.addHandler(records)
    broken = False
    # one element of one gradient, on the last rank only; whoever holds that element must tell the others
    model[2][0].weight.register_hook(lambda g: poke(g) if broken else g)

    def poke(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[-1, -1] = bad
        return grad

    try:
        for number in range(4):
            broken = number in (1, 2) and rank == world - 1
            before, scale = state_of(model, optimizer), engine.scale.value
            model(batch(number, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after = state_of(model, optimizer)
            assert optimizer.step_was_skipped == (number in (1, 2)), number
            if number in (1, 2):
                assert after.keys() == before.keys()
                for name, value in before.items():
                    assert_bitwise(after[name], value, f"step {number}, {name}")
                assert engine.scale.value == (scale / 2 if precision is not None else 1.0)
            else:
                assert any(not torch.equal(after[n], v) for n, v in before.items() if n.startswith("parameter"))
    finally:
        logger.removeHandler(records)
    assert engine.skipped_steps == 2
    return records.texts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("precision", "bad"), [(None, float("nan")), (FP16, float("inf"))], ids=["fp32 and NaN", "fp16 and infinity"]
)
def test_a_step_with_a_bad_gradient_changes_nothing(
    precision: lowtide.Precision | None, bad: float, stage: int, ranks: int
) -> None:
    texts = run_ranks(ranks, skipped, stage, precision, bad)
    assert texts[0] == [
        "step skipped: the gradient of '2.0.weight' is not finite (1 skipped so far)",
        "step skipped: the gradient of '2.0.weight' is not finite (2 skipped so far)",
    ]
    assert all(text == [] for text in texts[1:]), "one rank speaks for all"


def grows_and_falls(rank: int, world: int) -> None:
    model = net()
    model, optimizer = lowtide.shard(model, adamw(model), stage=2, precision=FP16, comm=COMM)
    scale = engine_of(model).scale
    assert scale.value == 2.0**16
    scale._good_steps = 1999
    for number, expected in enumerate((2.0**17, 2.0**17, 2.0**16)):
        x = batch(number, rank) * (float("inf") if number == 2 else 1)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert scale.value == expected, number


def test_the_scale_grows_after_many_good_steps_and_halves_after_a_bad_one() -> None:
    run_ranks(1, grows_and_falls)


def scale_of_the_forward(rank: int, world: int) -> None:
    """A graph is unscaled by the scale that it was built with, even if a skipped step has changed the scale since."""
    model = net()
    model, optimizer = lowtide.shard(model, adamw(model), stage=2, precision=FP16, comm=COMM)
    early = model(batch(0, rank)).float().square().mean()
    model(batch(1, rank) * float("inf")).float().square().mean().backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    early.backward()
    found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    optimizer.zero_grad()
    model(batch(0, rank)).float().square().mean().backward()
    for got, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad.full_tensor(), rtol=1e-2, atol=1e-6)  # type: ignore[union-attr]


def test_a_graph_keeps_the_scale_it_was_built_with() -> None:
    run_ranks(1, scale_of_the_forward)


# -- torch's own tools ------------------------------------------------------------------------------------------------


def with_scaler(rank: int, world: int, stage: int) -> None:
    """GradScaler, clipping in between, and NaN on the last rank only in one step."""
    plain, ours = net(), net()
    systems: list[Plain] = [
        Plain(plain, adamw(plain)) if world == 1 else Hand(plain, adamw(plain)),
        Sharded(ours, adamw(ours), stage=stage, comm=COMM),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in systems]
    for number in range(5):
        x = batch(number, rank) * (float("nan") if number == 2 and rank == world - 1 else 1.0)
        norms = []
        for system, scaler in zip(systems, scalers, strict=True):
            scaler.scale(system.forward(x).square().mean()).backward()
            system.after_backward(synced=True)
            system.before_step()
            scaler.unscale_(system.optimizer)
            norms.append(lowtide.clip_grad_norm_(system.model, 0.05))
            scaler.step(system.optimizer)
            scaler.update()
            system.optimizer.zero_grad()
        assert_bitwise(norms[1], norms[0], f"norm {number}") if number != 2 else None
        assert scalers[0].get_scale() == scalers[1].get_scale(), number
        with lowtide.gathered(ours):
            for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert_bitwise(a, b, f"step {number}, {name}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_grad_scaler(stage: int, ranks: int) -> None:
    run_ranks(ranks, with_scaler, stage)


def moments(rank: int, world: int, stage: int) -> None:
    """Kept in bf16 between steps, used in fp32 in a step: the same as rounding them by hand."""
    plain, ours = net(), net()
    first = Plain(plain, adamw(plain)) if world == 1 else Hand(plain, adamw(plain))
    second = Sharded(ours, adamw(ours), stage=stage, precision=lowtide.Precision(moments="bf16"), comm=COMM)
    for number in range(3):
        for system in (first, second):
            system.forward(batch(number, rank)).square().mean().backward()
            system.after_backward(synced=True)
            system.before_step()
            system.optimizer.step()
            system.optimizer.zero_grad()
        for state in first.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].to(torch.bfloat16))
        kept = {(k, v.dtype) for state in second.optimizer.state.values() for k, v in state.items()}
        assert kept == {("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.bfloat16), ("step", torch.float32)}
        with lowtide.gathered(ours):
            for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert_bitwise(a, b, f"step {number}, {name}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_in_bf16(stage: int, ranks: int) -> None:
    run_ranks(ranks, moments, stage)


def autocast(rank: int, world: int, stage: int) -> None:
    """autocast keeps cast copies of weights; they must not outlive the values they were made from."""
    plain, ours = net(), net()
    first = Plain(plain, adamw(plain)) if world == 1 else Hand(plain, adamw(plain))
    second = Sharded(ours, adamw(ours), stage=stage, comm=COMM)
    engine_of(ours).arena.poison = True
    for number in range(3):
        losses = []
        for system in (first, second):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = system.forward(batch(number, rank))
                out = system.forward(out)  # the second call finds the weights in autocast's cache
            losses.append(out.float().square().mean())
            losses[-1].backward()
            system.after_backward(synced=True)
            system.before_step()
            system.optimizer.step()
            system.optimizer.zero_grad()
        assert_bitwise(losses[1], losses[0], f"loss {number}")
        with lowtide.gathered(ours):
            for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
                assert_bitwise(a, b, f"step {number}, {name}")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_autocast(stage: int, ranks: int) -> None:
    run_ranks(ranks, autocast, stage)


def masters_elsewhere(rank: int, world: int, stage: int) -> None:
    """Writing one layer must not round the masters of all the others."""
    model = net()
    model, optimizer = lowtide.shard(model, adamw(model), stage=stage, precision=BF16, comm=COMM)
    for number in range(2):
        model(batch(number, rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pieces = engine_of(model).update.pieces
    written: Any = model[3][0].weight
    before = {p: piece.target.detach().clone() for p, piece in pieces.items()}
    with lowtide.gathered(model[3], write=True), torch.no_grad():
        written.fill_(0.5)
    for name, p in model.named_parameters():
        if not name.startswith("3."):
            assert_bitwise(pieces[p].target, before[p], f"the master of {name}")
    assert bool((pieces[written].target == 0.5).all())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_writing_a_layer_leaves_other_masters_alone(stage: int, ranks: int) -> None:
    run_ranks(ranks, masters_elsewhere, stage)


class AnyOutput(nn.Module):
    """Outputs in a container are scaled too, and integer inputs are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, index: Tensor) -> dict[str, Any]:
        return {"index": index, "parts": [self.head(self.table(index))]}


def containers(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model, reference = AnyOutput(), AnyOutput()
    reference.load_state_dict(model.state_dict())
    reference.half()
    model, _ = lowtide.shard(model, adamw(model), stage=stage, precision=FP16, comm=COMM)
    scale = engine_of(model).scale.value
    index = torch.tensor([1, 2, 6])
    out = model(index)
    assert out["index"].dtype is torch.int64
    out["parts"][0].float().square().mean().backward()
    expected = reference(index)["parts"][0]
    expected.register_hook(lambda g: g * scale)
    expected.float().square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert_bitwise(grad.float(), q.grad.float() / scale, "gradient")


@pytest.mark.parametrize("stage", [0, 3])
def test_scaled_outputs_in_containers(stage: int) -> None:
    run_ranks(1, containers, stage)
