"""Different numbers of batches inside ``model.join()``: the bits of DDP in torch's Join, and of a loop by hand that adds 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import lowtide
from lowtide import api
from lowtide.errors import ArgumentError, Error, Mismatch, PeerFailed, Refused
from tests.kit import uneven
from tests.kit.dist import run_ranks
from tests.kit.models import Block, Stack
from tests.kit.uneven import Loop

TRANSPORTS = ("torch", "auto")

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum-clip": {"optimizer": "sgd_momentum", "clip": 0.05},
    "micro": {"accumulate": 2},
    "no_sync": {"accumulate": 2, "no_sync": True},
    "zeroed": {"set_to_none": False, "accumulate": 2},
    "changes": {"changes": True, "clip": 0.05},
    "schedule": {"schedule": True},
    "options": {"schedule": True, "after_step": False, "after": 0},
    "buffers": {"model": "buffers", "evaluate": True},
    "tied": {"model": "tied_head", "clip": 0.5},
    "moe": {"model": "moe"},
    "active": {"divide_by": "active"},
}


def comm(transport: str) -> lowtide.Comm:
    return lowtide.Comm(bucket_bytes=0, deadline=300, transport=transport)


@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (0, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["plain", "momentum-clip", "buffers", "active"])
def test_the_loop_by_hand_gives_the_bits_of_ddp(counts: tuple[int, ...], name: str) -> None:
    uneven.check(Loop(counts, **{**LOOPS[name], "evaluate": False}), uneven.difference_of_oracles)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [(3, 5), (5, 3), (0, 2)], ids=str)
def test_two_ranks_give_the_bits_of_ddp(counts: tuple[int, ...], stage: int, transport: str) -> None:
    uneven.check(Loop(counts), uneven.difference, {"stage": stage, "comm": comm(transport)})


@pytest.mark.thinned(8)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", [(3, 5), (2, 5, 0), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_gives_the_bits_of_the_loop_by_hand(name: str, counts: tuple[int, ...], stage: int, transport: str) -> None:
    uneven.check(Loop(counts, **LOOPS[name]), uneven.difference, {"stage": stage, "comm": comm(transport)})


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("stage", "update"), [(3, "backward"), (1, "backward"), (3, "step"), (2, "step")])
def test_on_disk_and_with_updates_in_backward(stage: int, update: str, transport: str, tmp_path: Path) -> None:
    options = {
        "stage": stage,
        "comm": comm(transport),
        "update": lowtide.Update(update, chunk_bytes=4096),
        "disk": str(tmp_path),
    }
    uneven.check(Loop((1, 4), schedule=True), uneven.difference, options)


@pytest.mark.parametrize("stage", [0, 3])
def test_updates_in_backward_in_memory(stage: int) -> None:
    uneven.check(Loop((3, 1, 2)), uneven.difference, {"stage": stage, "comm": comm("auto"), "update": "backward"})


def test_low_precision_with_a_loss_scale() -> None:
    """There is no oracle outside: stages must agree, and all ranks leave with the same loss scale."""
    results = [run_ranks(2, scaled, stage) for stage in (0, 3)]
    for first, second in zip(*results, strict=True):
        assert first[1] == second[1] == results[0][0][1]
        for a, b in zip(first[0], second[0], strict=True):
            assert torch.equal(a, b)


def scaled(rank: int, world: int, stage: int) -> tuple[list[torch.Tensor], float]:
    model = stack()
    options: Any = {"stage": stage, "comm": comm("torch"), "precision": lowtide.Precision(param="bf16", loss_scale="dynamic")}
    model, optimizer = lowtide.shard(model, SGD(model.parameters(), lr=0.1), **options)
    with model.join():  # type: ignore[operator]
        for number in range(1 + 3 * rank):
            x = torch.full((2, 24), float("inf") if number == 2 else 0.1 * number)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = api.engine_of(model)
    assert engine.skipped_steps == 1
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()], engine.scale.value


# -- what a loop may do inside ----------------------------------------------------------------------------------------


def stack(count: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack([Block() for _ in range(count)])


def batches(count: int, rank: int) -> list[torch.Tensor]:
    return [torch.randn(2, 24, generator=torch.Generator().manual_seed(100 * rank + n)) for n in range(count)]


def sharded(stage: int, transport: str = "torch", **options: Any) -> tuple[Any, Any]:
    model = stack()
    return lowtide.shard(model, AdamW(model.parameters(), lr=0.01), stage=stage, comm=comm(transport), **options)


def looks_inside(rank: int, world: int, stage: int, transport: str) -> bool:
    """Everything that only reads goes on working when other ranks have no batches left."""
    model, optimizer = sharded(stage, transport)
    found: list[torch.Tensor] = []
    with model.join():
        for x in batches(1 + 2 * rank, rank):
            with torch.no_grad():
                model.blocks[1](x)  # a part by itself
            model(x).square().mean().backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            grad: Any = model.head.weight.grad
            found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone())
            optimizer.step()
            with lowtide.gathered(model.head):
                found.append(model.head.weight.detach().clone())
            optimizer.zero_grad()
            lowtide.sharded_state_dict(model)
    assert all(p.grad is None for p in model.parameters())
    whole = model.state_dict()
    if rank == 0:
        assert all(torch.isfinite(value).all() for value in whole.values())
    return all(torch.isfinite(t).all() for t in found)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_looking_inside(stage: int, transport: str) -> None:
    assert all(run_ranks(3, looks_inside, stage, transport))


def clipped_by_torch(rank: int, world: int, stage: int, counts: list[int]) -> list[torch.Tensor]:
    model = stack()
    model, optimizer = lowtide.shard(model, SGD(model.parameters(), lr=0.5), stage=stage, comm=comm("torch"))
    with model.join():  # type: ignore[operator]
        for x in batches(counts[rank], rank):
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def test_clipping_by_torch_reaches_ranks_that_follow() -> None:
    """At stage 2 every operation is repeated, at stage 0 whole values are handed over: the norm is the same up to rounding."""
    one, other = (run_ranks(2, clipped_by_torch, stage, [1, 4]) for stage in (0, 2))
    for rank in range(2):
        for a, b, c in zip(one[rank], other[rank], one[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            assert torch.equal(a, c)


def two_optimizers(rank: int, world: int) -> list[torch.Tensor]:
    model = stack()
    one, two = SGD(model.blocks.parameters(), lr=0.1), AdamW(model.head.parameters(), lr=0.01)
    model, one = lowtide.shard(model, one, stage=2, comm=comm("torch"))
    model, two = lowtide.shard(model, two)
    with model.join():  # type: ignore[operator]
        for number, x in enumerate(batches(1 + 3 * (1 - rank), rank)):
            two.param_groups[0]["lr"] = 0.01 / (number + 1)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                loss = model(x).square().mean()
                loss.backward()
                return loss

            two.step(closure)
            one.step()
            model.zero_grad()
    assert two.param_groups[0]["lr"] == 0.01 / 4
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def test_two_optimizers_and_a_closure() -> None:
    first, second = run_ranks(2, two_optimizers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], stack().blocks[0].norm.weight)


def left_in_the_middle(rank: int, world: int, stage: int) -> list[torch.Tensor]:
    """A loop may be left between any two calls."""
    model, optimizer = sharded(stage)
    with model.join():
        for number, x in enumerate(batches(4, rank)):
            loss = model(x).square().mean()
            if rank == 0 and number == 1:
                break
            loss.backward()
            if rank == 2 and number == 2:
                break
            optimizer.step()
            optimizer.zero_grad()
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loop_that_is_left_in_the_middle(stage: int) -> None:
    ranks = run_ranks(3, left_in_the_middle, stage)
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], rank, strict=True))


def one_after_another(rank: int, world: int) -> int:
    """Blocks of one model, and steps between them."""
    model, optimizer = sharded(3)
    for epoch in range(3):
        with model.join():
            for x in batches((rank + epoch) % 3, rank):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        model(batches(1, rank)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return api.engine_of(model).steps_taken


def test_one_block_after_another() -> None:
    assert run_ranks(2, one_after_another) == [1 + 1 + 2 + 1 + 2 + 1] * 2


def alone(rank: int, world: int) -> bool:
    model = stack()
    model, optimizer = lowtide.shard(model, SGD(model.parameters(), lr=0.1), stage=3)
    with model.join(), model.join():  # type: ignore[operator]
        model(batches(1, 0)[0]).sum().backward()
        optimizer.step()
        model.state_dict()
    return True


def test_one_rank_has_nobody_to_follow() -> None:
    assert run_ranks(1, alone) == [True]


# -- what it refuses, and how it fails --------------------------------------------------------------------------------


def refusals(rank: int, world: int, folder: str) -> list[str]:
    model, optimizer = sharded(3)
    texts: list[str] = []

    def refused(call: Any) -> None:
        with pytest.raises(Refused) as caught:
            call()
        texts.append(str(caught.value))

    def write() -> None:
        with lowtide.gathered(model, write=True):
            pass

    def nested() -> None:
        with model.join():
            pass

    with pytest.raises(ArgumentError, match="divide_by is 'some'; allowed: 'all'"), model.join(divide_by="some"):
        pass
    with lowtide.gathered(model):
        refused(nested)
    with model.join():
        refused(nested)
        for number, x in enumerate(batches(1 + 2 * rank, rank)):
            model(x).square().mean().backward()
            optimizer.step()
            if number == 0:
                model.state_dict(), optimizer.state_dict(), write()
            if number == 1:
                for call in (model.state_dict, optimizer.state_dict, write):
                    refused(call)
                refused(lambda: lowtide.save(f"{folder}/x", model, optimizer))
                refused(lambda: lowtide.load(folder, model, optimizer))
            optimizer.zero_grad()
    return texts


def test_what_needs_all_ranks_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, refusals, str(tmp_path))
    assert "leave it first" in first[0]
    assert first[1].startswith("join() inside another join()")
    for text, what in zip(
        second[2:], ("model.state_dict()", "optimizer.state_dict()", "gathered(write", "lowtide.save"), strict=False
    ):
        assert text.startswith(what)
        assert "ranks [0] have no batches left. Do it after the `with model.join():` block" in text


def differs(rank: int, world: int, how: str) -> str:
    model, optimizer = sharded(3 if how == "verb" else 1)
    try:
        with model.join(divide_by="active" if how == "divide" and rank == 1 else "all"):
            for number, x in enumerate(batches(0 if rank == 2 else 3, rank)):
                model(x).square().mean().backward()
                if how == "clip":
                    lowtide.clip_grad_norm_(model, 1.0 + rank * number)
                if not (how == "verb" and rank == 1 and number == 1):
                    optimizer.step()
                optimizer.zero_grad()
    except Mismatch as error:
        return str(error)
    return "nobody objected"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("verb", "ranks differ: rank 0 is at step 0, rank 1 is at forward. Inside join() all ranks"),
        ("clip", "ranks differ: rank 0 is at clip, rank 1 is at clip, with other arguments. Inside join()"),
        ("divide", "ranks differ: join(divide_by=...): rank 0 has 'all', rank 1 has 'active'"),
    ],
)
def test_ranks_with_batches_must_agree(how: str, text: str) -> None:
    for told in run_ranks(3, differs, how, fresh=True, timeout=60):
        assert told.startswith(text), told


def raises(rank: int, world: int, where: str, caught: bool) -> str:
    model, optimizer = sharded(3)
    victim = 1
    try:
        with model.join():
            for number, x in enumerate(batches((0, 3, 3)[rank], rank)):
                loss = model(x).square().mean()
                if rank == victim and number == 1 and where == "forward":
                    raise ValueError("the disk is on fire")
                loss.backward()
                if rank == victim and number == 1 and where == "backward":
                    raise ValueError("the disk is on fire")
                optimizer.step()
                optimizer.zero_grad()
    except PeerFailed as error:
        return f"{error.rank}: {error.cause}"
    except ValueError as error:
        if not caught:
            raise
        return str(error)
    return "nothing was heard"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("caught", [True, False])
def test_an_exception_on_one_rank_ends_all(where: str, caught: bool) -> None:
    """Also if the caller catches it, and the process lives on."""
    codes = [0, 0, 0] if caught else [0, 1, 0]
    results = run_ranks(3, raises, where, caught, fresh=True, timeout=60, exit_codes=codes)
    for rank in (0, 2):
        assert results[rank] == "1: ValueError: the disk is on fire"


def all_raise(rank: int, world: int) -> bool:
    """Ranks that all leave with an exception at the same point can go on with the model."""
    model, optimizer = sharded(2)

    def enough() -> None:
        with model.join():
            model(batches(1, rank)[0]).square().mean().backward()
            raise KeyError("enough")

    with pytest.raises(KeyError):
        enough()
    optimizer.zero_grad()
    with model.join():
        for x in batches(1 + rank, rank):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return True


def test_all_ranks_may_leave_with_an_exception() -> None:
    assert all(run_ranks(2, all_raise))


def outside(rank: int, world: int) -> str:
    model, optimizer = sharded(1)
    try:
        with model.join() if rank == 0 else torch.no_grad():
            with torch.enable_grad():
                model(batches(1, rank)[0]).square().mean().backward()
            optimizer.step()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "nobody objected"


def test_a_rank_that_does_not_join_is_found_out() -> None:
    for told in run_ranks(2, outside, fresh=True, timeout=60):
        assert told.startswith("Mismatch: ranks differ: rank 0 is at ask of 'join()', rank 1 is at reduce of"), told


def test_the_models_class_says_what_it_gained() -> None:
    model = lowtide.shard(nn.Linear(4, 4))[0]
    assert "follows the others" in (model.join.__doc__ or "")  # type: ignore[union-attr]
