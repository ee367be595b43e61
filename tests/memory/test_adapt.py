"""The world changes while a model trains: a slow disk, a smaller control group, another process in it. Bits stay, and the log
says why."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide
from lowtide.api import engine_of
from lowtide.planning.options import Rates
from lowtide.runtime import assembly
from lowtide.runtime.conditions import DiskSpeed
from lowtide.tiers.null import NullStore
from tests.kit import dist
from tests.kit.stores import SlowStore
from tests.kit.tools import missing
from tests.memory.test_set_memory import MIB, base, build, step


@pytest.fixture(autouse=True)
def _no_children() -> None:
    """Ranks of other tests are children of this process, and count as its loader workers would."""
    dist.close_pools()


# -- noise changes nothing ---------------------------------------------------------------------------------------------


def speed_of(store: NullStore) -> DiskSpeed:
    speed = DiskSpeed((), store, ranks=1)
    speed.rates = Rates(disk_read=1e-9, disk_write=1e-9)  # 1 GB/s
    return speed


def pass_a_step(store: NullStore, speed: DiskSpeed, *, gigabytes_per_second: float, seconds: float = 2.0) -> str | None:
    """A step in which the disk worked all the time, at this speed."""
    store.traffic.read_bytes += int(gigabytes_per_second * 1e9 * seconds)
    store.traffic.busy_seconds += seconds
    return speed.look(seconds)


def test_a_disk_that_is_slow_for_a_moment_changes_nothing() -> None:
    store = NullStore()
    speed = speed_of(store)
    rates = [1.0, 0.4, 0.4, 1.0, 0.9, 0.4, 1.1, 0.4, 0.4, 0.8, 1.2, 1.4]
    assert [pass_a_step(store, speed, gigabytes_per_second=r) for r in rates] == [None] * len(rates)
    assert speed.rates.disk_read == 1e-9


def test_a_disk_that_stays_slow_is_believed_and_so_is_its_recovery() -> None:
    store = NullStore()
    speed = speed_of(store)
    said = [pass_a_step(store, speed, gigabytes_per_second=0.5) for _ in range(3)]
    assert said[:2] == [None, None]
    assert said[2] == "the disk gives 0.50 GB/s instead of 1.00"
    assert speed.rates.disk_read == pytest.approx(2e-9)
    said = [pass_a_step(store, speed, gigabytes_per_second=1.0) for _ in range(3)]
    assert said[2] == "the disk gives 1.00 GB/s instead of 0.50"


def test_a_disk_that_is_far_off_is_believed_sooner() -> None:
    store = NullStore()
    speed = speed_of(store)
    assert [pass_a_step(store, speed, gigabytes_per_second=r) for r in (0.2, 0.9, 0.2)] == [None, None, None]
    assert pass_a_step(store, speed, gigabytes_per_second=0.2) == "the disk gives 0.20 GB/s instead of 1.00"
    said = [pass_a_step(store, speed, gigabytes_per_second=1.0) for _ in range(2)]
    assert said == [None, "the disk gives 1.00 GB/s instead of 0.20"]
    said = [pass_a_step(store, speed, gigabytes_per_second=r) for r in (0.05, 0.3)]
    assert said == [None, "the disk gives 0.30 GB/s instead of 1.00"], "of two the one that is less extreme"


def test_a_tight_run_finds_its_placement_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is put off has not taken its buffers when the step ends: that is no reason to learn again."""
    monkeypatch.setattr(DiskSpeed, "look", lambda *_: None)  # other tests use the disk meanwhile, and that would be a reason
    reference, plain = build()
    model, optimizer = lowtide.shard(*build(), memory=base() + 140 * MIB, disk=tmp_path, update=lowtide.Update("step", 1 << 20))
    engine, steady = engine_of(model), []
    for i in range(10):
        assert step(model, optimizer, i) == step(reference, plain, i)
        steady.append((engine.placer.steady, engine.due.under_way))
    assert steady[-5:] == [(True, True)] * 5


def test_a_disk_that_had_time_to_idle_is_not_slow() -> None:
    store = NullStore()
    speed = speed_of(store)
    for _ in range(6):
        store.traffic.read_bytes += 200 * MIB
        store.traffic.busy_seconds += 0.5
        assert speed.look(10.0) is None


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def throttled(monkeypatch: pytest.MonkeyPatch) -> list[SlowStore]:
    stores: list[SlowStore] = []
    opened = assembly._open_disk

    def slow(config: object, rank: int) -> SlowStore | None:
        store = opened(config, rank)  # type: ignore[arg-type]
        if store is not None:
            stores.append(SlowStore(store, 0.0))
        return stores[-1] if store is not None else None

    monkeypatch.setattr(assembly, "_open_disk", slow)
    return stores


def test_a_throttled_disk_is_believed_and_changes_no_bit(tmp_path: Path, throttled: list[SlowStore]) -> None:
    reference, plain = build()
    expected = [step(reference, plain, i) for i in range(16)]
    model, optimizer = lowtide.shard(*build(), memory=base() + 140 * MIB, disk=tmp_path, update=lowtide.Update("step", 1 << 20))
    losses = [step(model, optimizer, i) for i in range(4)]
    speed = engine_of(model).placer._speed
    assert speed is not None
    speed.rates = Rates(disk_read=1e-9, disk_write=1e-9)  # whatever else the disk was busy with so far
    throttled[0].seconds = 0.04  # of each request of a mebibyte, of which eight are under way
    losses += [step(model, optimizer, i) for i in range(4, 10)]
    assert speed.rates.disk_read > 2e-9, "0.5 GB/s or less instead of 1"
    throttled[0].seconds = 0.0
    losses += [step(model, optimizer, i) for i in range(10, 16)]
    assert losses == expected
    limit = engine_of(model).budget.limit
    assert limit is not None
    assert engine_of(model).budget.peak <= limit


