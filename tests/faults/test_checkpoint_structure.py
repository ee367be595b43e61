"""Checkpoints of any structure whose checksums are right: refused by `verify` and by a load alike, or they have one meaning.

The generator and the judge are in tests/kit/structure.py. A case is known by its number: ``judge_load(forger,
Shaper(forger).shaped(random.Random(number)))`` does it again.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.kit.crashes import apart
from tests.kit.forgery import Forger
from tests.kit.structure import MOVES, Shaper, in_chunks, judge, judge_load

READ = int(os.environ.get("LOWTIDE_CASES_READ", "1000000"))
LOADED = int(os.environ.get("LOWTIDE_CASES_LOADED", "20000"))
"""How many cases `make soak` does."""
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "in core, fused": ("adamw_fused", {}),
    "in core, plain": ("adamw_amsgrad", {}),
    "momentum": ("sgd_momentum", {}),
    "on disk": ("adamw_fused", {"memory": "900MiB", "disk": True}),
    "on disk, update in backward": ("adamw_fused", {"memory": "900MiB", "disk": True, "update": "backward"}),
}


def test_the_plain_one_is_accepted(forger: Forger) -> None:
    assert judge(forger.files, forger.shapes, random.Random(0))
    assert judge_load(forger, forger.files) == "loaded"


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_each_move_alone(move: Any, forger: Forger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.structure.MOVES", (move,))
    monkeypatch.setattr("tests.kit.structure.anything", move)
    for number in range(40):
        judge(Shaper(forger).shaped(random.Random(number)), forger.shapes, random.Random(number))


def test_many_structures_are_read(quick_path: Path) -> None:
    found = apart(in_chunks, quick_path, 0, 2000, False, "adamw_fused", {})
    assert found["accepted"] > 200
    assert found["refused"] > 200


@pytest.mark.parametrize("place", ["in core, fused", "on disk"])
def test_some_structures_are_loaded(place: str, quick_path: Path) -> None:
    found = apart(in_chunks, quick_path, 10**7, 200, True, *PLACES[place])
    assert found["loaded"] > 10
    assert found["refused"] > 50


@pytest.mark.soak
@pytest.mark.timeout(20_000)
def test_a_million_structures_are_read(quick_path: Path) -> None:
    print(apart(in_chunks, quick_path, 10**6, READ, False, "adamw_fused", {}, seconds=20_000))


@pytest.mark.soak
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("place", PLACES)
def test_very_many_structures_are_loaded(place: str, quick_path: Path) -> None:
    print(apart(in_chunks, quick_path, 10**8, LOADED // len(PLACES), True, *PLACES[place], seconds=20_000))
