"""What every codec does: right sizes, errors within its bound, strange numbers, odd lengths, buffers that start anywhere.

``BlockInt8`` is a codec of this file: 8 bits and a scale per block, so that the seam is held to more than the two that ship.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowtide
from lowtide.comm.codec import BF16, Codec, Exact, codec_named
from lowtide.errors import ArgumentError, InternalError

EVERY_DTYPE = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int32, torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
WIDE = [torch.float32, torch.float64]
SIZES = [0, 1, 2, 3, 7, 63, 64, 65, 1000, (1 << 16) - 1, (1 << 16) + 1]
STRANGE = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1 / 3, 2.0**-126, 2.0**-127, 2.0**-133, 2.0**-134, 2.0**-149,
    3.3895313892515355e38, 3.3961775292304601e38, 3.4028234663852886e38, 1e-300, 1e300, 255.0, 257.0, 258.0, 1 + 2.0**-8,
]  # fmt: skip


class BlockInt8:
    """fp32 in 8 bits: every block of 64 has its largest magnitude as a scale. A block with a number that is not finite
    becomes NaN as a whole."""

    name = "block-int8"
    BLOCK = 64

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel + 4 * -(-numel // self.BLOCK) if dtype in WIDE else numel * dtype.itemsize

    def _expect(self, values: Tensor, wire: Tensor) -> None:
        if wire.dtype != torch.uint8 or wire.numel() != self.wire_bytes(values.numel(), values.dtype):
            raise InternalError("sizes")
        if values.dim() != 1 or not values.is_contiguous() or not wire.is_contiguous():
            raise InternalError("shape")

    def encode(self, values: Tensor, out: Tensor) -> None:
        self._expect(values, out)
        if values.dtype not in WIDE:
            out.copy_(values.view(torch.uint8))
            return
        at = 0
        for block in values.split(self.BLOCK) if values.numel() else ():
            scale = block.abs().max().float().reshape(1)
            scale = torch.where(block.isfinite().all(), scale, math.nan)
            steps = torch.where(scale > 0, block.double() / scale * 127, 0.0).round().clamp(-127, 127)
            out[at : at + 4] = scale.view(torch.uint8)
            out[at + 4 : at + 4 + block.numel()] = steps.to(torch.int8).view(torch.uint8)
            at += 4 + block.numel()

    def decode(self, wire: Tensor, out: Tensor) -> None:
        self._expect(out, wire)
        if out.dtype not in WIDE:
            out.view(torch.uint8).copy_(wire)
            return
        at = 0
        for block in out.split(self.BLOCK) if out.numel() else ():
            scale = wire[at : at + 4].clone().view(torch.float32).double()
            steps = wire[at + 4 : at + 4 + block.numel()].clone().view(torch.int8)
            block.copy_(steps.double() * scale / 127)
            at += 4 + block.numel()

    def bound(self, largest: float) -> float:
        return math.inf if largest > 3.4e38 else largest * (1 / 254 + 2.0**-20) + 2.0**-126


CODECS: list[Codec] = [Exact(), BF16(), BlockInt8()]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def buffer(numel: int, dtype: torch.dtype, offset: int) -> Tensor:
    """A 1-D tensor that starts ``offset`` elements into its memory, which is full of ones."""
    room = torch.full(((numel + offset) * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)
    return room[offset:]


def placed(values: Tensor, offset: int) -> Tensor:
    made = buffer(values.numel(), values.dtype, offset)
    made.view(torch.uint8).copy_(values.view(torch.uint8))
    return made


def there_and_back(codec: Codec, values: Tensor, *, wire_offset: int = 0, offset: int = 0) -> Tensor:
    """Through the wire, with a guard of bytes on both sides that nobody may write."""
    size = codec.wire_bytes(values.numel(), values.dtype)
    room = torch.full((wire_offset + size + 9,), 0xA5, dtype=torch.uint8)
    wire = room[wire_offset : wire_offset + size]
    given = placed(values, offset)
    codec.encode(given, wire)
    assert same_bits(given, values), "encode changed its input"
    beside = torch.cat([room[:wire_offset], room[wire_offset + size :]])
    assert (beside == 0xA5).all(), "encode wrote beside its room"
    sent = wire.clone()
    out = buffer(values.numel(), values.dtype, offset)
    codec.decode(wire, out)
    assert same_bits(wire, sent), "decode changed its input"
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def holds(codec: Codec, values: Tensor, back: Tensor) -> None:
    """The contract for numbers that are rounded."""
    finite = values.isfinite()
    assert not back[~finite].isfinite().any(), "a number that was not finite became finite"
    largest = values[finite].abs().max().item() if finite.any() else 0.0
    bound = codec.bound(largest)
    if finite.all() and bound < math.inf:
        assert ((back.double() - values.double()).abs() <= bound).all(), f"an error above {bound}"


@every_codec
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_sizes_and_dtypes(codec: Codec, dtype: torch.dtype) -> None:
    for numel in SIZES if dtype in (torch.float32, torch.float64, torch.int64) else SIZES[:9]:
        values = torch.randint(-8, 9, (numel,)).to(dtype)
        back = there_and_back(codec, values)
        if dtype in WIDE:
            holds(codec, values, back)
        else:
            assert same_bits(back, values)


@every_codec
def test_bytes_are_counted_piece_by_piece(codec: Codec) -> None:
    """Pieces of any length lie one after the other on the wire, where they start at odd bytes."""
    pieces = [torch.randn(n) for n in (5, 0, 1, 64, 67, 130)]
    int8s = [torch.arange(3, dtype=torch.int8), torch.arange(2, dtype=torch.int8)]
    ordered = [int8s[0], *pieces, int8s[1]]
    sizes = [codec.wire_bytes(piece.numel(), piece.dtype) for piece in ordered]
    wire = torch.zeros(sum(sizes), dtype=torch.uint8)
    for piece, room in zip(ordered, wire.split(sizes), strict=True):
        codec.encode(piece, room)
    for piece, room in zip(ordered, wire.split(sizes), strict=True):
        back = torch.empty_like(piece)
        codec.decode(room, back)
        alone = there_and_back(codec, piece)
        assert same_bits(back, alone)


@every_codec
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("value", STRANGE)
def test_strange_numbers(codec: Codec, dtype: torch.dtype, value: float) -> None:
    for others in ([], [1.0, -2.0, 0.5]):
        values = torch.tensor([value, *others, -value], dtype=torch.float64).to(dtype)
        holds(codec, values, there_and_back(codec, values))


bits_32 = st.integers(0, (1 << 32) - 1)
bits_64 = st.integers(0, (1 << 64) - 1)


def of_bits(patterns: list[int], dtype: torch.dtype) -> Tensor:
    data = b"".join(pattern.to_bytes(dtype.itemsize, "little") for pattern in patterns)
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


@every_codec
@settings(deadline=None, max_examples=150)
@given(patterns=st.lists(bits_32, max_size=150), wire_offset=st.integers(0, 9), offset=st.integers(0, 3))
def test_any_bits(codec: Codec, patterns: list[int], wire_offset: int, offset: int) -> None:
    values = of_bits(patterns, torch.float32)
    back = there_and_back(codec, values, wire_offset=wire_offset, offset=offset)
    holds(codec, values, back)
    assert same_bits(back, there_and_back(codec, values)), "where the bytes lie changed a number"


@every_codec
@settings(deadline=None, max_examples=100)
@given(numbers=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200), exponent=st.integers(-120, 110))
def test_errors_stay_within_the_bound(codec: Codec, numbers: list[float], exponent: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32) * 2.0**exponent
    assert values.isfinite().all()
    holds(codec, values, there_and_back(codec, values))


@every_codec
def test_the_bound_grows_with_the_largest(codec: Codec) -> None:
    bounds = [codec.bound(x) for x in (0.0, 1e-40, 1e-3, 1.0, 1e30, 3.4028234663852886e38)]
    assert bounds == sorted(bounds)
    assert bounds[0] >= 0
    assert (codec.bound(1.0) == 0.0) == (codec.name == "exact")


@every_codec
def test_gradients_are_no_matter(codec: Codec) -> None:
    values = torch.ones(5, requires_grad=True)
    wire = torch.empty(codec.wire_bytes(5, torch.float32), dtype=torch.uint8)
    with torch.no_grad():
        codec.encode(values, wire)
    back = torch.zeros(5)
    codec.decode(wire, back)
    assert torch.equal(back, torch.ones(5))


@every_codec
def test_what_does_not_fit_is_refused(codec: Codec) -> None:
    values, size = torch.zeros(10), codec.wire_bytes(10, torch.float32)
    for wire in (torch.zeros(size - 1, dtype=torch.uint8), torch.zeros(size + 1, dtype=torch.uint8), torch.zeros(size)):
        with pytest.raises(InternalError):
            codec.encode(values, wire)
        with pytest.raises(InternalError):
            codec.decode(wire, values)
    fitting = torch.zeros(size, dtype=torch.uint8)
    for strided in (torch.zeros(20)[::2], torch.zeros(2, 5)):
        with pytest.raises(InternalError):
            codec.encode(strided, fitting)
        with pytest.raises(InternalError):
            codec.decode(fitting, strided)


@settings(deadline=None, max_examples=150)
@given(patterns=st.lists(bits_64, max_size=80), dtype=st.sampled_from([torch.float64, torch.int64, torch.complex64]))
def test_exact_changes_no_bit(patterns: list[int], dtype: torch.dtype) -> None:
    values = of_bits(patterns, dtype)
    assert same_bits(there_and_back(Exact(), values, wire_offset=3), values)


def nearest_bf16(value: float) -> float:
    """Rounded to 8 significant bits with whole numbers, ties to even."""
    if not math.isfinite(value) or value == 0:
        return value
    mantissa, exponent = math.frexp(abs(value))  # abs(value) = mantissa * 2**exponent, 0.5 <= mantissa < 1
    lowest = max(exponent - 8, -133)  # exponent of the last bit; below the normal range it stays
    scaled = math.ldexp(mantissa, exponent - lowest)  # exact: a power of two
    whole = math.floor(scaled)
    rest = scaled - whole
    whole += rest > 0.5 or (rest == 0.5 and whole % 2 == 1)
    rounded = math.ldexp(whole, lowest) if whole.bit_length() + lowest <= 128 else math.inf
    return math.copysign(rounded, value)


nearby = st.builds(  # around the middle of two neighbours, where rounding twice goes wrong
    lambda whole, nudge, exponent, sign: sign * math.ldexp((whole + 0.5) * (1 + nudge * 2.0**-40), exponent),
    st.integers(128, 255), st.integers(-3, 3), st.integers(-130, 118), st.sampled_from([-1, 1]),
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(numbers=st.lists(st.one_of(nearby, st.floats(), st.floats(width=32)), min_size=1, max_size=60))
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_bf16_rounds_to_nearest_even(numbers: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    expected = torch.tensor([nearest_bf16(x) for x in values.tolist()], dtype=torch.float64).to(dtype)
    back = there_and_back(BF16(), values)
    nan = values.isnan()
    assert back[nan].isnan().all()
    assert torch.equal(back[~nan], expected[~nan])


def test_bf16_keeps_what_it_can_hold() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    kept = every[~every.isnan()]
    for dtype in WIDE:
        assert torch.equal(there_and_back(BF16(), kept.to(dtype)).to(torch.bfloat16), kept)
    assert there_and_back(BF16(), every[every.isnan()].float()).isnan().all()


def test_bf16_halves_and_quarters() -> None:
    assert BF16().wire_bytes(1001, torch.float32) == 2002
    assert BF16().wire_bytes(1001, torch.float64) == 2002
    assert BF16().wire_bytes(1001, torch.float16) == 2002
    assert BF16().wire_bytes(1001, torch.int64) == 8008


def test_names() -> None:
    assert codec_named("exact").name == "exact"
    assert codec_named("bf16").name == "bf16"
    for wrong in ("int4", "", "BF16"):
        with pytest.raises(ArgumentError, match=r"allowed: 'exact', 'bf16'") as caught:
            codec_named(wrong)
        assert isinstance(caught.value, lowtide.Error)
