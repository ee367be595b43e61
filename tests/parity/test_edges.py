"""Corners where a sharded model could quietly differ from a plain one: failures that are caught, resumes, odd calls."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import errors
from lowtide.api import engine_of
from tests.kit.dist import close_pools, run_ranks
from tests.kit.lifetime import collected

STAGES = (0, 1, 2, 3)
SEPARATE = lowtide.Comm(bucket_bytes=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(3)))


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(stage: int, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = build()
    return lowtide.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, comm=SEPARATE, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(rank: int, world: int, stage: int) -> None:
    """state_dicts of model and optimizer carry everything: stop, build anew, go on, same bits."""
    model, optimizer = sharded(stage)
    train(model, optimizer, range(2), rank)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))  # plain state_dicts share the model's memory
    shard_of = lowtide.sharded_state_dict(model)
    expected = train(model, optimizer, range(2, 5), rank)
    if stage == 3 and rank:
        assert kept == ({}, {}) if world > 1 else True
        with pytest.raises(errors.ArgumentError, match="rank 0"):
            optimizer.load_state_dict({})
    # what rank 0 has travels to the others as a file would
    files: list[Any] = [kept]
    if world > 1:
        torch.distributed.broadcast_object_list(files, 0)
    again, fresh = sharded(stage)
    again.load_state_dict(files[0][0])
    fresh.load_state_dict(copy.deepcopy(files[0][1]))
    assert train(again, fresh, range(2, 5), rank) == expected
    lowtide.load_sharded_state_dict(again, shard_of)
    fresh.load_state_dict(copy.deepcopy(files[0][1]))
    assert train(again, fresh, range(2, 5), rank) == expected
    # an optimizer that has run before it is sharded brings its states along
    plain = build()
    used = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, used, range(1), 0)
    oracle_model = build()
    oracle = torch.optim.AdamW(oracle_model.parameters(), lr=1e-2)
    train(oracle_model, oracle, range(1), 0)
    model, optimizer = lowtide.shard(plain, used, stage=stage, comm=SEPARATE)
    got, want = train(model, optimizer, range(1, 3), 0), train(oracle_model, oracle, range(1, 3), 0)
    assert got == want


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_resume(world: int, stage: int) -> None:
    run_ranks(world, resume, stage)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("planted")


@pytest.mark.parametrize("stage", STAGES)
def test_a_caught_failure_in_the_first_backward_changes_nothing_later(stage: int) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        head, tail = model[:1], model[1:]  # type: ignore[index]
        other = model(batch(7)).square().mean()
        with pytest.raises(ValueError, match="planted"):
            tail(Fails.apply(head(batch(9)))).square().mean().backward()
        optimizer.zero_grad()
        other.backward()  # its graph is older than the failure
        optimizer.step()
        optimizer.zero_grad()
        return train(model, optimizer, range(3))

    plain = build()
    assert run(*sharded(stage)) == run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_forward_is_cleaned_up_by_the_next(stage: int) -> None:
    model, optimizer = sharded(stage)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch(0))
    handle.remove()
    plain = build()
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(3))
    assert train(model, optimizer, range(3)) == want
    if stage == 3:
        with pytest.raises(errors.Evicted):
            model[0].linear.weight.sum()


@pytest.mark.parametrize("stage", STAGES)
def test_a_dropped_model_takes_its_threads_along(stage: int) -> None:
    model, optimizer = sharded(stage)
    train(model, optimizer, range(1))
    engine, before = weakref.ref(engine_of(model)), threading.active_count()
    del model, optimizer
    collected(engine)
    assert threading.active_count() <= before


def states_seen(rank: int, world: int) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 40))
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return [tuple(optimizer.state.get(p, {}).get("exp_avg", torch.empty(0)).shape) for p in model.parameters()]


def test_states_between_steps_are_this_ranks_part() -> None:
    """Whole, cut, or not there at all, as docs/gradients.md says."""
    first, second = run_ranks(2, states_seen)
    assert first == [(8, 8), (8,), (128,), (0,)]
    assert second == [(0,), (0,), (192,), (40,)]


class Prompted(nn.Module):
    """Returns a leaf, what is made of it, and something that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.kept: Tensor | None = None

    def forward(self, prompt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.kept is None:
            self.kept = prompt * 2
        return prompt, self.block(prompt), self.kept


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_model_returns_again_gets_no_second_hook(stage: int) -> None:
    model = Prompted()
    lowtide.shard(model, stage=stage, comm=SEPARATE)
    prompt = nn.Parameter(torch.ones(4, 24))
    for _ in range(5):
        outputs = model(prompt)
        sum(o.sum() for o in outputs).backward(retain_graph=True)  # type: ignore[union-attr]
    hooks = [len(t._backward_hooks or {}) for t in (outputs[0], outputs[2])]
    assert hooks == [1, 1]
    assert prompt.grad is not None


def test_lost_writes_are_refused() -> None:
    run_ranks(2, lost_writes)


def lost_writes(rank: int, world: int) -> None:
    model, _ = sharded(3)
    with pytest.raises(errors.Evicted):
        model[0].linear.weight.data = torch.zeros(24, 24)

    def clamp(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.linear.weight.clamp_(-0.01, 0.01)  # type: ignore[union-attr]

    model[0].register_forward_hook(clamp)
    with pytest.raises(errors.Refused, match=r"0\.linear\.weight.*gathered"):
        model(batch(0))


@pytest.mark.parametrize("world", [1, 2])
def test_no_sync(world: int) -> None:
    run_ranks(world, mixed_no_sync)


def mixed_no_sync(rank: int, world: int) -> None:
    for stage in STAGES:
        model, optimizer = sharded(stage)
        model(batch(0, rank)).square().mean().backward()
        with model.no_sync():
            loss = model(batch(1, rank)).square().mean()
            if world > 1:
                with pytest.raises(errors.Refused, match="zero_grad"):
                    loss.backward()
                optimizer.zero_grad(set_to_none=stage % 2 == 0)
            loss = model(batch(1, rank)).square().mean()
            loss.backward()
        if world > 1:
            with pytest.raises(errors.Refused, match="no_sync"):
                optimizer.step()
            with pytest.raises(errors.Refused, match="no_sync"):
                lowtide.clip_grad_norm_(model, 1.0)
        else:
            plain = build()
            for step in range(2):
                plain(batch(step)).square().mean().backward()
            optimizer.step()
            torch.optim.AdamW(plain.parameters(), lr=1e-2).step()
            assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_masters_keep_what_rounding_would_lose() -> None:
    fine = {k: v + 1e-4 for k, v in build(1).state_dict().items()}
    masters = []
    for stage in STAGES:
        model, _ = sharded(stage, precision="bf16")
        model.load_state_dict(fine)
        with lowtide.gathered(model[2], write=True), torch.no_grad():
            model[2].linear.bias.zero_()
        masters.append([p.target.detach().clone() for p in engine_of(model).update.pieces.values()])
    for got in masters:
        for value, (name, want) in zip(got, fine.items(), strict=True):
            assert torch.equal(value, torch.zeros(24) if name == "2.linear.bias" else want), name


def test_loss_scale_is_undone_where_gradients_leave() -> None:
    model, _ = sharded(2, precision=lowtide.Precision(loss_scale=1024.0))
    plain = build()
    x = batch(0).requires_grad_()
    y = batch(0).requires_grad_()
    model(model(x)).sum().backward()
    plain(plain(y)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_parameters_that_share_memory_are_refused() -> None:
    model = build()
    model[0].linear.weight.data = model[1].linear.weight.data
    with pytest.raises(errors.Refused, match=r"0\.linear\.weight.*1\.linear\.weight|1\.linear\.weight.*0\.linear\.weight"):
        lowtide.shard(model)


def test_only_what_was_updated_makes_graphs_stale() -> None:
    for stage in STAGES:
        model = build()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model[1:].parameters(), lr=0.1)
        lowtide.shard(model, first, stage=stage, comm=SEPARATE)
        lowtide.shard(model, second)
        features = model[0](batch(0)).detach()
        loss = model[1:](features).square().mean()
        model[0](batch(0)).square().mean().backward()
        first.step()
        loss.backward()
        second.step()
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        second.step()
        with pytest.raises(RuntimeError):
            loss.backward()


def test_a_stranger_in_a_new_group_changes_nothing() -> None:
    model, optimizer = sharded(2)
    with pytest.raises(errors.ArgumentError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    train(model, optimizer, range(1))


def test_step_inside_gathered_is_refused() -> None:
    model, optimizer = sharded(3)
    model(batch(0)).sum().backward()
    with lowtide.gathered(model), pytest.raises(errors.Refused, match="gathered"):
        optimizer.step()
    optimizer.step()


def test_a_forked_child_may_read_resident_parameters() -> None:
    model, _ = sharded(0)
    weight = model[0].linear.weight.detach()
    want = float(weight.sum())
    child = os.fork()
    if child == 0:
        os._exit(0 if float(weight.sum()) == want else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_negative_views_of_parameters() -> None:
    class Imaginary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w.conj().imag

    plain, model = Imaginary(), Imaginary()
    lowtide.shard(model, stage=3)
    x = [torch.ones(6, requires_grad=True) for _ in range(2)]
    plain(x[0]).sum().backward()
    model(x[1]).sum().backward()
    assert torch.equal(x[0].grad, x[1].grad)
    assert torch.equal(plain.w.grad, model.w.grad.full_tensor())


class TiedHead(nn.Module):
    """A module whose only parameters are another module's: it has no unit of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 24)
        self.block = Block()
        self.head = TiedHead(self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 0, "memory": "4GiB"}, {"memory": "4GiB", "disk": "."}])
def test_a_module_that_only_borrows_parameters(options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    close_pools()  # ranks of other tests would count against the number
    losses = []
    for way in (None, options):
        torch.manual_seed(0)
        model: nn.Module = Tied()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if way is not None:
            model, optimizer = lowtide.shard(model, optimizer, comm=SEPARATE, **way)
        for step in range(5):
            tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(step))
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:5] == losses[5:]
