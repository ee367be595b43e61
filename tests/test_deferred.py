"""Models built inside lowtide.deferred(): the numbers of an ordinary build, in files instead of memory."""

from __future__ import annotations

import copy
import gc
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError, DoesNotFit
from tests.kit.cgroup import memory_group
from tests.kit.dist import run_ranks
from tests.kit.parity import assert_bitwise
from tests.kit.tools import missing

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


class Initialised(nn.Module):
    """Init functions that make temporaries, other dtypes and orders in memory, tied and copied parts."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Parameter(torch.empty(180, 150))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(200, 200))
        nn.init.trunc_normal_(self.truncated, std=0.02)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(200, 200), sparsity=0.3))
        self.zeros = nn.Parameter(torch.zeros(200, 200), requires_grad=False)
        self.ones = nn.Parameter(torch.ones(200, 200))
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(300, 300).to(torch.bfloat16)
        self.copied = copy.deepcopy(self.half)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(200, 200))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(200, 200))
        self.tied = nn.Linear(200, 200, bias=False)
        self.tied.weight = self.truncated
        self.lstm = nn.LSTM(64, 64, 2)
        self.new = nn.Parameter(self.ones.new_empty(200, 200).fill_(3.0))
        self.stacked = nn.Parameter(torch.stack([torch.randn(100, 100) for _ in range(3)]))


def from_config() -> nn.Module:
    from transformers import AutoModel, LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModel.from_config(LlamaConfig(**sizes, vocab_size=512))


def in_double() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(200, 200), nn.Embedding(100, 100))
    finally:
        torch.set_default_dtype(before)


MODELS: list[Callable[[], nn.Module]] = [transformer, gpt2, llama, Buffers, Initialised, from_config, in_double]


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


def files() -> list[str]:
    """The lines of the memory map that are files without a name, made by us."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rw-s" in line and line.endswith("(deleted)")]


def in_file(tensor: Tensor, folder: Path | str = "/") -> bool:
    """Whether the memory of ``tensor`` is a file without a name in ``folder``."""
    address = tensor.untyped_storage().data_ptr()
    for line in files():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return f" {str(folder).rstrip('/')}/" in line
    return False


def test_large_parameters_live_in_files_without_a_name(tmp_path: Path) -> None:
    gc.collect()  # what others left closes its files now, or not before the end
    handles = len(os.listdir("/proc/self/fd"))
    with lowtide.deferred(disk=tmp_path):
        model = transformer()
        assert list(tmp_path.iterdir()) == [], "not even for a moment"
    large = [p for p in model.parameters() if p.nbytes >= LARGE]
    assert len(large) >= 8
    assert all(in_file(p, tmp_path) for p in large)
    assert len(os.listdir("/proc/self/fd")) <= handles, "a file per tensor, but no handle"
    assert not list(tmp_path.iterdir()), "nothing is left behind, whatever happens to the process"
    del model, large
    gc.collect()
    assert not [line for line in files() if str(tmp_path) in line], "gone with their tensors"


