"""The ranks that share one model, and the only place where process groups are made.

lowtide never talks over the caller's process group: the caller's collectives could fall between ours. It makes groups of its
own over the same ranks, which also live on when the caller destroys theirs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util as multiprocessing_util
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from lowtide.comm.channel import Channel, Wire
from lowtide.comm.transport import Alone, TorchTransport, Transport
from lowtide.comm.watch import Watch
from lowtide.errors import ArgumentError, DeadlineExceeded, Refused

_log = logging.getLogger(__name__)

_ALLOWED = "allowed: a ProcessGroup, a DeviceMesh of one (shard) or two (replicate, shard) dimensions, or None"


@dataclass(frozen=True)
class Axis:
    """This rank's place among the ranks of one dimension."""

    rank: int
    size: int


@dataclass(frozen=True)
class _Members:
    """Global ranks as rows (replicas) of shards, and the backend that carries host memory between them."""

    rows: tuple[tuple[int, ...], ...]
    backend: str

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(rank for row in self.rows for rank in row)


class Group:
    """The job that shares one model: ``rank = replicate.rank * shard.size + shard.rank``."""

    def __init__(self, *, replicate: Axis, shard: Axis, watch: Watch, connect: Callable[[str], Wire], deadline: float) -> None:
        self.replicate = replicate
        self.shard = shard
        self.rank = replicate.rank * shard.size + shard.rank
        self.size = replicate.size * shard.size
        self.watch = watch
        self._connect = connect
        self._deadline = deadline
        self._pid = os.getpid()
        self._channels: list[Channel] = []
        self._closed = False
        self._leave = self._at_exit
        if self.size > 1:
            atexit.register(self._leave)
            # Children of multiprocessing end without atexit; their finalizers run while an exception is still in flight.
            self._finalizer = multiprocessing_util.Finalize(None, self._leave, exitpriority=100)

    @classmethod
    def join(cls, group: ProcessGroup | DeviceMesh | None, *, deadline: float) -> Group:
        """Collective over the given ranks. ``None`` is the world, or one rank if torch.distributed is not initialised."""
        members = _members(group)
        if members is None:
            one = Axis(0, 1)
            wire = Wire(Alone(), Alone(), Alone())
            return cls(replicate=one, shard=one, watch=Watch(None), connect=lambda _: wire, deadline=deadline)
        here = dist.get_rank()
        replicate_rank = next(i for i, row in enumerate(members.rows) if here in row)
        row = members.rows[replicate_rank]
        replicate, shard = Axis(replicate_rank, len(members.rows)), Axis(row.index(here), len(row))
        links = _Links(members, replicate, shard, deadline)
        rank, size = members.all.index(here), len(members.all)
        watch = Watch(links.gloo("watch", members.all), rank=rank, size=size) if size > 1 else Watch(None)
        return cls(replicate=replicate, shard=shard, watch=watch, connect=links.wire, deadline=deadline)

    def channel(self, name: str) -> Channel:
        """Collective: every rank opens the same channels in the same order."""
        if self._closed:
            raise Refused(f"channel {name!r} was asked for after the group was closed; shard the model again.")
        channel = Channel(name, self._connect(f"{name}/{len(self._channels)}"), watch=self.watch, deadline=self._deadline)
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """End the channels and tell the others that this rank left in good order. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        self.watch.close()
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


class _Links:
    """Makes process groups over the members. Their names are unique per job, members and join."""

    def __init__(self, members: _Members, replicate: Axis, shard: Axis, deadline: float) -> None:
        self._members = members
        self._replicate = replicate
        self._shard = shard
        self._timeout = timedelta(seconds=deadline)
        world = dist.group.WORLD
        if world is None:
            raise ArgumentError(f"torch.distributed is not initialised. {_ALLOWED}.")
        self._store = world.get_group_store()
        who = "-".join(map(str, members.all))
        # Each rank counts its joins in the store itself: the numbers agree because joining is collective.
        self._prefix = f"lowtide/{who}/{self._store.add(f'lowtide/{who}/joined/{dist.get_rank()}', 1)}"

    def wire(self, name: str) -> Wire:
        rows = self._members.rows
        world = self._transport(f"{name}/world", self._members.all)
        if self._replicate.size == 1:
            return Wire(shard=world, replicate=Alone(), world=world)
        if self._shard.size == 1:
            return Wire(shard=Alone(), replicate=world, world=world)
        column = tuple(row[self._shard.rank] for row in rows)
        return Wire(
            shard=self._transport(f"{name}/shard{self._replicate.rank}", rows[self._replicate.rank]),
            replicate=self._transport(f"{name}/replicate{self._shard.rank}", column),
            world=world,
        )

    def gloo(self, name: str, ranks: Sequence[int]) -> Any:
        """A bare gloo backend: unlike ``new_group`` it needs neither equal numbers of groups on all ranks nor a registry."""
        store = PrefixStore(f"{self._prefix}/{name}", self._store)
        try:
            return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), self._timeout)
        except RuntimeError as error:
            _log.error("ranks %s could not connect for %r: %s", list(ranks), name, error)
            raise DeadlineExceeded(f"ranks {list(ranks)} to open {name!r}", self._timeout.total_seconds()) from error

    def _transport(self, name: str, ranks: Sequence[int]) -> Transport:
        if len(ranks) == 1:
            return Alone()
        if self._members.backend == "gloo":
            return TorchTransport(self.gloo(name, ranks))
        new_group = cast("Callable[..., ProcessGroup]", getattr(dist, "new_group"))  # noqa: B009 - it has no types
        backend = self._members.backend
        # MPI cannot make a group among its members alone: there every rank of the world must share the model.
        local = backend != "mpi"
        made = new_group(list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=local, sort_ranks=False)
        return TorchTransport(made)


def _members(group: object) -> _Members | None:
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return _Members((tuple(range(dist.get_world_size())),), _backend(dist.group.WORLD))
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("this rank is not in the given group; only its members may share the model.")
    if isinstance(group, DeviceMesh):
        return _mesh_members(group)
    if isinstance(group, ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
        if dist.get_rank() not in ranks:
            raise ArgumentError(f"rank {dist.get_rank()} is not in the given group of ranks {list(ranks)}.")
        return _Members((ranks,), _backend(group))
    raise ArgumentError(f"group is {group!r}; {_ALLOWED}.")


def _mesh_members(mesh: DeviceMesh) -> _Members:
    ranks = mesh.mesh
    if ranks.dim() not in (1, 2):
        raise ArgumentError(f"group is a DeviceMesh of {ranks.dim()} dimensions; {_ALLOWED}.")
    rows = tuple(tuple(int(rank) for rank in row) for row in ranks.reshape(-1, ranks.shape[-1]))
    if not any(dist.get_rank() in row for row in rows):
        raise ArgumentError(f"rank {dist.get_rank()} is not in the given mesh of ranks {rows}.")
    return _Members(rows, _backend(mesh.get_group(0)))


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
