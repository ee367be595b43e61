"""Checkpoints that say of one thing two things, with checksums that are right: `verify` refuses them, and so does a load.

What `verify` passes has one meaning: every element is in one place, every value can be what it is said to be. The states of
random number generators are looked at most closely, because their owners read memory at places that stand in them.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.checkpoint import rng
from tests.kit.forgery import PAYLOAD, TABLE, Forger


def rows_of(table: Any, kind: str, name: str) -> list[list[int]]:
    """The parts of one kind of one name."""
    number = table["names"].index(name)
    kinds = [i for i, row in enumerate(table["kinds"]) if row[0] == kind]
    return [part for block in table["blocks"] for part in block[4] if part[0] in kinds and part[1] == number]


def block_of(table: Any, kind: str, name: str) -> list[Any]:
    part = rows_of(table, kind, name)[0]
    return next(block for block in table["blocks"] if part in block[4])


def parameter(table: Any, name: str, **facts: Any) -> None:
    table["objects"]["model"]["parameters"][name].update(facts)


def rows_overlap(table: Any) -> None:
    """Elements 10 to 30 are there twice, the second time with the bytes of others."""
    kind, name, _, hi, at = rows_of(table, "parameters", "up.weight")[0]
    block_of(table, "parameters", "up.weight")[4].append([kind, name, 10, hi, at])


def a_row_twice(table: Any) -> None:
    block = block_of(table, "parameters", "up.weight")
    block[4].append(copy.copy(block[4][0]))


def a_row_inside_another(table: Any) -> None:
    kind, name, _, _, at = rows_of(table, "parameters", "up.weight")[0]
    block_of(table, "parameters", "up.weight")[4].append([kind, name, 3, 5, at])


def a_gap(table: Any) -> None:
    rows_of(table, "parameters", "up.weight")[0][3] -= 1


def a_state_with_a_gap(table: Any) -> None:
    rows_of(table, "optimizer.exp_avg", "up.weight")[0][3] -= 1


def the_beginning_is_missing(table: Any) -> None:
    rows_of(table, "parameters", "up.weight")[0][2] = 1


def an_extra_in_two_places(table: Any) -> None:
    block = block_of(table, "object", "extra.tensor")
    kind, name, _, _, at = block[4][0]
    block[4].append([kind, name, 1, 2, at])


def two_blocks_of_the_same_bytes(table: Any) -> None:
    block = block_of(table, "parameters", "up.weight")
    table["blocks"].append([*block[:4], []])


def a_kind_that_is_none(table: Any) -> None:
    table["kinds"].append(["object 0", "float32"])


def an_optimizer_kind_without_a_name(table: Any) -> None:
    table["kinds"].append(["optimizer.", "float32"])


def another_dtype_than_its_bytes(table: Any) -> None:
    parameter(table, "up.weight", dtype="int32")


def a_state_here_and_there(table: Any) -> None:
    table["objects"]["small"]["up.weight"]["exp_avg"] = {"$": "scalar", "dtype": "float32", "value": 0.5}


def states_of_nothing(table: Any) -> None:
    table["objects"]["small"]["nothing"] = {}


def no_small_states_of_one(table: Any) -> None:
    del table["objects"]["small"]["up.weight"]


def colliding_keys(table: Any) -> None:
    """Python's hash of a whole number is its rest by 2**61 - 1: thousands of such keys take the square of their time."""
    pairs = [[{"$": "int", "text": str((2**61 - 1) * n)}, 0] for n in range(5, 5000)]
    table["objects"]["model"]["extra"]["many"] = {"$": "dict", "pairs": pairs}


def too_deep(table: Any) -> None:
    value: Any = []
    for _ in range(70):
        value = [value]
    table["objects"]["model"]["extra"]["deep"] = value


def alias(table: Any, name: str, of: str) -> None:
    table["objects"]["model"]["aliases"][name] = of


def group_of(table: Any, names: list[str]) -> None:
    table["objects"]["model"]["groups"][0]["parameters"] = names


def tensor(table: Any, **facts: Any) -> None:
    table["objects"]["model"]["extra"]["tensor"].update(facts)


