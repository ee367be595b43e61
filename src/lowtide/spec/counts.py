"""A model of which only the number of parameters is known. No torch: the command line answers at once."""

from __future__ import annotations

import re
from decimal import Decimal

from lowtide.errors import ArgumentError
from lowtide.spec.model import ModelSpec, UnitFacts, Work

ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}

_COUNT = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbgt]?)\s*$", re.IGNORECASE)
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}

# (below this many parameters, layers): the depth that published transformers of that size have
_USUAL_DEPTH = ((2e9, 24), (10e9, 32), (25e9, 40), (50e9, 60), (110e9, 80))
_GREATEST_DEPTH = 96


def parse_count(text: str) -> int:
    """A number of parameters as people write it: ``7.5e9``, ``7.5B``, ``7500000000``, ``124M``, ``1T``."""
    match = _COUNT.match(text)
    if match is None:
        raise ArgumentError(
            f"{text!r} is not a number of parameters; write it like 7.5e9, 7.5B, 124M, 1T or 7500000000 (K, M, B and T are "
            f"powers of 1000)."
        )
    count = Decimal(re.sub("[_,]", "", match[1])) * _SCALE[match[2].lower()]
    if count != int(count) or count < 1:
        raise ArgumentError(f"{text!r} is {count.normalize():f} parameters; a model has a whole number of them, at least 1.")
    return int(count)


def bytes_of(dtype: str) -> int:
    """Bytes of one number."""
    if dtype not in ITEM_BYTES:
        raise ArgumentError(f"dtype is {dtype!r}; allowed: {', '.join(map(repr, ITEM_BYTES))}.")
    return ITEM_BYTES[dtype]


def bare_count(params: int, *, layers: int | None = None, dtype: str = "fp32", tokens: int | None = None) -> ModelSpec:
    """A model of ``params`` parameters in ``layers`` equal units (by default as many as transformers of that size have).

    With ``tokens`` in a batch the work is that of a transformer: two operations per token and parameter forward, four backward.
    Activations are never known: they depend on the model's shape.
    """
    if params < 1:
        raise ArgumentError(f"params is {params}; a model has at least 1.")
    if tokens is not None and tokens < 1:
        raise ArgumentError(f"tokens is {tokens}; give at least 1, or None where the batch is not known.")
    if layers is None:
        layers = min(params, next((depth for below, depth in _USUAL_DEPTH if params < below), _GREATEST_DEPTH))
    if not 1 <= layers <= params:
        raise ArgumentError(f"layers is {layers}; allowed: 1 to the number of parameters ({params}).")
    item, (each, left) = bytes_of(dtype), divmod(params, layers)
    sizes = [each + (index < left) for index in range(layers)]
    return ModelSpec(
        name=f"{params:,} parameters",
        units=tuple(
            UnitFacts(
                name=f"layer {index}",
                numel=size,
                trained_numel=size,
                parameter_bytes=size * item,
                forward=Work(flops=2.0 * size * (tokens or 0)),
                backward=Work(flops=4.0 * size * (tokens or 0)),
            )
            for index, size in enumerate(sizes)
        ),
        dtype=dtype,
        batch=f"{tokens} tokens, activations not known" if tokens else "",
    )
