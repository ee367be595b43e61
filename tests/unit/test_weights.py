"""Weights in safetensors files: reading in pieces, hostile files, and which weight belongs to which parameter."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from lowtide.errors import ArgumentError, Refused
from lowtide.spec import weights as module_under_test
from lowtide.spec.weights import Weights, give_buffers_memory, leave_meta, load_buffers, match, open_weights
from tests.kit.parity import assert_bitwise

BYTES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8]
WIDER = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.complex64]
DTYPES = [*BYTES, *WIDER, torch.bool, torch.uint16, torch.uint32, torch.uint64]


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 100, shape, generator=generator).to(torch.float32).to(dtype)


def saved(folder: Path, **tensors: Tensor) -> Weights:
    save_file(tensors, folder / "model.safetensors")
    return open_weights(folder)


def raw(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with any header, well formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "hostile.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"matrix": of(dtype, 7, 9), "scalar": of(dtype), "none": of(dtype, 0, 3), "line": of(dtype, 5)}
    weights = saved(tmp_path, **tensors)
    assert sorted(weights.names) == sorted(tensors)
    for name, tensor in tensors.items():
        assert (weights.shape(name), weights.dtype(name)) == (tuple(tensor.shape), dtype)
        out = torch.empty_like(tensor)
        weights.read_into(name, out)
        assert torch.equal(out.view(torch.uint8) if out.dim() else out, tensor.view(torch.uint8) if tensor.dim() else tensor)


@pytest.mark.parametrize("piece", [64, 256, 4096, 4 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["rows", "channels_last", "transposed", "strided"])
def test_any_strides_and_dtype(
    piece: int, dtype: torch.dtype, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces cut rows, and rows of rows; the result is always what copy_ gives."""
    monkeypatch.setattr(module_under_test, "_PIECE_BYTES", piece)
    tensor = torch.randn(5, 3, 7, 11)
    weights = saved(tmp_path, x=tensor)
    out = {
        "rows": lambda: torch.empty(5, 3, 7, 11, dtype=dtype),
        "channels_last": lambda: torch.empty(5, 3, 7, 11, dtype=dtype, memory_format=torch.channels_last),
        "transposed": lambda: torch.empty(11, 7, 3, 5, dtype=dtype).permute(3, 2, 1, 0),
        "strided": lambda: torch.zeros(5, 6, 7, 22, dtype=dtype)[:, ::2, :, ::2],
    }[order]()
    weights.read_into("x", out)
    assert_bitwise(out, torch.empty_like(out).copy_(tensor), order)
    if order == "strided":
        assert not out._base[:, 1::2].any(), "nothing is written between the elements"


def test_into_parameters_and_inference_tensors(tmp_path: Path) -> None:
    weights = saved(tmp_path, x=torch.arange(6.0).view(2, 3))
    param = nn.Parameter(torch.zeros(2, 3))
    weights.read_into("x", param)
    assert param.requires_grad
    assert param.is_leaf
    assert param.tolist() == [[0, 1, 2], [3, 4, 5]]
    with torch.inference_mode():
        inner = torch.zeros(2, 3, dtype=torch.float64)
        weights.read_into("x", inner)
        weights.read_into("x", half := nn.Parameter(torch.zeros(2, 3)).to(torch.bfloat16))
    assert inner.tolist() == half.tolist() == param.tolist()
    with torch.inference_mode():
        weights.read_into("x", param)


def test_a_bool_that_is_none(tmp_path: Path) -> None:
    path = raw(tmp_path, {"b": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}, b"\x00\x02\xff")
    out = torch.zeros(3, dtype=torch.bool)
    open_weights(path).read_into("b", out)
    assert out.view(torch.uint8).tolist() == [0, 1, 1]


def test_wrong_arguments(tmp_path: Path) -> None:
    weights = saved(tmp_path, x=torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match=r"'x' is \(2, 3\), not \(3, 2\)"):
        weights.read_into("x", torch.zeros(3, 2))
    with pytest.raises(ArgumentError, match="meta device"):
        weights.read_into("x", torch.zeros(2, 3, device="meta"))
    with pytest.raises(ArgumentError, match=r"no tensor 'y'; it has 'x'"):
        weights.shape("y")


