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
from tests.kit.simdevice import SCHEDULES, SYNC, Schedule, configure, needs_compiler, on_sim_ranks, report
from tests.kit.simdevice.accelerators import allowed

pytestmark = needs_compiler

_HOST_GRADIENTS = "gradients stay on the device and homes are on the host: nothing brings the one to the other (S2.1)"
_SLOT_REUSE = "a slot is filled again while kernels still read it: the copy waits for no reader (S1.1)"
_CLIPPING = "shelved gradients on the host meet scalars of the device (S2.4)"
_NUMPY = "a checkpoint takes .numpy() of what is on the device (S2.5)"
_CHANNEL = "a channel's work is given to its thread without an event of the stream that makes its input (S1.3)"
_CONTROL = "headers and facts are tensors of the host, on the group that carries the data (S2.6)"


@dataclass(frozen=True)
class Setup:
    """One way to run lowtide with a model on a device. ``finding``: what is wrong today, in every schedule; ``also``: in some."""

    name: str
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
    finding: str = ""
    also: dict[str, str] = field(default_factory=dict)


SETUPS = [
    Setup("no offload"),
    Setup("memory", {"memory": "8GiB"}),
    Setup("device_memory", {"device_memory": "64KiB"}),
    Setup("device_memory, backward", {"device_memory": "64KiB", "update": "backward"}),
    Setup("device_memory, bf16", {"device_memory": "64KiB"}, half=True),
    Setup("disk", disk=True, all_on_disk=True),
    Setup("disk, homes in memory", disk=True),
    Setup("disk, recompute", {"activations": "recompute"}, disk=True),
    Setup("disk, activations on the host", {"activations": "host"}, disk=True),
    Setup("disk, activations on disk", {"activations": "disk"}, disk=True),
    Setup("disk, backward", {"update": "backward"}, disk=True),
    Setup("disk, lowtide's clipping", disk=True, clip="lowtide"),
    Setup("disk, torch's clipping", disk=True, clip="torch"),
    Setup("disk, GradScaler", disk=True, scaler=True),
    Setup("no offload, save", save=True),
    Setup("two ranks", {"stage": 3}, world=2),
    Setup("two ranks, a stream of their own", {"stage": 3}, world=2, own_stream=True),
    Setup("two ranks, a backend for devices only", {"stage": 3}, world=2, group="simccl"),
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
    configure(SYNC)
    expected = train(setup, rank, None)
    configure(schedule)
    budget = mock.patch.object(assembly, "default_budget", lambda: None) if setup.all_on_disk else contextlib.nullcontext()
    with allowed(), budget, tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if world > 1:
            dist.broadcast_object_list(folders)
        got = train(setup, rank, folders[0])
        races = report().races
        dist.barrier()
    wrong = [d for a, b in zip(got, expected, strict=True) if (d := first_difference(a, b))]
    return f"{len(wrong)} of {len(got)} tensors differ, {len(races)} races: {(wrong + races)[:2]}" if wrong or races else ""
