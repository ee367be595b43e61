"""Models built inside lowtide.deferred(): the numbers of an ordinary build, in files instead of memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ArgumentError
from tests.kit.dist import run_ranks
from tests.kit.parity import assert_bitwise

LARGE = 64 << 10  # bytes from which a tensor gets a file of its own


def transformer() -> nn.Module:
    return nn.Transformer(64, 4, 2, 2, 256, batch_first=True)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=256))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512))


class Buffers(nn.Module):
    """Buffers, some of them not saved, and every common way to make numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(200, 200)))
        self.register_buffer("angles", torch.arange(40_000.0).cos(), persistent=False)
        self.register_buffer("table", torch.randperm(20_000))
        self.register_buffer("line", torch.linspace(0, 1, 30_000))
        self.norm = nn.BatchNorm1d(20_000)
        self.weight = nn.Parameter(torch.randn(200, 200) * 0.02)
        self.drawn = nn.Parameter(torch.empty(200, 200).normal_(std=0.1))
        self.scaled = nn.Parameter(torch.rand(300, 100, dtype=torch.float64))
        self.like = nn.Parameter(torch.zeros_like(self.weight) + torch.eye(200))
        self.orthogonal = nn.Linear(150, 150)
        nn.init.orthogonal_(self.orthogonal.weight)


MODELS: list[Callable[[], nn.Module]] = [transformer, gpt2, llama, Buffers]


@pytest.mark.parametrize("make", MODELS)
def test_the_same_numbers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    expected = make()
    after = torch.rand(3)
    torch.manual_seed(0)
    with lowtide.deferred():
        model = make()
    assert torch.equal(torch.rand(3), after), "the random numbers go on where they would"
    assert list(model.state_dict()) == list(expected.state_dict())
    for (name, a), (other, b) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert (name, a.requires_grad, a.stride()) == (other, b.requires_grad, b.stride())
        assert type(a) is nn.Parameter
        assert_bitwise(a, b, name)
    for (name, a), (_, b) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert_bitwise(a, b, name)


def test_large_parameters_live_in_files_without_a_name(tmp_path: Path) -> None:
    with lowtide.deferred(disk=tmp_path):
        model = transformer()
    large = [p for p in model.parameters() if p.nbytes >= LARGE]
    assert len(large) >= 8
    for p in large:
        assert (p.untyped_storage().filename or "").startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind, whatever happens to the process"
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(maps) >= len(large)
    assert all(line.endswith("(deleted)") for line in maps)


def test_outside_nothing_changes() -> None:
    with lowtide.deferred():
        pass
    assert nn.Linear(300, 300).weight.untyped_storage().filename is None


def test_no_such_folder() -> None:
    with (
        pytest.raises(ArgumentError, match=r"deferred\(disk='/no/such/folder'\): there is no such folder"),
        lowtide.deferred(disk="/no/such/folder"),
    ):
        pass


def sharded(rank: int, world: int, stage: int) -> list[float]:
    losses = []
    for defer in (False, True):
        torch.manual_seed(rank)  # rank 0's numbers win
        if defer:
            with lowtide.deferred():
                model = gpt2()
        else:
            model = gpt2()
        model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), stage=stage)
        model.eval()  # no dropout
        index = torch.arange(16).view(2, 8) + rank
        for _ in range(2):
            loss = model(input_ids=index, labels=index).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if defer:
            assert all("lowtide-" not in line for line in Path("/proc/self/maps").read_text().splitlines()), "files let go"
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_sharding_a_deferred_model(stage: int) -> None:
    for losses in run_ranks(2, sharded, stage):
        assert losses[:2] == losses[2:]


SCRIPT = """
import re, resource, sys, threading, torch, lowtide
from torch import nn
torch.set_num_threads(1)
MIB = 1 << 20
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(24))   # 16 MiB each
torch.randn(2048, 2048)
base = anonymous()
peak = base
stop = threading.Event()
def watch():
    global peak
    while not stop.wait(0.005):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[1] == "deferred":
    with lowtide.deferred(sys.argv[2]):
        model = Net()
else:
    model = Net()
stop.set()
watcher.join()
print((peak - base) // MIB)
"""


def test_anonymous_memory_stays_low(tmp_path: Path) -> None:
    """384 MiB of parameters; without deferred they are all anonymous."""
    grown = {}
    for how in ("deferred", "plain"):
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how, str(tmp_path)]
        grown[how] = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout)
    assert grown["plain"] > 350
    assert grown["deferred"] < 64, f"{grown['deferred']} MiB"
