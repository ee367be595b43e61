"""How ranks talk: the group a model is shared by, channels that carry exchanges in order, and the watch over peers."""

from __future__ import annotations

from lowtide.comm.agree import agree
from lowtide.comm.channel import Channel, Label, Ticket, Wire
from lowtide.comm.group import Axis, Group
from lowtide.comm.reduce import tree_sum
from lowtide.comm.transport import Alone, TorchTransport, Transport
from lowtide.comm.watch import Watch

__all__ = [
    "Alone",
    "Axis",
    "Channel",
    "Group",
    "Label",
    "Ticket",
    "TorchTransport",
    "Transport",
    "Watch",
    "Wire",
    "agree",
    "tree_sum",
]
