"""Joining: the world, a part of it, a mesh of two dimensions; and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide.comm import Axis, Group, Label, Wire
from lowtide.errors import ArgumentError, DeadlineExceeded
from tests.kit.dist import run_ranks


def who(wire: Wire, notes: list[bytes]) -> dict[str, list[int]]:
    """The global ranks on each axis, in the order of the axis."""
    mine = torch.tensor([dist.get_rank()])
    axes = {"shard": wire.shard, "replicate": wire.replicate, "world": wire.world}
    return {name: axis.all_gather_small(mine).flatten().tolist() for name, axis in axes.items()}


def look(group: Group) -> tuple[int, int, Axis, Axis, dict[str, list[int]]]:
    try:
        channel = group.channel("one")
        seen = channel.run(Label("look", 0, "axes"), who)
        return group.rank, group.size, group.replicate, group.shard, seen
    finally:
        group.close()


def test_without_torch_distributed_there_is_one_rank() -> None:
    assert not dist.is_initialized()
    group = Group.join(None, deadline=5)
    assert (group.rank, group.size, group.shard, group.replicate) == (0, 1, Axis(0, 1), Axis(0, 1))
    assert group.watch.failure is None
    group.watch.raise_if_failed("anything")
    group.watch.report(ValueError())
    assert group.channel("one").run(Label("x", 0, "y"), lambda wire, notes: notes, b"note") == [b"note"]
    group.close()
    group.close()


def join_world(rank: int, world_size: int) -> object:
    return look(Group.join(None, deadline=20))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_none_is_the_world(world_size: int) -> None:
    everybody = list(range(world_size))
    for rank, seen in enumerate(run_ranks(world_size, join_world)):
        axes = {"shard": everybody, "replicate": [rank], "world": everybody}
        assert seen == (rank, world_size, Axis(0, 1), Axis(rank, world_size), axes)


def join_part(rank: int, world_size: int) -> object:
    part = dist.new_group([1, 3], use_local_synchronization=True)
    extra = [dist.new_group([1], use_local_synchronization=True) for _ in range(2)]  # ranks may own other numbers of groups
    try:
        if rank not in (1, 3):
            with pytest.raises(ArgumentError, match="not in the given group"):
                Group.join(dist.GroupMember.NON_GROUP_MEMBER, deadline=5)  # type: ignore[arg-type]
            return None
        return look(Group.join(part, deadline=20))
    finally:
        for group in [part, *extra]:
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)


def test_a_part_of_the_world_may_join() -> None:
    seen = run_ranks(4, join_part)
    assert seen[0] is None
    assert seen[2] is None
    assert seen[1] == (0, 2, Axis(0, 1), Axis(0, 2), {"shard": [1, 3], "replicate": [1], "world": [1, 3]})
    assert seen[3] == (1, 2, Axis(0, 1), Axis(1, 2), {"shard": [1, 3], "replicate": [3], "world": [1, 3]})


def join_mesh(rank: int, world_size: int) -> object:
    return look(Group.join(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), deadline=20))


def test_a_mesh_of_two_dimensions_is_replicas_of_shards() -> None:
    assert run_ranks(4, join_mesh) == [
        (0, 4, Axis(0, 2), Axis(0, 2), {"shard": [0, 1], "replicate": [0, 2], "world": [0, 1, 2, 3]}),
        (1, 4, Axis(0, 2), Axis(1, 2), {"shard": [0, 1], "replicate": [1, 3], "world": [0, 1, 2, 3]}),
        (2, 4, Axis(1, 2), Axis(0, 2), {"shard": [2, 3], "replicate": [0, 2], "world": [0, 1, 2, 3]}),
        (3, 4, Axis(1, 2), Axis(1, 2), {"shard": [2, 3], "replicate": [1, 3], "world": [0, 1, 2, 3]}),
    ]


def join_columns(rank: int, world_size: int, shape: tuple[int, int]) -> object:
    return look(Group.join(DeviceMesh("cpu", torch.tensor([1, 0]).view(shape)), deadline=20))


def test_a_mesh_may_be_flat_and_in_any_order() -> None:
    sharded, replicated = run_ranks(2, join_columns, (1, 2)), run_ranks(2, join_columns, (2, 1))
    assert sharded[1] == (0, 2, Axis(0, 1), Axis(0, 2), {"shard": [1, 0], "replicate": [1], "world": [1, 0]})
    assert replicated[1] == (0, 2, Axis(0, 2), Axis(0, 1), {"shard": [1], "replicate": [1, 0], "world": [1, 0]})


def refuse(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1, 1))
    texts = []
    for wrong in ("gloo", 3, [0, 1], mesh):
        with pytest.raises(ArgumentError) as caught:
            Group.join(wrong, deadline=5)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return texts


def test_other_things_are_refused_with_what_is_allowed() -> None:
    for texts in run_ranks(2, refuse):
        assert all("ProcessGroup" in text and "DeviceMesh" in text for text in texts)
        assert "3 dimensions" in texts[-1]


def interleave(rank: int, world_size: int) -> list[int]:
    """The caller's collectives and ours, at the same time, in another order on each rank."""
    group = Group.join(None, deadline=20)
    a, b = group.channel("a"), group.channel("b")
    seen: list[int] = []

    def total(wire: Wire, notes: list[bytes]) -> int:
        return int(wire.world.all_gather_small(torch.tensor([rank + 1])).sum())

    for i in range(20):
        label = Label("sum", i, "x")
        order = (a, b) if rank == 0 else (b, a)
        tickets = [channel.submit(label, total) for channel in order]
        user = torch.tensor([10 * (rank + 1)])
        dist.all_reduce(user)
        seen.extend([int(user), *(ticket.wait() for ticket in tickets)])
    group.close()
    return seen


def test_channels_and_the_callers_collectives_do_not_meet() -> None:
    assert run_ranks(2, interleave) == [[30, 3, 3] * 20] * 2


def two_groups(rank: int, world_size: int) -> object:
    one, two = Group.join(None, deadline=20), Group.join(None, deadline=20)
    seen = look(two), look(one)
    assert look(Group.join(None, deadline=20)) == seen[0]
    return seen[0] == seen[1]


def test_several_models_may_join_one_after_the_other_and_together() -> None:
    assert run_ranks(2, two_groups) == [True, True]


def join_late(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(DeadlineExceeded) as caught:
        Group.join(None, deadline=0.5)
    return str(caught.value)


def test_a_rank_that_never_joins_is_a_deadline() -> None:
    assert "no answer for ranks [0, 1] to say where they are within" in run_ranks(2, join_late, fresh=True)[0]
