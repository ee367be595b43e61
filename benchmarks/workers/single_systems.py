"""The systems of the out-of-core benchmarks: plain PyTorch, lowtide, DeepSpeed ZeRO-3 with everything on NVMe.

Each builds the same model from the same seed, begins, and trains one batch at a time, saying where the time went. All use
AdamW with torch's default decay; DeepSpeed its own compiled one, as those who keep its states on disk do.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from gpt import GPT, Shape
from torch import Tensor

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01


class System(Protocol):
    """What a worker needs of one."""

    def __init__(self, shape: Shape, order: dict[str, Any]) -> None: ...
    def build(self) -> int:
        """Make the model; returns how many parameters it has."""
        ...

    def begin(self) -> dict[str, Any]: ...
    def step(self, batch: Tensor) -> dict[str, Any]: ...


def _adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def _clip(model: GPT, norm: float | None) -> None:
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


class Plain:
    """PyTorch as it is."""

    def __init__(self, shape: Shape, order: dict[str, Any]) -> None:
        self._shape, self._clip = shape, order.get("clip")

    def build(self) -> int:
        self._model = GPT(self._shape)
        self._optimizer = _adamw(self._model)
        return sum(p.numel() for p in self._model.parameters())

    def begin(self) -> dict[str, Any]:
        return {}

    def step(self, batch: Tensor) -> dict[str, Any]:
        times = [time.perf_counter()]
        loss = self._model(batch, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        _clip(self._model, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        times.append(time.perf_counter())
        return {"loss": loss.item(), "phases": _phases(times)}


def _phases(times: list[float]) -> dict[str, float]:
    names = ("forward", "backward", "update")
    return {name: b - a for name, a, b in zip(names, times[:-1], times[1:], strict=True)}


class Lowtide:
    """The order says memory, update and activations; ``memory`` may be missing: then everything lives on disk."""

    def __init__(self, shape: Shape, order: dict[str, Any]) -> None:
        self._shape = shape
        self._spool, self._clip = order["spool"], order.get("clip")
        self._settings = {key: order[key] for key in ("memory", "update", "activations")}

    def build(self) -> int:
        import lowtide

        with lowtide.deferred(disk=self._spool):
            self._model = GPT(self._shape)
        self._optimizer = _adamw(self._model)
        return sum(p.numel() for p in self._model.parameters())

    def begin(self) -> dict[str, Any]:
        import lowtide
        from lowtide.api import engine_of

        lowtide.shard(self._model, self._optimizer, disk=self._spool, **self._settings)
        self._engine = engine_of(self._model)
        start = time.perf_counter()
        self._drain()
        usage = self._engine.usage()
        return {
            "drain_seconds": time.perf_counter() - start,
            "written_bytes": usage.disk_written_bytes,
            "disk_bytes": usage.disk_bytes,
            "units": len(self._engine.units),
        }

    def _drain(self) -> None:
        if self._engine.store is not None:
            self._engine.store.drain()

    def step(self, batch: Tensor) -> dict[str, Any]:
        before, counted = self._engine.usage(), self._engine.activations.saved.saved_bytes
        counted.clear()  # without a memory number nobody else does
        times = [time.perf_counter()]
        loss = self._model(batch, batch)
        times.append(time.perf_counter())
        saved = sum(counted.values())
        loss.backward()
        times.append(time.perf_counter())
        at_update = self._engine.usage()
        _clip(self._model, self._clip)
        self._optimizer.step()
        updated, updated_at = self._engine.usage(), time.perf_counter()
        self._optimizer.zero_grad()
        times.append(time.perf_counter())
        # Writes that a step leaves behind belong to it: the next system's turn must neither pay for them nor hide them.
        self._drain()
        drained_at = time.perf_counter()
        usage = self._engine.usage()
        return {
            "loss": loss.item(),
            "phases": {**_phases(times), "drain": drained_at - times[-1]},
            "saved_activation_bytes": saved,
            "read_bytes": usage.disk_read_bytes - before.disk_read_bytes,
            "written_bytes": usage.disk_written_bytes - before.disk_written_bytes,
            "wait_seconds": usage.disk_wait_seconds - before.disk_wait_seconds,
            "disk_bytes": usage.disk_bytes,
            "activations": usage.activations,
            "step_call": {
                "bytes": updated.disk_read_bytes
                + updated.disk_written_bytes
                - at_update.disk_read_bytes
                - at_update.disk_written_bytes,
                "seconds": updated_at - times[2],
            },
        }


class DeepSpeed:
    """ZeRO-3, parameters and optimizer states on NVMe; ``sub_group`` is the one setting that a user has to find."""

    def __init__(self, shape: Shape, order: dict[str, Any]) -> None:
        self._shape, self._spool, self._sub_group = shape, order["spool"], order["sub_group"]
        self._rendezvous, self._clip = order["rendezvous"], order.get("clip")

    def build(self) -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{self._rendezvous}", rank=0, world_size=1)
        self._model = GPT(self._shape)
        return sum(p.numel() for p in self._model.parameters())

    def begin(self) -> dict[str, Any]:
        import deepspeed

        nvme = {"device": "nvme", "nvme_path": self._spool}
        zero: dict[str, Any] = {
            "stage": 3,
            "offload_optimizer": {**nvme, "buffer_count": 4},
            "offload_param": {**nvme, "buffer_count": 8, "buffer_size": int(2e7)},
        }
        if self._sub_group is not None:
            zero["sub_group_size"] = self._sub_group
        config = {
            "train_micro_batch_size_per_gpu": self._shape.batch,
            "gradient_clipping": self._clip or 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": False}},
            "zero_optimization": zero,
            "steps_per_print": 1_000_000,
            "aio": {"block_size": 1 << 20, "queue_depth": 8},
        }
        self._engine, *_ = deepspeed.initialize(model=self._model, model_parameters=self._model.parameters(), config=config)
        return {}

    def step(self, batch: Tensor) -> dict[str, Any]:
        times = [time.perf_counter()]
        loss = self._engine(batch, batch)
        times.append(time.perf_counter())
        self._engine.backward(loss)
        times.append(time.perf_counter())
        self._engine.step()
        times.append(time.perf_counter())
        return {"loss": loss.item(), "phases": _phases(times)}


SYSTEMS: dict[str, type[System]] = {"plain": Plain, "lowtide": Lowtide, "deepspeed": DeepSpeed}
