"""How the ranks of one job are connected: the only place where process groups are made and where ranks begin to share memory.

lowtide never talks over the caller's process group: the caller's collectives could fall between ours. It makes groups of its
own over the same ranks, which also live on when the caller destroys theirs.

Which transport connects some ranks follows from where they are: on one host shared memory, on several hosts with as many ranks
on each the two levels, otherwise torch.distributed. All of them give the same bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from lowtide.comm import futex
from lowtide.comm.channel import Wire
from lowtide.comm.codec import Codec
from lowtide.comm.deadlines import Deadlines
from lowtide.comm.interface import choose_interface, gloo_options
from lowtide.comm.local import LocalTransport, open_together
from lowtide.comm.measuring import RAIL, Candidates, measure
from lowtide.comm.processes import this_host
from lowtide.comm.shared import CannotShare, Segment
from lowtide.comm.transport import Alone, LinkBroken, TorchTransport, Transport
from lowtide.comm.tuning import Tuning
from lowtide.comm.two_level import TwoLevel
from lowtide.errors import ArgumentError, DeadlineExceeded, Mismatch, PeerFailed

_log = logging.getLogger(__name__)

_FACTS_BYTES = 512
_AFTER_THE_WATCH = 5.0  # seconds


@dataclass(frozen=True)
class Axis:
    """This rank's place among the ranks of one dimension."""

    rank: int
    size: int


@dataclass(frozen=True)
class Members:
    """Global ranks as rows (replicas) of shards, and the backend that carries host memory between them."""

    rows: tuple[tuple[int, ...], ...]
    backend: str

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(rank for row in self.rows for rank in row)


@dataclass(frozen=True)
class CommonMemory:
    """Memory that the ranks of one host map, which together hold one copy of the model's shards."""

    segment: Segment
    here: Axis
    """This rank among those that map it."""
    ranks: tuple[int, ...]
    """Their numbers in the job."""
    carries: tuple[int, ...]
    """The shards, by their rank on the shard axis, that this rank puts into it: its own, and its rail's on other hosts."""


@dataclass(frozen=True)
class _Untuned:
    """A new connection: what it is known by, itself, the ranks that measure it together, and what to choose among."""

    key: tuple[str, tuple[int, ...]]
    over: TorchTransport
    everyone: Transport
    candidates: Candidates


