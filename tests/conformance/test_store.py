"""What every store must do, asked of all of them: disk with and without direct I/O, striped, host, slowed down, null."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.errors import ArgumentError, DoesNotFit, InternalError, Refused
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.host import HostStore
from lowtide.tiers.null import NullStore
from lowtide.tiers.spool import Folder
from lowtide.tiers.store import Extent, Key, Priority, Store
from tests.kit.stores import SlowStore, aligned_bytes

KEY = Key("blocks.3", "moments")
SIZES = [1, 511, 4095, 4096, 4097, 8192, 100_000, 0, (1 << 20) + 4096, (1 << 20) + 5, (9 << 20) + 3]
FAST = settings(max_examples=25, deadline=None)


def striped(folder: str) -> DiskStore:
    pair = [os.path.join(folder, name) for name in "ab"]
    for path in pair:
        os.makedirs(path, exist_ok=True)
    return DiskStore([Folder(path) for path in pair], rank=0)


BUILDERS: dict[str, Callable[[str], Store]] = {
    "disk": lambda folder: DiskStore([Folder(folder)], rank=0),
    "memory folder": lambda folder: DiskStore([Folder(folder)], rank=0),
    "one thread": lambda folder: DiskStore([Folder(folder)], rank=0, threads=1),
    "striped": striped,
    "host": lambda folder: HostStore(),
    "slow disk": lambda folder: SlowStore(DiskStore([Folder(folder)], rank=0), 0.002),
    "slow host": lambda folder: SlowStore(HostStore(), 0.002),
}
DISKS = ["disk", "memory folder", "one thread", "striped", "slow disk"]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if getattr(request, "param", "disk") != "memory folder":
        yield str(tmp_path)
        return
    path = tempfile.mkdtemp(dir="/dev/shm")
    yield path
    shutil.rmtree(path)


def over(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("build", "folder"), [(n, n) for n in names], indirect=["build", "folder"], ids=names)


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Callable[[str], Store]:
    return BUILDERS[request.param]


@pytest.fixture
def store(build: Callable[[str], Store], folder: str) -> Iterator[Store]:
    store = build(folder)
    yield store
    store.close()


def cuts_of(sizes: list[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]


def random_bytes(nbytes: int, *, aligned: bool = False) -> Tensor:
    memory = torch.from_numpy(aligned_bytes(nbytes)) if aligned else torch.empty(nbytes + 1, dtype=torch.uint8)[1:]
    return memory.random_(0, 256)


def get(store: Store, extent: Extent, block: int) -> Tensor:
    into = torch.zeros(extent.block_bytes(block), dtype=torch.uint8)
    store.read(extent, block, into, Priority.NOW).wait()
    return into


@over(list(BUILDERS))
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned memory", "odd memory"])
def test_every_size_comes_back(store: Store, aligned: bool) -> None:
    extent = store.reserve(KEY, cuts_of(SIZES))
    assert extent.nbytes == sum(SIZES)
    data = [random_bytes(n, aligned=aligned) for n in SIZES]
    for block, bytes_ in enumerate(data):
        store.write(extent, block, bytes_, Priority.WRITE_BACK).wait()
    into = [random_bytes(n, aligned=aligned) for n in SIZES]
    tickets = [store.read(extent, block, memory, Priority.NEXT) for block, memory in enumerate(into)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done
    assert all(torch.equal(a, b) for a, b in zip(data, into, strict=True))
    assert (store.traffic.read_bytes, store.traffic.written_bytes) == (sum(SIZES), sum(SIZES))


@over(list(BUILDERS))
def test_the_last_write_wins_and_neighbours_stay(store: Store) -> None:
    extent = store.reserve(KEY, cuts_of([5000, 5000, 5000]))
    data = [random_bytes(5000) for _ in range(3)]
    for block, bytes_ in enumerate(data):
        store.write(extent, block, bytes_, Priority.WRITE_BACK)
    newer = [random_bytes(5000) for _ in range(4)]
    for bytes_ in newer:
        store.write(extent, 1, bytes_, Priority.WRITE_BACK)
    store.drain()
    for block, expected in enumerate([data[0], newer[-1], data[2]]):
        assert torch.equal(get(store, extent, block), expected)


@over(list(BUILDERS))
def test_requests_of_one_block_keep_their_order_under_load(store: Store) -> None:
    rng = random.Random(0)
    blocks = 6
    extent = store.reserve(KEY, cuts_of([4096 * 3 + 7] * blocks))
    last: dict[int, int] = {}
    checks: list[tuple[Tensor, int]] = []
    for number in range(150):
        block = rng.randrange(blocks)
        priority = Priority(rng.randrange(len(Priority)))
        if block in last and rng.random() < 0.5:
            into = torch.zeros(extent.block_bytes(block), dtype=torch.uint8)
            store.read(extent, block, into, priority)
            checks.append((into, last[block]))
        else:
            data = torch.full((extent.block_bytes(block),), number, dtype=torch.uint8)
            store.write(extent, block, data, priority)
            last[block] = number
    store.drain()
    assert len(checks) > 40
    assert all(bool((into == expected).all()) for into, expected in checks)


@over(list(BUILDERS))
def test_callbacks_are_called_once(store: Store) -> None:
    extent = store.reserve(KEY, cuts_of([4096] * 8))
    told: list[int] = []
    for block in range(8):
        ticket = store.write(extent, block, random_bytes(4096), Priority.NOW)
        ticket.on_done(lambda block=block: told.append(block))
    store.drain()
    assert sorted(told) == list(range(8))
    ticket.on_done(lambda: told.append(-1))
    assert told[-1] == -1


@over(list(BUILDERS))
def test_what_was_never_written_is_not_read(store: Store) -> None:
    extent = store.reserve(KEY, cuts_of([100, 100]))
    store.write(extent, 0, random_bytes(100), Priority.NOW).wait()
    with pytest.raises(InternalError, match=r"block 1 of moments of 'blocks\.3': it was never written"):
        get(store, extent, 1)


@over(list(BUILDERS))
@pytest.mark.parametrize("wrong", ["length", "type", "shape", "block"])
def test_wrong_memory_is_refused(store: Store, wrong: str) -> None:
    extent = store.reserve(KEY, [0, 64])
    tensor = {
        "length": torch.zeros(65, dtype=torch.uint8),
        "type": torch.zeros(64, dtype=torch.int8),
        "shape": torch.zeros((8, 8), dtype=torch.uint8),
        "block": torch.zeros(64, dtype=torch.uint8),
    }[wrong]
    with pytest.raises(InternalError, match=r"moments of 'blocks\.3'"):
        store.write(extent, 1 if wrong == "block" else 0, tensor, Priority.NOW).wait()


@over(list(BUILDERS))
@pytest.mark.parametrize("cuts", [[], [1, 2], [0, 5, 4]])
def test_wrong_cuts_are_refused(store: Store, cuts: list[int]) -> None:
    with pytest.raises(InternalError, match="cuts"):
        store.reserve(KEY, cuts)


@over(list(BUILDERS))
def test_freed_room_is_refused_and_others_stay(store: Store) -> None:
    kept, gone = store.reserve(KEY, [0, 5000]), store.reserve(KEY, [0, 5000])
    data = random_bytes(5000)
    store.write(kept, 0, data, Priority.NOW)
    into = torch.zeros(5000, dtype=torch.uint8)
    store.write(gone, 0, random_bytes(5000), Priority.WRITE_BACK)
    last = store.read(gone, 0, into, Priority.WRITE_BACK)
    store.free(gone)  # while requests are pending
    store.free(gone)
    last.wait()
    store.drain()
    with pytest.raises(InternalError, match="freed"):
        store.read(gone, 0, into, Priority.NOW).wait()
    for _ in range(3):
        again = store.reserve(KEY, [0, 5000])
        store.write(again, 0, random_bytes(5000), Priority.NOW).wait()
        store.free(again)
    assert torch.equal(get(store, kept, 0), data)


@over(list(BUILDERS))
def test_several_threads(store: Store) -> None:
    failures: list[BaseException] = []

    def user(number: int) -> None:
        try:
            for turn in range(6):
                extent = store.reserve(Key(f"unit {number}", "values"), cuts_of([5000, 4096]))
                for block in range(2):
                    data = torch.full((extent.block_bytes(block),), 10 * number + turn, dtype=torch.uint8)
                    store.write(extent, block, data, Priority.WRITE_BACK)
                    assert torch.equal(get(store, extent, block), data)
                store.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=user, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    store.drain()


@over(list(BUILDERS))
def test_close_is_final_and_idempotent(build: Callable[[str], Store], folder: str) -> None:
    before = threading.enumerate()
    store = build(folder)
    extent = store.reserve(KEY, cuts_of([8192] * 20))
    data = random_bytes(8192)
    tickets = [store.write(extent, block, data, Priority.WRITE_BACK) for block in range(20)]
    store.close()
    store.close()
    assert all(ticket.done for ticket in tickets)
    for use in (
        lambda: store.reserve(KEY, [0, 1]),
        lambda: store.write(extent, 0, data, Priority.NOW).wait(),
        lambda: store.read(extent, 0, data, Priority.NOW).wait(),
    ):
        with pytest.raises(Refused, match="closed"):
            use()
    store.free(extent)
    assert not [thread for thread in threading.enumerate() if thread not in before]
    assert not [name for _, folders, files in os.walk(folder) for name in (*folders, *files) if name not in "ab"]


@pytest.mark.parametrize("name", list(BUILDERS))
@FAST
@given(data=st.data())
def test_any_sequence_of_requests_gives_what_was_written_last(name: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3 * 4096) | st.sampled_from([4096, 8192]), min_size=1, max_size=5))
    steps = data.draw(
        st.lists(st.tuples(st.booleans(), st.integers(0, len(sizes) - 1), st.sampled_from(Priority)), max_size=25)
    )
    odd = data.draw(st.booleans())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if name == "memory folder" else None) as folder:
        with closing(BUILDERS[name](folder)) as store:
            extent = store.reserve(KEY, cuts_of(sizes))
            content: dict[int, Tensor] = {}
            checks: list[tuple[Tensor, Tensor]] = []
            for write, block, priority in steps:
                if write:
                    content[block] = random_bytes(sizes[block], aligned=not odd)
                    store.write(extent, block, content[block], priority)
                elif block in content:
                    checks.append((random_bytes(sizes[block], aligned=odd), content[block]))
                    store.read(extent, block, checks[-1][0], priority)
            store.drain()
            assert all(torch.equal(into, expected) for into, expected in checks)
            for block, expected in content.items():
                assert torch.equal(get(store, extent, block), expected)


@over(DISKS)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_and_disturbs_nothing(store: Store, folder: str) -> None:
    extent = store.reserve(KEY, [0, 5000])
    data = random_bytes(5000)
    store.write(extent, 0, data, Priority.NOW).wait()
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: store.reserve(KEY, [0, 1]),
            lambda: store.read(extent, 0, data, Priority.NOW),
            lambda: store.write(extent, 0, data, Priority.NOW),
            store.drain,
        ):
            try:
                use()
            except Refused:
                refused += 1
        inner = store.inner if isinstance(store, SlowStore) else store
        inner.free(extent)
        store.close()
        inner._finalizer()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert torch.equal(get(store, extent, 0), data)
    assert [name for _, folders, _ in os.walk(folder) for name in folders if name.startswith("lowtide-")]


@over(DISKS)
def test_a_dropped_store_is_gone(build: Callable[[str], Store], folder: str) -> None:
    store = build(folder)
    extent = store.reserve(KEY, cuts_of([4096] * 10))
    for block in range(10):
        store.write(extent, block, random_bytes(4096), Priority.WRITE_BACK)
    store.drain()
    seen = weakref.ref(store)
    del store
    gc.collect()
    for thread in threading.enumerate():  # a thread may be just letting go of its last request
        if thread.name.startswith("lowtide-io"):
            thread.join(30)
    assert seen() is None
    assert not [name for _, folders, _ in os.walk(folder) for name in folders if name.startswith("lowtide-")]


class Held(DiskStore):
    """The first write does not end before it may."""

    def __init__(self, folder: str) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        super().__init__([Folder(folder)], rank=0, threads=1)

    def _pwrite(self, fd: int, memory: object, offset: int) -> int:
        if not self.entered.is_set():
            self.entered.set()
            assert self.leave.wait(30)
        return super()._pwrite(fd, memory, offset)


@pytest.mark.parametrize("folder", ["disk", "memory folder"], indirect=True)
def test_urgent_requests_of_a_disk_go_first(folder: str) -> None:
    with closing(Held(folder)) as store:
        extent = store.reserve(KEY, cuts_of([4096] * 7))
        data = random_bytes(4096)
        store.write(extent, 0, data, Priority.NOW)
        assert store.entered.wait(30)
        order: list[str] = []
        for block, priority in enumerate([*reversed(Priority), Priority.NOW], start=1):
            ticket = store.write(extent, block, data, priority)
            ticket.on_done(lambda text=f"{block} {priority.name}": order.append(text))
        store.leave.set()
        store.drain()
    assert order == ["5 NOW", "6 NOW", "4 NEXT", "3 MOMENTS", "2 WRITE_BACK", "1 CHECKPOINT"]


def test_freed_room_is_not_handed_out_before_its_last_request_is_done(tmp_path: Path) -> None:
    with closing(Held(str(tmp_path))) as store:
        gone = store.reserve(KEY, [0, 4096])
        store.write(gone, 0, random_bytes(4096), Priority.NOW)
        assert store.entered.wait(30)
        store.free(gone)
        meanwhile = store.reserve(KEY, [0, 4096])
        assert store._records[meanwhile].blocks[0].place.offset == 4096
        store.leave.set()
        store.drain()
        afterwards = store.reserve(KEY, [0, 4096])
        assert store._records[afterwards].blocks[0].place.offset == 0


def test_freed_room_on_disk_is_used_again(tmp_path: Path) -> None:
    with closing(DiskStore([Folder(str(tmp_path))], rank=0)) as store:
        spool = store._spools[0]
        extents = [store.reserve(KEY, cuts_of([4096 * 3, 5000])) for _ in range(4)]
        size = spool.size_bytes
        assert size == 4 * (4096 * 3 + 8192)
        for extent in (extents[1], extents[3], extents[2]):  # neighbours grow together whatever their order
            store.free(extent)
        store.reserve(KEY, [0, 3 * 4096 * 5])
        assert spool.size_bytes == size
        store.free(extents[0])
        store.reserve(KEY, [0, 4096 * 6])  # free room at the start is too short; the file grows by what is missing
        assert spool.size_bytes == size + 4096 * 6


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
@FAST
def test_blocks_on_disk_never_overlap(steps: list[tuple[bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(DiskStore([Folder(folder)], rank=0)) as store:
        held: list[Extent] = []
        for take, number in steps:
            if take or not held:
                held.append(store.reserve(KEY, cuts_of([number, number // 3])))
            else:
                store.free(held.pop(number % len(held)))
            blocks = [b for record in store._records.values() for b in record.blocks if b.place.room]
            spans = sorted((b.place.offset, b.place.offset + b.place.room) for b in blocks)
            free = [(offset, offset + nbytes) for offset, nbytes in store._spools[0]._free]
            joined = sorted(spans + free)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(joined))  # no overlap and nothing lost
            assert (joined[-1][1] if joined else 0) == store._spools[0].size_bytes
            assert all(a[1] < b[0] for a, b in itertools.pairwise(free))  # neighbours are merged
            assert store._spools[0].used_bytes == sum(b - a for a, b in spans)


def test_an_extent_may_be_freed_in_the_middle_of_anything(tmp_path: Path) -> None:
    """As by a garbage collection, which runs in whatever method the thread is in."""

    class Collected(DiskStore):
        victims: list[Extent]

        def _find_room(self, room: int) -> tuple[object, int]:
            if self.victims:
                self.free(self.victims.pop())
            return super()._find_room(room)

        def _retire(self, record: object) -> None:
            if self.victims:
                self.free(self.victims.pop())
            super()._retire(record)

    with closing(Collected([Folder(str(tmp_path))], rank=0)) as store:
        store.victims = []
        victims = [store.reserve(KEY, [0, 4096]) for _ in range(6)]
        kept, data = store.reserve(KEY, [0, 4096]), random_bytes(4096)
        store.victims = victims
        store.reserve(KEY, cuts_of([4096] * 3))
        store.write(kept, 0, data, Priority.NOW).wait()
        while victims:
            get(store, kept, 0)
        assert torch.equal(get(store, kept, 0), data)
        store.drain()
        assert store._spools[0].used_bytes == 4 * 4096


def test_inference_tensors_and_views_are_memory_too(tmp_path: Path) -> None:
    with closing(DiskStore([Folder(str(tmp_path))], rank=0)) as store:
        extent = store.reserve(KEY, [0, 4000])
        with torch.inference_mode():
            data = torch.arange(1000, dtype=torch.float32)
            store.write(extent, 0, data.view(torch.uint8), Priority.NOW)
            into = torch.zeros(1000)
            store.read(extent, 0, into.view(torch.uint8), Priority.NOW).wait()
        assert torch.equal(into, data)


def test_blocks_are_dealt_out_by_speed(tmp_path: Path) -> None:
    class Uneven(DiskStore):
        def _measure(self, spool: object) -> float:
            return 3e9 if spool.folder.path.endswith("fast") else 1e9

    for name in ("fast", "slow"):
        (tmp_path / name).mkdir()
    folders = [Folder(str(tmp_path / "slow")), Folder(str(tmp_path / "fast"))]
    with closing(Uneven(folders, rank=0)) as store:
        store.reserve(KEY, cuts_of([65536] * 40))
        assert [spool.used_bytes // 65536 for spool in store._spools] == [10, 30]


def test_host_memory_has_a_limit() -> None:
    store = HostStore(10_000)
    first = store.reserve(KEY, [0, 6000])
    with pytest.raises(DoesNotFit) as caught:
        store.reserve(KEY, [0, 4001])
    assert (caught.value.tier, caught.value.needed_bytes, caught.value.budget_bytes) == ("host", 10_001, 10_000)
    assert "moments of 'blocks.3'" in str(caught.value)
    store.free(first)
    store.reserve(KEY, [0, 10_000])


def test_null_counts_and_moves_nothing() -> None:
    store = NullStore()
    extent = store.reserve(KEY, [0, 100, 300])
    memory = random_bytes(200)
    before = memory.clone()
    store.write(extent, 0, torch.zeros(100, dtype=torch.uint8), Priority.NOW).wait()
    told: list[int] = []
    store.read(extent, 1, memory, Priority.NOW).on_done(lambda: told.append(1))
    store.drain()
    assert told == [1]
    assert torch.equal(memory, before)
    assert (store.traffic.read_bytes, store.traffic.written_bytes, store.used_bytes) == (200, 100, 300)
    store.free(extent)
    assert store.used_bytes == 0
    with pytest.raises(InternalError, match="freed"):
        store.read(extent, 1, memory, Priority.NOW)
    store.close()
    with pytest.raises(Refused, match="closed"):
        store.reserve(KEY, [0, 1])


def test_a_disk_store_needs_a_folder() -> None:
    with pytest.raises(ArgumentError, match="folder"):
        DiskStore([], rank=0)
