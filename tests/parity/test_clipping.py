"""Clipping on one rank: losses, norms and weights are plain PyTorch's, whichever function clips and wherever gradients lie."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime.grads import Grads
from tests.kit import out_of_core
from tests.kit.dist import run_ranks
from tests.kit.models_hf import HUGGING_FACE
from tests.kit.out_of_core import settle
from tests.kit.parity import find_specimen

out_of_core  # noqa: B018  # importing it makes "no number" mean "everything on disk"

Clip = Callable[[nn.Module], Tensor | None]


def by_parts(model: nn.Module) -> Tensor:
    """What torch's clipping is made of, called by hand."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total)
    return total


def by_group(model: nn.Module) -> Tensor:
    """Two groups, each clipped by itself, and then all of them once more."""
    params = list(model.parameters())
    norms = [torch.nn.utils.clip_grad_norm_(part, 0.03) for part in (params[::2], params[1::2])]
    return torch.stack([*norms, torch.nn.utils.clip_grad_norm_(params, 0.04)])


def values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


CLIPS: dict[str, Clip] = {
    "torch": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05),
    "lowtide": lambda m: lowtide.clip_grad_norm_(m, 0.05),
    "inf": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, float("inf")),
    "one": lambda m: lowtide.clip_grad_norm_(m, 0.5, 1.0),
    "nothing": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9),
    "parts": by_parts,
    "group": by_group,
    "values": values,
    "values, then norm": lambda m: (values(m), torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01))[1],
}


@dataclass(frozen=True)
class Loop:
    """A training loop that clips."""

    model: str
    clip: str
    accumulate: int = 1
    autocast: bool = False
    scaler: bool = False
    to_none: bool = True
    threads: int = 1

    def __str__(self) -> str:
        flags = [name for name in ("autocast", "scaler") if getattr(self, name)]
        return "-".join([self.model, self.clip, f"x{self.accumulate}", *flags, "none" if self.to_none else "zero"])


def train(loop: Loop, shard: Callable[[nn.Module, torch.optim.Optimizer], Any], *, steps: int = 4) -> list[Tensor]:
    """Every number that the loop makes."""
    specimen = find_specimen(loop.model)
    model = specimen.build(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3, enabled=loop.scaler)
    out: list[Tensor] = []
    for step in range(steps):
        for micro in range(loop.accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                loss = specimen.loss(model, specimen.batch(step * loop.accumulate + micro, 0)) / loop.accumulate
            scaler.scale(loss).backward()
            out.append(loss.detach().clone())
        scaler.unscale_(optimizer)
        if (norm := CLIPS[loop.clip](model)) is not None:
            out.append(norm.clone())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=loop.to_none)
    with lowtide.gathered(model):
        out += [p.detach().clone() for p in model.parameters()]
    return out