FORGERIES: dict[str, Callable[[Any], None]] = {
    **{
        change.__name__.replace("_", " "): change
        for change in (
            *(rows_overlap, a_row_twice, a_row_inside_another, a_gap, a_state_with_a_gap, the_beginning_is_missing),
            *(an_extra_in_two_places, two_blocks_of_the_same_bytes, a_kind_that_is_none, an_optimizer_kind_without_a_name),
            *(another_dtype_than_its_bytes, a_state_here_and_there, states_of_nothing, no_small_states_of_one),
            *(colliding_keys, too_deep),
        )
    },
    "strides that overlap": lambda t: parameter(t, "up.weight", stride=[3, 2]),
    "strides that leave out elements": lambda t: parameter(t, "up.weight", stride=[1, 6]),
    "strides all zero": lambda t: parameter(t, "up.weight", stride=[0, 0]),
    "strides of another number": lambda t: parameter(t, "up.weight", stride=[1]),
    "strides that point behind the end": lambda t: parameter(t, "up.weight", stride=[2**61, 1]),
    "a shape that no tensor has": lambda t: parameter(t, "up.weight", shape=[0, 2**62 - 1, 2**62 - 1], stride=[1, 1, 1]),
    "another name that is a parameter": lambda t: alias(t, "up.weight", "down.weight"),
    "another name of nothing": lambda t: alias(t, "x", "nothing"),
    "a parameter in two groups": lambda t: group_of(t, ["up.bias"]),
    "a parameter of no model in a group": lambda t: group_of(t, ["nothing"]),
    "a buffer that is a parameter": lambda t: t["objects"]["model"]["buffers"].update({"up.weight": {"$": "tensor"}}),
    "an optimizer without groups": lambda t: t["objects"]["model"].update(groups=None),
    "groups without an optimizer": lambda t: t["objects"]["model"].update(optimizer=None),
    "a scale of nothing": lambda t: t["objects"]["model"]["scale"].update(value=0.0),
    "a scale below nothing": lambda t: t["objects"]["model"]["scale"].update(value=-2.0),
    "an extra whose shape overflows": lambda t: tensor(t, shape=[0, 2**61, 2**61]),
    "an extra of fewer elements": lambda t: tensor(t, shape=[4]),
    "an extra that is somewhere else": lambda t: tensor(t, name="extra.other"),
    "a scalar that is a list": lambda t: t["objects"]["model"]["extra"].update(
        x={"$": "scalar", "dtype": "float32", "value": [1]}
    ),
    "a whole number that is none": lambda t: t["objects"]["model"]["extra"].update(
        x={"$": "scalar", "dtype": "int64", "value": 0.5}
    ),
}


def changed(forger: Forger, change: Callable[[Any], None]) -> dict[str, bytes]:
    table = json.loads(forger.files[TABLE])
    change(table)
    return forger.forged(json.dumps(table).encode())


@pytest.mark.parametrize("name", FORGERIES)
def test_two_things_of_one(name: str, forger: Forger) -> None:
    before = {n: t.clone() for n, t in forger.model.state_dict().items()}
    forger.write(changed(forger, FORGERIES[name]))
    assert forger.verify().startswith("refused"), forger.verify()
    assert forger.load().startswith("refused"), forger.load()
    for kept, tensor_ in forger.model.state_dict().items() if not forger.poisoned else ():
        assert torch.equal(tensor_, before[kept]), "it changed what it refused to load"


# -- random numbers ---------------------------------------------------------------------------------------------------


def torch_state(state: torch.Tensor, **fields: int) -> torch.Tensor:
    """A state of torch's generator with other counters."""
    places = {"left": ("<i", 8), "seeded": ("<i", 12), "following": ("<q", 16), "kept": ("<B", 5040), "kept32": ("<B", 5052)}
    raw = bytearray(state.numpy().tobytes())
    for name, value in fields.items():
        struct.pack_into(places[name][0], raw, places[name][1], value)
    return torch.frombuffer(raw, dtype=torch.uint8)


def numpy_state(saved: Any, at: int, value: Any) -> tuple[Any, ...]:
    return (*saved[:at], value, *saved[at + 1 :])


