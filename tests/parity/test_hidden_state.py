"""State that autograd knows nothing of, and activations that are computed again: plain PyTorch's bits, or a typed error.

A product: kinds of hidden state (tests/kit/hidden_state.py) × what becomes of activations × whether the first step has room.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import ChangedInPlace, Poisoned, RecomputedDifferently
from lowtide.runtime.guard import ActivationGuard
from tests.kit.dist import run_ranks
from tests.kit.hidden_state import KINDS, UNSEEN, WIDTH, Model, rewind
from tests.kit.parity import first_difference

WAYS: dict[str, dict[str, Any]] = {
    "memory alone": {"memory": "16GiB"},
    "memory alone, no room at first": {"memory": "16GiB"},
    "recompute": {"activations": "recompute"},
    "recompute, stage 3 on disk": {"activations": "recompute", "disk": "?", "memory": "16GiB"},
    "disk": {"activations": "disk", "disk": "?", "memory": "16GiB"},
}


def options_of(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if "no room" in way:
        monkeypatch.setattr(ActivationGuard, "_is_room_for_all", lambda _: False)
    found = WAYS[way]
    return {**found, "disk": str(folder)} if "disk" in found else found


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[Tensor]:
    """What a loop comes to, and what it leaves in the generators of Python and NumPy."""
    out: list[Tensor] = []
    for step in range(steps):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).cos() + step
        loss = model(x).square().mean()
        out.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*out, torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)]


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def both(make: Callable[[], nn.Module], options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], nn.Module]:
    model, optimizer = build(make)
    rewind()
    expected = numbers(model, optimizer)
    model, optimizer = build(make)
    lowtide.shard(model, optimizer, **options)
    rewind()
    return expected, numbers(model, optimizer), model


def assert_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [first_difference(a, b) for a, b in zip(got, expected, strict=True)] == [None] * len(expected)


@pytest.fixture(autouse=True)
def _one_thread_and_no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both take most of the time of so small a loop, and change no bit of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("lowtide.runtime.budget.gc.collect", lambda: 0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_or_a_typed_error(kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(way, tmp_path, monkeypatch)
    if kind in UNSEEN and ("recompute" in way or "no room" in way):
        with pytest.raises(RecomputedDifferently, match="came to other values when it was computed again"):
            both(lambda: Model(KINDS[kind]), options)
    else:
        expected, got, _ = both(lambda: Model(KINDS[kind]), options)
        assert_bits(got, expected)


def test_after_the_error_nothing_goes_on_before_a_state_is_loaded() -> None:
    model, optimizer = build(lambda: Model(KINDS["Clock"]))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    lowtide.shard(model, optimizer, activations="recompute", comm=lowtide.Comm(bucket_bytes=0))
    rewind()
    with pytest.raises(RecomputedDifferently, match=r"tensor 3 of the .* that autograd saved in it, float32") as caught:
        numbers(model, optimizer)
    assert caught.value.unit == "blocks.2"
    assert 'activations="keep"' in str(caught.value)
    for call in (lambda: model(torch.ones(1, WIDTH)), optimizer.step):
        with pytest.raises(Poisoned, match="came to other values"):
            call()
    model.load_state_dict(start)
    assert torch.isfinite(model(torch.ones(1, WIDTH))).all()


def test_what_is_not_compared_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prints the product above would pass over silent wrong numbers: it is the comparison that finds them."""
    monkeypatch.setattr("lowtide.runtime.recompute.print_of", lambda _: 0)
    expected, got, _ = both(lambda: Model(KINDS["Clock"]), {"activations": "recompute"})
    assert any(first_difference(a, b) for a, b in zip(got, expected, strict=True))


# -- one rank only ----------------------------------------------------------------------------------------------------


class OnOneRank(KINDS["Counter"]):  # type: ignore[misc]
    """Only the last rank's blocks count. Computing again gathers where backward needs no parameter: a bias is in no graph."""

    rank = 0

    def factor(self, given: Any) -> Any:
        return super().factor(given) * 0 + 1 if OnOneRank.rank else 1.0

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return torch.sigmoid(x + self.linear.bias * self.factor(given)).square()


