"""One function per system: wraps the same model and optimizer and returns a function that trains one batch.

Every system gets AdamW with ``fused=True``, which is an order of magnitude faster on a CPU than the default, and otherwise
its own defaults, except where a comment says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[Tensor], float]

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Task:
    """What every system trains with: samples in a batch, and the norm to which gradients are clipped (None: they are not)."""

    batch_size: int
    clip: float | None = None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task) -> Step:
    def step(batch: Tensor) -> float:
        loss = model(batch, batch)
        loss.backward()
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def alone(model: nn.Module, task: Task) -> Step:
    """Ranks that do not talk at all: what the machine would give if communication were free. Not a training system."""
    return _plain_loop(model, _adamw(model), task)


def ddp(model: nn.Module, task: Task) -> Step:
    # Without the bucket view every gradient is held twice; no one who watches memory leaves it off.
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_loop(wrapped, _adamw(wrapped), task)


def zero_redundancy(model: nn.Module, task: Task) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return _plain_loop(wrapped, optimizer, task)


def fsdp2(model: nn.Module, task: Task) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    return _fully_sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)), task)


def fsdp2_hybrid(model: nn.Module, task: Task) -> Step:
    """Sharded inside a host, copied between hosts: each host holds everything, and only gradients cross the network."""
    from torch.distributed.device_mesh import init_device_mesh

    local = int(os.environ["LOCAL_SIZE"])
    shape = (dist.get_world_size() // local, local)
    return _fully_sharded(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")), task)


def _fully_sharded(model: nn.Module, mesh: Any, task: Task) -> Step:
    from torch.distributed.fsdp import fully_shard

    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(model, _adamw(model), task)


def deepspeed(stage: int) -> Callable[[nn.Module, Task], Step]:
    def build(model: nn.Module, task: Task) -> Step:
        import deepspeed as ds

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": task.batch_size,
            "gradient_clipping": task.clip or 0.0,
            "zero_optimization": {"stage": stage},
            # The fused AdamW of torch is not on DeepSpeed's list of optimizers it has tested with ZeRO.
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        }
        engine, *_ = ds.initialize(model=model, optimizer=_adamw(model), config=config)

        def step(batch: Tensor) -> float:
            loss = engine(batch, batch)
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step

    return build


def lowtide(stage: int, *, memory: str | None = None, **talk: Any) -> Callable[[nn.Module, Task], Step]:
    """``memory``: for all ranks together; ``talk`` is what ``Comm`` is given, if anything."""

    def build(model: nn.Module, task: Task) -> Step:
        import lowtide as lt

        comm = lt.Comm(**talk) if talk else None
        sharded, optimizer = lt.shard(model, _adamw(model), stage=stage, memory=memory, comm=comm)
        return _plain_loop(sharded, optimizer, task)

    return build


BUILDERS: dict[str, Callable[[nn.Module, Task], Step]] = {
    "alone": alone,
    "plain": alone,
    "ddp": ddp,
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "fsdp2-hybrid": fsdp2_hybrid,
    **{f"deepspeed-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"lowtide-{stage}": lowtide(stage) for stage in (0, 1, 2, 3)},
    "lowtide-3-shared": lowtide(3, transport="shared"),
    "lowtide-3-memory": lowtide(3, memory="2.4GiB"),
    "lowtide-3-torch": lowtide(3, transport="torch"),
    "lowtide-3-bf16": lowtide(3, codec="bf16"),
}