OTHER_STATES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **{
        f"numpy's position {n}": lambda s, n=n: {"numpy": numpy_state(s["numpy"], 2, n)}
        for n in (625, 10**5, 10**7, 2**31 - 1, -1, -(10**7), 2**62, True, 1.0, "0", None)
    },
    "numpy's name": lambda s: {"numpy": numpy_state(s["numpy"], 0, "PCG64")},
    "fewer words for numpy": lambda s: {"numpy": numpy_state(s["numpy"], 1, s["numpy"][1][:-1])},
    "no words for numpy": lambda s: {"numpy": numpy_state(s["numpy"], 1, [1, 2])},
    "words of another dtype": lambda s: {"numpy": numpy_state(s["numpy"], 1, s["numpy"][1].view(torch.int32))},
    "words as a table": lambda s: {"numpy": numpy_state(s["numpy"], 1, s["numpy"][1].view(2, 312))},
    "a normal number that is text": lambda s: {"numpy": numpy_state(s["numpy"], 4, "x")},
    "half of a normal number": lambda s: {"numpy": numpy_state(s["numpy"], 3, 2)},
    "too little for numpy": lambda s: {"numpy": s["numpy"][:4]},
    **{
        f"torch's counters {left}, {following}": lambda s, a=left, b=following: {
            "torch": torch_state(s["torch"], left=a, following=b)
        }
        for left, following in ((600, 624), (624, 2), (624, 624), (0, 0), (-1, 0), (1, 625), (1, -1), (2, 2**40))
    },
    "torch was not seeded": lambda s: {"torch": torch_state(s["torch"], seeded=0)},
    "a flag that is none": lambda s: {"torch": torch_state(s["torch"], kept=7)},
    "another flag that is none": lambda s: {"torch": torch_state(s["torch"], kept32=255)},
    "fewer bytes for torch": lambda s: {"torch": s["torch"][:-1]},
    "no bytes for torch": lambda s: {"torch": s["torch"][:0]},
    "numbers for torch": lambda s: {"torch": [1, 2, 3]},
    "another version of python's": lambda s: {"python": (2, *s["python"][1:])},
    "python's position": lambda s: {"python": (3, (*s["python"][1][:-1], 625), None)},
    "python's position below nothing": lambda s: {"python": (3, (*s["python"][1][:-1], -1), None)},
    "a word of python's": lambda s: {"python": (3, (2**32, *s["python"][1][1:]), None)},
    "fewer words of python's": lambda s: {"python": (3, s["python"][1][1:], None)},
    "a normal number of python's that is a list": lambda s: {"python": (*s["python"][:2], [])},
    "an accelerator's as text": lambda s: {"accelerator": "x"},
    "one more": lambda s: {"more": None},
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_a_state_that_no_generator_has(name: str) -> None:
    saved = rng.states()
    assert rng.problem_of(saved) is None
    other = {**saved, **OTHER_STATES[name](saved)}
    assert rng.problem_of(other) is not None
    with pytest.raises(ValueError, match="the random numbers"):
        rng.restore(other)
    assert torch.equal(rng.states()["torch"], saved["torch"])
    assert random.getstate() == saved["python"]


def test_every_state_that_a_generator_has() -> None:
    """Whatever was drawn before, and in the middle of a pair of normal numbers."""
    for drawn in range(0, 1300, 7):
        torch.manual_seed(drawn)
        random.seed(drawn)
        np.random.seed(drawn)
        torch.rand(drawn)
        torch.randn(drawn % 20)
        torch.randn(drawn % 3, dtype=torch.float64)
        np.random.random(drawn)
        np.random.normal(size=drawn % 3)
        for _ in range(drawn):
            random.random()
        for _ in range(drawn % 3):
            random.gauss(0, 1)
        saved = rng.states()
        assert rng.problem_of(saved) is None
        expected = torch.rand(700), torch.randn(3), random.random(), random.gauss(0, 1), np.random.normal(size=3)
        rng.restore(saved)
        found = torch.rand(700), torch.randn(3), random.random(), random.gauss(0, 1), np.random.normal(size=3)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_numpys_position_in_a_checkpoint(forger: Forger) -> None:
    """`verify` says so, too: it is the one that people ask about a file from elsewhere."""
    for position in (625, 2**31 - 1, -1):
        forger.write(changed(forger, lambda t, n=position: t["objects"]["rng"]["numpy"]["items"].__setitem__(2, n)))
        assert "numpy" in forger.verify()
        assert "numpy" in forger.load()


def test_torchs_counters_in_a_checkpoint(forger: Forger) -> None:
    table = json.loads(forger.files[TABLE])
    _, offset, nbytes, _, _ = block = block_of(table, "object", "rng.torch")
    payload = bytearray(forger.files[PAYLOAD])
    state = torch.frombuffer(payload[offset : offset + nbytes], dtype=torch.uint8)
    payload[offset : offset + nbytes] = torch_state(state, left=600, following=624).numpy().tobytes()
    files = forger.resealed(table, bytes(payload), block)
    forger.write(files)
    assert "torch" in forger.verify()
    assert "torch" in forger.load()
