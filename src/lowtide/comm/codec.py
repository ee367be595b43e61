"""What becomes of numbers on their way between hosts: a codec turns them into bytes for the wire, and back.

Only what crosses a network goes through a codec; inside a host numbers stay as they are. ``exact`` is the default,
because any other codec changes bits.

[Note: pieces are coded whole] A piece goes through a codec by itself and comes back by itself. How many bytes it takes depends
on its length, so that a codec may add to every block of numbers what describes it (a scale, say). Pieces that travel together
lie one after the other; the bytes of one piece are never cut, and pieces may start at any byte.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import ArgumentError, InternalError

_BLOCK = 1 << 16  # elements that are rounded at once where that takes room: it stays in the cache


class Codec(Protocol):
    """All ranks use the same one. Stateless: the same numbers give the same bytes, always and everywhere."""

    @property
    def name(self) -> str: ...

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """How many bytes a piece of ``numel`` elements takes on the wire."""
        ...

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write ``values`` (1-D) as bytes into ``out`` (1-D uint8, as long as ``wire_bytes`` says)."""
        ...

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """The other way: ``out`` has the dtype and the length of what was encoded. A number that was not finite is not
        finite afterwards, so that nobody updates with it."""
        ...

    def bound(self, largest: float) -> float:
        """How far a finite number can be from itself after both ways, at most, where none in its piece is larger in
        magnitude than ``largest``. 0 if nothing ever changes."""
        ...


class Exact:
    """The bytes as they are, of any dtype."""

    name = "exact"

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        _check(self, values, out)
        out.copy_(_bytes_of(values))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        _check(self, out, wire)
        _bytes_of(out).copy_(wire)

    def bound(self, largest: float) -> float:
        return 0.0


class BF16:
    """fp32 and fp64 rounded to the nearest bfloat16 (ties to even): half and a quarter of the bytes. Other dtypes pass exactly.

    A number keeps its exponent and 8 bits: the error is at most 1/256 of it. NaN stays NaN, an infinity stays itself.
    """

    name = "bf16"

    RELATIVE_ERROR = 2.0**-8
    SMALLEST_NORMAL = 2.0**-126  # smaller ones lose bits, and some processors make them zero
    OVERFLOW = 2.0**128 * (1 - 2.0**-9)  # from here on the nearest is an infinity

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * (torch.bfloat16 if _is_wide(dtype) else dtype).itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        _check(self, values, out)
        if not _is_wide(values.dtype):
            out.copy_(_bytes_of(values))
        elif not _fits(out, torch.bfloat16):
            rounded = torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
            _round(values, rounded)
            out.copy_(rounded.view(torch.uint8))
        else:
            _round(values, out.view(torch.bfloat16))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        _check(self, out, wire)
        if not _is_wide(out.dtype):
            _bytes_of(out).copy_(wire)
        else:
            aligned = wire if _fits(wire, torch.bfloat16) else wire.clone()
            out.detach().copy_(aligned.view(torch.bfloat16))

    def bound(self, largest: float) -> float:
        return math.inf if largest >= self.OVERFLOW else self.RELATIVE_ERROR * largest + self.SMALLEST_NORMAL


EXACT: Codec = Exact()
_CODECS: dict[str, Codec] = {codec.name: codec for codec in (EXACT, BF16())}


def codec_named(name: str) -> Codec:
    """``"exact"`` or ``"bf16"``."""
    if name not in _CODECS:
        raise ArgumentError(f"codec is {name!r}; allowed: {', '.join(map(repr, _CODECS))}.")
    return _CODECS[name]


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


def _check(codec: Codec, values: Tensor, wire: Tensor) -> None:
    for what, tensor in (("numbers", values), ("bytes", wire)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise InternalError(f"codec {codec.name!r} needs contiguous 1-D {what}, got shape {tuple(tensor.shape)}")
    expected = codec.wire_bytes(values.numel(), values.dtype)
    if wire.dtype != torch.uint8 or wire.numel() != expected:
        raise InternalError(
            f"codec {codec.name!r}: {values.numel()} elements of {values.dtype} are {expected} bytes on the wire, "
            f"not {wire.numel()} of {wire.dtype}"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def _fits(wire: Tensor, dtype: torch.dtype) -> bool:
    """Whether these bytes lie where elements of ``dtype`` may lie."""
    return wire.data_ptr() % dtype.itemsize == 0 and wire.storage_offset() % dtype.itemsize == 0


def _round(values: Tensor, out: Tensor) -> None:
    """To the nearest bfloat16, ties to even."""
    if values.dtype == torch.float32:
        out.copy_(values.detach())
        return
    for part, rounded in zip(values.detach().split(_BLOCK), out.split(_BLOCK), strict=True):
        # By way of fp32 a number is rounded twice. Only one that fp32 puts exactly in the middle between two can go
        # the wrong way; it is moved by one bit to the side on which it was.
        single = part.to(torch.float32)
        bits = single.view(torch.int32)
        middle = (bits & 0xFFFF) == 0x8000
        before, after = part.abs(), single.double().abs()
        bits += torch.where(middle, (before > after).int() - (before < after).int(), 0)
        rounded.copy_(single)
