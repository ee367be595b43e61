"""One bit flips somewhere in a checkpoint: ``verify`` notices, and whoever reads gets an error or the numbers as they were.

What counts as detected and as harmless is said in ``tests/kit/damage.py``. The checkpoints are in memory (/dev/shm): one
without a disk tier, one whose bytes lie in a linked spool file, one of two ranks.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

import lowtide
from benchkit.chaos_tally import Tally
from tests.kit.checkpoints import Setup
from tests.kit.crashes import forked
from tests.kit.damage import Numbers, Region, flip, judged, numbers_of, regions
from tests.kit.forgery import Small
from tests.kit.out_of_core import settle
from tests.kit.recovery import ranks

SETUPS = {
    "in memory": Setup(),
    "linked": Setup(disk=True),
    "partly on disk": Setup(disk=True, resident="kinds"),
    "two ranks, linked": Setup(ranks=2, stage=3, disk=True),
}
READ_EVERY = 20
"""For every so many flips all numbers are read as well; for flips in what is only framing, always."""
FRAMING = ("payload header", "free room")


def save_one(folder: Path, setup: Setup, _: int) -> None:
    """A step of a small model, saved."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    lowtide.shard(model, optimizer, **setup.options(spool))
    if setup.disk:
        settle(model, setup.resident)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    lowtide.save(folder / "run" / "step-1", model, optimizer, extra={"step": 1}).wait()


class Victim:
    """A checkpoint that is flipped and flipped back."""

    def __init__(self, name: str, folder: Path, shelf: Path) -> None:
        self.name = name
        folder.mkdir()
        for child in ranks(folder, SETUPS[name].ranks, save_one, folder, SETUPS[name]):
            child.wait().result()
        self.path = shelf / f"checkpoint-{len(list(shelf.iterdir()))}"
        shutil.copytree(folder / "run" / "step-1", self.path)
        self.numbers: Numbers = numbers_of(self.path)
        self.regions: dict[str, list[Region]] = defaultdict(list)
        for region in regions(self.path):
            self.regions[region.what].append(region)

    def choose(self, chosen: random.Random) -> tuple[Region, int, int]:
        """Each sort of region as often as the others, whatever its size; free room less often."""
        what = chosen.choice([w for w in self.regions if w != "free room" or chosen.random() < 0.2])
        rows = self.regions[what]
        region = chosen.choices(rows, [row.stop - row.start for row in rows])[0]
        return region, chosen.randrange(region.start, region.stop), chosen.randrange(8)


def batch(victims: list[Victim], first: int, count: int) -> list[tuple[int, str, str, str]]:
    """Outcomes as (seed, checkpoint, region, outcome)."""
    out: list[tuple[int, str, str, str]] = []
    for seed in range(first, first + count):
        chosen = random.Random(seed)
        victim = chosen.choice(victims)
        region, offset, bit = victim.choose(chosen)
        path = victim.path / region.file
        flip(path, offset, bit)
        try:
            reads = region.what in FRAMING or not seed % READ_EVERY
            outcome = judged(victim.path, region, victim.numbers if reads else None)
        except Exception as error:  # anything but a CheckpointError is a finding
            outcome = f"missed: {type(error).__name__}: {error}"
        finally:
            flip(path, offset, bit)
        out.append((seed, victim.name, region.what, outcome))
    return out


def run(folder: Path, tally: Tally, seed: int, *, once: bool) -> None:
    """Flip until enough bits were flipped; ``once``: one bit."""
    folder.mkdir(exist_ok=True)
    beside = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    with tempfile.TemporaryDirectory(prefix="chaos-flips-", dir=beside) as name:
        victims = [Victim(setup, folder / str(number), Path(name)) for number, setup in enumerate(SETUPS)]
        while tally.goes_on:
            count = 1 if once else min(2000, tally.planned - tally.done)
            for number, checkpoint, region, outcome in forked(batch, victims, seed, count, seconds=300).result():
                if outcome.startswith("missed"):
                    tally.differs(number, f"{checkpoint}, {region}: {outcome}")
                tally.counts[f"{region}: {outcome.split(':')[0]}"] += 1
            tally.done += count
            seed += count
            tally.note()
            if once:
                break
        for victim in victims:
            if numbers_of(victim.path) != victim.numbers:
                tally.differs(seed, f"{victim.name} is not as it was after all flips were undone")
