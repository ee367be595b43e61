"""What a caller may choose: every word is checked, and a wrong one is answered with the allowed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lowtide.config import (
    Activations,
    Comm,
    Config,
    KindDtypes,
    Partition,
    Precision,
    Update,
    build_config,
    parse_bytes,
    parse_stage,
)
from lowtide.errors import ArgumentError
from lowtide.stages import STAGES

ARGUMENTS: dict[str, Any] = {
    "world_size": 2,
    "stage": "auto",
    "partition": "element",
    "precision": None,
    "activations": "auto",
    "update": "step",
    "comm": None,
    "memory": None,
    "device_memory": None,
    "disk": None,
    "weights": None,
    "adapt": "placement",
    "run": None,
}


def config(**changes: Any) -> Config:
    return build_config(**{**ARGUMENTS, **changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        (1, 1),
        (4e9, 4_000_000_000),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("4G", 4 << 30),
        ("4GB", 4_000_000_000),
        ("500MB", 500_000_000),
        ("500MiB", 500 << 20),
        ("0.5T", 1 << 39),
        ("64kB", 64_000),
        ("64KiB", 64 << 10),
        (" 17000000 ", 17_000_000),
        (17, 17),
        ("17b", 17),
    ],
)
def test_bytes(text: Any, expected: int | None) -> None:
    assert parse_bytes("memory", text) == expected


@pytest.mark.parametrize("text", ["4 GB!", "", "G", "-4GiB", "four", "4XB", "1e9", "4GiBs", "4 4 GB"])
def test_wrong_bytes(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^memory is .*; write a number and a unit, such as '4GiB', '500MB' or '0\.5T'\.$"):
        parse_bytes("memory", text)


@pytest.mark.parametrize("text", ["1", "17", " 900 ", "1048575"])
def test_bytes_of_which_the_unit_was_forgotten(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^memory is .*, which are bytes; write the unit, such as '\d+GiB'\.$"):
        parse_bytes("memory", text)


@pytest.mark.parametrize("value", [0, -1, 0.5, "0", "0GiB", float("nan")])
def test_no_bytes(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^memory is .*; give more than 0 bytes\.$"):
        parse_bytes("memory", value)


def test_stages_are_zero_s() -> None:
    """Each stage shards what the one before shards, and one kind more."""
    table = [(s.optimizer, s.gradients, s.parameters) for s in (STAGES[n] for n in range(4))]
    assert table == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert [STAGES[n].number for n in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("value", "ranks", "number"), [("auto", 1, 0), ("auto", 2, 3), (0, 8, 0), (2, 1, 2), (3, 1, 3)])
def test_stage(value: Any, ranks: int, number: int) -> None:
    assert parse_stage(value, ranks) is STAGES[number]


@pytest.mark.parametrize("value", [4, -1, True, "3", "three", None, 2.5])
def test_wrong_stage(value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_stage(value, 2)
    assert str(caught.value).startswith(f"stage is {value!r}; allowed: 0 (nothing sharded), 1 (optimizer), 2 (+ gradients), 3 ")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Partition("rows"), "partition is 'rows'; allowed: 'element', 'row', 'tensor'. Did you mean 'row'?"),
        (lambda: Partition("x"), "partition is 'x'; allowed: 'element', 'row', 'tensor'."),
        (lambda: Precision(param="fp8"), "Precision.param is 'fp8'; allowed: 'fp64', 'fp32', 'fp16', 'bf16'."),
        (lambda: Precision(moments="half"), "Precision.moments is 'half'; allowed: 'fp64', 'fp32', 'fp16', 'bf16'."),
        (lambda: Precision(loss_scale="auto"), "Precision.loss_scale is 'auto'; allowed: 'dynamic'."),
        (lambda: Precision(loss_scale=0), "Precision.loss_scale is 0; give a number > 0 or 'dynamic'."),
        (lambda: Activations("drop"), "activations is 'drop'; allowed: 'auto', 'keep', 'recompute', 'host', 'disk'."),
        (lambda: Activations("auto", (("a.*", "drop"),)), "activations of 'a.*' is 'drop'; allowed: "),
        (lambda: Update("forward"), "update is 'forward'; allowed: 'step', 'backward'."),
        (lambda: Update("step", 100), "Update.chunk_bytes is 100; give at least 4096."),
        (
            lambda: config(adapt="troughput"),
            "adapt is 'troughput'; allowed: 'placement', 'throughput'. Did you mean 'throughput'?",
        ),
        (lambda: Comm(deadline=0), "Comm.deadline is 0; give seconds > 0."),
        (lambda: Comm(prefetch=-1), "Comm.prefetch and Comm.bucket_bytes must be >= 0."),
        (lambda: Comm(bucket_bytes=-1), "Comm.prefetch and Comm.bucket_bytes must be >= 0."),
    ],
)
def test_wrong_policies(make: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("shares", [(), (0, 0), (1, -1)])
def test_wrong_shares(shares: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="give one number >= 0 per rank, not all zero"):
        Partition("element", shares)


def test_one_share_per_rank() -> None:
    with pytest.raises(ArgumentError, match=r"^Partition\.shares has 3 entries for 2 ranks that share the model\.$"):
        config(partition=Partition("element", (1, 2, 3)))


@pytest.mark.parametrize(
    ("precision", "own", "expected"),
    [
        (Precision(), "fp32", "fp32 fp32 fp32 fp32 fp32"),
        (Precision(), "bf16", "bf16 bf16 bf16 bf16 bf16"),
        (Precision(param="bf16"), "fp32", "bf16 fp32 fp32 fp32 fp32"),
        (Precision(param="fp16"), "fp64", "fp16 fp32 fp32 fp32 fp32"),
        (Precision(param="bf16", master="bf16"), "fp32", "bf16 bf16 bf16 bf16 bf16"),
        (Precision(param="bf16", gradient="bf16"), "fp32", "bf16 fp32 bf16 fp32 fp32"),
        (Precision(reduce="fp64"), "fp32", "fp32 fp32 fp64 fp64 fp32"),
        (Precision(moments="bf16"), "fp32", "fp32 fp32 fp32 fp32 bf16"),
        (Precision(param="fp64"), "fp32", "fp64 fp64 fp64 fp64 fp64"),
    ],
)
def test_dtype_of_every_kind(precision: Precision, own: str, expected: str) -> None:
    """param, master, gradient, reduce, moments."""
    names = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert precision.dtypes(names[own]) == KindDtypes(*(names[word] for word in expected.split()))


def test_integers_keep_their_dtype() -> None:
    assert Precision(param="bf16", moments="fp16").dtypes(torch.int8) == KindDtypes(*[torch.int8] * 5)


def test_loss_scale_in_force() -> None:
    assert Precision(param="fp16").scale == "dynamic"
    assert Precision(param="fp16", loss_scale=8.0).scale == 8.0
    assert Precision(param="bf16").scale is None
    assert Precision(param="bf16", loss_scale="dynamic").scale == "dynamic"


def test_words_stand_for_policies() -> None:
    built = config(partition="row", precision="bf16", stage=2, memory="1KiB", run="here")
    assert built.partition == Partition("row")
    assert built.precision == Precision(param="bf16")
    assert (built.stage, built.memory_bytes, built.run) == (STAGES[2], 1024, "here")
    assert built.comm == Comm()
    assert config(comm=Comm(prefetch=3)).comm.prefetch == 3


def test_a_config_is_frozen_and_shows_all_it_holds() -> None:
    """Ranks compare configurations by their text: two that differ must not look alike."""
    base = config()
    assert dataclasses.is_dataclass(base)
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.memory_bytes = 1  # type: ignore[misc]
    changes: list[dict[str, Any]] = [
        {"stage": 1},
        {"partition": "row"},
        {"partition": Partition("element", (1, 2))},
        {"precision": "bf16"},
        {"precision": Precision(moments="bf16")},
        {"activations": "keep"},
        {"comm": Comm(prefetch=2)},
        {"memory": 10},
        {"adapt": "throughput"},
        {"run": "x"},
    ]
    assert len({repr(base), *(repr(config(**change)) for change in changes)}) == 1 + len(changes)