def _on_one_rank(rank: int, world: int, disk: str | None, transport: str) -> list[str]:
    OnOneRank.rank = rank
    model, optimizer = build(lambda: Model(OnOneRank))
    expected = numbers(model, optimizer)
    model, optimizer = build(lambda: Model(OnOneRank))
    more = {"disk": disk, "memory": "16GiB"} if disk else {}
    comm = lowtide.Comm(bucket_bytes=0, deadline=20, transport=transport)
    lowtide.shard(model, optimizer, stage=3, activations="recompute", comm=comm, **more)
    got = numbers(model, optimizer)
    kept = len(engine_of(model).placer.guard.changes)
    return [str(text) for a, b in zip(got[:-1], expected[:-1], strict=True) if (text := first_difference(a, b))] + (
        [f"{kept} units kept"] if kept != (3 if rank else 0) else []
    )


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("transport", ["shared", "torch"])
def test_a_rank_that_keeps_what_another_computes_again(transport: str, disk: bool, tmp_path: Path) -> None:
    assert run_ranks(2, _on_one_rank, str(tmp_path) if disk else None, transport) == [[], []]


# -- arguments that are one object ------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Attention that is called in one of several ways, as a unit of its own."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.same = Same()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)[None]
        m = x.flip(1)
        q, k, v = {"x": x, "m": m}[self.pattern[0]], *({"x": x, "m": m}[c] for c in self.pattern[1:3])
        if self.pattern.endswith("="):
            out = self.attention(query=q, key=k, value=v, need_weights=False)[0]
        else:
            out = self.attention(q, k, v, need_weights=False)[0]
        return x + out + self.same(x, [x, {"inner": (x, m)}], other=m)


class Same(nn.Module):
    """Asks of tensors inside containers whether they are one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inside: Any, *, other: Tensor) -> Tensor:
        one = inside[0] is x and inside[1]["inner"][0] is x and inside[1]["inner"][1] is other
        return torch.sigmoid(self.linear(x)) if one else self.linear(x).exp() * self.linear(other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", ["xxx", "xmm", "xxm", "xmx", "xxx=", "xmm="])
def test_arguments_that_are_one_object_are_one_again(
    pattern: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, got, _ = both(lambda: Twice(pattern), options_of(way, tmp_path, monkeypatch))
    assert_bits(got, expected)


# -- in place, hooks, max_norm ----------------------------------------------------------------------------------------


class ChangedAfterSaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Changes(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x))


class Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sigmoid()
        z = y * y
        y.add_(1)
        return z.tanh()


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_after_saving_raises(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(ChangedAfterSaving)
    lowtide.shard(model, optimizer, units=[Changes, nn.Linear], **options_of(way, tmp_path, monkeypatch))
    with pytest.raises(ChangedInPlace, match="modified by an inplace operation"):
        numbers(model, optimizer)


@pytest.mark.parametrize("way", WAYS)
def test_a_result_changed_by_the_caller_raises(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block has saved its own result, and the model changes it afterwards."""
    model, optimizer = build(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(2))))
    model[0].register_forward_hook(lambda module, args, output: output.mul_(2))
    lowtide.shard(model, optimizer, **options_of(way, tmp_path, monkeypatch))
    with pytest.raises(ChangedInPlace, match="modified by an inplace operation"):
        numbers(model, optimizer)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_callers_run_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(KINDS["Counter"]):  # type: ignore[misc]
        def factor(self, given: Any) -> Any:
            return 1.0

    seen: list[str] = []
    model, optimizer = build(lambda: Model(Plain))
    lowtide.shard(model, optimizer, **options_of(way, tmp_path, monkeypatch))
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    numbers(model, optimizer, 2)
    assert sorted(seen) == sorted([name for name, module in model.named_modules() if name != "blocks"] * 2)


class MomentumEncoder(nn.Module):
    """Follows its trained half, past all versions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Follower() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Follower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.key.weight.data.mul_(0.9).add_(self.query.weight.data, alpha=0.1)
        return x + torch.tanh(self.query(x)) * self.key(x)


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, max_norm=0.5)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x * 3).long().abs() % 10).mean(1)
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("make", [Renormalised, MomentumEncoder])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_writes_to_its_parameters(
    way: str, make: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, got, _ = both(make, options_of(way, tmp_path, monkeypatch))
    assert_bits(got, expected)


@pytest.mark.parametrize("activations", ["keep", "recompute", "auto"])
def test_composable_checkpoint(activations: str, tmp_path: Path) -> None:
    """FSDP2's own checkpointing, whose hooks are inside ours in forward and outside in the recomputation."""
    from torch.distributed._composable import checkpoint

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
        for block in model:
            checkpoint(block)
        return model

    expected, got, _ = both(make, {"activations": activations, "disk": str(tmp_path), "memory": "16GiB"})
    assert_bits(got, expected)
