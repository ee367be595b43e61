"""The machines that come as data files: every file is valid and plausible; a user's own file is checked as strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ArgumentError
from lowtide.spec.catalogue import impossible_numbers, load, names, parse

WANTED = ["a100-40g", "a100-80g", "cpu-2", "cpu-64", "h100-80g", "rtx4090", "v100-32g"]
GIB = 2**30


def text(name: str) -> str:
    return resources.files("lowtide").joinpath("hardware").joinpath(f"{name}.json").read_text(encoding="utf-8")


def test_the_names() -> None:
    assert names() == WANTED


@pytest.mark.parametrize("name", WANTED)
def test_every_file_is_plausible(name: str) -> None:
    found = load(name)
    compute, disk = found.compute, found.disk
    assert impossible_numbers(found) == []
    assert len(found.source) > 60
    assert "http" not in found.source
    assert compute.flops["fp32"] >= compute.flops["fp64"]
    assert found.host_bandwidth < compute.bandwidth
    assert 1e-7 < compute.op_seconds < 1e-4
    assert disk is not None
    assert disk.write <= disk.mixed <= disk.read
    assert disk.read < found.host_bandwidth
    assert found.between is not None
    assert found.between.bandwidth < found.inside.bandwidth * found.ranks_per_host
    assert found.host_bytes >= 16 * GIB
    assert (compute.memory_bytes is None) == (found.link is None) == name.startswith("cpu")
    if found.link is not None:
        assert compute.memory_bytes == int(name.partition("-")[2].rstrip("g") or 24) * GIB
        assert found.link.bandwidth < compute.bandwidth
        assert found.host_bytes > compute.memory_bytes
        assert compute.fault_seconds == 0
        assert compute.flops["fp16"] > compute.flops["fp32"]


def test_dense_not_sparse() -> None:
    assert load("h100-80g").compute.flops["bf16"] == 989.4e12
    assert load("a100-80g").compute.flops["bf16"] == 312e12
    assert load("v100-32g").compute.flops["fp16"] == 125e12
    assert "bf16" not in load("v100-32g").compute.flops
    assert load("rtx4090").compute.flops["bf16"] == 165.2e12


def test_an_own_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text("cpu-2"))
    assert load(str(path)) == load("cpu-2")


def _set(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("compute", "flops", "fp32", value=0), "compute.flops.fp32 is 0.0; it must be a positive number"),
        (_set("disk", "read", value=-1), "disk.read is -1.0"),
        (_set("disk", "reed", value=1), "disk.reed is not a field; did you mean 'read'?"),
        (_set("host_bytes", value="much"), "host_bytes: Input should be a valid integer"),
        (_set("inside", value=None), "inside: "),
        (_set("compute", "bandwidth", value=float("nan")), "compute.bandwidth is nan"),
    ],
)
def test_a_wrong_file_names_its_field(change: Callable[[dict[str, Any]], None], message: str) -> None:
    content = json.loads(text("cpu-2"))
    change(content)
    with pytest.raises(ArgumentError) as caught:
        parse(json.dumps(content), where="mine")
    assert message in str(caught.value)
    assert str(caught.value).startswith("mine does not describe hardware")


def test_an_unknown_name_suggests_a_close_one(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'h100-80g'"):
        load("H100")
    with pytest.raises(ArgumentError, match=r"known are a100-40g, .*path of a \.json file"):
        load("?")
    with pytest.raises(ArgumentError, match="cannot be read as hardware: No such file"):
        load(str(tmp_path / "gone.json"))
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ArgumentError, match="the whole file"):
        load(str(tmp_path / "text.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    with pytest.raises(ArgumentError, match="it is not text"):
        load(str(tmp_path / "bytes.json"))