def test_a_file_system_that_needs_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no O_TMPFILE, opening a folder for writing fails with EISDIR; 0 is what makes it do so here."""
    monkeypatch.setattr(os, "O_TMPFILE", 0)
    with lowtide.deferred(disk=tmp_path):
        layer = nn.Linear(300, 300)
    assert in_file(layer.weight, tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_way_to_make_a_parameter_is_caught(tmp_path: Path) -> None:
    with lowtide.deferred(disk=tmp_path):
        models = [Buffers(), Initialised()]
    for model in models:
        names = {n for n, p in [*model.named_parameters(), *model.named_buffers()] if p.nbytes >= LARGE and not in_file(p)}
        assert not names


def test_memory_that_is_shared_stays_shared() -> None:
    """Arithmetic made it and several look at it: moving one of them would part them."""
    with lowtide.deferred():
        both = torch.randn(400, 200) * 0.02
        model = nn.Module()
        model.first, model.second = nn.Parameter(both[:200]), nn.Parameter(both[200:])
        model.register_buffer("whole", both)
        kept = torch.randn(300, 300) * 2
        layer = nn.Module()
        layer.register_buffer("kept", kept)
    model.first.data.fill_(7)
    assert (both[:200] == 7).all()
    assert layer.kept is kept, "a buffer stays the object that was given"


def test_functions_that_write_elsewhere_or_into_themselves() -> None:
    outer = torch.empty(300, 300)
    with lowtide.deferred():
        assert torch.randn(300, 300, out=outer) is outer
        assert outer.to(torch.float32) is outer
        assert outer.contiguous() is outer
        assert outer.normal_() is outer
        shared = torch.ones(300, 300).share_memory_()
        address = shared.data_ptr()
        module = nn.Module()
        module.register_buffer("shared", shared)
    assert outer.untyped_storage().filename is None
    assert module.shared is shared
    assert shared.data_ptr() == address, "other processes may look at it there"


def test_autograd_inside() -> None:
    with lowtide.deferred():
        x = torch.ones(300, 300, requires_grad=True)
        y = x.clone().to(torch.float64) * 2
        y.sum().backward()
    assert torch.equal(x.grad, torch.full((300, 300), 2.0))


def test_vmap_inside() -> None:
    with lowtide.deferred():
        out = torch.func.vmap(lambda x: x.clone() + torch.ones(40_000))(torch.zeros(3, 40_000))
    assert torch.equal(out, torch.ones(3, 40_000))


def test_nested(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    with lowtide.deferred(outside):
        a = nn.Linear(300, 300)
        with lowtide.deferred(inside):
            b = nn.Linear(300, 300)
            assert not [line for line in files() if "inside" in line and "outside" in line]
        c = nn.Linear(300, 300)
    assert [in_file(m.weight, outside) for m in (a, b, c)] == [True, False, True]
    assert in_file(b.weight, inside)
    assert len([line for line in files() if str(tmp_path) in line]) == 3, "nothing was moved twice"


def test_a_context_holds_for_its_thread() -> None:
    made: dict[str, nn.Module] = {}
    opened, done = threading.Event(), threading.Event()

    def build_deferred() -> None:
        with lowtide.deferred():
            opened.set()
            done.wait(30)
            made["deferred"] = nn.Linear(300, 300)

    thread = threading.Thread(target=build_deferred)
    thread.start()
    assert opened.wait(30)
    made["plain"] = nn.Linear(300, 300)
    done.set()
    thread.join()
    assert in_file(made["deferred"].weight)
    assert not in_file(made["plain"].weight)


def test_many_threads_at_once() -> None:
    expected: dict[int, Tensor] = {}
    got: dict[int, Tensor] = {}
    failures: list[BaseException] = []

    def build(seed: int) -> None:
        try:
            for _ in range(5):
                generator = torch.Generator().manual_seed(seed)
                with lowtide.deferred():
                    layer = nn.Linear(300, 300)
                    nn.init.normal_(layer.weight, generator=generator)
                got[seed] = layer.weight
                if not in_file(layer.weight):
                    raise AssertionError("not in a file")
        except BaseException as error:
            failures.append(error)

    for seed in range(4):
        expected[seed] = torch.empty(300, 300).normal_(generator=torch.Generator().manual_seed(seed))
    threads = [threading.Thread(target=build, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for seed in range(4):
        assert_bitwise(got[seed].detach(), expected[seed], str(seed))


def test_an_exception_ends_it() -> None:
    def fails() -> nn.Module:
        raise ZeroDivisionError(nn.Linear(300, 300))

    with pytest.raises(ZeroDivisionError), lowtide.deferred():
        fails()
    assert not in_file(nn.Linear(300, 300).weight)


def test_one_parameter_under_two_names_is_one() -> None:
    with lowtide.deferred():
        model = Initialised()
    assert model.tied.weight is model.truncated
    assert len(list(model.parameters())) == len(list(Initialised().parameters()))


def test_on_the_meta_device_nothing_is_made(tmp_path: Path) -> None:
    with lowtide.deferred(tmp_path), torch.device("meta"):
        model = transformer()
    assert all(p.is_meta for p in model.parameters())
    assert not [line for line in files() if str(tmp_path) in line]


def test_values_survive_when_their_pages_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide import deferral

    monkeypatch.setattr(deferral, "_RESIDENT_BYTES", 0)
    torch.manual_seed(0)
    expected = transformer()
    torch.manual_seed(0)
    with lowtide.deferred(tmp_path):
        model = transformer()
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert_bitwise(a, b, name)


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DoesNotFit, match=r"disk: 4\.0 MiB needed") as caught, lowtide.deferred(tmp_path):
            nn.Linear(1024, 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.needed_bytes == 4 << 20
    assert str(tmp_path) in str(caught.value)
    assert not in_file(nn.Linear(300, 300).weight)


def test_a_folder_in_memory_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    if kinds.get("/dev/shm") != "tmpfs":
        missing("a tmpfs at /dev/shm", "mount one")
    with caplog.at_level(logging.WARNING, "lowtide"), lowtide.deferred("/dev/shm"):
        layer = nn.Linear(300, 300)
    assert "files in '/dev/shm' take memory, not disk" in caplog.text
    assert in_file(layer.weight, "/dev/shm")


def test_outside_nothing_changes() -> None:
    with lowtide.deferred():
        pass
    assert not in_file(nn.Linear(300, 300).weight)


def test_no_such_folder() -> None:
    with (
        pytest.raises(ArgumentError, match=r"deferred\(disk='/no/such/folder'\): there is no such folder"),
        lowtide.deferred(disk="/no/such/folder"),
    ):
        pass


def sharded(rank: int, world: int, stage: int, folder: str) -> list[float]:
    losses = []
    for defer in (False, True):
        torch.manual_seed(rank)  # rank 0's numbers win
        if defer:
            with lowtide.deferred(folder):
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
            assert not [line for line in files() if f" {folder}/" in line], "files let go"
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_sharding_a_deferred_model(stage: int, tmp_path: Path) -> None:
    for losses in run_ranks(2, sharded, stage, str(tmp_path)):
        assert losses[:2] == losses[2:]


SCRIPT = """
import os, sys
how, folder, group = sys.argv[1:]
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
import torch, lowtide
from torch import nn
from lowtide.job.memory import peak_bytes, reset_peak
torch.set_num_threads(1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(38))   # 16 MiB each
        self.drawn = nn.Parameter(torch.randn(2048, 2048) * 0.02)
        for layer in self.layers:   # as Hugging Face does: all once more, when nothing new is made
            nn.init.normal_(layer.weight, std=0.02)
torch.randn(2048, 2048)
reset_peak()
base = peak_bytes()
if how == "deferred":
    with lowtide.deferred(folder):
        model = Net()
else:
    model = Net()
print((peak_bytes() - base) >> 20)
"""


def build(how: str, folder: Path, group: str = "") -> subprocess.CompletedProcess[str]:
    """Build 624 MiB of parameters in a process of its own, in a control group if one is given; prints MiB of growth."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how, str(folder), group]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def test_the_resident_set_stays_low(tmp_path: Path) -> None:
    """Anonymous memory and mapped pages together."""
    grown = {how: int(build(how, tmp_path).stdout) for how in ("deferred", "plain")}
    assert grown["plain"] > 600
    assert grown["deferred"] < 150, f"{grown['deferred']} MiB"


def test_a_model_larger_than_the_memory_limit_is_built(tmp_path: Path) -> None:
    """Pages that wait to be written count, and the kernel writes them out in time."""
    with memory_group(400 << 20) as folder:
        group = str(folder)
        done = build("deferred", tmp_path, group)
        assert done.returncode == 0, done.stderr[-2000:]
        assert build("plain", tmp_path, group).returncode == -9, "the limit is real"
