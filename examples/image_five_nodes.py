"""Image recognition on five nodes: lowtide's stage 3 against DDP. Needs: pip install -c constraints.txt scikit-learn

    python examples/image_five_nodes.py

A convolutional network with BatchNorm learns scikit-learn's handwritten digits on five ranks, which this script starts on
this machine. Both runs see the same images in the same order. Shown for each: the memory that one rank needs for the
model's states (parameters, gradients, optimizer), the accuracy on images that were held out, and the time.
(On more than two ranks lowtide and DDP add gradients in different orders, so they agree up to rounding.)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.api import engine_of
from lowtide.job.launch import start_ranks, started_by_launch
from lowtide.job.ranks import Member, joined

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("this example needs scikit-learn: pip install -c constraints.txt scikit-learn") from error

RANKS = 5
BATCH = 16


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self, channels: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Outcome:
    state_bytes: int
    """Parameters, gradients and optimizer states on one rank, after a backward pass."""
    accuracy: float
    seconds: float


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and held-out images (N × 1 × 8 × 8, values 0–1) and labels, always the same."""
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(raw.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(raw.target, dtype=torch.int64)[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def train(system: str, member: Member, epochs: int) -> Outcome:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    forward: nn.Module = model
    if system == "lowtide":
        lowtide.shard(model, optimizer, stage=3)
    else:
        forward = DistributedDataParallel(model)
    images, labels, held_out_images, held_out_labels = digits()
    per_step = BATCH * member.ranks
    steps_per_epoch = len(images) // per_step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * steps_per_epoch)
    shuffle = torch.Generator().manual_seed(0)
    state_bytes = 0
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=shuffle)
        for step in range(steps_per_epoch):
            first = step * per_step + member.rank * BATCH
            mine = order[first : first + BATCH]
            F.cross_entropy(forward(images[mine]), labels[mine]).backward()
            state_bytes = max(state_bytes, states_of(system, model, optimizer))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        right = (forward(held_out_images).argmax(1) == held_out_labels).float().mean()
    return Outcome(state_bytes, right.item(), seconds)


def states_of(system: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the model's states on this rank."""
    if system == "lowtide":
        live = engine_of(model).ledger.live
        return live["parameters"] + live["gradients"] + live["optimizer"]
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors)


def rank_main(epochs: int) -> None:
    torch.set_num_threads(1)
    with joined() as member:
        outcomes = {system: train(system, member, epochs) for system in ("DDP", "lowtide")}
        if member.rank == 0:
            report(outcomes)


def report(outcomes: dict[str, Outcome]) -> None:
    print(f"{'':10}{'states per rank':>18}{'accuracy':>12}{'time':>10}")
    for system, outcome in outcomes.items():
        print(f"{system:10}{outcome.state_bytes / 1024:>14,.1f} KiB{outcome.accuracy:>12.1%}{outcome.seconds:>8.1f} s")
    ddp, ours = outcomes["DDP"], outcomes["lowtide"]
    change = ours.state_bytes / ddp.state_bytes - 1
    print(f"{RANKS} ranks, stage 3 against DDP: memory per rank {change:+.1%}, time {ours.seconds / ddp.seconds - 1:+.0%}")
    print(json.dumps({system: vars(outcome) for system, outcome in outcomes.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    if started_by_launch():
        rank_main(args.epochs)
        return
    failure = start_ranks([sys.executable, __file__, *sys.argv[1:]], RANKS)
    if failure is not None:
        raise SystemExit(f"{failure.traceback}\nrank {failure.rank}: {failure.message}")


if __name__ == "__main__":
    main()
