"""What a block of Python on a page may take for granted: a model, its optimizer, a loader, and names for them.

Where a block shards ``model`` itself it gets a plain one, which is trained afterwards: what a page makes must work.
Elsewhere the model is sharded, recorded and has been trained for a step. Everything else a block has to say itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.spec.probe import cache_machine
from tests.docs.printed import ROOT, Snippet
from tests.job.test_doctor import HARDWARE

_WIDTH = 32
_SHARDS_MODEL = re.compile(r"lowtide\.shard\(\s*model\b")


def prepare(page: str, *, quick: bool) -> None:
    """Make what a page takes for granted in the folder where it is run; ``quick``: and the figures of a machine."""
    from safetensors.torch import save_file

    for folder in ("fast", "large", "base-model"):
        os.mkdir(folder)
    Path("base-model", "config.json").write_text("{}")
    save_file(Model().state_dict(), "model.safetensors")
    for folder in ("docs", "examples"):
        os.symlink(ROOT / folder, folder)
    if quick:
        cache_machine(HARDWARE, ".")
    if page == "docs/runs.md":  # about what `lowtide report` has shown on the page before
        from lowtide.cli.main import run

        run("train --model tests.job.specimens:tiny_gpt --data docs --steps 3 --run runs/a".split())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).square().mean()


class Sampler:
    """Something with a state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"used": 3}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def run_python(snippet: Snippet, *, rank: int) -> None:
    """Run a block; raises whatever it raises."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = [torch.randn(4, _WIDTH) for _ in range(4 + 2 * (rank % 2))]  # another number of batches on every other rank
    shards = _SHARDS_MODEL.search(snippet.text) is not None
    loss = torch.tensor(1.0)
    if not shards:
        lowtide.shard(model, optimizer, run=f"recorded/line-{snippet.line}")
        loss = _train(model, optimizer, loader[0])
    names: dict[str, Any] = {
        **{"lowtide": lowtide, "torch": torch, "Model": Model, "model": model, "optimizer": optimizer},
        **{"another": Model(), "third": Model(), "loader": loader, "batch": loader[0], "loss": loss, "sampler": Sampler()},
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    }
    exec(compile("\n" * (snippet.line - 1) + snippet.text, snippet.page, "exec"), names)
    if shards and isinstance(names["model"], Model):
        for _ in range(2):
            _train(names["model"], names["optimizer"], torch.randn(4, _WIDTH))
