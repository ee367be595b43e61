"""What the table of rank 0 says of a model and its optimizer: checked as far as that goes without the model itself."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from lowtide.checkpoint import tree
from lowtide.checkpoint.manifest import DTYPES, first_problem
from lowtide.errors import CheckpointCorrupted

_MOST_DIMENSIONS = 64
_Size = Annotated[int, Field(ge=0, lt=2**62)]


class ParamFacts(BaseModel):
    """What the checkpoint says of one parameter."""

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    shape: Annotated[list[_Size], Field(max_length=_MOST_DIMENSIONS)]
    stride: Annotated[list[_Size], Field(max_length=_MOST_DIMENSIONS)]
    dtype: str


class Group(BaseModel):
    """A group of the optimizer."""

    model_config = ConfigDict(frozen=True, strict=True)

    parameters: list[str]
    options: dict[str, JsonValue]
    """Encoded."""


class Scale(BaseModel):
    """The loss scale of fp16."""

    model_config = ConfigDict(frozen=True, strict=True)

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Annotated[int, Field(ge=0, lt=2**31)]


class Described(BaseModel):
    """See the module's docstring. ``buffers`` and ``extra`` are encoded (checkpoint/tree.py)."""

    model_config = ConfigDict(frozen=True, strict=True)

    parameters: dict[str, _Row]
    aliases: dict[str, str]
    """Other names of tied parameters, and the name under which each is saved."""
    buffers: dict[str, JsonValue]
    groups: list[Group] | None
    optimizer: str | None
    scale: Scale
    extra: dict[str, JsonValue]


def describe(objects: dict[str, Any], where: str) -> tuple[Described, dict[str, ParamFacts]]:
    """The model of a checkpoint and its parameters, from the objects of the table of rank 0."""
    try:
        model = Described.model_validate(objects.get("model"))
    except ValidationError as error:
        problem = f"the table of rank 0 does not describe the model: {first_problem(error)}"
        raise CheckpointCorrupted(problem, where) from None
    facts = {name: _facts(name, row, where) for name, row in model.parameters.items()}
    if (problem := _contradiction(model)) is not None:
        raise CheckpointCorrupted(problem, where)
    return model, facts


def _facts(name: str, row: _Row, where: str) -> ParamFacts:
    if row.dtype not in DTYPES:
        raise CheckpointCorrupted(f"{name[:100]!r} has the unknown dtype {row.dtype[:20]!r}", where)
    shape, stride = tuple(row.shape), tuple(row.stride)
    if not _are_dense(shape, stride):
        raise CheckpointCorrupted(f"{name[:100]!r} has strides {str(stride)[:200]} for shape {str(shape)[:200]}", where)
    return ParamFacts(shape=shape, stride=stride, dtype=DTYPES[row.dtype])


def _are_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether every element has a place of its own, and they lie side by side; dimensions of one element have no say."""
    if len(shape) != len(stride) or not tree.is_shape(shape):
        return False
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _contradiction(model: Described) -> str | None:
    """What one part of the description says and another denies."""
    for alias, name in model.aliases.items():
        if name not in model.parameters or alias in model.parameters:
            return f"{alias[:100]!r} is said to be another name of {name[:100]!r}"
    for name, value in model.buffers.items():
        if name in model.parameters:
            return f"{name[:100]!r} is a parameter and a buffer"
        if not isinstance(value, dict) or value.get("$") not in ("tensor", "scalar"):
            return f"the buffer {name[:100]!r} is not a tensor"
    names = [name for group in model.groups or () for name in group.parameters]
    if len(set(names)) < len(names) or not model.parameters.keys() >= set(names):
        return "its optimizer has a parameter twice, or one that the model lacks"
    if (model.groups is None) is not (model.optimizer is None):
        return "it has groups of an optimizer without its class, or the class without groups"
    return None
