"""Tables and payloads made to do harm, in checkpoints whose checksums fit: refused with a CheckpointError, or harmless.

An attacker can compute checksums, so everything behind them has to be checked as well: where blocks lie, what parts claim, what
the objects beside the tensors say. And no memory is taken for what is only claimed.
"""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.checkpoint.manifest import MANIFEST, parse_table
from lowtide.errors import CheckpointCorrupted, CheckpointError, Error
from lowtide.spec.weights import open_weights
from tests.kit.anything import JSON, MANY
from tests.kit.crashes import apart, forked
from tests.kit.forgery import PAYLOAD, TABLE, Forger, examine
from tests.kit.hostile import EVIL, Mutator, table_problem

# -- tables -----------------------------------------------------------------------------------------------------------


def table_with(forger: Forger, change: Callable[[Any], Any]) -> bytes:
    table = json.loads(forger.files[TABLE])
    change(table)
    return json.dumps(table).encode()


def block(table: Any, **fields: Any) -> None:
    """Change the first block: file, offset, nbytes, xxh3, parts."""
    for key, value in fields.items():
        table["blocks"][0][("file", "offset", "nbytes", "xxh3", "parts").index(key)] = value


def part(table: Any, **fields: Any) -> None:
    for key, value in fields.items():
        table["blocks"][0][4][0][("kind", "name", "lo", "hi", "at").index(key)] = value


HUGE = 2**62 - 1
BAD_TABLES: dict[str, Callable[[Any], Any]] = {
    "another rank": lambda t: t.update(rank=1),
    "a file that is not listed": lambda t: t["files"].append("more.safetensors"),
    "a file elsewhere": lambda t: t["files"].append("../step-1/rank-00000.safetensors"),
    "the manifest as a file": lambda t: t["files"].append("manifest.json"),
    "a block in no file": lambda t: block(t, file=99),
    "a block behind the end": lambda t: block(t, offset=HUGE),
    "a block that is too long": lambda t: block(t, nbytes=HUGE),
    "an end that overflows": lambda t: block(t, offset=HUGE, nbytes=HUGE),
    "a negative offset": lambda t: block(t, offset=-1),
    "a negative size": lambda t: block(t, nbytes=-1),
    "a checksum that is too large": lambda t: block(t, xxh3=2**64),
    "a block with five fields too many": lambda t: t["blocks"][0].extend([0] * 5),
    "a part of no kind": lambda t: part(t, kind=99),
    "a part of no name": lambda t: part(t, name=99),
    "a part that ends before it begins": lambda t: part(t, lo=5, hi=4),
    "a part behind its block": lambda t: part(t, at=HUGE),
    "a part that is too long": lambda t: part(t, lo=0, hi=HUGE),
    "a part with a fraction": lambda t: part(t, lo=0.5),
    "a dtype that does not exist": lambda t: t["kinds"].append(["parameters", "float7"]),
    "a dtype that is a word of Python": lambda t: t["kinds"].append(["parameters", "__class__"]),
    "no blocks": lambda t: t.pop("blocks"),
    "one key too many": lambda t: t.update(run="rm -rf"),
}
BAD_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda t: t["objects"].clear(),
    "no model": lambda t: t["objects"].pop("model"),
    "a model that is a list": lambda t: t["objects"].update(model=[]),
    "parameters that are a list": lambda t: t["objects"]["model"].update(parameters=[]),
    "a shape with a negative size": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(shape=[-5, 6]),
    "a shape that overflows": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(shape=[2**40, 2**40]),
    "a shape of many sizes": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(shape=[1] * 65, stride=[1] * 65),
    "another shape": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(shape=[6, 5]),
    "a stride out of its memory": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(stride=[2**40, 1]),
    "an unknown dtype": lambda t: t["objects"]["model"]["parameters"]["up.weight"].update(dtype="float7"),
    "a parameter too few": lambda t: t["objects"]["model"]["parameters"].pop("up.bias"),
    "no rng": lambda t: t["objects"].pop("rng"),
    "an rng that is text": lambda t: t["objects"].update(rng="x"),
    "an rng of another shape": lambda t: t["objects"]["rng"].update(torch=[1, 2]),
    "no small states": lambda t: t["objects"].pop("small"),
    "small states that are a list": lambda t: t["objects"].update(small=[1]),
    "a small state that is text": lambda t: t["objects"]["small"].update({"up.weight": "x"}),
    "no state": lambda t: t["objects"].pop("state"),
    "a state that is not there": lambda t: t["objects"]["state"].clear(),
    "aliases that are a list": lambda t: t["objects"]["model"].update(aliases=[1]),
    "aliases to nowhere": lambda t: t["objects"]["model"].update(aliases={"up.weight": "nowhere"}),
    "aliases that are lists": lambda t: t["objects"]["model"].update(aliases={"up.weight": []}),
    "no buffers": lambda t: t["objects"]["model"].pop("buffers"),
    "buffers that are text": lambda t: t["objects"]["model"].update(buffers="x"),
    "a buffer that is a number": lambda t: t["objects"]["model"]["buffers"].update({"norm.running_mean": 3}),
    "groups that are a number": lambda t: t["objects"]["model"].update(groups=3),
    "a group too many": lambda t: t["objects"]["model"]["groups"].append({}),
    "a group without options": lambda t: t["objects"]["model"]["groups"][0].pop("options"),
    "a group with parameters of its own": lambda t: t["objects"]["model"]["groups"][0]["options"].update(params=[]),
    "options that are a list": lambda t: t["objects"]["model"]["groups"][0].update(options=[1]),
    "no scale": lambda t: t["objects"]["model"].pop("scale"),
    "a scale that is text": lambda t: t["objects"]["model"].update(scale="x"),
    "no extra": lambda t: t["objects"]["model"].pop("extra"),
    "an extra that is text": lambda t: t["objects"]["model"].update(extra="x"),
    "a tensor of another size": lambda t: t["objects"]["model"]["extra"]["tensor"].update(shape=[6]),
    "a tensor of a huge size": lambda t: t["objects"]["model"]["extra"]["tensor"].update(shape=[HUGE]),
    "a tensor of another dtype": lambda t: t["objects"]["model"]["extra"]["tensor"].update(dtype="float64"),
}
MAY_LOAD = {"a group with parameters of its own"}
"""Odd, but harmless: nobody reads it."""
OF_ANOTHER_MODEL = {"a state that is not there"}
"""Whole, and refused by the model that it is to be loaded into."""


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_with(name: str, forger: Forger) -> None:
    text = table_with(forger, BAD_TABLES[name])
    with pytest.raises(CheckpointCorrupted):
        parse_table(text, forger.manifest, 0, "")
    forger.write(forger.forged(text))
    assert forger.load().startswith("refused")
    assert forger.verify().startswith("refused")


