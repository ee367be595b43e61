"""Nested values as JSON and back: what ``state_dict()`` of a scheduler, a sampler or a scaler returns, and what callers add.

JSON has no tuples, no keys but text, and no infinities; those are written as an object with the single key ``$`` and decoded to
what they were. Tensors of one element stand in the text, larger ones go to the payload. Anything else is refused by name, since
reading it back would need code from the file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from lowtide.checkpoint.manifest import DTYPES
from lowtide.errors import ArgumentError, CheckpointCorrupted, CheckpointError

_DEEPEST = 64
_MOST_DIMENSIONS = 64
_SAME_HASH = 64
"""Keys of one dict with one hash, at most: more of them are no accident, and cost time by their square."""

Put = Callable[[str, Tensor], None]
"""Keep a tensor under a name."""
Get = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""The tensor that was kept under a name, of this shape and dtype."""
Look = Callable[[str, tuple[int, ...], torch.dtype], None]
"""Raises unless there is such a tensor."""


_WHOLE = frozenset(d for d in DTYPES.values() if not (d.is_floating_point or d.is_complex))


def encode(value: Any, path: str, put: Put, *, depth: int = 0) -> JsonValue:
    """``value`` as JSON; ``path`` names it in errors and names the tensors in it."""
    if depth > _DEEPEST:
        raise ArgumentError(f"{path}: nested more than {_DEEPEST} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, path)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else {"$": "int", "text": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$": "float", "text": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, path, put)
    if isinstance(value, list | tuple):
        row: Any = value
        items: list[JsonValue] = [encode(v, f"{path}[{i}]", put, depth=depth + 1) for i, v in enumerate(row)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, put, depth)  # pyright: ignore[reportUnknownArgumentType]
    raise ArgumentError(
        f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, text, and lists, tuples and dicts of them. "
        f"Leave it out, or turn it into one of these."
    )


def text(value: str, path: str) -> str:
    """``value``, if it is one that a file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{path!a} has {value[:100]!a}, which is no text: a half of a character stands alone in it. Rename it; a "
            f"file's name goes through os.fsencode()."
        ) from error
    return value


def _encode_mapping(value: Mapping[Any, Any], path: str, put: Put, depth: int) -> JsonValue:
    if all(isinstance(key, str) for key in value) and "$" not in value:
        return {text(key, path): encode(v, f"{path}.{key}", put, depth=depth + 1) for key, v in value.items()}
    odd = next((k for k in value if not isinstance(k, str | int | float | bool | tuple | None)), None)
    if odd is not None:
        raise ArgumentError(f"{path} has a key of type {type(odd).__name__}; keys are text, numbers or tuples of them.")
    pairs: list[JsonValue] = []
    for key, v in value.items():
        pairs.append([encode(key, f"a key of {path}", put, depth=depth + 1), encode(v, f"{path}.{key}", put, depth=depth + 1)])
    return {"$": "dict", "pairs": pairs}


def _encode_tensor(value: Tensor, path: str, put: Put) -> JsonValue:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or value.layout is not torch.strided or value.is_quantized:
        raise ArgumentError(f"{path} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot hold.")
    shape: list[JsonValue] = list(value.shape)
    if not value.dim() and ((value.dtype.is_floating_point and value.dtype.itemsize >= 2) or value.dtype == torch.int64):
        return {"$": "scalar", "dtype": dtype, "value": encode(value.item(), path, put)}
    put(path, value.detach())
    return {"$": "tensor", "name": path, "dtype": dtype, "shape": shape}


def is_shape(sizes: Sequence[Any]) -> bool:
    """Whether torch can make a tensor of these sizes, as far as counting goes."""
    if len(sizes) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        return False
    return math.prod(max(size, 1) for size in sizes) < 2**58  # bytes have to be counted too, also where there are none


def check(tree: JsonValue, look: Look, where: str) -> None:
    """Raise unless ``decode`` can read it; no tensor is made for that."""
    try:
        _check(tree, look, where, 0)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorrupted(f"a value in it cannot be read: {error!s:.100}", where) from None


def _check(tree: JsonValue, look: Look, where: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} levels deep")
    if isinstance(tree, list):
        for item in tree:
            if isinstance(item, list | dict):
                _check(item, look, where, depth + 1)
        return
    if not isinstance(tree, dict):
        return
    tag = tree.get("$")
    if "$" not in tree:
        for value in tree.values():
            if isinstance(value, list | dict):
                _check(value, look, where, depth + 1)
    elif tag == "tuple":
        _check(_list(tree["items"]), look, where, depth)
    elif tag == "dict":
        pairs = _list(tree["pairs"])
        for key, value in pairs:
            _check(key, look, where, depth + 1)
            _check(value, look, where, depth + 1)
        refuse_colliding(decode(key, _no_key, where) for key, _ in pairs)
    elif tag == "tensor":
        look(*_named_tensor(tree))
    else:
        _decode_tagged(tree, _no_key, where)


def _no_key(*_: object) -> Tensor:
    raise ValueError("a tensor is no key")


def refuse_colliding(keys: Iterable[Any]) -> None:
    """Raise if very many keys have the same hash, without ever putting two of them into one table."""
    counts = Counter(hash(key) for key in keys)
    if counts and max(counts.values()) > _SAME_HASH:
        raise ValueError(f"{max(counts.values())} keys of a dict with the same hash")


def decode(tree: JsonValue, get: Get, where: str) -> Any:
    """The inverse of ``encode``."""
    if isinstance(tree, list):
        return [decode(item, get, where) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$" not in tree:
        return {key: decode(value, get, where) for key, value in tree.items()}
    try:
        return _decode_tagged(tree, get, where)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointCorrupted(f"a value in it cannot be read: {error!s:.100}", where) from None


def _decode_tagged(tree: dict[str, JsonValue], get: Get, where: str) -> Any:
    tag: Any = tree["$"]
    fields: dict[str, Any] = dict(tree)
    if tag == "tuple":
        return tuple(decode(item, get, where) for item in _list(fields["items"]))
    if tag == "dict":
        pairs = [(decode(key, get, where), value) for key, value in _list(fields["pairs"])]
        refuse_colliding(key for key, _ in pairs)
        return {key: decode(value, get, where) for key, value in pairs}
    if tag == "int":
        return int(str(fields["text"])[:5000])
    if tag == "float":
        return float(str(fields["text"]))
    if tag == "scalar":
        value = decode(fields["value"], get, where)
        dtype = DTYPES[str(fields["dtype"])]
        if not isinstance(value, int | float) or (isinstance(value, float) and dtype in _WHOLE):
            raise ValueError(f"the number {value!s:.40} as {dtype}")
        return torch.tensor(value, dtype=dtype)
    if tag == "tensor":
        return get(*_named_tensor(fields))
    raise ValueError(f"the unknown tag {tag!s:.40}")


def _named_tensor(fields: Mapping[str, Any]) -> tuple[str, tuple[int, ...], torch.dtype]:
    shape, name = _list(fields["shape"]), fields["name"]
    if not is_shape(shape) or not isinstance(name, str):
        raise ValueError(f"the shape {shape!s:.80} of {name!s:.80}")
    return name, tuple(shape), DTYPES[str(fields["dtype"])]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list was expected")
    return value  # pyright: ignore[reportUnknownVariableType]
