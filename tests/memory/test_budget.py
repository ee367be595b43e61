"""The memory number: a job that was given one lives in a control group of exactly that size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import engine_of
from lowtide.errors import DoesNotFit
from lowtide.runtime.budget import Budget, Meter, children_by_search, children_of
from lowtide.tiers.arena import Arena
from tests.kit import dist, out_of_core  # without a memory number, everything goes to disk
from tests.kit.tools import missing

MIB = 1 << 20
assert out_of_core.RESIDENCIES

JOB = """
import json, os, sys, torch, lowtide
from lowtide.job.gpt import GPT
from lowtide.job.presets import Shape
group, disk, update, activations = sys.argv[1:5]
memory, first_batch, growing = map(int, sys.argv[5:])
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
torch.set_num_threads(2)
torch.manual_seed(0)
with lowtide.deferred(disk=disk):
    model = GPT(Shape(layers=8, width=512, heads=8, tokens=4096, context=128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model, optimizer = lowtide.shard(model, optimizer, memory=memory, disk=disk, update=update, activations=activations)
losses, reads = [], []
for step in range(6):
    batch = first_batch + growing * step
    torch.manual_seed(step)
    tokens = torch.randint(0, 4096, (batch, 128))
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    reads.append(lowtide.api.engine_of(model).usage().disk_read_bytes)
with open("/proc/self/status") as file:
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file if line.endswith("kB\\n")}
peak = (kilobytes["VmHWM"] - kilobytes["RssFile"]) * 1024
print(json.dumps({"losses": losses, "read": reads[-1] - reads[-2], "peak": peak}))
"""


@pytest.fixture(autouse=True)
def _no_children() -> None:
    """Ranks of other tests are children of this process, and count as its loader workers would."""
    dist.close_pools()


@pytest.fixture
def group(tmp_path: Path) -> Path:
    root = Path("/sys/fs/cgroup/memory")
    if not root.is_dir():
        root = Path("/sys/fs/cgroup")
    path = root / f"lowtide-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        missing("a memory cgroup", f"{root} does not let us make one: {error.strerror}")
    yield path  # type: ignore[misc]
    path.rmdir()


def run(
    group: Path, memory: int, disk: Path, update: str, *, activations: str = "auto", batch: int = 2, growing: int = 0
) -> dict[str, object]:
    name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / name).write_text(str(memory))
    numbers = [str(number) for number in (memory, batch, growing)]
    command = [sys.executable, "-c", JOB, str(group), str(disk), update, activations, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"exit {done.returncode} (-9: killed for memory): {done.stderr[-2000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    # The group does not count what the process had before it joined; the kernel's own peak does.
    assert result["peak"] <= memory, f"{result['peak'] / MIB:.0f} MiB of {memory / MIB:.0f}"
    return result


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_control_group_of_the_number_s_size(group: Path, tmp_path: Path, update: str) -> None:
    """29 M parameters have 470 MB of states; torch itself takes about 250 MiB. Nothing is killed, and memory saves reading."""
    small = run(group, 520 * MIB, tmp_path, update)
    large = run(group, 1200 * MIB, tmp_path, update)
    assert small["losses"] == large["losses"], "the number changed the numbers"
    assert large["read"] < small["read"], "more memory means less traffic"  # type: ignore[operator]


def test_what_backward_has_freed_leaves_room_for_the_update(group: Path, tmp_path: Path) -> None:
    """The allocator keeps what backward has freed, here about 300 MB of activations; the update then takes its buffers."""
    run(group, 760 * MIB, tmp_path, "step", activations="keep", batch=10)


def test_batches_that_grow_are_not_killed(group: Path, tmp_path: Path) -> None:
    run(group, 700 * MIB, tmp_path, "backward", growing=1)


def test_what_cannot_fit_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)])
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(DoesNotFit, match="raise memory to at least") as caught:
        lowtide.shard(model, torch.optim.AdamW(model.parameters()), memory=8 * MIB, disk=str(tmp_path))
    assert caught.value.needed_bytes > caught.value.budget_bytes == 8 * MIB
    assert [p.data_ptr() for p in model.parameters()] == before
    assert type(model) is nn.Sequential


def test_a_forward_pass_writes_nothing(tmp_path: Path) -> None:
    """Parameters that were not changed are let go without a write."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    model, _ = lowtide.shard(model, None, disk=str(tmp_path), comm=lowtide.Comm(bucket_bytes=0))
    engine = engine_of(model)
    assert engine.store is not None
    engine.store.drain()  # shard() itself writes, behind its return
    before = engine.usage()
    with torch.no_grad():
        model(torch.ones(2, 64))
    engine.store.drain()
    after = engine.usage()
    assert after.disk_read_bytes > before.disk_read_bytes
    assert after.disk_written_bytes == before.disk_written_bytes


def test_the_heap_is_given_back_when_it_is_asked_for_or_near_the_number() -> None:
    """Memory that is given back costs a page fault for every page that is taken again, so a step with room keeps it."""
    budget = Budget(1 << 40)
    budget.new_step(tidy=True)
    start = budget.read()

    def leave_freed() -> None:
        # Small enough to lie in the heap, not in mappings of their own; some stay, or the heap would shrink by itself.
        kept.extend([torch.ones(16 << 10) for _ in range(2048)][::64])

    kept: list[torch.Tensor] = []
    leave_freed()
    freed = budget.read() - start
    assert freed > 100 * MIB, "the allocator keeps what was freed"
    budget.new_step(tidy=False)
    assert budget.read() - start > freed // 2, "there is room: it stays"
    budget.make_room(1 << 20)
    assert budget.read() - start > freed // 2, "and for what comes"
    budget.make_room(1 << 40)
    assert budget.read() - start < freed // 2, "what comes needs it"
    leave_freed()
    budget.new_step(tidy=True)
    assert budget.read() - start < freed // 2, "a step is to be measured"


def test_what_came_and_went_between_two_moments_is_known_the_next_time() -> None:
    """The kernel remembers the highest mark of the process: it shows a peak that no reading met."""
    budget = Budget(1 << 40)
    budget.new_step(tidy=True)
    nbytes = Meter().risen() + 100 * MIB
    budget.look("before")
    start = budget.read()
    torch.ones(nbytes // 4)
    budget.look("after")
    assert budget.read() < start + nbytes // 2, "it is gone"
    assert nbytes * 0.95 < budget.peak - start < nbytes * 1.05
    assert nbytes * 0.95 < budget.needed - start < nbytes * 1.05
    budget.new_step(tidy=True)
    budget.look("before")
    assert budget.needed - start > nbytes * 0.9, "it is expected to come again"


def test_room_is_made_for_what_is_known_to_come() -> None:
    spared: list[int] = []
    budget = Budget(1 << 40, spare=lambda: spared.append(1))
    budget.new_step(tidy=True)
    budget.look("before")
    taken = torch.ones(64 << 20)
    budget.look("after")
    del taken
    budget.limit = budget.settle() + 100 * MIB
    budget.look("after")
    assert not spared, "nothing comes after it that would not fit"
    budget.look("before")
    assert spared, "256 MB are expected, 100 are left"
    spared.clear()
    budget.forget_growth()
    budget.new_step(tidy=True)
    budget.look("before")
    assert not spared


def test_what_arenas_take_is_not_expected_again() -> None:
    arena = Arena(torch.device("cpu"), forked=False)
    budget = Budget(1 << 40, pools=[arena])
    budget.new_step(tidy=True)
    budget.look("before")
    kept = arena.take(256 * MIB)
    kept.tensor.fill_(1)
    budget.look("after")
    budget.new_step(tidy=True)
    start = budget.read()
    budget.look("before")
    assert budget.needed - start < kept.nbytes // 4


def test_what_workers_and_their_children_have_counts() -> None:
    """Asked of the kernel, and by a search where it does not say: the same processes."""
    code = "import subprocess, sys, time; held = bytearray(80 << 20); print('ready', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    meter = Meter()
    meter.look_around()
    before = meter.children_bytes
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        found = children_of(os.getpid())
        assert worker.pid in found
        assert sorted(found) == sorted(children_by_search(os.getpid()))
        meter.look_around()
        assert meter.children_bytes - before > 80 * MIB, "the worker's own worker has them"
        for pid in found:
            if pid != worker.pid and worker.pid in [p.pid for p in psutil.Process(pid).parents()]:
                os.kill(pid, signal.SIGKILL)
    assert children_by_search(worker.pid) == [], "it has ended"


def grown(budget: Budget, moment: str, nbytes: int) -> None:
    """Let ``budget`` see that so much is taken after ``moment``."""
    budget.look(moment)
    taken = torch.ones(nbytes // 4)
    budget.look(None)
    del taken


def test_room_is_made_again_only_for_more_than_was_made_before() -> None:
    spared: list[int] = []
    budget = Budget(1 << 40, spare=lambda: spared.append(1))
    budget.new_step(tidy=True)
    grown(budget, "little", 64 * MIB)
    grown(budget, "much", 256 * MIB)
    budget.margin = 8 * MIB
    budget.limit = budget.settle() + 50 * MIB
    budget.look("little")
    assert len(spared) == 1
    budget.look("little")
    assert len(spared) == 1, "nothing has changed since"
    budget.look("much")
    assert len(spared) == 2, "more is to come than room was made for"


def test_what_a_loop_does_between_passes_is_not_expected_again(tmp_path: Path) -> None:
    """Evaluation, and then something large, a checkpoint or a metric."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    model, optimizer = lowtide.shard(model, torch.optim.AdamW(model.parameters()), memory="6GiB", disk=str(tmp_path))
    budget = engine_of(model).budget
    for _ in range(4):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 64))
        held = torch.ones(300 * MIB // 4)
        model(torch.ones(2, 64))  # and a pass whose result nobody uses
        more = torch.ones(300 * MIB // 4)
        loss = model(torch.ones(2, 64)).sum()
        del held, more
        loss.backward()
        optimizer.zero_grad()
    optimizer.step()
    start = budget.read()
    model(torch.ones(2, 64)).sum().backward()
    assert budget.needed - start < 200 * MIB


def test_buffers_of_an_update_that_was_put_off_take_what_activations_leave(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = lowtide.shard(model, optimizer, memory="6GiB", disk=str(tmp_path), update="step")
    engine = engine_of(model)
    placer, buffers, needs = engine.placer, engine.memory.buffers, engine.placer._needs
    planned = placer.placement.buffer_bytes
    assert needs is not None
    assert planned is not None
    assert planned > 2 * needs.chunk_bytes
    placer.buffers_within_room()
    assert buffers.capacity == planned, "there is room"
    engine.budget.limit = engine.budget.read()
    placer.buffers_within_room()
    assert buffers.capacity == 2 * needs.chunk_bytes, "an update can always go on"
    placer.buffers_as_planned()
    assert buffers.capacity == planned
