"""Whatever somebody wrote into a checkpoint, `lowtide ckpt` answers or refuses in one line, and changes nothing else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.checkpoint.manifest import MANIFEST
from lowtide.cli.main import run
from tests.kit.anything import JSON, MANY
from tests.kit.forgery import TABLE, Forger
from tests.kit.hostile import Mutator

COMMANDS = ("show", "show --tensors", "verify", "export", "export --dtype bf16", "export --checkpoint", "diff", "diff other")


def answers(forger: Forger, quick: Path, capsys: pytest.CaptureFixture[str]) -> set[int]:
    """The exit codes of all commands on the forgery as it is."""
    good, out = quick / "good", quick / "out"
    if not good.exists():
        good.mkdir()
        for name, text in forger.files.items():
            (good / name).write_bytes(text)
    codes: set[int] = set()
    for line in COMMANDS:
        command, _, flag = line.partition(" ")
        more = {"export": [*flag.split(), str(out)], "diff": [str(good)]}.get(command, flag.split())
        first = [str(forger.path)]
        arguments = [*more, *first] if flag == "other" else [*first, *more]
        capsys.readouterr()
        code = run(["ckpt", command, *arguments])
        said = capsys.readouterr()
        assert code in (0, 1), (line, said.err)
        assert said.err.count("\n") == int(code == 1 and not said.out), (line, said.err)
        assert out.exists() == (command == "export" and code == 0), line
        shutil.rmtree(out, ignore_errors=True)
        codes.add(code)
    assert {p.name for p in quick.iterdir()} <= {"good", "LATEST"}
    capsys.readouterr()
    assert run(["ckpt", "gc", str(forger.path.parent), "--now"]) == 0
    assert run(["ckpt", "ls", str(forger.path.parent)]) == 0
    return codes


def test_a_good_one_is_answered(forger: Forger, quick_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answers(forger, quick_path, capsys) == {0}


@settings(MANY, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_table(forger: Forger, quick_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    forger.write(forger.forged(Mutator(forger.files[TABLE]).mutated(random.Random(seed))))
    answers(forger, quick_path, capsys)


@settings(MANY, max_examples=25)
@given(keys=st.lists(st.sampled_from(["rng", "small", "state", "model"]), min_size=1, max_size=3), value=JSON)
def test_any_objects(forger: Forger, quick_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], value: Any) -> None:
    table = json.loads(forger.files[TABLE])
    for key in keys:
        inside = table["objects"][key]
        inside[random.Random(str(value)).choice(list(inside))] = value
    forger.write(forger.forged(json.dumps(table).encode()))
    answers(forger, quick_path, capsys)


@settings(MANY, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_manifest(forger: Forger, quick_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    mutated = Mutator(forger.files[MANIFEST]).mutated(random.Random(seed))
    forger.write({**forger.files, MANIFEST: mutated})
    answers(forger, quick_path, capsys)
