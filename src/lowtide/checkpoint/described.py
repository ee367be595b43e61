"""What the table of rank 0 says of a model beside its parameters: checked, for commands that have no model themselves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from lowtide.checkpoint.source import ParamFacts, Source
from lowtide.errors import CheckpointCorrupted


class Group(BaseModel):
    """A group of the optimizer."""

    model_config = ConfigDict(frozen=True, strict=True)

    parameters: list[str]
    options: JsonValue


class Described(BaseModel):
    """See the module's docstring. ``buffers`` and ``extra`` are encoded (checkpoint/tree.py)."""

    model_config = ConfigDict(frozen=True, strict=True)

    aliases: dict[str, str]
    """Other names of tied parameters, and the name under which each is saved."""
    buffers: dict[str, JsonValue]
    groups: list[Group] | None
    optimizer: str | None
    scale: JsonValue
    extra: JsonValue


def described(source: Source) -> Described:
    """The model of a checkpoint."""
    try:
        return Described.model_validate(source.tables[0].objects.get("model"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = ".".join(str(step)[:60] for step in first["loc"][:4])
        problem = f"the table of rank 0 does not describe the model: {at}: {first['msg'][:120]}"
        raise CheckpointCorrupted(problem, str(source.path)) from None


def refuse_strides(source: Source, name: str, facts: ParamFacts) -> None:
    """Raise unless the strides of a parameter put its elements side by side, into memory that its files can fill."""
    steps = sum((size - 1) * stride for size, stride in zip(facts.shape, facts.stride, strict=True))
    if facts.numel and steps != facts.numel - 1:
        raise CheckpointCorrupted(f"{name[:100]!r} has strides {facts.stride} for shape {facts.shape}", str(source.path))
    if facts.numel * facts.dtype.itemsize > sum(file.nbytes for file in source.manifest.files):
        raise CheckpointCorrupted(f"{name[:100]!r} is larger than all files together", str(source.path))
