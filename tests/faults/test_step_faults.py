"""The n-th I/O of a training step fails, for every n: a typed error that names the place, or no effect, never a wrong number.

After every failure the model is looked at. It raises; or it has exactly the values from before the step, or from after it. And
from a state_dict it goes on as if nothing had happened.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.api import engine_of
from lowtide.config import Config
from lowtide.errors import DiskError, DiskFull, Error, Poisoned
from lowtide.tiers.spool import Folder
from tests.kit.dist import run_ranks
from tests.kit.out_of_core import Where, opened_by, undefined_memory
from tests.kit.parity import Plain, Sharded, first_difference
from tests.kit.scenarios import adamw, loss_of, stack
from tests.kit.stores import Effect, FailingDisk, Fault

FOREVER = 10**9
BLOCKS = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_step(system: Plain, number: int, rank: int = 0) -> None:
    loss_of(system, number, rank).backward()
    system.optimizer.step()
    system.optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    with lowtide.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def known(steps: int) -> list[list[Tensor]]:
    """The parameters of a plain model after so many steps."""
    model = stack(count=BLOCKS)
    system = Plain(model, adamw(model))
    found = [values(model)]
    for number in range(steps):
        train_step(system, number)
        found.append(values(model))
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return not any(first_difference(x, y) for x, y in zip(a, b, strict=True))


class Trainee:
    """A model on a disk that fails when told, after one step."""

    def __init__(self, folder: Path, where: Where, rank: int = 0) -> None:
        self.disks: list[FailingDisk] = []

        def open_disk(config: Config, rank: int) -> FailingDisk:
            self.disks.append(FailingDisk([Folder(f.path, f.limit) for f in config.disk], rank=rank))
            return self.disks[-1]

        self.model = stack(count=BLOCKS)
        with opened_by(open_disk):
            self.system = Sharded(self.model, adamw(self.model), stage=3, **where.options(str(folder)))
        self.disk = self.disks[0]
        train_step(self.system, 0, rank)
        self.states = self.model.state_dict(), self.system.optimizer.state_dict()
        self.disk.drain()

    def step(self, number: int, rank: int = 0) -> None:
        """One step, as far as it goes: everything that was put off, and every write."""
        train_step(self.system, number, rank)
        engine_of(self.model).settle()
        self.disk.drain()

    def reload(self) -> None:
        self.model.load_state_dict(self.states[0])
        self.system.optimizer.load_state_dict(self.states[1])
        self.system.optimizer.zero_grad()


def tells_the_place(error: BaseException, folder: Path) -> bool:
    """Whether it is an error of ours that names folder, unit and rank; a poisoned model quotes the cause."""
    if isinstance(error, DiskError):
        return (
            error.file == str(folder) and error.unit != "" and error.offset is not None and f"rank {error.rank}" in str(error)
        )
    return isinstance(error, Poisoned) and str(folder) in str(error) and "rank 0" in str(error) and "offset" in str(error)


def drained(disk: FailingDisk) -> None:
    disk.arm(None)
    while True:  # every failed write that nobody waited for is told once
        try:
            disk.drain()
        except DiskError:
            continue
        return


def attempt(folder: Path, where: Where, fault: Fault, expected: list[list[Tensor]]) -> str:
    """What a fault in the second step comes to; "missed" if that step has fewer requests."""
    trainee = Trainee(folder, where)
    trainee.disk.arm(fault)
    failure = caught(lambda: trainee.step(1))
    hit = trainee.disk.failed_calls
    drained(trainee.disk)
    if failure is None:  # what was written wrong shows when it is read
        failure = caught(lambda: go_on(trainee, expected))
    if failure is None:
        return "no effect" if hit else "missed"
    assert tells_the_place(failure, folder), repr(failure)
    outcome = look(trainee, folder, expected)
    failure = None
    trainee.reload()
    trainee.step(1)
    go_on(trainee, expected)
    assert_idle(trainee)
    return outcome


def caught(run: Callable[[], None]) -> Error | None:
    try:
        run()
    except Error as error:
        return error
    return None


def go_on(trainee: Trainee, expected: list[list[Tensor]]) -> None:
    """The second step was taken: look at the result, and take the third."""
    assert same(values(trainee.model), expected[2]), "wrong after the second step"
    trainee.step(2)
    assert same(values(trainee.model), expected[3]), "wrong after the third step"


def assert_idle(trainee: Trainee) -> None:
    engine = engine_of(trainee.model)
    engine.residency.forget()
    trainee.disk.drain()
    gc.collect()
    engine.buffers_arena.trim()
    assert engine.buffers_arena.taken_bytes == engine.buffers_arena.limbo_bytes == engine.arena.taken_bytes == 0


def look(trainee: Trainee, folder: Path, expected: list[list[Tensor]]) -> str:
    """What a model shows after a failure. What had been asked for may still fail; after that, every answer is right or none."""
    for _ in range(2 * BLOCKS + 2):
        try:
            found = values(trainee.model)
        except DiskError as error:
            if not tells_the_place(error, folder):
                raise
        except Poisoned:
            for call in (trainee.model.state_dict, trainee.system.optimizer.state_dict, lambda: trainee.step(1)):
                with pytest.raises(Poisoned):
                    call()
            return "poisoned"
        else:
            for steps, label in ((1, "before"), (2, "after"), (3, "later")):
                if same(found, expected[steps]):
                    return label
            raise AssertionError("half-updated, and nobody was told")
    return "lost"


KINDS = {
    "a read that fails": Fault(errno.EIO, calls="read", times=FOREVER),
    "a write that fails": Fault(errno.EIO, calls="write"),
    "a write with a flipped bit": Fault(Effect.FLIP, calls="write"),
}
MORE_KINDS = {
    "a read that fails once": Fault(errno.EIO, calls="read"),
    "a read with a flipped bit": Fault(Effect.FLIP, calls="read", times=FOREVER),
    "a write that fails and all after it": Fault(errno.EIO, calls="write", times=FOREVER),
    "a write without room": Fault(errno.ENOSPC, calls="write"),
    "a torn write": Fault(Effect.TORN, calls="write"),
    "a short write": Fault(Effect.SHORT, calls="write", times=FOREVER),
    "a short read": Fault(Effect.SHORT, calls="read", times=FOREVER),
}
CASES = [*KINDS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in MORE_KINDS)]


def outcomes(folder: Path, where: Where, fault: Fault) -> list[str]:
    """What comes of the fault at every request of the step, one after another."""
    expected, found = known(3), list[str]()
    with undefined_memory():
        while not found or found[-1] != "missed":
            found.append(attempt(folder, where, Fault(fault.what, len(found), fault.calls, fault.times), expected))
    return found[:-1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("kind", CASES)
def test_every_request_of_a_step(kind: str, update: str, tmp_path: Path) -> None:
    fault = {**KINDS, **MORE_KINDS}[kind]
    found = outcomes(tmp_path, Where(update, 8 << 20), fault)
    assert len(found) >= 9  # two blocks and a head: each is read for forward and with two moments, and all that is written
    if (fault.times == 1 and fault.calls == "read") or fault.what is Effect.SHORT:
        assert set(found) == {"no effect"}
    else:
        assert "no effect" not in found or fault.what in (Effect.FLIP, Effect.TORN)
        assert "poisoned" in found


@pytest.mark.parametrize("update", ["step", "backward"])
def test_small_chunks(update: str, tmp_path: Path) -> None:
    """With many chunks per unit a failure falls between two of them; the requests that are tried are spread over the step."""
    expected, where, found = known(3), Where(update, 4096), list[str]()
    with undefined_memory():
        for at in (0, 13, 26, 40):
            for calls in ("read", "write"):
                fault = Fault(errno.EIO, at, calls, FOREVER if calls == "read" else 1)
                found.append(attempt(tmp_path, where, fault, expected))
    assert "poisoned" in found
    assert "missed" not in found


# -- at the start -----------------------------------------------------------------------------------------------------


def test_too_little_room_is_told_before_anything_changes(tmp_path: Path) -> None:
    """The model stays a plain one, and nothing stays in the folder."""
    model = stack(count=BLOCKS)
    optimizer = adamw(model)
    expected = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(DiskFull) as caught_:
        lowtide.shard(model, optimizer, **{**Where().options(str(tmp_path)), "disk": (str(tmp_path), 60_000)})
    assert str(tmp_path) in str(caught_.value)
    assert type(model).__mro__[1] is nn.Module
    assert same([p.detach() for p in model.parameters()], expected)
    del caught_
    gc.collect()
    assert os.listdir(tmp_path) == []
    system = Plain(model, optimizer)
    train_step(system, 0)
    assert same(values(model), known(1)[1])
    lowtide.shard(model, optimizer, **Where().options(str(tmp_path)))
    train_step(system, 1)
    assert same(values(model), known(2)[2])


@pytest.mark.parametrize("what", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_write_that_fails_while_sharding(at: int, what: int, tmp_path: Path) -> None:
    """Told by shard itself or by the first who needs those bytes."""

    def open_disk(config: Config, rank: int) -> FailingDisk:
        return FailingDisk([Folder(f.path, f.limit) for f in config.disk], rank=rank, fault=Fault(what, at, "write"))

    def run() -> None:
        model = stack(count=BLOCKS)
        with opened_by(open_disk):
            system = Sharded(model, adamw(model), **Where().options(str(tmp_path)))
        for number in range(2):
            train_step(system, number)
            values(model)

    with pytest.raises(DiskError) as caught_:
        run()
    assert tells_the_place(caught_.value, tmp_path)


# -- on several ranks -------------------------------------------------------------------------------------------------


def _on_two_ranks(rank: int, world: int, update: str, fault: Fault, folder: str) -> None:
    trainee = Trainee(Path(folder), Where(update, 8 << 20), rank)
    if rank == 1:
        trainee.disk.arm(fault)
    for number in range(1, 3):
        trainee.step(number, rank)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("calls", "at"), [("read", 0), ("read", 4), ("read", 9), ("write", 0), ("write", 4), ("write", 8)])
def test_the_other_rank_hears_of_it(calls: str, at: int, update: str, tmp_path: Path) -> None:
    """Well before the deadline of an exchange, which is 30 seconds here."""
    fault = Fault(errno.EIO, at, calls, FOREVER)
    texts = run_ranks(2, _on_two_ranks, update, fault, str(tmp_path), fresh=True, exit_codes=[1, 1])
    assert "DiskError: disk: a " in texts[1]
    assert "rank 1" in texts[1]
    assert "lowtide.errors.PeerFailed: rank 1 failed: DiskError: disk: a " in texts[0]
