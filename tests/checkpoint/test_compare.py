"""Two checkpoints are compared by what they hold, not by who wrote them; every difference is named and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint.compare import Difference, diff
from lowtide.checkpoint.importing import import_hf
from lowtide.errors import CheckpointCorrupted
from tests.checkpoint.exchange import Job, saved
from tests.kit.checkpoints import Setup

NAN, OTHER_NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


def imported(folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    (folder / f"{name}-hf").mkdir()
    save_file(tensors, folder / f"{name}-hf" / "model.safetensors")
    return import_hf(folder / f"{name}-hf", folder / name).path


def compared(folder: Path, one: dict[str, Tensor], two: dict[str, Tensor]) -> tuple[Difference, ...]:
    return diff(imported(folder, "one", one), imported(folder, "two", two)).differences


@pytest.mark.parametrize(
    "setup",
    [Setup(stage=3, disk=True), Setup(stage=3, disk=True, resident="kinds", chunk_bytes=8192)],
    ids=str,
)
@pytest.mark.parametrize("specimen", ["gpt", "convolutions", "tied_head", "odd_sizes"])
def test_where_bytes_lived_makes_no_difference(tmp_path: Path, specimen: str, setup: Setup) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    torch.manual_seed(0)
    one, _ = saved(tmp_path / "memory", specimen, Setup())
    torch.manual_seed(0)
    two, _ = saved(tmp_path / "disk", specimen, setup)
    found = diff(one, two)
    assert found.differences == ()
    assert found.identical
    assert found.tensors > 0
    assert found.nbytes > 0


def test_other_ranks_have_other_values_and_the_same_model(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, _ = saved(tmp_path / "one", "gpt", Setup(ranks=2, stage=3, disk=True))
    two, _ = saved(tmp_path / "two", "gpt", Setup(ranks=2, stage=0))
    assert diff(one, two).identical
    three, _ = saved(tmp_path, "gpt", Setup())
    found = diff(one, three)
    assert not found.identical
    only = {d.name for d in found.differences if d.what == "only in the first"}
    assert only
    assert all(name.startswith("rank 1 ") for name in only)


def test_a_step_shows_everywhere(tmp_path: Path) -> None:
    job = Job(tmp_path, "convolutions")
    job.train()
    one = job.save()
    job.train()
    two = job.save(extra={"epoch": 1})
    found = diff(one, two)
    sections = {d.section for d in found.differences}
    assert {"parameters", "optimizer.exp_avg", "optimizer.exp_avg_sq", "buffers", "values"} <= sections
    values = {d.name: d for d in found.differences if d.section == "values"}
    assert (values["step"].first, values["step"].second) == ("1", "2")
    assert values["extra.epoch"].what == "only in the second"
    model = diff(one, two, model_only=True)
    assert {d.section for d in model.differences} == {"parameters", "buffers"}
    assert diff(one, one).identical


@pytest.mark.parametrize(
    ("a", "b", "different", "largest", "odd"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 7.0], 2, 4.0, 0),
        ([float(NAN), 1.0], [float(NAN), 1.0], 0, 0.0, 0),
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0, 0),
        ([float("nan"), 1.0], [2.0, 1.5], 2, 0.5, 1),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0, 0.0, 0),
        ([float("inf"), 1.0], [float("-inf"), 1.0], 1, 0.0, 1),
    ],
)
def test_numbers_are_compared_by_their_bits(
    tmp_path: Path, a: list[float], b: list[float], different: int, largest: float, odd: int
) -> None:
    found = compared(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)})
    if not different:
        assert found == ()
        return
    (only,) = found
    assert (only.different, only.count, only.largest, only.not_numbers) == (different, len(a), largest, odd)
    assert str(only).startswith(f"parameters w: {different} of {len(a)} elements differ, by at most {largest:g}")


def test_two_kinds_of_nan_differ(tmp_path: Path) -> None:
    (only,) = compared(tmp_path, {"w": NAN.reshape(1)}, {"w": OTHER_NAN.reshape(1)})
    assert (only.different, only.not_numbers) == (1, 1)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int8, torch.bool, torch.uint16, torch.uint64),
    ],
    ids=str,
)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.tensor([0, 1, 0, 1]).to(dtype)
    b = torch.tensor([0, 1, 1, 0]).to(dtype)
    (only,) = compared(tmp_path, {"w": a}, {"w": b})
    assert (only.different, only.count, only.largest) == (2, 4, 1.0)


def test_what_is_larger_than_a_piece(tmp_path: Path) -> None:
    a = torch.zeros(3 << 20)
    b = a.clone()
    b[[0, 1 << 20, (3 << 20) - 1]] = torch.tensor([1.0, -3.0, 2.0])
    (only,) = compared(tmp_path, {"w": a}, {"w": b})
    assert (only.different, only.count, only.largest) == (3, 3 << 20, 3.0)


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    one = {"same": torch.ones(2), "gone": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(2)}
    two = {"same": torch.ones(2), "new": torch.ones(2), "shape": torch.ones(3, 2), "dtype": torch.ones(2).double()}
    found = {d.name: d for d in compared(tmp_path, one, two)}
    assert {name: d.what for name, d in found.items()} == {
        "gone": "only in the first",
        "new": "only in the second",
        "shape": "shape",
        "dtype": "dtype",
    }
    assert (found["shape"].first, found["shape"].second) == ("(2, 3)", "(3, 2)")
    assert (found["dtype"].first, found["dtype"].second) == ("torch.float32", "torch.float64")


def _conv(folder: Path, name: str, order: Any, change: float) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, (2, 4))).to(memory_format=order)
    with torch.no_grad():
        model[0].weight[2, 1, 1, 3] += change
    lowtide.shard(model)
    return lowtide.save(folder / "run" / name, model).wait()


def test_the_order_of_memory_makes_no_difference(tmp_path: Path) -> None:
    torch.manual_seed(1)
    rows = _conv(tmp_path, "rows", torch.contiguous_format, 0.0)
    last = _conv(tmp_path, "last", torch.channels_last, 0.0)
    changed = _conv(tmp_path, "changed", torch.channels_last, 0.5)
    assert diff(rows, last, model_only=True).identical
    for a, b in ((rows, changed), (changed, rows)):
        (only,) = diff(a, b, model_only=True).differences
        assert (only.name, only.different, only.count) == ("0.weight", 1, 120)
        assert only.largest == pytest.approx(0.5)


class _Tied(nn.Module):
    def __init__(self, first: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.arange(6.0))
        for name in (first, *({"a", "b"} - {first})):
            self.register_parameter(name, weight)


def test_a_tied_parameter_may_have_another_name(tmp_path: Path) -> None:
    paths = []
    for first in ("a", "b"):
        model = _Tied(first)
        lowtide.shard(model)
        paths.append(lowtide.save(tmp_path / "run" / first, model).wait())
    assert diff(*paths, model_only=True).identical


def test_damage_is_an_error_not_a_difference(tmp_path: Path) -> None:
    one = imported(tmp_path, "one", {"w": torch.ones(100)})
    two = imported(tmp_path, "two", {"w": torch.ones(100)})
    payload = two / "rank-00000.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    with pytest.raises(CheckpointCorrupted):
        diff(one, two)
