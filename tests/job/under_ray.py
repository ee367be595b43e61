"""One training loop for two launchers: ``python -m tests.job.under_ray FOLDER`` trains in two workers of Ray Train; with
``torchrun -m tests.job.under_ray FOLDER plain`` it is two ranks of torchrun. Each rank leaves its facts in FOLDER."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import lowtide
from tests.job.specimens import TINY, tiny_gpt

STEPS = 4


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def loop(config: dict[str, Any]) -> None:
    """What a user of Ray Train writes. The group is Ray's, the sharding ours."""
    joined = dist.is_initialized()
    before = listening()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # "shared" is an error where ranks cannot share memory; "auto" would say so in a log that nobody reads.
    lowtide.shard(model, optimizer, stage=3, comm=lowtide.Comm(transport="shared", deadline=30, first_deadline=60))
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(1 + rank)
    losses: list[str] = []
    for step in range(STEPS):
        tokens = torch.randint(TINY.tokens, (2, TINY.context + 1), generator=draw)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if rank == 1 and step == config.get("fails_at"):
            raise ZeroDivisionError("a mistake on rank 1")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    weights = hashlib.sha256()
    with lowtide.gathered(model):
        for parameter in model.parameters():
            weights.update(parameter.detach().numpy().tobytes())
    facts = {"rank": rank, "size": dist.get_world_size(), "joined": joined, "losses": losses, "weights": weights.hexdigest()}
    facts["opened"] = sorted({ip for ip, _ in listening() - before})
    facts["process"] = os.getpid()
    Path(config["folder"], f"facts-{rank}").write_text(json.dumps(facts))


def main(folder: Path, fails_at: int | None) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Ray's own sockets have paths of at most 107 bytes, so `folder` must be short.
    store_bytes = 80 * 2**20
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=store_bytes, _temp_dir=str(folder / "ray"))
    try:
        TorchTrainer(
            loop,
            train_loop_config={"folder": str(folder), "fails_at": fails_at},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "storage")),
        ).fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if sys.argv[2:] == ["plain"]:
        loop({"folder": sys.argv[1]})
    else:
        # By its importable name: workers then import the loop, as they would a user's module.
        from tests.job import under_ray

        under_ray.main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else None)