MEMORY = """
import ctypes, mmap, os, sys, torch
from lowtide.job.memory import peak_bytes, reset_peak
from lowtide.spec.weights import open_weights
torch.set_num_threads(1)
weights = open_weights(sys.argv[1])
outs = [torch.ones(48 << 20, dtype=torch.bfloat16), torch.ones(6 << 20, 8).t().contiguous().t()]
weights.read_into("warm", torch.ones(1 << 20, dtype=torch.bfloat16))
reset_peak()
base = peak_bytes()
for name, out in zip("xy", outs):
    weights.read_into(name, out)
print((peak_bytes() - base) >> 20)
rights = mmap.PROT_READ | mmap.PROT_WRITE
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=rights, flags=mmap.MAP_PRIVATE) as view:
    pages = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE + 1))()
    start = ctypes.c_char.from_buffer(view)
    if ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(view)), pages):
        raise OSError("mincore")
    print(sum(p & 1 for p in pages) * mmap.PAGESIZE >> 20)
    del start
"""


def test_memory_stays_small_and_the_page_cache_clean(tmp_path: Path) -> None:
    """384 MiB into another dtype, or other strides: a piece at a time; and the file leaves the page cache."""
    path = tmp_path / "large.safetensors"
    save_file({"x": torch.ones(48 << 20), "y": torch.ones(6 << 20, 8), "warm": torch.ones(1 << 20)}, path)
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)  # pages that wait to be written cannot be dropped
    os.close(handle)
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(path)]
    grown, cached = map(int, subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout.split())
    assert grown <= 12, f"{grown} MiB"
    if os.stat(tmp_path).st_dev != os.stat("/dev/shm").st_dev:
        assert cached <= 40, f"{cached} MiB of 388"


# -- files that cannot be believed ------------------------------------------------------------------------------------

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "I8", "shape": [4], "data_offsets": [8, 12]},
}
DATA = bytes(12)