class Links:
    """Makes the connections of one job. Names are unique per job, members and join."""

    def __init__(
        self, members: Members, replicate: Axis, shard: Axis, *, deadlines: Deadlines, transport: str, codec: Codec
    ) -> None:
        self._members, self._replicate, self._shard = members, replicate, shard
        self._codec = codec
        # Longer than anybody waits, so that the report of the watch comes before a bare time-out.
        self._timeout = timedelta(seconds=deadlines.longest + _AFTER_THE_WATCH)
        world = dist.group.WORLD
        if world is None:
            raise ArgumentError("torch.distributed is not initialised.")
        self._store = world.get_group_store()
        who = "-".join(map(str, members.all))
        # Each rank counts its joins in the store itself: the numbers agree because joining is collective.
        self._prefix = f"lowtide/{who}/{self._store.add(f'lowtide/{who}/joined/{dist.get_rank()}', 1)}"
        self._interface = choose_interface(
            PrefixStore(f"{self._prefix}/interface", self._store),
            members.all,
            dist.get_rank(),
            environ=os.environ,
            timeout=timedelta(seconds=deadlines.longest),
        )
        self._bootstraps: dict[tuple[int, ...], TorchTransport] = {}
        self._locals: list[LocalTransport] = []
        self._segments: list[Segment] = []
        self._tunings: dict[tuple[str, tuple[int, ...]], Tuning] = {}  # by kind of connection and ranks
        self._untuned: list[_Untuned] = []
        self._crossing: list[TwoLevel | TorchTransport] = []  # those that add up numbers of several hosts
        self._hosts = self._ask_for_hosts(transport)
        self._shares = self._can_share(transport)

    def wire(self, name: str) -> Wire:
        """Collective: the transports of one channel."""
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

    @property
    def untuned(self) -> bool:
        """Whether connections have been made of which nobody knows how they are best used. The same on all ranks: if the ranks
        of one row have such a connection, so has the world."""
        return bool(self._untuned)

    def tune(self) -> None:
        """Collective: measure those. Work for a channel, so that it has a deadline and a hang has a name."""
        for new in self._untuned:
            self._tunings[new.key] = measure(new.over, new.everyone, new.candidates)
            new.over.tune(self._tunings[new.key])
        self._untuned.clear()

    def gloo(self, name: str, ranks: Sequence[int]) -> Any:
        """A bare gloo backend: unlike ``new_group`` it needs neither equal numbers of groups on all ranks nor a registry."""
        store = PrefixStore(f"{self._prefix}/{name}", self._store)
        try:
            options = gloo_options(self._interface, self._timeout)
            return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), options)
        except RuntimeError as error:
            _log.error("ranks %s could not connect for %r: %s", list(ranks), name, error)
            if LinkBroken(str(error)).timed_out:
                raise DeadlineExceeded(f"ranks {list(ranks)} to open {name!r}", self._timeout.total_seconds()) from error
            raise PeerFailed(-1, f"a connection was lost ({error})", f"opening {name!r}") from error

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, by their number in the job."""
        here = self._hosts[dist.get_rank()]
        return tuple(i for i, rank in enumerate(self._members.all) if self._hosts[rank] == here)

    @property
    def shared_bytes(self) -> int:
        """What the ranks of this host hold together, as memory that is taken now."""
        segments = [*self._segments, *(s for local in self._locals for s in local.segments)]
        return sum(segment.taken_bytes for segment in segments)

    @property
    def codec(self) -> Codec | None:
        """How gradients cross the network between hosts; None if they cross none, or if it is not known which ranks share a
        host."""
        return self._codec if self._crossing else None

    def use_codec(self, codec: Codec) -> None:
        """Another one from now on. All ranks do this at the same place, where none of them reduces."""
        self._codec = codec
        for transport in self._crossing:
            transport.use_codec(codec)

    @property
    def crossing_seconds(self) -> float:
        """How long gradients have been under way between hosts so far."""
        return sum(transport.crossing_seconds for transport in self._crossing)

    def share_memory(self, nbytes: int, ask: Callable[[bytes], list[bytes]]) -> CommonMemory | None:
        """Collective over the shard axis: memory that its ranks on this host map, or None. ``ask``: the bytes of all ranks."""
        row = self._members.rows[self._replicate.rank]
        hosts = self._by_host(row)
        if not self._shares or not _regular(hosts):
            return None
        here = next(ranks for ranks in hosts if dist.get_rank() in ranks)
        at = here.index(dist.get_rank())
        numbers = tuple(self._members.all.index(rank) for rank in here)

        def share(mine: bytes) -> list[bytes]:
            everybody = ask(mine)
            return [everybody[number] for number in numbers]

        segment = open_together(at, nbytes, share)
        self._segments.append(segment)
        return CommonMemory(segment, Axis(at, len(here)), numbers, tuple(row.index(ranks[at]) for ranks in hosts))

    def close(self) -> None:
        """Let go of everything but what others still use."""
        self._bootstraps.clear()
        for segment in [*self._segments, *(s for local in self._locals for s in local.segments)]:
            segment.close()
        self._segments.clear()
        self._locals.clear()
        self._crossing.clear()

    # -- who is where -------------------------------------------------------------------------------------------------

    def _ask_for_hosts(self, transport: str) -> dict[int, str]:
        """The host of every rank. All must want the same transport and codec, or their exchanges would not meet."""
        mine = f"{transport} {self._codec.name} {this_host()}".encode()[:_FACTS_BYTES]
        ranks = self._members.all
        if self._members.backend != "gloo":
            return {rank: str(rank) for rank in ranks}
        texts = [row.rstrip(b"\0").decode() for row in self._bootstrap(ranks)(mine.ljust(_FACTS_BYTES, b"\0"))]
        for rank, text in zip(ranks, texts, strict=True):
            wanted, first = text.split(" ", 2)[:2], texts[0].split(" ", 2)[:2]
            if wanted != first:
                raise Mismatch(f"Comm(transport, codec): rank {ranks[0]} has {first}, rank {rank} has {wanted}")
        return {rank: text.split(" ", 2)[2] for rank, text in zip(ranks, texts, strict=True)}

    def _by_host(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """``ranks`` host by host, in the order in which hosts come up."""
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(self._hosts[rank], []).append(rank)
        return [tuple(found) for found in hosts.values()]

    def _can_share(self, transport: str) -> bool:
        """Whether ranks share memory: asked for, possible on this system, and tried. The answer is the same on all ranks."""
        if transport == "torch" or self._members.backend != "gloo":
            return False
        trouble = "" if futex.available() else "this system has no futex that Python can reach"
        here = next(ranks for ranks in self._by_host(self._members.all) if dist.get_rank() in ranks)
        if not trouble and len(here) > 1:
            try:
                open_together(here.index(dist.get_rank()), 1, self._bootstrap(here)).close()
            except CannotShare as error:
                trouble = str(error)
        troubles = self._bootstrap(self._members.all)(trouble.encode()[:200].ljust(200, b"\0"))
        first = next((t.rstrip(b"\0").decode(errors="replace") for t in troubles if t.rstrip(b"\0")), None)
        if first is not None and transport == "shared":
            raise ArgumentError(f"Comm.transport is 'shared', but {first}. Use transport='auto' or 'torch'.")
        if first is not None:
            _log.warning("ranks of one host do not share memory, they talk over torch.distributed: %s", first)
        return first is None

    def _bootstrap(self, ranks: tuple[int, ...]) -> Callable[[bytes], list[bytes]]:
        """Everybody's bytes, of one length, over a connection that is there before any other."""
        over = self._bootstraps.get(ranks)
        if over is None and len(ranks) > 1:
            over = self._bootstraps[ranks] = TorchTransport(self.gloo(f"bootstrap/{'-'.join(map(str, ranks))}", ranks))

        def share(mine: bytes) -> list[bytes]:
            if over is None:
                return [mine]
            try:
                rows = over.all_gather_small(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            except RuntimeError as error:
                raise PeerFailed(-1, f"a connection was lost ({error})", "joining the group") from error
            return [row.numpy().tobytes() for row in rows]

        return share

    # -- transports ---------------------------------------------------------------------------------------------------

    def _transport(self, name: str, ranks: tuple[int, ...]) -> Transport:
        if len(ranks) == 1:
            return Alone()
        if self._members.backend != "gloo":
            device = _device_of(self._members.backend)
            over = TorchTransport(self._torch_group(ranks), codec=self._codec, device=device)
            if device.type == "cpu":  # elsewhere a wait ends before the bytes are there, and a clock would say nothing
                self._tune(over, over, over.candidates, ranks)
            return over
        hosts = self._by_host(ranks)
        if not self._shares or not _regular(hosts):
            over = TorchTransport(self.gloo(name, ranks), codec=self._codec)
            self._tune(over, over, over.candidates, ranks)
            self._crossing += [over] if len(hosts) > 1 else []
            return over
        here = next(host for host in hosts if dist.get_rank() in host)
        at = here.index(dist.get_rank())
        local = LocalTransport(at, len(here), share=self._bootstrap(here), timeout=self._timeout.total_seconds())
        self._locals.append(local)
        if len(hosts) == 1:
            return local
        rail = tuple(host[at] for host in hosts)
        over = TorchTransport(self.gloo(f"{name}/rail{at}", rail))
        two_level = TwoLevel(
            ranks.index(dist.get_rank()),
            [[ranks.index(rank) for rank in host] for host in hosts],
            local=local,
            rail=over,
            codec=self._codec,
        )
        self._tune(over, two_level, RAIL, ranks)
        self._crossing.append(two_level)
        return two_level

    def _tune(self, over: TorchTransport, everyone: Transport, candidates: Candidates, ranks: tuple[int, ...]) -> None:
        """How to use ``over``, which connects all of ``everyone`` or some: as these ranks have measured when they were first
        connected in this way. If they have not, they will."""
        key = (type(everyone).__name__, ranks)
        if key in self._tunings:
            over.tune(self._tunings[key])
        else:
            self._untuned.append(_Untuned(key, over, everyone, candidates))

    def _torch_group(self, ranks: Sequence[int]) -> ProcessGroup:
        new_group = cast("Callable[..., ProcessGroup]", getattr(dist, "new_group"))  # noqa: B009 - it has no types
        backend = self._members.backend
        # MPI cannot make a group among its members alone: there every rank of the world must share the model.
        local = backend != "mpi"
        return new_group(list(ranks), timeout=self._timeout, backend=backend, use_local_synchronization=local, sort_ranks=False)


def _regular(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether the two levels can connect them: several ranks on a host, and as many on every one."""
    return len(hosts[0]) > 1 and len({len(ranks) for ranks in hosts}) == 1


def _device_of(backend: str) -> torch.device:
    """Where a backend wants the bytes that it moves."""
    accelerator = torch.accelerator.current_accelerator() if backend != "mpi" else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
