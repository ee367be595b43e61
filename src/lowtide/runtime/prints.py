"""The print of a tensor: a hash of its elements, by which a tensor that was dropped is known again.

Only the elements count that the tensor shows, not the storage behind it. They are hashed as they lie in memory where they lie
without gaps, in whatever order of dimensions; where there are gaps they are copied piece by piece.

This is also the seam for accelerators: their memory is not read here, so they have no print (``None``, and nothing is
compared). There a print would be computed where the tensor lies, and the comparison would end in one flag that is read
together with the one for finite gradients.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from lowtide.tiers.transfer import digest_of
from lowtide.torch_internals import has_own_dispatch, is_functorch_wrapped

_PIECE = 1 << 18  # elements that are copied at once


def can_be_printed(tensor: Tensor) -> bool:
    """Whether its memory can be read from here."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return not is_functorch_wrapped(tensor) and not has_own_dispatch(tensor)


def print_of(tensor: Tensor) -> int | None:
    """A hash of shape, dtype and elements; None for tensors whose memory cannot be read from here."""
    if not can_be_printed(tensor):
        return None
    kind = hash((tuple(tensor.shape), tensor.dtype, tensor.is_conj(), tensor.is_neg()))
    return hash((kind, _of_elements(tensor) if tensor.numel() else 0))


def _of_elements(tensor: Tensor) -> int:
    """The elements themselves; dimensions that repeat them (``expand``) count once."""
    shape, stride, gaps = _as_it_lies(tensor)
    with torch.no_grad():
        flat = torch.empty(0, dtype=tensor.dtype, device="cpu")
        flat.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)  # pyright: ignore[reportUnknownMemberType]
        if not gaps:
            return digest_of(flat.view(-1).view(torch.uint8).numpy())
        hasher = xxhash.xxh3_64()
        rows = max(1, _PIECE * shape[0] // flat.numel())
        for first in range(0, shape[0], rows):
            piece = flat[first : first + rows].contiguous()
            hasher.update(piece.view(-1).view(torch.uint8).numpy().data)
        return hasher.intdigest()


def _as_it_lies(tensor: Tensor) -> tuple[list[int], list[int], bool]:
    """Shape and strides with the dimension that has the longest step first, and whether there are gaps between elements."""
    dims = [(step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and step]
    dims.sort(reverse=True)
    expected, gaps = 1, False
    for step, size in reversed(dims):
        gaps = gaps or step != expected
        expected = step * size
    return [size for _, size in dims] or [1], [step for step, _ in dims] or [1], gaps
