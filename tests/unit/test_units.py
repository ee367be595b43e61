"""Which parameters travel together: every parameter in exactly one unit, blocks found, choices obeyed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import ArgumentError
from lowtide.spec.units import UnitSpec, find_units, needs
from tests.kit.models import MENAGERIE, Block, Stack
from tests.kit.models_structure import GPT, Chain


def units_of(model: nn.Module, choice: Any = None, bucket_bytes: int = 0) -> list[UnitSpec]:
    return find_units(model, choice, bucket_bytes=bucket_bytes)


def names(units: list[UnitSpec]) -> list[str]:
    return [unit.name for unit in units]


@pytest.mark.parametrize("bucket_bytes", [0, 5000, 1 << 30])
@pytest.mark.parametrize("name", MENAGERIE)
def test_every_parameter_is_in_one_unit(name: str, bucket_bytes: int) -> None:
    model = MENAGERIE[name].build()
    units = units_of(model, bucket_bytes=bucket_bytes)
    assert [id(p) for u in units for p in u.params] != []
    assert sorted(id(p) for u in units for p in u.params) == sorted(map(id, model.parameters()))
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for unit in units:
        assert len(unit.names) == len(unit.params)
        assert all(by_name[n] is p for n, p in zip(unit.names, unit.params, strict=True))
        assert unit.modules
        assert unit.nbytes == sum(p.nbytes for p in unit.params)


@pytest.mark.parametrize("name", MENAGERIE)
def test_units_are_hosted_by_modules_that_are_called(name: str) -> None:
    """A ModuleList has no forward: a hook on it would never run."""
    for unit in units_of(MENAGERIE[name].build()):
        assert all(type(module).forward is not nn.Module.forward for module in unit.modules)


def test_blocks_and_what_is_left() -> None:
    assert names(units_of(GPT(tied=False))) == ["tok", "pos", "blocks.0", "blocks.1", "norm", "head"]
    assert names(units_of(Stack([Block(), Block()]))) == ["blocks.0", "blocks.1", "head"]
    assert names(units_of(nn.Linear(3, 3))) == ["(root)"]


def test_a_tied_parameter_is_in_the_first_unit_and_both_modules_need_it() -> None:
    model = GPT(tied=True)
    units = units_of(model)
    assert names(units) == ["tok", "pos", "blocks.0", "blocks.1", "norm"]
    assert units[0].modules == (model.tok, model.head)


def test_parameters_around_blocks_belong_to_the_module_that_uses_them() -> None:
    model = nn.Module()
    model.forward = lambda x: x  # type: ignore[method-assign]
    model.bias = nn.Parameter(torch.zeros(3))
    model.blocks = nn.ModuleList([Block(), Block()])
    units = units_of(model)
    assert names(units) == ["(root)", "blocks.0", "blocks.1"]
    assert units[0].modules == (model,)


def test_blocks_inside_blocks_stay_with_theirs() -> None:
    """A router's experts: which of them runs may differ from rank to rank, so they travel with their block."""
    assert names(units_of(Stack([Chain(), Chain()])))[:2] == ["blocks.0", "blocks.1"]
    assert names(units_of(Stack([Chain(), Chain()]), "blocks.*.inner.*"))[:3] == [
        "blocks.0",
        "blocks.0.inner.0",
        "blocks.0.inner.1",
    ]


def test_different_classes_in_a_list_are_not_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4))
    assert names(units_of(model)) == ["0", "1", "2"]
    inside = Stack([nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)), nn.Linear(24, 24)])
    assert names(units_of(inside)) == ["blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("blocks.*", ["tok", "pos", "blocks.0", "blocks.1", "norm", "head"]),
        ("blocks.0", ["tok", "pos", "blocks.0", "blocks.1", "norm", "head"]),
        (nn.Linear, ["tok", "pos", "blocks.0.norm", "blocks.0.qkv"]),
        (["blocks.1", "head"], ["tok", "pos", "blocks.0", "blocks.1", "norm", "head"]),
        (lambda m: isinstance(m, Block), ["tok", "pos", "blocks.0.norm", "blocks.0.qkv", "blocks.0.proj", "blocks.0.mlp"]),
        ("blocks.*.mlp", ["tok", "pos", "blocks.0.norm", "blocks.0.qkv", "blocks.0.proj", "blocks.0.mlp"]),
        (["blocks.*", "blocks.*.mlp"], ["tok", "pos", "blocks.0", "blocks.1", "norm", "head"]),
    ],
)
def test_chosen(choice: Any, expected: list[str]) -> None:
    assert names(units_of(GPT(tied=False), choice))[: len(expected)] == expected


def test_a_star_stays_within_one_level() -> None:
    with pytest.raises(ArgumentError, match=r"^units='blocks\.\*\.nope' matches no module of GPT; it has tok, pos, blocks, "):
        units_of(GPT(tied=False), "blocks.*.nope")
    assert "blocks.0.norm" not in names(units_of(GPT(tied=False), "*"))


@pytest.mark.parametrize("choice", ["nope", ["blocks.*", "nope"], nn.Conv2d])
def test_a_choice_that_matches_nothing(choice: Any) -> None:
    with pytest.raises(ArgumentError, match="matches no module of GPT; it has tok, pos, blocks, "):
        units_of(GPT(tied=False), choice)


def test_the_whole_model_as_one_unit() -> None:
    model = GPT(tied=False)
    (unit,) = units_of(model, GPT)
    assert (unit.modules, len(unit.params)) == ((model,), len(list(model.parameters())))


def test_small_neighbours_share_a_unit() -> None:
    """Joined while the sum stays within the limit, in order, and never across a larger one."""
    model = nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in (10, 20, 100, 5, 5, 90)])  # 4 bytes each
    assert names(units_of(model, bucket_bytes=4 * 100)) == ["0 … 1", "2", "3 … 5"]
    joined = units_of(model, bucket_bytes=4 * 100)
    assert [u.nbytes for u in joined] == [120, 400, 400]
    assert joined[2].modules == (model[3], model[4], model[5])
    assert names(units_of(model, bucket_bytes=4 * 99)) == ["0 … 1", "2", "3 … 4", "5"]
    assert len(units_of(model, bucket_bytes=1 << 20)) == 1


def test_what_a_forward_needs() -> None:
    """Everything below a module that is not another unit's."""
    model = Stack([Chain(), Chain()])
    hosts = {m for u in units_of(model, "blocks.*.inner.*") for m in u.modules}
    chain: Any = model.blocks[0]
    assert needs(chain, hosts) == {chain.gain}
    assert needs(chain.inner[0], hosts) == set(chain.inner[0].parameters())
    assert needs(model, hosts - {model.head}) == set(model.head.parameters())
