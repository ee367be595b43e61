"""An ordinary PyTorch training loop with one added line.

    python examples/plain_loop.py                                 one process
    torchrun --nproc-per-node 2 examples/plain_loop.py            two ranks: each keeps half of every state

A small residual network learns to imitate another one. Take the marked line out and the losses stay the same.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    args = parser.parse_args()

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(1)
    teacher = Network(args.width, 1)
    torch.manual_seed(0)
    model = Network(args.width, args.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = lowtide.shard(model, optimizer, stage=args.stage)  # <- the added line
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    torch.manual_seed(100 + rank)  # every rank draws batches of its own
    for step in range(1, args.steps + 1):
        x = torch.randn(64, args.width)
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        lowtide.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % max(1, args.steps // 5) == 0):
            print(f"step {step:4d}   loss {loss.item():.6f}")

    weights = model.state_dict()  # plain names, whole tensors on rank 0; every rank calls it
    if rank == 0:
        count = sum(weight.numel() for weight in weights.values())
        print(f"{count:,} parameters are ready to be saved, {len(weights)} tensors")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
