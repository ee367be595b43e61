"""BatchNorm statistics and other buffers, kept alike over ranks as DDP keeps them.

DDP sends rank 0's buffers to all before a forward pass that follows one whose backward was to be synchronised (and before the
first). The same rule here, so that the same forward passes see the same buffers. Inside
``join()`` it takes those of the last rank that still has batches.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.comm.group import Group


class Buffers:
    """Sends buffers when DDP would."""

    def __init__(self, model: nn.Module, group: Group, channel: Channel) -> None:
        self._model, self._group, self._channel = model, group, channel
        self.due = True
        """Whether the next forward pass begins with the buffers of rank ``root``."""
        self.root = 0

    @property
    def will_send(self) -> bool:
        """Whether the next forward pass needs all ranks for them."""
        return self.due and self._group.size > 1 and next(self._model.buffers(), None) is not None

    def before_forward(self) -> None:
        if self.will_send:
            self.send()

    def after_forward(self, *, sync: bool) -> None:
        self.due = torch.is_grad_enabled() and sync

    def send(self) -> None:
        """Make every rank's buffers those of rank ``root``."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self._model.buffers():
            by_dtype[buffer.dtype].append(buffer.detach())
        if not by_dtype:
            return
        root = self.root

        def work(wire: Wire, _: list[bytes]) -> None:
            for dtype in sorted(by_dtype, key=str):
                buffers = by_dtype[dtype]
                flat = torch.cat([b.flatten() for b in buffers])
                wire.world.broadcast(flat.view(torch.uint8), root)
                if self._group.rank != root:
                    for buffer, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(value.view(buffer.shape))

        nbytes = sum(b.nbytes for buffers in by_dtype.values() for b in buffers)
        self._channel.run(Label("send", -1, f"buffers of the model, {nbytes} bytes"), work)
