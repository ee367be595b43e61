"""BatchNorm statistics and other buffers, kept alike over ranks as DDP keeps them.

DDP sends rank 0's buffers to all before a forward pass that follows one whose backward was to be synchronised (and before the
first). The same rule here, so that the same forward passes see the same buffers.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.comm.group import Group


class Buffers:
    """Sends rank 0's buffers when DDP would."""

    def __init__(self, model: nn.Module, group: Group, channel: Channel) -> None:
        self._model, self._group, self._channel = model, group, channel
        self._due = True

    def before_forward(self) -> None:
        if self._due and self._group.size > 1:
            self.send()

    def after_forward(self, *, sync: bool) -> None:
        self._due = torch.is_grad_enabled() and sync

    def send(self) -> None:
        """Make every rank's buffers rank 0's."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self._model.buffers():
            by_dtype[buffer.dtype].append(buffer.detach())
        if not by_dtype:
            return

        def work(wire: Wire, _: list[bytes]) -> None:
            for dtype in sorted(by_dtype, key=str):
                buffers = by_dtype[dtype]
                flat = torch.cat([b.flatten() for b in buffers])
                wire.world.broadcast(flat.view(torch.uint8))
                if self._group.rank:
                    for buffer, value in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(value.view(buffer.shape))

        nbytes = sum(b.nbytes for buffers in by_dtype.values() for b in buffers)
        self._channel.run(Label("send", -1, f"buffers of the model, {nbytes} bytes"), work)
