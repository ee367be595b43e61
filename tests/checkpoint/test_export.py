"""What leaves a checkpoint for Hugging Face, or comes from there, keeps its bits, and takes the memory of a tensor."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import lowtide
from lowtide.checkpoint.compare import diff
from lowtide.checkpoint.export import export_hf, export_whole
from lowtide.checkpoint.folder import LATEST, read_manifest
from lowtide.checkpoint.importing import import_hf
from lowtide.checkpoint.source import verify
from lowtide.errors import ArgumentError, CheckpointCorrupted, CheckpointMismatch
from tests.checkpoint.exchange import ON_DISK, Job, assert_same_bits, saved
from tests.kit.checkpoints import Setup
from tests.kit.models_hf import HUGGING_FACE

CASES = [
    ("gpt2", Setup()),
    ("gpt2", ON_DISK),
    ("gpt2", Setup(ranks=2, stage=3, disk=True)),
    ("bert", Setup(ranks=2, stage=1)),
    ("llama", ON_DISK),
    ("t5", ON_DISK),
    ("resnet", ON_DISK),
    ("vit", Setup()),
]


def with_transformers(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers finds in a folder."""
    model = HUGGING_FACE[name].build(5)
    return type(model).from_pretrained(folder).state_dict()  # type: ignore[attr-defined]


def configuration(name: str, folder: Path) -> Path:
    model: Any = HUGGING_FACE[name].build(0)
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "setup"), CASES, ids=lambda case: str(case))
def test_transformers_reads_the_same_bits(tmp_path: Path, name: str, setup: Setup) -> None:
    checkpoint, expected = saved(tmp_path, name, setup)
    done = export_hf(checkpoint, tmp_path / "hf", like=configuration(name, tmp_path / "config"))
    assert "config.json" in done.files
    assert_same_bits(with_transformers(name, tmp_path / "hf"), expected)


def test_a_model_may_be_cut_into_several_files(tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, "gpt2")
    done = export_hf(checkpoint, tmp_path / "hf", shard_bytes=5000, like=configuration("gpt2", tmp_path / "config"))
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "hf" / f).values()) for f in files]
    assert index["metadata"]["total_size"] == sum(sizes) == done.nbytes
    assert index["metadata"]["aliases"] == {"lm_head.weight": "transformer.wte.weight"}
    assert set(index["weight_map"]) == set(expected) - {"lm_head.weight"}
    assert all(len(load_file(tmp_path / "hf" / f)) == 1 for f, size in zip(files, sizes, strict=True) if size > 5000)
    assert_same_bits(with_transformers("gpt2", tmp_path / "hf"), expected)


def test_tied_names_are_there_once_and_noted(tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, "gpt2")
    export_hf(checkpoint, tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected) - {"lm_head.weight"}
        assert file.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}


@pytest.mark.parametrize("specimen", ["convolutions", "buffers", "odd_sizes", "mixed_dtypes", "tied_head", "frozen_block"])
def test_awkward_tensors(tmp_path: Path, specimen: str) -> None:
    checkpoint, expected = saved(tmp_path, specimen)
    export_hf(checkpoint, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same_bits(found, {name: expected[name] for name in found})
    left = set(expected) - set(found)
    assert all(any(torch.equal(expected[name], expected[other]) for other in found) for name in left)  # tied


def test_a_tensor_in_another_order_is_written_in_pieces(tmp_path: Path) -> None:
    """Larger than a piece, so that rows have to be cut in two dimensions."""
    model = nn.Sequential(nn.Conv2d(3, 1500, (9, 300), bias=False).to(memory_format=torch.channels_last))
    lowtide.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lowtide.save(tmp_path / "run" / "one", model).wait()
    export_hf(tmp_path / "run" / "one", tmp_path / "hf")
    assert_same_bits(load_file(tmp_path / "hf" / "model.safetensors"), dict(model.state_dict()))


def test_another_dtype_comes_from_the_masters(tmp_path: Path) -> None:
    checkpoint, expected = saved(tmp_path, "gpt", Setup(precision="bf16"))
    export_hf(checkpoint, tmp_path / "same")
    same = load_file(tmp_path / "same" / "model.safetensors")
    assert {t.dtype for t in same.values()} == {t.dtype for t in expected.values()} == {torch.bfloat16}
    export_hf(checkpoint, tmp_path / "fp32", dtype=torch.float32)
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    assert_same_bits({name: t.bfloat16() for name, t in whole.items()}, same)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in whole.values())


