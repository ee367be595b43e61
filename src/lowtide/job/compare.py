"""The same few steps twice, as plain PyTorch and with lowtide: one loop, one line of difference, each in fresh processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.job.batches import SyntheticBatches
from lowtide.job.memory import counted_peak, job_peak, measure_rank, rank_memory_from_json, reset_peak
from lowtide.job.models import build_model
from lowtide.job.options import Options, cores
from lowtide.job.planned import Choices
from lowtide.job.ranks import Member, gather_json, joined
from lowtide.job.sides import Side, SideDisk
from lowtide.job.tiers import DiskTraffic, Meter, shard_as_asked


def run_side(name: str, options: Options, member: Member) -> Side:
    """Train on synthetic tokens; ``name`` is ``plain`` (PyTorch alone, DDP on several ranks) or ``lowtide``."""
    torch.set_num_threads(options.threads or max(1, cores() // member.local_ranks))
    torch.manual_seed(options.seed)  # pyright: ignore[reportUnknownMemberType]
    built = build_model(options)
    model = built.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    forward: nn.Module = model
    if name == "lowtide":
        shard_as_asked(model, optimizer, options, Choices(stage=options.stage))
    elif member.ranks > 1:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.manual_seed(options.seed + member.rank)  # pyright: ignore[reportUnknownMemberType]
    batches = SyntheticBatches(vocabulary=built.vocabulary, batch=options.batch_size, context=built.context)
    meter = Meter(model) if name == "lowtide" else None
    if options.memory is None:  # a memory number holds from the start, so its peak counts from there
        reset_peak()
    traffic: list[DiskTraffic] = []
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(options.steps):
        tokens, targets = batches.draw()
        start = time.perf_counter()
        loss: torch.Tensor = forward(tokens, targets)
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        traffic += [meter.step()] if meter is not None else []
    memory = [rank_memory_from_json(entry) for entry in gather_json(asdict(measure_rank()), member)]
    peaks = [rank.peak_bytes for rank in memory]
    return Side(
        losses=losses,
        seconds=seconds,
        peak_bytes=job_peak(memory),
        rank_peaks=peaks,
        counted_bytes=counted_peak(memory),
        disk=_disk(traffic, meter),
        weights=_digest(model),
    )


def _disk(traffic: list[DiskTraffic], meter: Meter | None) -> SideDisk:
    return SideDisk(
        room_bytes=meter.usage.disk_bytes if meter is not None else 0,
        read_bytes=[step.read_bytes for step in traffic],
        written_bytes=[step.written_bytes for step in traffic],
        wait_seconds=[step.wait_seconds for step in traffic],
        activations=meter.usage.activations if meter is not None else "keep",
    )


def _digest(model: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters, in their order. A block at a time: the whole model may not fit."""
    digest = hashlib.sha256()
    for _, block in itertools.groupby(model.named_parameters(), key=lambda entry: entry[0].split(".")[:2]):
        parameters = [parameter for _, parameter in block]
        with lowtide.gathered(parameters):
            for parameter in parameters:
                digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_side(name: str, options: Options, result: Path) -> None:
    """Run one side as a rank, and let rank 0 write what came out."""
    with joined() as member:
        side = run_side(name, options, member)
        if member.rank == 0:
            result.write_text(json.dumps(asdict(side)))
