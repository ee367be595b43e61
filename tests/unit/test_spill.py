"""Saved tensors in a store: the same bytes back, written once, in bounded memory, and gone when their graph is."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import ChangedInPlace, DiskError
from lowtide.runtime.spill import Spill, Spilled
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.host import HostStore
from lowtide.tiers.spool import Folder
from lowtide.tiers.store import Extent, IOTicket, Key, Priority, Store
from tests.kit.stores import FailingDisk, Fault, SlowStore

KIB, MIB = 1 << 10, 1 << 20


class Watched(HostStore):
    """Counts what is asked of it; writes and reads wait until they are let go."""

    def __init__(self, *, held: bool = False) -> None:
        super().__init__()
        self.held = held
        self.reserved: list[Extent] = []
        self.requests: list[tuple[str, Extent, Priority]] = []
        self.tickets: list[LateTicket] = []

    def reserve(self, key: Key, cuts: Any) -> Extent:
        assert key.unit == "activations"
        self.reserved.append(super().reserve(key, cuts))
        return self.reserved[-1]

    def write(self, extent: Extent, block: int, data: Tensor, priority: Priority) -> IOTicket:
        return self._late("write", extent, priority, lambda: super(Watched, self).write(extent, block, data, priority))

    def read(self, extent: Extent, block: int, into: Tensor, priority: Priority) -> IOTicket:
        return self._late("read", extent, priority, lambda: super(Watched, self).read(extent, block, into, priority))

    def _late(self, verb: str, extent: Extent, priority: Priority, work: Callable[[], IOTicket]) -> IOTicket:
        self.requests.append((verb, extent, priority))
        self.tickets.append(LateTicket(work))
        if not self.held:
            self.tickets[-1].wait()
        return self.tickets[-1]

    def let_go(self) -> None:
        for ticket in self.tickets:
            ticket.wait()

    def count(self, verb: str) -> int:
        return sum(request[0] == verb for request in self.requests)


class LateTicket:
    """Does its work when somebody waits for it."""

    def __init__(self, work: Callable[[], IOTicket]) -> None:
        self._work: Callable[[], IOTicket] | None = work

    @property
    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None

    def on_done(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


@pytest.fixture(params=["host", "disk", "slow"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = DiskStore([Folder(str(tmp_path))], rank=0) if request.param == "disk" else HostStore()
    if request.param == "slow":
        made = SlowStore(made, 0.005)
    yield made
    made.close()


def spill_of(store: Store, **options: Any) -> Spill:
    spill = Spill(store, **{"least_bytes": 1, **options})
    spill.arena.poison = True
    return spill


def packed(spill: Spill, tensor: Tensor) -> Spilled:
    handle = spill.pack(tensor)
    assert handle is not None
    return handle


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


def hooks(spill: Spill) -> saved_tensors_hooks:
    return saved_tensors_hooks(
        lambda tensor: spill.pack(tensor) or tensor, lambda got: got.unpack() if isinstance(got, Spilled) else got
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


VIEWS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: numbers(3, 5),
    "several blocks": lambda: numbers(600, 1000),
    "whole blocks": lambda: numbers(2 * MIB // 4),
    "transposed": lambda: numbers(7, 11).t(),
    "channels last": lambda: numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "every other column": lambda: numbers(8, 10)[:, ::2],
    "third of the last dimension": lambda: numbers(4, 30).chunk(3, dim=-1)[1],
    "third of the first dimension": lambda: numbers(30, 4).chunk(3)[1],
    "expanded": lambda: numbers(1, 9).expand(5, 9),
    "overlapping": lambda: numbers(20).as_strided((5, 8), (2, 1), 3),
    "0-dim": lambda: numbers(),
    "bfloat16": lambda: numbers(5, 3, dtype=torch.bfloat16)[2:],
    "bool": lambda: numbers(13) > 0,
    "int64": lambda: torch.arange(10)[3:8],
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64)[1:],
    "half of a complex": lambda: torch.view_as_real(torch.randn(4, 3, dtype=torch.complex64))[..., 1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_same_tensor_comes_back(view: str, store: Store) -> None:
    spill = spill_of(store)
    tensor = VIEWS[view]()
    expected, stride, before = tensor.clone(), tensor.stride(), tensor.data_ptr()
    handle = packed(spill, tensor)
    spill.flush()
    del tensor
    back = handle.unpack()
    assert torch.equal(back, expected)
    assert (back.stride(), back.dtype, back.shape) == (stride, expected.dtype, expected.shape)
    assert back.data_ptr() != before or spill.held_bytes == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.randn(3).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(3)),
        torch.empty(3, device="meta"),
        torch.randn(1000)[:400:100],
    ],
    ids=["empty", "sparse", "conjugate", "parameter", "meta", "little of much"],
)
def test_what_is_left_as_it_is(tensor: Tensor) -> None:
    store = Watched()
    assert spill_of(store).pack(tensor) is None
    assert not store.requests


def test_small_ones_and_those_refused_stay() -> None:
    asked: list[Tensor] = []

    def should_spill(tensor: Tensor) -> bool:
        asked.append(tensor)
        return len(asked) > 1

    spill = spill_of(Watched(), least_bytes=1000, should_spill=should_spill)
    assert spill.pack(torch.randn(249)) is None
    assert not asked
    tensor = torch.randn(250)
    assert spill.pack(tensor) is None
    assert spill.pack(tensor) is not None


# -- written once -----------------------------------------------------------------------------------------------------


def test_views_of_the_same_memory_are_written_once() -> None:
    store = Watched()
    spill = spill_of(store)
    tensor = torch.randn(6, 10)
    handles = [packed(spill, view) for view in (tensor, tensor.t(), tensor[:, :7], tensor, tensor.view(torch.int32))]
    assert store.count("write") == 1
    assert [h.is_first for h in handles] == [True, False, False, False, False]
    assert spill.spilled_bytes_live == 240
    spill.flush()
    assert same(handles[2].unpack(), tensor[:, :7])
    assert same(handles[4].unpack(), tensor.view(torch.int32))
    assert store.count("read") == 1, "read once for all that wait for it"


def test_other_memory_at_the_same_address_is_written() -> None:
    """The bytes of a freed tensor are given to the next one at once: another storage, the same address."""
    store = Watched()
    spill = spill_of(store)
    handles: list[Spilled] = []
    addresses: set[int] = set()
    bytes_ = bytearray(4000)
    for value in range(8):
        tensor = torch.frombuffer(bytes_, dtype=torch.float32)  # the allocator may or may not use an address again
        tensor.fill_(float(value))
        addresses.add(tensor.data_ptr())
        handles.append(packed(spill, tensor))
        spill.flush()
        del tensor
    assert len(addresses) == 1
    assert [h.unpack()[0].item() for h in handles] == list(range(8))


def test_memory_that_is_filled_again_is_written_again() -> None:
    """A block of an arena is one storage for ever; only while it is held are its bytes known to be the same."""
    store = Watched()
    spill = spill_of(store)
    memory = torch.frombuffer(bytearray(4000), dtype=torch.float32)
    first = packed(spill, memory)
    spill.flush()
    memory.data.fill_(3.0)  # as a read from the disk would: no version moves
    second = packed(spill, memory)
    spill.flush()
    assert (first.unpack()[0], second.unpack()[0]) == (0.0, 3.0)
    store.held = True
    handles = [packed(spill, memory) for _ in range(2)]
    assert [h.is_first for h in handles] == [True, False], "under way: one write is enough"


def test_a_change_between_two_saves_is_kept() -> None:
    spill = spill_of(Watched())
    tensor = torch.zeros(100)
    first = packed(spill, tensor)
    tensor.add_(1)
    second = packed(spill, tensor)
    assert second.unpack()[0] == 1
    with pytest.raises(ChangedInPlace):
        first.unpack()


# -- changed in place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alive", [True, False], ids=["still alive", "dead"])
@pytest.mark.parametrize("how", ["itself", "a view", "the base", "without grad"])
def test_a_change_in_place_raises_as_in_torch(how: str, alive: bool, store: Store) -> None:
    def run(spill: Spill | None) -> str:
        base = torch.ones(4, 50, requires_grad=True) * 2
        x = base.view(50, 4) if how == "the base" else base
        if spill is None:
            y = x.square()
        else:
            with hooks(spill):
                y = x.square()
            spill.flush()
        if how == "without grad":
            with torch.no_grad():
                x.add_(1)
        else:
            {"itself": x, "a view": x[0], "the base": base}[how].add_(1)
        if not alive:
            del x, base
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            y.sum().backward()
        return str(caught.value)

    run(None)
    assert "is at version 1; expected version 0" in run(spill_of(store))


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_writes_in_flight_are_bounded() -> None:
    store = Watched(held=True)
    spill = spill_of(store, in_flight_bytes=10 * KIB)
    tensors = [torch.full((KIB,), float(i)) for i in range(7)]  # 4 KiB each
    handles: list[Spilled] = []
    for tensor in tensors:
        handles.append(packed(spill, tensor))
        assert spill.held_bytes <= 10 * KIB
    assert [ticket.done for ticket in store.tickets] == [True] * 5 + [False] * 2, "the oldest went first"
    assert handles[6].unpack().data_ptr() == tensors[6].data_ptr(), "still here: not read"
    store.let_go()
    assert spill.held_bytes == 0


def test_reads_go_ahead_backwards_within_the_bound() -> None:
    store = Watched()
    spill = spill_of(store, in_flight_bytes=12 * KIB)
    handles = [packed(spill, torch.full((KIB,), float(i))) for i in range(8)]
    spill.flush()
    store.requests.clear()
    assert handles[7].unpack()[0] == 7
    order = [(h.stored.extent, p) for h, p in zip(reversed(handles[4:]), [Priority.NOW] + [Priority.NEXT] * 3, strict=True)]
    assert [(extent, priority) for _, extent, priority in store.requests] == order
    assert handles[6].unpack()[0] == 6
    assert store.requests[-1][1] is handles[3].stored.extent, "one was used, so one more fits"
    for number in range(5, -1, -1):
        assert handles[number].unpack()[0] == number
    assert store.count("read") == 8
    assert spill.arena.reserved_bytes <= 16 * KIB


def test_out_of_order_is_right_too(store: Store) -> None:
    spill = spill_of(store, in_flight_bytes=9 * KIB)
    tensors = [torch.randn(KIB) for _ in range(9)]
    handles = [packed(spill, tensor) for tensor in tensors]
    for _ in range(3):
        for number in torch.randperm(9).tolist():
            assert torch.equal(handles[number].unpack(), tensors[number])
            if number == 4:
                spill.flush()


def test_steady_state_reserves_nothing() -> None:
    store = Watched()
    spill = spill_of(store)
    for step in range(6):
        handles = [packed(spill, torch.randn(rows, KIB)) for rows in (1, 500, 300, 1)]
        spill.flush()
        for handle in reversed(handles):
            handle.unpack()
        assert len(store.reserved) == 4, f"step {step}"
        del handles, handle
        assert spill.spilled_bytes_live == 0
    packed(spill, torch.randn(495, KIB))
    assert len(store.reserved) == 4, "a little smaller: the same room"
    spill.trim()
    assert store.used_bytes == 0
    assert spill.arena.reserved_bytes == 0


# -- graphs -----------------------------------------------------------------------------------------------------------


def chain(x: Tensor) -> Tensor:
    for _ in range(5):
        x = torch.sin(x) * torch.exp(-x) + x
    return x.sum()


@pytest.mark.parametrize("bound", [1, 3 * 4 * KIB, 1 << 30])
def test_gradients_are_the_same(store: Store, bound: int) -> None:
    expected, got = (torch.linspace(0, 1, KIB).requires_grad_() for _ in range(2))
    chain(expected).backward()
    spill = spill_of(store, in_flight_bytes=bound)
    with hooks(spill):
        loss = chain(got)
    assert spill.spilled_bytes_live > 15 * 4 * KIB - 1
    loss.backward(retain_graph=True)
    assert expected.grad is not None
    assert torch.equal(got.grad, expected.grad)  # pyright: ignore
    loss.backward()
    assert torch.equal(got.grad, 2 * expected.grad)  # pyright: ignore
    assert spill.spilled_bytes_live == 0


def test_double_backward(store: Store) -> None:
    results: list[Tensor] = []
    for spill in (None, spill_of(store)):
        x = torch.linspace(0, 1, KIB).requires_grad_()
        if spill is None:
            loss = chain(x)
        else:
            with hooks(spill):
                loss = chain(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        results.append(x.grad)  # pyright: ignore
    assert torch.equal(*results)


def test_a_graph_that_is_never_walked_gives_its_room_back() -> None:
    store = Watched()
    spill = spill_of(store)
    for _ in range(5):
        with hooks(spill):
            loss = chain(torch.ones(KIB, requires_grad=True))
        del loss
        gc.collect()
    reserved = len(store.reserved)
    assert spill.spilled_bytes_live == 0
    with hooks(spill):
        chain(torch.ones(KIB, requires_grad=True))
    assert len(store.reserved) == reserved


def test_memory_is_let_go() -> None:
    store = Watched()
    spill = spill_of(store, in_flight_bytes=0)
    tensor = torch.randn(MIB)
    alive = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    handle = packed(spill, tensor)
    del tensor
    assert alive.expired()
    assert handle.unpack().numel() == MIB


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_disk_that_fails_is_named(call: str, tmp_path: Path) -> None:
    store = FailingDisk([Folder(str(tmp_path))], fault=Fault(errno.EIO, calls=call, times=1 << 30))
    spill = spill_of(store)

    def there_and_back() -> None:
        handle = packed(spill, torch.randn(KIB))
        spill.flush()
        handle.unpack()

    with pytest.raises(DiskError) as caught:
        there_and_back()
    assert caught.value.unit == "activations"
    store.arm(None)
    store.close()