def test_whole_numbers_keep_their_dtype(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, "convolutions")
    export_hf(checkpoint, tmp_path / "hf", dtype=torch.float16)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert {t.dtype for n, t in found.items() if n.endswith("num_batches_tracked")} == {torch.int64}
    assert {t.dtype for n, t in found.items() if not n.endswith("num_batches_tracked")} == {torch.float16}


def test_everything_is_private(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, "gpt")
    for folder in (export_hf(checkpoint, tmp_path / "a").path, export_whole(checkpoint, tmp_path / "b").path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}


# -- whole checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", [ON_DISK, Setup(ranks=2, stage=3, disk=True, resident="kinds")], ids=str)
def test_a_whole_copy_needs_nothing_else(tmp_path: Path, setup: Setup) -> None:
    checkpoint, expected = saved(tmp_path, "gpt", setup)
    assert list(checkpoint.glob("*spool*"))
    done = export_whole(checkpoint, tmp_path / "copies" / "step-2")
    copy = done.path
    assert {p.name for p in copy.iterdir()} == {"manifest.json", *done.files}
    assert not list(copy.glob("*spool*"))
    assert all(file.xxh3 is not None for file in read_manifest(copy).files)
    assert verify(copy) == sum(p.stat().st_size for p in copy.iterdir() if p.name != "manifest.json")
    assert diff(checkpoint, copy).identical
    assert (tmp_path / "copies" / LATEST).read_text() == "step-2\n"
    for file in checkpoint.iterdir():
        file.unlink()
    one = Job(tmp_path, "gpt", Setup())
    lowtide.load(copy, one.model, one.optimizer)
    assert_same_bits(one.tensors(), expected)


def test_a_copy_is_as_old_as_its_original(tmp_path: Path) -> None:
    job = Job(tmp_path, "gpt")
    for _ in range(2):
        job.train()
        job.save(extra={"step": job.steps})
    for name in ("step-2", "step-1"):
        export_whole(tmp_path / "run" / name, tmp_path / "copies" / name)
    assert lowtide.load(tmp_path / "copies", job.model, job.optimizer) == {"step": 2}


# -- from Hugging Face ------------------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
@pytest.mark.parametrize("setup", [Setup(), ON_DISK], ids=str)
def test_what_transformers_wrote_can_be_loaded(tmp_path: Path, name: str, setup: Setup) -> None:
    model: Any = HUGGING_FACE[name].build(7)
    model.save_pretrained(tmp_path / "hf")
    checkpoint = import_hf(tmp_path / "hf", tmp_path / "imported" / "start").path
    assert verify(checkpoint) > 0
    job = Job(tmp_path, name, setup)
    assert lowtide.load(checkpoint, job.model) == {}
    assert_same_bits(job.tensors(), model.state_dict())
    with pytest.raises(CheckpointMismatch, match="without an optimizer"):
        lowtide.load(checkpoint, job.model, job.optimizer)
    lowtide.load(checkpoint, job.model, job.optimizer, strict=False)
    assert_same_bits(job.tensors(), model.state_dict())
    job.train()


def test_there_and_back_again(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, "convolutions")
    export_hf(checkpoint, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "back")
    assert diff(checkpoint, tmp_path / "back", model_only=True).identical


@pytest.mark.parametrize("specimen", ["buffers", "odd_sizes", "mixed_dtypes", "tied_head"])
def test_a_file_does_not_say_what_is_a_buffer(tmp_path: Path, specimen: str) -> None:
    """A load finds each under its name."""
    checkpoint, expected = saved(tmp_path, specimen)
    export_hf(checkpoint, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "back")
    job = Job(tmp_path, specimen, Setup())
    lowtide.load(tmp_path / "back", job.model)
    assert_same_bits(job.tensors(), expected)


