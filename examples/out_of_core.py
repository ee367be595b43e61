"""Training a model that is larger than its memory number, with one added line.

    python examples/out_of_core.py                                # states of 1.6 GB inside 640 MiB, in a temporary folder
    python examples/out_of_core.py --memory 1GiB --disk .         # more memory, less traffic, the same losses

Parameters, gradients and Adam's averages live on disk and come to memory unit by unit. Take the marked lines out and the
losses stay the same; the memory does not.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.api import engine_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    with lowtide.deferred(disk=args.disk):  # <- the usual numbers, but the model never is whole in memory
        model = nn.Sequential(*(Block(args.width) for _ in range(args.blocks)))
    states = 16 * sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    lowtide.shard(model, optimizer, memory=args.memory, disk=args.disk, update="backward")  # <- the added line

    x = torch.randn(32, args.width)
    wanted = x.roll(1, dims=1)
    for step in range(1, args.steps + 1):
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        usage = engine_of(model).usage()
        print(f"step {step}   loss {loss.item():.6f}   host {usage.host_bytes / 2**20:.0f} MiB   ", end="")
        print(f"disk {usage.disk_bytes / 2**20:.0f} MiB, read {usage.disk_read_bytes / 2**20:.0f} MiB so far")
    print(f"{states / 2**20:.0f} MiB of parameters, gradients and averages, memory number {args.memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--memory", default="640MiB")
    parser.add_argument("--disk", help="a folder on a disk; default: a temporary one")
    args = parser.parse_args()
    if args.disk is not None:
        train(args)
        return
    with tempfile.TemporaryDirectory(prefix="lowtide-example-") as folder:
        args.disk = folder
        train(args)


if __name__ == "__main__":
    main()