def same(loop: Loop, shard: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    expected = train(loop, lambda model, optimizer: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = train(loop, shard)
    assert len(got) == len(expected)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype is b.dtype, number
        assert torch.equal(a, b) or (a.isnan().all() and b.isnan().all()), f"number {number}: {a} against {b}"


MODELS = ("tied_head", "convolutions", "mixed_dtypes", "bfloat16")
LOOPS = [
    *(Loop(m, c) for m, c in itertools.product(MODELS, CLIPS)),
    *(Loop(m, c, accumulate=4, to_none=none) for m, c, none in itertools.product(MODELS, ("torch", "lowtide"), (True, False))),
    *(Loop(m, c, autocast=True) for m, c in itertools.product(MODELS[:1], ("torch", "lowtide"))),
    *(Loop(m, c, accumulate=n, scaler=True) for m, c, n in itertools.product(MODELS[:1], ("torch", "lowtide"), (1, 4))),
]


@pytest.fixture(scope="module", params=["memory", "disk"])
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("spool")

    def in_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        lowtide.shard(model, optimizer, stage=3)

    def on_disk(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        lowtide.shard(model, optimizer, disk=str(folder), update=lowtide.Update(chunk_bytes=4096), stage=3)
        settle(model, "disk")

    return {"memory": in_memory, "disk": on_disk}[request.param]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_one_rank_equals_plain_torch(loop: Loop, shard: Any) -> None:
    same(loop, shard)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Gradients that are read once more, for a norm or to see whether they are finite."""
    names: list[str] = []
    pieces, whole = Grads.pieces, Grads.whole_from_shelf

    def read_pieces(self: Grads, wanted: Any) -> Any:
        for record, lo, part in pieces(self, wanted):
            names.append(record.unit.names[record.index])
            yield record, lo, part

    def read_whole(self: Grads, record: Any) -> Any:
        names.append(record.unit.names[record.index])
        return whole(self, record)

    Grads.pieces, Grads.whole_from_shelf = read_pieces, read_whole  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Grads.pieces, Grads.whole_from_shelf = pieces, whole  # type: ignore[method-assign]


@pytest.mark.parametrize("clip", ["torch", "lowtide", "inf"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_gradient_is_read_for_a_norm(clip: str, accumulate: int, scaled: bool, tmp_path: Path) -> None:
    """Known when backward ends, from the first step on; other orders than 2, and norms of gradients that a loss scaler has
    multiplied, from the second time on that they are asked for."""
    specimen = find_specimen("tied_head")
    model = specimen.build(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lowtide.shard(model, optimizer, disk=str(tmp_path), update=lowtide.Update(chunk_bytes=4096), stage=3)
    settle(model, "disk")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for step in range(3):
        with counted() as read:
            for micro in range(accumulate):
                scaler.scale(specimen.loss(model, specimen.batch(step * accumulate + micro, 0))).backward()
            scaler.unscale_(optimizer)
            CLIPS[clip](model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if (clip != "inf" and not scaled) or step > 0:
            assert read == []
        else:
            assert read


def test_what_is_not_finite_is_found_without_a_look(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 80), nn.Linear(80, 8))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    lowtide.shard(model, optimizer, disk=str(tmp_path), update=lowtide.Update(chunk_bytes=4096), stage=3)
    settle(model, "disk")
    (model(torch.ones(2, 8)).sum() * math.inf).backward()
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped
    with lowtide.gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def reads_on_rank(rank: int, world: int, stage: int, folder: str | None) -> list[str]:
    """Which gradients one step reads again, after the first."""
    specimen = find_specimen("tied_head")
    model = specimen.build(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"disk": folder, "update": lowtide.Update(chunk_bytes=4096)} if folder else {}
    lowtide.shard(model, optimizer, stage=stage, **options)
    if folder:
        settle(model, "disk")
    for step in range(2):
        with counted() as read:
            for micro in range(2):
                specimen.loss(model, specimen.batch(2 * step + micro, rank)).backward()
            lowtide.clip_grad_norm_(model, 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return read


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_no_part_of_a_gradient_is_read_for_a_norm(stage: int, tier: str, tmp_path: Path) -> None:
    assert run_ranks(2, reads_on_rank, stage, str(tmp_path) if tier == "disk" else None) == [[], []]


# -- a framework, whose default is to clip at 1.0 ---------------------------------------------------------------------


def trained(
    folder: Path, shard: Callable[[nn.Module, torch.optim.Optimizer], Any], **options: Any
) -> tuple[list[Any], list[Tensor]]:
    """The log and the weights of a run of Hugging Face's Trainer."""
    import transformers

    class Trainer(transformers.Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            shard(self.model, self.optimizer)
            return optimizer

    model = HUGGING_FACE["gpt2"].build(seed=1)
    data = [{"input_ids": row, "labels": row} for step in range(8) for row in HUGGING_FACE["gpt2"].batch(step, 0)[0]]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the framework's own
        trainer.train()
    kept = [
        {k: v for k, v in entry.items() if k in ("loss", "grad_norm", "learning_rate")} for entry in trainer.state.log_history
    ]
    with lowtide.gathered(model):
        return kept, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 4}, {"bf16": True}], ids=str)
def test_hugging_face_trainer(options: dict[str, Any], shard: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path, lambda model, optimizer: None, **options)
    got = trained(tmp_path, shard, **options)
    assert got[0] == expected[0]
    assert any(entry.get("grad_norm", 0) > 1 for entry in got[0]), "nothing was clipped"
    assert all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))