def test_an_import_becomes_the_newest(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, "gpt")
    export_hf(checkpoint, tmp_path / "hf")
    imported = import_hf(tmp_path / "hf", checkpoint.parent / "again").path
    assert read_manifest(imported).sequence == read_manifest(checkpoint).sequence + 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("command", [export_hf, export_whole])
def test_damage_is_found_and_nothing_is_left(tmp_path: Path, command: Any) -> None:
    checkpoint, _ = saved(tmp_path, "gpt", Setup())
    payload = checkpoint / "rank-00000.safetensors"
    begin = 8 + int.from_bytes(payload.read_bytes()[:8], "little")
    flip(payload, begin + 100)
    with pytest.raises(CheckpointCorrupted, match="not what was written"):
        command(checkpoint, tmp_path / "out" / "target")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("command", [export_hf, export_whole, import_hf])
def test_what_is_there_is_not_touched(tmp_path: Path, command: Any) -> None:
    checkpoint, _ = saved(tmp_path, "gpt", Setup())
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thing").write_text("mine")
    with pytest.raises(ArgumentError, match="there already"):
        command(tmp_path if command is import_hf else checkpoint, tmp_path / "taken")
    assert [p.read_text() for p in (tmp_path / "taken").iterdir()] == ["mine"]


def test_only_floating_point_dtypes(tmp_path: Path) -> None:
    checkpoint, _ = saved(tmp_path, "gpt", Setup())
    with pytest.raises(ArgumentError, match="floating-point"):
        export_hf(checkpoint, tmp_path / "out", dtype=torch.int8)
    with pytest.raises(ArgumentError, match="at least 1 byte"):
        export_hf(checkpoint, tmp_path / "out", shard_bytes=0)
    with pytest.raises(ArgumentError, match=r"config\.json"):
        export_hf(checkpoint, tmp_path / "out", like=tmp_path)


def test_complex128_has_no_name_in_safetensors(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex128))])
    lowtide.shard(model)
    lowtide.save(tmp_path / "run" / "one", model).wait()
    with pytest.raises(lowtide.Error, match="complex128"):
        export_hf(tmp_path / "run" / "one", tmp_path / "out")


# -- memory -----------------------------------------------------------------------------------------------------------

TENSORS, TENSOR_BYTES = 24, 4 << 20
MEASURED = """
import sys
from pathlib import Path
from lowtide.checkpoint.compare import diff
from lowtide.checkpoint.export import export_hf, export_whole
from lowtide.checkpoint.importing import import_hf

def measured(what):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = rows()["VmRSS"]
    what()
    return rows()["VmHWM"] - before

def rows():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {l.split(":")[0]: int(l.split()[1]) << 10 for l in lines if l.startswith(("VmRSS", "VmHWM"))}

where = Path(sys.argv[1])
import_hf(where / "small", where / "warm")
export_hf(where / "warm", where / "warm-hf")
export_whole(where / "warm", where / "warm-copy")
diff(where / "warm", where / "warm-copy")
print(measured(lambda: import_hf(where / "hf", where / "imported")))
print(measured(lambda: export_hf(where / "imported", where / "exported")))
print(measured(lambda: export_whole(where / "imported", where / "copied")))
print(measured(lambda: diff(where / "imported", where / "copied")))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    for name, count in (("hf", TENSORS), ("small", 1)):
        (tmp_path / name).mkdir()
        tensors = {f"layer.{n}.weight": torch.full((TENSOR_BYTES // 4,), float(n)) for n in range(count)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        del tensors
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    grown = dict(zip(("import_hf", "export_hf", "export_whole", "diff"), map(int, done.stdout.split()), strict=True))
    # a tensor, two blocks on each side, pieces, and what the allocator keeps; the model has 24 tensors
    assert {name: nbytes for name, nbytes in grown.items() if nbytes > 8 * TENSOR_BYTES} == {}
