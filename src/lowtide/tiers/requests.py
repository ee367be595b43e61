"""What every store checks before it accepts a request, and the ticket of one that was carried out at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowtide.errors import InternalError
from lowtide.tiers.store import Extent, Key


class DoneTicket:
    """See ``IOTicket``."""

    done = True

    def wait(self) -> None:
        return None

    def on_done(self, callback: Callable[[], None]) -> None:
        callback()


def new_extent(key: Key, cuts: Sequence[int]) -> Extent:
    if not cuts or cuts[0] != 0 or any(after < before for before, after in itertools.pairwise(cuts)):
        raise InternalError(f"{key}: cuts must start at 0 and not fall, not {tuple(cuts)}")
    return Extent(key, tuple(cuts))


def check_request(extent: Extent, block: int, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is memory for exactly that block."""
    if not 0 <= block < len(extent.cuts) - 1:
        raise InternalError(f"{extent.key} has no block {block}")
    is_bytes = tensor.dim() == 1 and tensor.dtype == torch.uint8 and tensor.is_contiguous()
    if not is_bytes or tensor.numel() != extent.block_bytes(block):
        raise InternalError(
            f"block {block} of {extent.key} takes a contiguous 1-D tensor of {extent.block_bytes(block)} bytes, "
            f"not {tuple(tensor.shape)} of {tensor.dtype}"
        )