SQUEEZED = """
import json, logging, os, subprocess, sys, torch, lowtide
from lowtide.api import engine_of
from lowtide.job.gpt import GPT
from lowtide.job.presets import Shape
from lowtide.spec.limits import memory_left
group, disk, memory, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
squeeze = how == "squeeze"
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("lowtide").addHandler(handler)
logging.getLogger("lowtide").setLevel(logging.INFO)
torch.set_num_threads(2)
torch.manual_seed(0)
with lowtide.deferred(disk=disk):
    model = GPT(Shape(layers=8, width=512, heads=8, tokens=4096, context=128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model, optimizer = lowtide.shard(model, optimizer, memory=memory, disk=disk)
limit_file = next(f for f in ("memory.limit_in_bytes", "memory.max") if os.path.exists(f"{group}/{f}"))
losses, limits, in_step = [], [], []
for step in range(12):
    if squeeze and step == 4:
        lowtide.set_memory(model, memory * 3 // 4)
    if squeeze and step == 8:  # nobody tells lowtide: it has to notice that the group has become smaller
        engine = engine_of(model)
        with open(f"{group}/{limit_file}", "w") as file:
            file.write(str(int(engine.budget.limit * 0.75)))  # less than the limit, as what was imported before is not charged
    if how == "neighbour" and step == 8:  # and nobody tells it that another process of the group takes memory
        budget = engine_of(model).budget
        held = budget.settle()
        taken = memory_left() - (max(int(budget.limit * 0.9), held + 40 * 2**20) - held)  # it must live until it has noticed
        # In a session of its own and no child of ours: what children have is part of the number.
        command = [sys.executable, "-c", NEIGHBOUR, group, str(taken)]
        subprocess.run(command, check=True)
    torch.manual_seed(step)
    tokens = torch.randint(0, 4096, (2, 128))
    loss = model(tokens, tokens)
    in_step.append(engine_of(model).budget.limit)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    limits.append(engine_of(model).budget.limit)
print(json.dumps({"losses": losses, "limits": limits, "in_step": in_step, "said": said}))
"""
NEIGHBOUR = """
import os, sys, time
ready, done = os.pipe()
if os.fork():
    os.close(done)
    sys.exit(None if os.read(ready, 1) else "the neighbour has died before it had its memory")
os.setsid()
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
held = b"x" * int(sys.argv[2])
for inherited in (0, 1, 2):  # nobody waits for the end of our output
    os.close(inherited)
os.write(done, b"!")
time.sleep(300)
"""


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup/memory")
    path = (root if root.is_dir() else Path("/sys/fs/cgroup")) / f"lowtide-adapt-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        missing("a memory cgroup", f"{path.parent} does not let us make one: {error.strerror}")
    yield path
    path.rmdir()


def end_all_in(group: Path) -> None:
    """The neighbour of a run, which does not end with it."""
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def trained_in(group: Path, disk: Path, memory: int, how: str, *, others: int = 0) -> dict[str, list[object]]:
    """In a control group of ``memory``, and ``others`` for other processes."""
    name = next(f for f in ("memory.limit_in_bytes", "memory.max") if (group / f).exists())
    (group / name).write_text(str(memory + others))
    program = f"NEIGHBOUR = {NEIGHBOUR!r}\n{SQUEEZED}"
    command = [sys.executable, "-c", program, str(group), str(disk), str(memory), how]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    finally:
        end_all_in(group)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


MEMORY = 1000 * MIB


@pytest.fixture(scope="module")
def calm(group: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The run that nothing disturbs."""
    return trained_in(group, tmp_path_factory.mktemp("calm"), MEMORY, "calm")


@pytest.mark.timeout(600)  # two runs, which take long on a busy disk
def test_memory_that_another_process_took_is_noticed(group: Path, tmp_path: Path, calm: dict[str, list[object]]) -> None:
    found = trained_in(group, tmp_path, MEMORY, "neighbour", others=600 * MIB)
    assert found["losses"] == calm["losses"]
    limits = [int(n) for n in found["limits"]]  # type: ignore[call-overload]
    assert limits[:8] == [MEMORY] * 8
    assert 0.8 * MEMORY < limits[8] < 0.95 * MEMORY
    assert found["in_step"][8] == limits[8], "before the step, not after it"
    reasons = [str(line) for line in found["said"] if "placed anew" in str(line)]
    assert any(line.startswith("the machine leaves") for line in reasons)
    assert not any("the machine leaves" in str(line) for line in calm["said"])


@pytest.mark.timeout(600)  # two runs, which take long on a busy disk
def test_a_run_that_is_squeezed_lives_on_with_the_same_bits(group: Path, tmp_path: Path, calm: dict[str, list[object]]) -> None:
    """First by set_memory, then by a smaller control group, of which nobody tells it."""
    memory = MEMORY
    squeezed = trained_in(group, tmp_path, memory, "squeeze")
    assert squeezed["losses"] == calm["losses"]
    limits = [int(n) for n in squeezed["limits"]]  # type: ignore[call-overload]
    assert limits[3] == memory
    assert limits[4] == memory * 3 // 4
    assert limits[-1] < limits[4], "the smaller group was noticed"
    assert squeezed["in_step"][8] < limits[7], "before the step that would not have survived it"  # type: ignore[operator]
    assert any("the caller allows" in str(line) for line in squeezed["said"])
    assert any("the machine leaves" in str(line) for line in squeezed["said"])
