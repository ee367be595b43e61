"""lowtide on the simulated accelerator, as it is: setups × schedules against plain PyTorch on the same device.

A cell is right if every parameter has plain PyTorch's bits and nothing raced. What is wrong today is expected to fail, with the
finding; whoever mends it takes the finding out here.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.runtime import assembly
from tests.kit.dist import RanksFailed
from tests.kit.parity import first_difference
from tests.kit.simdevice import LATE, SCHEDULES, SIDE_EARLY, SYNC, Schedule, configure, needs_compiler, on_sim_ranks, report
from tests.kit.simdevice.accelerators import allowed

pytestmark = needs_compiler


class Known(AssertionError):
    """What is expected to be wrong, and is."""


@dataclass(frozen=True)
class Finding:
    """What is wrong today, by its number in the report on the device tier, and a text by which it is known again."""

    number: str
    what: str
    sign: str

    def __str__(self) -> str:
        return f"{self.number}: {self.what}"


_ON_HOST = Finding(
    "S2.1",
    "gradients stay on the device and homes are on the host, and nothing brings the one to the other",
    "attempting to assign a gradient with device type 'sim' to a tensor with device type 'cpu'",
)
_SLOTS = Finding(
    "S1.1",
    "a slot is filled again while kernels still read it, because the copy waits for no reader",
    "nothing orders the two",
)
_SCALER = Finding(
    "S2.4",
    "shelved gradients are on the host, and what a GradScaler multiplies them by is on the device",
    "_amp_foreach_non_finite_check_and_unscale_: Expected all tensors to be on the same device",
)
_NUMPY = Finding(
    "S2.5", "a checkpoint takes .numpy() of what is on the device", "can't convert sim:0 device type tensor to numpy"
)
_CHANNEL = Finding(
    "S1.3",
    "channels compute on the main stream and know nothing of the stream that makes their input",
    "nothing orders the two",
)
_CONTROL = Finding(
    "S2.6", "headers and facts are tensors of the host, on the group that carries the data", "No backend type associated with"
)


@dataclass(frozen=True)
class Setup:
    """One way to run lowtide with a model on a device. ``finding``: why it is wrong today; None: it is right."""

    name: str
    finding: Finding | None = None
    options: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    disk: bool = False
    all_on_disk: bool = False
    half: bool = False
    clip: str = ""
    scaler: bool = False
    save: bool = False
    own_stream: bool = False
    group: str = ""

    def __str__(self) -> str:
        return self.name


SETUPS = [
    Setup("no offload"),
    Setup("memory", options={"memory": "8GiB"}),
    Setup("device_memory", _ON_HOST, {"device_memory": "64KiB"}),
    Setup("device_memory, backward", _ON_HOST, {"device_memory": "64KiB", "update": "backward"}),
    Setup("device_memory, bf16", _ON_HOST, {"device_memory": "64KiB"}, half=True),
    Setup("disk", _SLOTS, disk=True, all_on_disk=True),
    Setup("disk, homes in memory", _SLOTS, disk=True),
    Setup("disk, recompute", _SLOTS, {"activations": "recompute"}, disk=True),
    Setup("disk, activations on the host", _SLOTS, {"activations": "host"}, disk=True),
    Setup("disk, activations on disk", _SLOTS, {"activations": "disk"}, disk=True),
    Setup("disk, backward", _ON_HOST, {"update": "backward"}, disk=True),
    Setup("disk, lowtide's clipping", _SLOTS, disk=True, clip="lowtide"),
    Setup("disk, torch's clipping", _SLOTS, disk=True, clip="torch"),
    Setup("disk, GradScaler", _SCALER, disk=True, scaler=True),
    Setup("no offload, save", _NUMPY, save=True),
    Setup("two ranks", options={"stage": 3}, world=2),
    Setup("two ranks, a stream of their own", _CHANNEL, {"stage": 3}, world=2, own_stream=True),
    Setup("two ranks, a backend for devices only", _CONTROL, {"stage": 3}, world=2, group="simccl"),
]


def build(half: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    return (model.bfloat16() if half else model).to("sim")


def train(setup: Setup, rank: int, folder: str | None) -> list[Tensor]:
    """Parameters after four steps; ``folder``: with lowtide."""
    model = build(setup.half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None:
        options = dict(setup.options)
        if setup.disk:
            options["disk"] = folder
        if setup.group:
            options["group"] = dist.new_group(backend=setup.group)
        model, optimizer = lowtide.shard(model, optimizer, comm=lowtide.Comm(bucket_bytes=0, deadline=60), **options)
    scaler = torch.amp.GradScaler("sim", init_scale=256.0) if setup.scaler else None
    stream = torch.Stream("sim") if setup.own_stream else torch.accelerator.current_stream()
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(8, 64, generator=generator).to("sim", torch.bfloat16 if setup.half else torch.float32)
            loss = model(x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            if folder is None and setup.world > 1:
                _average(model, setup.world)
            if setup.clip:
                clip = lowtide.clip_grad_norm_ if setup.clip == "lowtide" and folder else nn.utils.clip_grad_norm_
                clip(model if clip is lowtide.clip_grad_norm_ else model.parameters(), 0.01)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    torch.accelerator.synchronize()
    if folder is None:
        return [p.detach().cpu() for p in model.parameters()]
    if setup.save:
        lowtide.save(f"{folder}/checkpoint", model, optimizer)
    with lowtide.gathered(model):
        return [p.detach().cpu() for p in model.parameters()]


def _average(model: nn.Module, world: int) -> None:
    """As lowtide does: each gradient times 1/W, then added in the order of ranks."""
    for p in model.parameters():
        mine = (p.grad * (1.0 / world)).cpu()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        p.grad = torch.stack(parts).sum(0).to("sim")


def outcome(rank: int, world: int, setup: Setup, schedule: Schedule) -> str:
    """What is wrong, or nothing."""
    configure(SYNC)
    expected = train(setup, rank, None)
    configure(schedule)
    budget = mock.patch.object(assembly, "default_budget", return_value=None) if setup.all_on_disk else contextlib.nullcontext()
    with allowed(), budget, tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        try:
            got = train(setup, rank, folders[0])
        except Exception as error:
            if world > 1:
                raise  # the ranks are no longer in step
            return f"{type(error).__name__}: {error}"
        races = report().races
        dist.barrier()
    wrong = [difference for a, b in zip(got, expected, strict=True) if (difference := first_difference(a, b))]
    return f"{len(wrong)} of {len(got)} tensors differ, {len(races)} races: {(races + wrong)[:2]}" if wrong or races else ""


def _cells() -> list[Any]:
    """Every setup under every schedule. In `make test` a setup runs synchronously and under the schedule that shows most."""
    cells: list[Any] = []
    for setup in SETUPS:
        marks = (
            [pytest.mark.xfail(strict=True, raises=(AssertionError, RanksFailed), reason=str(setup.finding))]
            if setup.finding
            else []
        )
        for schedule in SCHEDULES:
            more = [] if schedule in (SYNC, SIDE_EARLY if setup.disk else LATE) else [pytest.mark.soak]
            cells.append(pytest.param(setup, schedule, id=f"{setup}-{schedule}", marks=[*marks, *more]))
    return cells


@pytest.mark.parametrize(("setup", "schedule"), _cells())
def test_plain_pytorchs_bits_without_a_race(setup: Setup, schedule: Schedule) -> None:
    try:
        found = on_sim_ranks(setup.world, outcome, setup, schedule, timeout=100)
    except RanksFailed as error:
        found = [str(error)]
    wrong = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)
    if setup.finding is not None and setup.finding.sign in wrong:
        raise Known(wrong)
    assert not wrong, wrong
