"""The ranks that share one model: who they are, the channels they talk on, and how they part."""

from __future__ import annotations

import atexit
import os
import sys
from multiprocessing import util as multiprocessing_util
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.comm.codec import codec_named
from lowtide.comm.deadlines import Deadlines
from lowtide.comm.launched import join_if_launched
from lowtide.comm.links import Axis, CommonMemory, Links, Members
from lowtide.comm.transport import Alone
from lowtide.comm.watch import NEWS, Watch
from lowtide.errors import ArgumentError, PeerFailed, Refused

_ALLOWED = "allowed: a ProcessGroup, a DeviceMesh of one (shard) or two (replicate, shard) dimensions, or None"


class Group:
    """The job that shares one model: ``rank = replicate.rank * shard.size + shard.rank``."""

    def __init__(self, *, replicate: Axis, shard: Axis, watch: Watch, links: Links | None, deadlines: Deadlines) -> None:
        self.replicate = replicate
        self.shard = shard
        self.rank = replicate.rank * shard.size + shard.rank
        self.size = replicate.size * shard.size
        self.watch = watch
        self.deadlines = deadlines
        self._links = links  # None on one rank
        self._pid = os.getpid()
        self._channels: list[Channel] = []
        self._closed = False
        self._leave = self._at_exit
        if self.size > 1:
            atexit.register(self._leave)
            # Children of multiprocessing end without atexit; their finalizers run while an exception is still in flight.
            self._finalizer = multiprocessing_util.Finalize(None, self._leave, exitpriority=100)

    @classmethod
    def join(
        cls,
        group: ProcessGroup | DeviceMesh | None,
        *,
        deadline: float,
        first_deadline: float | None = None,
        transport: str = "auto",
        codec: str = "exact",
    ) -> Group:
        """Collective over the given ranks. ``None`` is the world, or one rank if torch.distributed is not initialised."""
        if group is None:
            join_if_launched(os.environ)
        members = _members(group)
        deadlines = Deadlines(deadline, first=deadline if first_deadline is None else first_deadline)
        if members is None:
            return cls(replicate=Axis(0, 1), shard=Axis(0, 1), watch=Watch(None), links=None, deadlines=deadlines)
        here = dist.get_rank()
        replicate_rank = next(i for i, row in enumerate(members.rows) if here in row)
        row = members.rows[replicate_rank]
        replicate, shard = Axis(replicate_rank, len(members.rows)), Axis(row.index(here), len(row))
        rank, size = members.all.index(here), len(members.all)
        if size == 1:
            return cls(replicate=replicate, shard=shard, watch=Watch(None), links=None, deadlines=deadlines)
        links = Links(members, replicate, shard, deadlines=deadlines, transport=transport, codec=codec_named(codec))
        watch = Watch(links.gloo("watch", members.all), rank=rank, size=size)
        return cls(replicate=replicate, shard=shard, watch=watch, links=links, deadlines=deadlines)

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, this one among them, by their number in the job."""
        return self._links.host_ranks if self._links is not None else (0,)

    @property
    def codec(self) -> str | None:
        """How gradients cross the network between hosts; None if they cross none."""
        codec = self._links.codec if self._links is not None else None
        return codec.name if codec is not None else None

    def use_codec(self, name: str) -> None:
        """Another codec from now on. All ranks do this at the same place, where none of them reduces."""
        if self._links is not None:
            self._links.use_codec(codec_named(name))

    @property
    def crossing_seconds(self) -> float:
        """How long gradients have been under way between hosts so far."""
        return self._links.crossing_seconds if self._links is not None else 0.0

    def shared_memory(self) -> tuple[int, int]:
        """Bytes of memory that the ranks of this host hold together now, and how many ranks they are."""
        taken = self._links.shared_bytes if self._links is not None else 0
        return taken, len(self.host_ranks)

    def share_memory(self, nbytes: int, channel: Channel) -> CommonMemory | None:
        """Collective: memory that the ranks of this host that share shards all map; None if they do not."""
        if self._links is None:
            return None

        def ask(mine: bytes) -> list[bytes]:
            return channel.run(Label("share", -1, "memory"), lambda _, notes: notes, mine)

        return self._links.share_memory(nbytes, ask)

    def channel(self, name: str) -> Channel:
        """Collective: every rank opens the same channels in the same order."""
        if self._closed:
            raise Refused(f"channel {name!r} was asked for after the group was closed; shard the model again.")
        wire = self._open(f"{name}/{len(self._channels)}")
        channel = Channel(name, wire, watch=self.watch, deadline=self.deadlines)
        self._channels.append(channel)
        if self._links is not None and self._links.untuned:
            links = self._links
            channel.run(Label("measure", -1, "the network"), lambda wire, notes: links.tune())
        return channel

    def _open(self, name: str) -> Wire:
        if self._links is None:
            return Wire(Alone(), Alone(), Alone())
        try:
            return self._links.wire(name)
        except PeerFailed as lost:
            told = self.watch.await_news(NEWS)
            if told is None:
                raise
            raise PeerFailed(told.rank, told.cause, lost.waiting_for, told.report) from lost

    def close(self) -> None:
        """End the channels and tell the others that this rank left in good order. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        self.watch.close()
        if self._links is not None:
            self._links.close()
        if self.size > 1:
            atexit.unregister(self._leave)
            self._finalizer.cancel()

    def _at_exit(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        error = _unhandled()
        if error is not None:
            self.watch.report(error)
        self.close()


def _members(group: object) -> Members | None:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return Members((tuple(range(dist.get_world_size())),), _backend(dist.group.WORLD))
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this rank is not in the given group; only its members may share the model.")
    if isinstance(group, DeviceMesh):
        return _mesh_members(group)
    if isinstance(group, ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
        if dist.get_rank() not in ranks:
            raise ArgumentError(f"rank {dist.get_rank()} is not in the given group of ranks {list(ranks)}.")
        return Members((ranks,), _backend(group))
    raise ArgumentError(f"group is {group!r}; {_ALLOWED}.")


def _mesh_members(mesh: DeviceMesh) -> Members:
    ranks = mesh.mesh
    if ranks.dim() not in (1, 2):
        raise ArgumentError(f"group is a DeviceMesh of {ranks.dim()} dimensions; {_ALLOWED}.")
    rows = tuple(tuple(int(rank) for rank in row) for row in ranks.reshape(-1, ranks.shape[-1]))
    if not any(dist.get_rank() in row for row in rows):
        raise ArgumentError(f"rank {dist.get_rank()} is not in the given mesh of ranks {rows}.")
    return Members(rows, _backend(mesh.get_group(0)))


def _backend(group: ProcessGroup | None) -> str:
    """The backend that moves host memory; gloo wherever it does that."""
    config = dist.get_backend_config(group)  # such as "gloo" or "cpu:gloo,cuda:nccl"
    devices = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    return devices.get("cpu", dist.get_backend(group))


def _unhandled() -> BaseException | None:
    """The exception that is ending this process, if one is."""
    error = sys.exc_info()[1] or cast("BaseException | None", getattr(sys, "last_value", None))
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        return error.__context__ or error
    return error
