"""Everything in a checkpoint that is not a piece of a parameter: as JSON, with its tensors beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue
from torch import nn
from torch.optim import Optimizer

from lowtide.checkpoint import rng, tree
from lowtide.errors import ArgumentError
from lowtide.runtime.contents import Contents
from lowtide.runtime.engine import Engine


def of_rank(
    engine: Engine, optimizer: Optimizer | None, contents: Contents, state: Mapping[str, Any], put: tree.Put
) -> dict[str, JsonValue]:
    """What every rank saves: its random numbers, its small states, and what the caller's objects are in."""
    small: dict[str, JsonValue] = {}
    for unit in engine.units:
        for param, name in zip(unit.params, unit.names, strict=True):
            if optimizer is not None and contents.stepped(param):
                small[name] = tree.encode(contents.small_states(param), f"optimizer.{name}", put)
    return {
        "rng": tree.encode(rng.states(), "rng", put),
        "small": small,
        "state": {name: tree.encode(state_of(thing, name), f"state.{name}", put) for name, thing in state.items()},
    }


def of_model(
    engine: Engine, optimizer: Optimizer | None, contents: Contents, extra: Mapping[str, Any] | None, put: tree.Put
) -> dict[str, JsonValue]:
    """What rank 0 saves beside that: the same on all ranks."""
    parameters: dict[str, JsonValue] = {}
    for unit in engine.units:
        for name, spec, dtypes in zip(unit.names, unit.layout.params, unit.dtypes, strict=True):
            dtype = str(dtypes.param).removeprefix("torch.")
            parameters[name] = {"shape": list(spec.shape), "stride": list(spec.stride), "dtype": dtype}
    buffers = persistent_buffers(engine.model)
    return {
        "parameters": parameters,
        "aliases": dict(aliases(engine)),
        "buffers": tree.encode(buffers, "buffers", put),
        "groups": groups(optimizer, engine, put) if optimizer is not None else None,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
        "scale": engine.scale.state(),
        "extra": tree.encode(dict(extra or {}), "extra", put),
    }


def groups(optimizer: Optimizer, engine: Engine, put: tree.Put) -> list[JsonValue]:
    """The optimizer's groups: options, and the names of their parameters."""
    out: list[JsonValue] = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names: list[JsonValue] = [engine.name_of[p] for p in group["params"]]
        encoded = tree.encode(options, f"optimizer.param_groups[{number}]", put)
        out.append({"parameters": names, "options": encoded})
    return out


def persistent_buffers(model: nn.Module) -> dict[str, Any]:
    """Buffers that a state_dict would have, by their first name."""
    out: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:  # pyright: ignore[reportPrivateUsage]
                seen.add(id(buffer))
                out[f"{prefix}.{name}" if prefix else name] = buffer
    return out


def aliases(engine: Engine) -> dict[str, str]:
    """Other names of tied parameters."""
    named = engine.model.named_parameters(remove_duplicate=False)
    return {name: engine.name_of[p] for name, p in named if engine.name_of[p] != name}


def state_of(thing: Any, name: str) -> Any:
    """What an object of ``state=`` wants kept."""
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        raise ArgumentError(
            f"state[{name!r}] is a {type(thing).__name__} without state_dict() and load_state_dict(); "
            f"plain values go into extra=."
        )
    return thing.state_dict()