def test_the_handmade_file_is_good(tmp_path: Path) -> None:
    assert sorted(open_weights(raw(tmp_path, {**GOOD, "__metadata__": {"format": "pt"}}, DATA)).names) == ["a", "b"]
    assert open_weights(raw(tmp_path, {})).names == ()


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **fields}}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "JSON in it is not valid"),
        (b"{", "JSON in it is not valid"),
        (b"\xff\xfe{}", "JSON in it is not valid"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "not an object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}', "twice"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', "not valid|the shape"),
        ({"a": 3}, "lacks its dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks its dtype, shape or data_offsets"),
        (changed("a", dtype="F33"), "unknown dtype 'F33'"),
        (changed("a", dtype=["F32"]), "unknown dtype"),
        (changed("a", shape=[-2]), "the shape"),
        (changed("a", shape=[2.0]), "the shape"),
        (changed("a", shape=[True, 2]), "the shape"),
        (changed("a", shape="2"), "the shape"),
        (changed("a", shape=[1] * 99 + [2]), "the shape"),
        (changed("a", shape=[3]), "8 bytes, which is not a F32 of shape"),
        (changed("a", shape=[2**61, 2**61]), "which is not a F32"),
        (changed("a", data_offsets=[0]), "the place"),
        (changed("a", data_offsets=[-8, 0]), "the place"),
        (changed("a", data_offsets=[8, 0]), "-8 bytes"),
        (changed("a", data_offsets=[0, 2**70]), "the place"),
        (changed("b", data_offsets=[4, 8]), "'b' begins at byte .* and overlaps 'a'"),
        (changed("b", data_offsets=[9, 13]), "leaves a gap after 'a'"),
        (changed("b", shape=[3], data_offsets=[8, 11]), "its tensors end at byte"),
        (changed("b", shape=[40], data_offsets=[8, 48]), "its tensors end at byte"),
    ],
)
def test_a_bad_header_is_refused_with_the_file_and_the_problem(header: Any, problem: str, tmp_path: Path) -> None:
    path = raw(tmp_path, header, DATA)
    with pytest.raises(Refused, match=problem) as caught:
        open_weights(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("length", [1_000_000, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_not_read(length: int, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"a header of {length} bytes"):
        open_weights(raw(tmp_path, GOOD, DATA, length=length))


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = raw(tmp_path, GOOD, DATA, length=150_000_000)
    os.truncate(path, 200_000_000)  # sparse
    with pytest.raises(Refused, match="at most 100000000 fit"):
        open_weights(path)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_that_is_too_short(size: int, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(Refused, match=r"short\.safetensors"):
        open_weights(path)


def test_every_mutation_of_a_header_is_read_or_refused(tmp_path: Path) -> None:
    """A few thousand bytes changed one at a time: a typed error, or values; never anything else."""
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int8)}, path)
    good = path.read_bytes()
    outcomes = {"read": 0, "refused": 0}
    for at in range(len(good) - 28):
        for value in {0, 34, 44, 48, 57, 123, 125, 255, good[at] ^ 1, good[at] ^ 128}:
            path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
            try:
                weights = open_weights(path)
                for name in weights.names:
                    weights.read_into(name, torch.empty(weights.shape(name), dtype=weights.dtype(name)))
                outcomes["read"] += 1
            except (Refused, ArgumentError):
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 50


def test_truncated_or_replaced_after_it_was_opened(tmp_path: Path) -> None:
    weights = saved(tmp_path, x=torch.zeros(100))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(Refused, match="changed or replaced"):
        weights.read_into("x", torch.empty(100))
    weights = saved(tmp_path, x=torch.zeros(100))
    save_file({"x": torch.ones(100)}, tmp_path / "new")
    os.replace(tmp_path / "new", path)
    with pytest.raises(Refused, match="changed or replaced"):
        weights.read_into("x", torch.empty(100))
    path.unlink()
    with pytest.raises(ArgumentError, match=r"model\.safetensors cannot be opened: No such file"):
        weights.read_into("x", torch.empty(100))


def test_short_reads_go_on_and_errors_name_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real disk gives neither on demand, so the system call is replaced."""
    tensor = torch.randn(1000)
    weights = saved(tmp_path, x=tensor)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: real(handle, [buffers[0][:333]], at))
    weights.read_into("x", out := torch.empty(1000))
    assert torch.equal(out, tensor)

    def fails(handle: int, buffers: list[memoryview], at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(Refused, match=r"model\.safetensors, byte \d+: 'x' cannot be read: Input/output error"):
        weights.read_into("x", out)
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: 0)
    with pytest.raises(Refused, match=r"ends at byte \d+, inside 'x'"):
        weights.read_into("x", out)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no such file or folder"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"pytorch_model\.bin can run code"):
        open_weights(tmp_path)
    with pytest.raises(ArgumentError, match=r"not a \.safetensors file"):
        open_weights(tmp_path / "pytorch_model.bin")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ArgumentError, match="not a regular file"):
        open_weights(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "folder.safetensors" / "model.safetensors").mkdir()
    with pytest.raises(ArgumentError, match="not a regular file"):
        open_weights(tmp_path / "folder.safetensors")


# -- an index ---------------------------------------------------------------------------------------------------------


def sharded(folder: Path) -> dict[str, Tensor]:
    tensors = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(4)}
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "model-00002-of-00002.safetensors")
    places = {n: f"model-0000{1 if n == 'a' else 2}-of-00002.safetensors" for n in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 44}, "weight_map": places}))
    return tensors


@pytest.mark.parametrize("path", [".", "model.safetensors.index.json"])
def test_an_index_and_its_files(path: str, tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    weights = open_weights(tmp_path / path)
    assert weights.names == tuple(tensors)
    for name, tensor in tensors.items():
        weights.read_into(name, out := torch.empty_like(tensor))
        assert torch.equal(out, tensor)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({}, "no weight_map"),
        ({"weight_map": ["a"]}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "names the file '../secret.safetensors'"),
        ({"weight_map": {"a": "/etc/secret.safetensors"}}, "only .safetensors files beside the index"),
        ({"weight_map": {"a": ".."}}, "only .safetensors"),
        ({"weight_map": {"a": ""}}, "only .safetensors"),
        ({"weight_map": {"a": "x\x00.safetensors"}}, "only .safetensors"),
        ({"weight_map": {"a": "x\\y.safetensors"}}, "only .safetensors"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "only .safetensors"),
        ({"weight_map": {"a": "model-00002-of-00002.safetensors"}}, "says that 'a' is in model-00002"),
        ([], "not an object"),
    ],
)
def test_a_bad_index_is_refused(index: Any, problem: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(Refused, match=problem) as caught:
        open_weights(tmp_path)
    assert str(path) in str(caught.value)


def test_a_missing_shard_and_a_huge_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ArgumentError, match=r"model-00001-of-00002\.safetensors cannot be opened"):
        open_weights(tmp_path)
    os.truncate(tmp_path / "model.safetensors.index.json", 200_000_000)
    with pytest.raises(Refused, match="an index of 200000000 bytes"):
        open_weights(tmp_path)


# -- names ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, BatchNorm's buffers, one buffer that is not saved, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(4.0).cos(), persistent=False)


def plain_state(net: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in net.state_dict().items() if n != "head.weight"}


@pytest.mark.parametrize("prefix", ["", "model.", "transformer.", "a.b."])
def test_the_file_may_have_a_prefix_more(prefix: str, tmp_path: Path) -> None:
    weights = saved(tmp_path, **{prefix + n: t for n, t in plain_state(Net()).items()})
    found = match(weights, Net())
    assert found == {n: prefix + n.replace("head", "embed") for n in Net().state_dict()}


@pytest.mark.parametrize("prefix", ["model", "transformer"])
def test_the_model_may_have_a_prefix_more(prefix: str, tmp_path: Path) -> None:
    weights = saved(tmp_path, **plain_state(Net()))
    outer = nn.Module()
    outer.add_module(prefix, inner := Net())
    outer.lm_head = nn.Linear(4, 10, bias=False)
    outer.lm_head.weight = inner.embed.weight
    found = match(weights, outer)
    assert found["lm_head.weight"] == found[f"{prefix}.head.weight"] == found[f"{prefix}.embed.weight"] == "embed.weight"
    assert found[f"{prefix}.norm.running_var"] == "norm.running_var"


def test_a_tied_weight_under_any_of_its_names(tmp_path: Path) -> None:
    state = plain_state(Net())
    state["head.weight"] = state.pop("embed.weight")
    found = match(saved(tmp_path, **state), Net())
    assert found["embed.weight"] == found["head.weight"] == "head.weight"
    both = {**state, "embed.weight": torch.zeros(10, 4)}
    net = Net()
    net.load_state_dict(both)
    weights = saved(tmp_path, **both)
    weights.read_into(match(weights, Net())["embed.weight"], out := torch.empty(10, 4))
    assert torch.equal(out, net.embed.weight), "as load_state_dict does"


def test_a_buffer_that_is_not_saved_may_be_there(tmp_path: Path) -> None:
    found = match(saved(tmp_path, **plain_state(Net()), angles=torch.zeros(4)), Net())
    assert "angles" not in found


def test_missing_and_unexpected_names_are_listed(tmp_path: Path) -> None:
    state = plain_state(Net())
    del state["norm.weight"], state["norm.running_mean"]
    weights = saved(tmp_path, **state, **{f"new.{i}": torch.zeros(1) for i in range(8)})
    with pytest.raises(ArgumentError) as caught:
        match(weights, Net())
    text = str(caught.value)
    assert "does not fit Net: 2 missing in the file: 'norm.weight', 'norm.running_mean'" in text
    assert "8 unknown to the model: 'new.0', 'new.1', 'new.2', 'new.3', 'new.4', ... (3 more)" in text


def test_a_missing_tied_weight_is_missing_under_all_names(tmp_path: Path) -> None:
    state = plain_state(Net())
    del state["embed.weight"]
    with pytest.raises(ArgumentError, match=r"2 missing in the file: 'embed\.weight', 'head\.weight'"):
        match(saved(tmp_path, **state), Net())


def test_shapes_must_be_the_same(tmp_path: Path) -> None:
    state = {**plain_state(Net()), "embed.weight": torch.zeros(10, 5), "norm.bias": torch.zeros(1)}
    with pytest.raises(ArgumentError) as caught:
        match(saved(tmp_path, **state), Net())
    assert "'embed.weight' is (10, 5) in the file and (10, 4) in the model" in str(caught.value)
    assert "'norm.bias' is (1,) in the file and (4,) in the model" in str(caught.value)


def test_a_dropped_prefix_never_makes_one_weight_serve_two_parameters(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model.inner = nn.Module()
    model.inner.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ArgumentError, match="1 missing in the file"):
        match(saved(tmp_path, weight=torch.ones(2)), model)


# -- models on the meta device ----------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Everything in it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mask", torch.arange(6).view(2, 3))
        self.again = nn.Module()
        self.again.register_buffer("mask", self.mask)


def test_buffers_get_memory_and_values(tmp_path: Path) -> None:
    source = Plain()
    nn.init.normal_(source.norm.running_mean)
    save_model(source, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Plain()
        if device == "cpu":
            model.mask.zero_()
        found = match(weights, model)
        give_buffers_memory(model, torch.device("cpu"))
        load_buffers(weights, model, found)
        assert list(model.state_dict()) == list(source.state_dict())
        for name, buffer in source.named_buffers():
            assert_bitwise(model.get_buffer(name), buffer, name)
        assert model.again.mask is model.mask, "one buffer stays one"
    assert all(not b.is_meta for b in model.buffers())


def test_a_buffer_that_is_not_saved_cannot_come_from_a_file(tmp_path: Path) -> None:
    weights = saved(tmp_path, **plain_state(Net()))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(Refused, match=r"buffer 'angles' of Net .* Build the model under `with lowtide\.deferred\(\):`"):
        match(weights, model)
    assert all(b.is_meta for b in model.buffers()), "nothing was changed"


def test_parameters_leave_meta_as_the_same_objects() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    model[0].weight.note = "kept"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = list(model.parameters())
    shapes = [(p.shape, p.dtype, p.requires_grad) for p in before]
    leave_meta(model.parameters(), torch.device("cpu"))
    after = list(model.parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(a is b for a, b in zip(after, optimizer.param_groups[0]["params"], strict=True))
    assert [(p.shape, p.dtype, p.requires_grad) for p in after] == shapes
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in after)
    assert model[0].weight.note == "kept"
    assert sum(p.untyped_storage().nbytes() for p in after) < 100
    with torch.no_grad():
        model[0].weight.data = torch.ones(400, 300)  # what the engine does when it attaches a unit
    model[0](torch.ones(1, 300)).sum().backward()
    assert model[0].weight.grad is not None


def test_hooks_on_a_meta_parameter_are_not_lost_silently() -> None:
    param = nn.Parameter(torch.empty(2, device="meta"))
    param.register_hook(lambda grad: grad)
    with pytest.raises(Refused, match="has hooks"):
        leave_meta([param], torch.device("cpu"))


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def tiny(kind: str) -> Any:
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
        return transformers.GPT2Model, transformers.GPT2LMHeadModel, config
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied")
    return transformers.LlamaModel, transformers.LlamaForCausalLM, config


def fill(model: nn.Module, weights: Weights) -> None:
    found = match(weights, model)
    for name, param in model.named_parameters():
        weights.read_into(found[name], param)
    load_buffers(weights, model, found)


@pytest.mark.parametrize("kind", ["gpt2", "tied", "untied"])
@pytest.mark.parametrize("size", ["100MB", "20KB"])
def test_what_save_pretrained_writes(kind: str, size: str, tmp_path: Path) -> None:
    _, cls, config = tiny(kind)
    source = cls(config)
    source.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "20KB")
    model = cls(config)
    fill(model, open_weights(tmp_path))
    for (name, a), b in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        assert_bitwise(a, b, name)


@pytest.mark.parametrize("kind", ["gpt2", "tied"])
def test_weights_of_the_base_model(kind: str, tmp_path: Path) -> None:
    base, cls, config = tiny(kind)
    source = base(config)
    source.save_pretrained(tmp_path)
    model = cls(config)
    fill(model, open_weights(tmp_path))
    assert_bitwise(model.get_input_embeddings().weight, source.get_input_embeddings().weight, "embedding")
    name = next(n for n, p in source.named_parameters() if p is source.get_input_embeddings().weight)
    cls(config).save_pretrained(tmp_path)
    fill(source, open_weights(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    assert_bitwise(source.state_dict()[name], written[f"{cls.base_model_prefix}.{name}"], name)


def test_masks_in_old_gpt2_files(tmp_path: Path) -> None:
    base, cls, config = tiny("gpt2")
    state = {n: t.clone() for n, t in base(config).state_dict().items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}
    fill(cls(config), saved(tmp_path, **state))


def test_a_meta_model_that_cannot_be_completed_says_so(tmp_path: Path) -> None:
    _, cls, config = tiny("tied")
    cls(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = cls(config)
    with pytest.raises(Refused, match=re.escape("'model.rotary_emb.inv_freq'")):
        match(open_weights(tmp_path), model)
