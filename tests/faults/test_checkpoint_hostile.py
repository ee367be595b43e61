"""Manifests made to do harm: a CheckpointError, or something that passes every check; nothing else, and no memory for it.

By hand: what an attacker would try first. By hypothesis: what nobody would think of. ``benchmarks/chaos.py --hostile`` does the
same a million times.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT, File, parse_manifest, parse_table, to_text
from lowtide.errors import CheckpointCorrupted, CheckpointError, CheckpointTooNew
from tests.kit.anything import JSON, MANY
from tests.kit.forgery import Forger
from tests.kit.hostile import Mutator, manifest_problem, signed

# -- manifests --------------------------------------------------------------------------------------------------------


def changed(forger: Forger, **fields: Any) -> bytes:
    """The manifest with other fields, and a checksum that fits."""
    return signed(json.dumps({**json.loads(forger.files[MANIFEST]), **fields}, separators=(",", ":")).encode())


def row(forger: Forger, **fields: Any) -> dict[str, Any]:
    return {**json.loads(forger.files[MANIFEST])["files"][0], **fields}


def test_the_tool_signs_as_the_library_does(forger: Forger) -> None:
    assert signed(forger.files[MANIFEST]) == forger.files[MANIFEST] == to_text(forger.manifest)
    assert parse_manifest(changed(forger, step=77), "").step == 77


MANIFEST_FIELDS: dict[str, list[Any]] = {
    "format": ["other", "", None, 1, [], "lowtide checkpoint "],
    "version": [0, -1, "1", 1.5, None, [], 2**70],
    "step": [-1, 2**62, 2**64, 10**400, 1.5, "1", None, [], {}, True],
    "sequence": [-1, 2**62, 10**400, 0.1, "1", None],
    "world_size": [0, -1, 2, 3, 1 << 20, (1 << 20) + 1, 2**62, "1", None, 1.0],
    "stage": [-1, 4, 2**62, "3", None],
    "name": ["x" * 256, None, 1, []],
    "lowtide": ["x" * 101, None, 1],
    "torch": ["x" * 101, None, 1],
    "created": ["x" * 41, None, 1],
    "plan": ["x" * 65, None],
    "files": [None, {}, [], [None], [1], ["rank-00000.json"], [{}], [[]]],
}
NAMES = [
    *(
        "../x",
        "/etc/passwd",
        "a/b",
        ".",
        "..",
        "",
        "x" * 101,
        "A",
        "a b",
        "a\0b",
        "a\n",
        "-a",
        ".hidden",
        "é",
        "\u202e",
        "a\\b",
    ),
]


@pytest.mark.parametrize("field", MANIFEST_FIELDS)
def test_a_manifest_with_another(field: str, forger: Forger) -> None:
    for value in MANIFEST_FIELDS[field]:
        with pytest.raises(CheckpointError):
            parse_manifest(changed(forger, **{field: value}), "")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_file_name(name: str, forger: Forger) -> None:
    rows = json.loads(forger.files[MANIFEST])["files"]
    with pytest.raises(CheckpointCorrupted):
        parse_manifest(changed(forger, files=[*rows, row(forger, name=name)]), "")


@pytest.mark.parametrize("nbytes", [-1, 2**62, 2**64, 10**400, 1.5, "1", None])
def test_a_file_size(nbytes: Any, forger: Forger) -> None:
    rows = json.loads(forger.files[MANIFEST])["files"]
    with pytest.raises(CheckpointCorrupted):
        parse_manifest(changed(forger, files=[*rows, row(forger, name="more", nbytes=nbytes)]), "")


def test_odd_manifests(forger: Forger) -> None:
    text = forger.files[MANIFEST]
    twice = text.replace(b'"step":2,', b'"step":2,"step":99,')
    texts = [
        *(
            b"",
            b"{}",
            b"null",
            b"[]",
            b"\0" * 100,
            b"{" * 5000,
            b"[" * 10_000_000,
            text[:-1],
            text + b"\n",
            text + text,
            text[1:],
        ),
        *(b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), signed(b"[" * 100_000), signed(b'{"a":' * 50_000)),
        signed(b'{"format":"lowtide checkpoint","version":1' + b',"x":0' * 100_000 + b',"files":[],'),
    ]
    for each in texts:
        with pytest.raises(CheckpointCorrupted):
            parse_manifest(each, "")
    assert manifest_problem(parse_manifest(signed(twice), "")) is None  # the last one counts, for every reader


def test_a_newer_format_is_told_from_damage(forger: Forger) -> None:
    with pytest.raises(CheckpointTooNew) as caught:
        parse_manifest(changed(forger, version=2, lowtide="9.9", more={"than": "known"}), "")
    assert caught.value.version == 2
    assert "9.9" in str(caught.value)


@pytest.mark.timeout(20)
def test_a_manifest_with_very_many_files(forger: Forger) -> None:
    """Quadratic work would take minutes."""
    count = 60_000
    rows = [File(name=f"rank-{n:05d}.json", nbytes=2, xxh3="0" * 16) for n in reversed(range(count))]
    text = to_text(forger.manifest.model_copy(update={"files": tuple(rows), "world_size": count}))
    assert len(text) < MANIFEST_LIMIT
    began = time.process_time()
    assert parse_manifest(text, "").world_size == count
    assert time.process_time() - began < 10
    forger.write({**forger.files, MANIFEST: text})
    assert forger.load().startswith("refused")


def test_a_manifest_that_is_too_large_is_not_read(forger: Forger) -> None:
    with open(forger.path / MANIFEST, "r+b") as file:
        file.truncate(1 << 40)
    assert "are read" in forger.load()
    assert "are read" in forger.verify()


@MANY
@given(seed=st.integers(0, 2**32), sign=st.booleans())
def test_any_manifest(forger: Forger, seed: int, sign: bool) -> None:
    text = Mutator(forger.files[MANIFEST]).mutated(random.Random(seed))
    try:
        manifest = parse_manifest(signed(text) if sign else text, "")
    except CheckpointError:
        return
    assert manifest_problem(manifest) is None


@MANY
@given(text=st.binary(max_size=300), value=JSON)
def test_any_bytes_and_any_json(forger: Forger, text: bytes, value: Any) -> None:
    plain = json.dumps(value).encode()
    for each in (text, signed(text), plain, signed(plain)):
        with pytest.raises(CheckpointError):
            parse_manifest(each, "")
    for each in (text, plain):
        with pytest.raises(CheckpointError):
            parse_table(each, forger.manifest, 0, "")