@pytest.mark.parametrize("name", BAD_OBJECTS)
def test_objects_with(name: str, forger: Forger) -> None:
    """They pass the table's own checks; whoever uses them has to look."""
    forger.write(forger.forged(table_with(forger, BAD_OBJECTS[name])))
    held = [p for group in forger.optimizer.param_groups for p in group["params"]]
    said = forger.load()
    assert said.startswith("refused") or name in MAY_LOAD, said
    assert [p for group in forger.optimizer.param_groups for p in group["params"]] == held
    assert forger.verify().startswith("refused") is not (name in MAY_LOAD | OF_ANOTHER_MODEL)


def far_away(table: Any) -> None:
    """The tensor of ``extra``: its only part begins at element 2**61, and the shape says that this is right."""
    kind = next(i for i, kind in enumerate(table["kinds"]) if kind[0] == "object" and kind[1] == "int64")
    name = table["names"].index("extra.tensor")
    found = next(p for b in table["blocks"] for p in b[4] if p[:2] == [kind, name])
    found[2], found[3] = 2**61, 2**61 + 5
    table["objects"]["model"]["extra"]["tensor"]["shape"] = [2**61 + 5]


def repeated(table: Any) -> None:
    """The same 5 elements, again and again: 2**36 of them on paper, in a hundred rows."""
    kind = next(i for i, kind in enumerate(table["kinds"]) if kind[0] == "object" and kind[1] == "int64")
    name = table["names"].index("extra.tensor")
    found = next(b for b in table["blocks"] if b[4][0][:2] == [kind, name])
    found[4] = [[kind, name, 5 * n, 5 * n + 5, 0] for n in range(100)] + [[kind, name, 500, 505, 0]]
    table["objects"]["model"]["extra"]["tensor"]["shape"] = [2**36]


@pytest.mark.parametrize("change", [far_away, repeated])
def test_a_tensor_that_is_larger_than_its_file(change: Callable[[Any], None], forger: Forger) -> None:
    """Refused before memory is taken for it."""
    forger.write(forger.forged(table_with(forger, change)))
    assert forger.load().startswith("refused: checkpoint")


@MANY
@given(seed=st.integers(0, 2**32))
def test_any_table(forger: Forger, seed: int) -> None:
    text = Mutator(forger.files[TABLE]).mutated(random.Random(seed))
    try:
        table = parse_table(text, forger.manifest, 0, "")
    except CheckpointError:
        return
    assert table_problem(table, forger.manifest) is None
    try:
        examine(forger.forged(text), forger.shapes)
    except CheckpointError:
        return


