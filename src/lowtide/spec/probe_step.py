"""What a real training step reaches of the speed that the probe found kernel by kernel, alone and beside a busy disk.

The best speed of each kernel is a bound that no step keeps: caches are cold, threads wait for each other, clocks fall when all
cores work. How far below it a step stays is much the same for models of one kind, so one small transformer stands for all.

[Note: seconds of work] A kernel is either a matrix product, which runs at the speed the probe measured for its dtype, or it
moves memory, and runs at the speed of that; every kernel must be started, and memory that is new costs page faults on a CPU.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from lowtide.spec.hardware import Compute
from lowtide.spec.model import ModelSpec, Work
from lowtide.spec.tracing import trace

_WIDTH, _LAYERS, _TOKENS = 512, 4, 512
_LEAST_STEPS = 3
_WITHIN = (0.3, 1.1)
"""What is outside of this is not a property of the machine: something else went on."""


def seconds_of(work: Work, compute: Compute, dtype: str) -> float:
    """How long ``work`` takes if every kernel is at its best; see [Note: seconds of work]."""
    flops = compute.flops.get(dtype) or max(compute.flops.values())
    moving = work.moved_bytes / compute.bandwidth + work.fresh_bytes * compute.fault_seconds
    return work.flops / flops + moving + work.operations * compute.op_seconds


class ReferenceStep:
    """Forward and backward of a small transformer."""

    def __init__(self, device: torch.device) -> None:
        layer = nn.TransformerEncoderLayer(
            _WIDTH, 8, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device
        )
        self._model = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self._batch = torch.randn(2, _TOKENS // 2, _WIDTH, device=device)

    def best_seconds(self, compute: Compute) -> float:
        """If every kernel were at its best."""
        spec = trace(self._model, self._batch, bucket_bytes=0)
        return sum(seconds_of(work, compute, "fp32") for work in _all_work(spec))

    def run(self, seconds: float) -> float:
        """The median step, of those that fit into ``seconds``."""
        took: list[float] = []
        self._step()
        end = time.perf_counter() + seconds
        while len(took) < _LEAST_STEPS or time.perf_counter() < end:
            start = time.perf_counter()
            self._step()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    def _step(self) -> None:
        self._model(self._batch).sum().backward()
        self._model.zero_grad()
        if self._batch.device.type != "cpu":
            torch.accelerator.synchronize()


def share_reached(best: float, took: float) -> float:
    """Seconds at best over seconds taken."""
    return min(max(best / took, _WITHIN[0]), _WITHIN[1])


def _all_work(spec: ModelSpec) -> list[Work]:
    return [work for unit in spec.units for work in (unit.forward, unit.backward)] + [
        spec.outside_forward,
        spec.outside_backward,
    ]