@settings(MANY, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_table_in_a_load(forger: Forger, seed: int) -> None:
    forger.write(forger.forged(Mutator(forger.files[TABLE]).mutated(random.Random(seed))))
    forger.load()


@settings(MANY, max_examples=150)
@given(
    keys=st.lists(st.sampled_from(["rng", "small", "state", "model"]), min_size=1, max_size=3),
    value=JSON,
    evil=st.sampled_from(EVIL),
)
def test_any_objects_in_a_load(forger: Forger, keys: list[str], value: Any, evil: bytes) -> None:
    table = json.loads(forger.files[TABLE])
    for key in keys:
        inside = table["objects"][key]
        inside[random.Random(str(value)).choice(list(inside))] = value
    text = json.dumps(table).encode()
    forger.write(forger.forged(text.replace(b'"norm.running_mean"', evil if evil[:1] == b'"' else b'"x"', 1)))
    forger.load()


# -- payload headers --------------------------------------------------------------------------------------------------


def payload(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


OVERLAPS = b'"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}'


def test_a_payload_is_a_safetensors_file_that_anybody_can_read(forger: Forger) -> None:
    weights = open_weights(forger.path / PAYLOAD)
    assert any(name.endswith("up.weight") for name in weights.names)


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"\0" * 7, payload(b""), payload(b"{}", b"x"), payload(b"[]"), payload(b"null"), payload(b"{" * 10_000)),
        *(payload(b"{}", length=2**63), payload(b"{}", length=2**40), payload(b"{}", length=3), payload(b'{"a":1}')),
        payload(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"123"),
        payload(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', b"1234"),
        payload(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"1234"),
        payload(b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', b"1234"),
        payload(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,9223372036854775807]}}', b"1234"),
        payload(b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"1234"),
        payload(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' + OVERLAPS + b"}", b"1" * 6),
        payload(b'{"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' + OVERLAPS + b"}", b"1" * 6),
    ],
    ids=lambda text: ascii(text[:40]),
)  # fmt: skip
def test_a_payload_header(text: bytes, forger: Forger) -> None:
    """Readers of safetensors files refuse it; a load does not look at it, and notices that the numbers are not there."""
    files = {name: data for name, data in forger.files.items() if name != MANIFEST} | {PAYLOAD: text}
    forger.write({**files, MANIFEST: forger.manifest_for(files)})
    with pytest.raises(Error):
        open_weights(forger.path / PAYLOAD)
    assert forger.load().startswith("refused")


@MANY
@given(seed=st.integers(0, 2**32))
def test_any_payload_header(forger: Forger, tmp_path: Path, seed: int) -> None:
    whole = forger.files[PAYLOAD]
    end = 8 + int.from_bytes(whole[:8], "little")
    header = Mutator(whole[8:end].rstrip()).mutated(random.Random(seed))
    path = tmp_path / "x.safetensors"
    path.write_bytes(payload(header, whole[end:]))
    try:
        weights = open_weights(path)
    except Error:
        return
    for name in weights.names:
        assert weights.dtype(name).itemsize * torch.Size(weights.shape(name)).numel() <= len(whole)


# -- memory -----------------------------------------------------------------------------------------------------------


def within_little_memory(folder: Path, count: int) -> int:
    """Run in a process of its own: 256 MiB beyond what it has; whoever believes a size in a file needs more."""
    return forked(_within_little_memory, folder, count).result()


def _within_little_memory(folder: Path, count: int) -> int:
    forger = Forger(folder)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
    with pytest.raises((MemoryError, RuntimeError)):
        torch.empty(512 << 20, dtype=torch.uint8)
    changes = [*BAD_TABLES.values(), *BAD_OBJECTS.values(), far_away, repeated]
    for change in changes:
        forger.write(forger.forged(table_with(forger, change)))
        forger.load()
        forger.verify()
    mutator = Mutator(forger.files[TABLE])
    for seed in range(count):
        files = forger.forged(mutator.mutated(random.Random(seed)))
        try:
            examine(files, forger.shapes)
        except CheckpointError:
            continue
    forger.write(forger.files)
    assert forger.load() == "loaded"
    return count


def test_no_memory_for_sizes_that_are_only_claimed(tmp_path: Path) -> None:
    assert apart(within_little_memory, tmp_path, 2000) == 2000


def test_nothing_in_a_checkpoint_runs(forger: Forger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickle is read, whatever the files say."""
    import pickle

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "load", never)
    forger.write(forger.files)
    assert forger.load() == "loaded"
    assert forger.verify() == "verified"
    assert lowtide.load(forger.path, forger.model, forger.optimizer)["epoch"] == 3
