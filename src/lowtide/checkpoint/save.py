"""Saving: all ranks write their part at once; rank 0 makes the checkpoint appear when everything is durable.

What is on disk already stays there, if spool and checkpoint share a filesystem and there is room for what will be written
meanwhile: the blocks are pinned (tiers/pins.py) and the spool file gets a name in the checkpoint. The rest is streamed into one
safetensors file per rank. With ``background=True`` that happens in a thread, from copies and pins.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import JsonValue
from torch.optim import Optimizer

from lowtide.checkpoint import folder, objects, tree
from lowtide.checkpoint.manifest import COUNT_LIMIT, File, Manifest, table_name
from lowtide.checkpoint.snapshot import Section, Snapshot, TableBuilder, free_bytes
from lowtide.checkpoint.worker import Worker
from lowtide.comm.processes import this_host
from lowtide.errors import ArgumentError, CheckpointError, DiskFull, Error
from lowtide.files import allowed_bytes, json_bytes
from lowtide.runtime.contents import Contents
from lowtide.runtime.engine import Engine
from lowtide.runtime.exchange import Exchange, Outcome, said_by
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.pins import Pin
from lowtide.version import __version__

_log = logging.getLogger("lowtide")

Report = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to be written."""

_SMALL = 4 << 20  # for tables and the manifest


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, work: Callable[[Worker], None]) -> None:
        self.path = path
        self._raised = False
        self._worker = Worker("lowtide-checkpoint", lambda: self._run(work))

    @property
    def done(self) -> bool:
        return self._worker.over

    def wait(self) -> Path:
        """Until the checkpoint is there; raises what went wrong."""
        self._worker.wait()
        self._raised = True
        if self._worker.failure is not None:
            raise self._worker.failure.with_traceback(None)
        return self.path

    def settle(self) -> None:
        """Until it is over; raises what went wrong, unless somebody has heard of it."""
        self._worker.wait()
        if not self._raised:
            self.wait()

    def begin(self, provide: Callable[[], None]) -> None:
        """``provide`` what is to be saved, and return when the caller may go on."""
        try:
            self._worker.run(provide)
        except BaseException:
            self._raised = True
            raise

    def _run(self, work: Callable[[Worker], None]) -> None:
        try:
            work(self._worker)
        except BaseException as error:
            if self._worker.detached:  # it may take long until anybody waits
                bug = None if isinstance(error, Error) else error
                _log.error("checkpoint %s was not written: %s", self.path, said_by(error), exc_info=bug)
            raise


class _Fate(enum.Enum):
    """What has become of a checkpoint."""

    WORKING = enum.auto()
    UNKNOWN = enum.auto()
    THERE = enum.auto()


@dataclass(slots=True)
class _Saves:
    """What is known of one model's checkpoints."""

    exchange: Exchange
    """On a channel of its own: a save in the background must not mix with the collectives of training."""
    last: Saving | None = None
    pins: dict[Path, list[Pin]] = field(default_factory=dict[Path, "list[Pin]"])
    """By checkpoint. Several: it is not known which of them the one of that name refers to."""


_saves: weakref.WeakKeyDictionary[Engine, _Saves] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller asked for."""

    target: Path
    state: Mapping[str, Any]
    extra: Mapping[str, Any] | None
    step: int
    background: bool
    keep: int | None
    progress: Report | None
    may_link: bool = True


def save(engine: Engine, optimizer: Optimizer | None, wish: Wish) -> Saving:
    """Every rank calls this, between two steps."""
    saves = _saves_of(engine)
    if saves.last is not None:
        saves.last.settle()
    job = _Job(engine, optimizer, wish, saves)
    saving = saves.last = Saving(wish.target, job.run)
    saving.begin(job.provide)
    return saving


def finish(engine: Engine) -> None:
    """Wait for a save in the background."""
    if engine in _saves and (last := _saves[engine].last) is not None:
        last.settle()


def _saves_of(engine: Engine) -> _Saves:
    if engine not in _saves:
        _saves[engine] = _Saves(Exchange(engine.group, engine.group.channel("checkpoint")))
    return _saves[engine]


def _release_removed(saves: _Saves) -> None:
    """The places of checkpoints that somebody has removed are free again; of one that was moved they are not."""
    gone = [path for path in saves.pins if not folder.is_checkpoint(path)]
    spools = {spool for path in gone for pin in saves.pins[path] for spool in pin.spools()}
    for spool in spools:
        with_it = [path for path, pins in saves.pins.items() if any(spool in pin.spools() for pin in pins)]
        if spool.links() > len(with_it) - sum(path in gone for path in with_it):
            _log.warning("a checkpoint was moved or linked: its room on disk is not used again while this job runs")
            return
    for path in gone:
        for pin in saves.pins.pop(path):
            pin.release()


class _Job:
    """One checkpoint on one rank."""

    def __init__(self, engine: Engine, optimizer: Optimizer | None, wish: Wish, saves: _Saves) -> None:
        self._engine, self._optimizer, self._wish, self._saves = engine, optimizer, wish, saves
        self._exchange, self._rank = saves.exchange, engine.group.rank
        self._contents = Contents(engine, optimizer)
        self._snapshot = Snapshot(self._contents, engine.units, writes_parameters=engine.group.replicate.rank == 0)
        self._builder = TableBuilder(self._rank)
        self._pin: Pin | None = None
        self._linked: list[Section] = []
        self._copied: list[Section] = []
        self._written = self._total = 0
        self._can_wait = True
        """Whether what is saved stays as it is while training goes on."""
        self._working = Path()
        self._alive: folder.Mark | None = None
        self._fate = _Fate.WORKING
        self._objects: dict[str, JsonValue] = {}
        self._worker: Worker

    # -- on the caller's thread ---------------------------------------------------------------------------------------

    def provide(self) -> None:
        """Bring everything to rest, and ask the caller's objects for their state."""
        self._engine.settle()
        if self._engine.store is not None:
            self._engine.store.drain()
        _release_removed(self._saves)
        for name in self._engine.name_of.values():
            tree.text(name, "the model")
        self._objects = objects.of_rank(self._engine, self._optimizer, self._contents, self._wish.state, self._snapshot.put)
        if self._rank == 0:
            self._objects["model"] = objects.of_model(
                self._engine, self._optimizer, self._contents, self._wish.extra, self._snapshot.put
            )

    # -- on a thread that nobody interrupts ---------------------------------------------------------------------------

    def run(self, worker: Worker) -> None:
        """All of it. If anything fails on one rank, all ranks raise, and nothing is left of the checkpoint."""
        self._worker = worker
        try:
            self._prepare()
            self._write()
        except BaseException:
            self._give_up()
            raise
        self._drop_old()

    def _all(self, what: str, work: Callable[[], str], *, uses_model: bool = True) -> list[str]:
        """Do ``work`` on every rank; everybody's answer. If it fails on one, all ranks raise."""
        failure: BaseException | None = None
        try:
            with self._worker.attended() if uses_model and not self._worker.detached else contextlib.nullcontext():
                mine = Outcome(work())
        except BaseException as error:  # raised below, when all know of it
            failure = _explained(error, self._wish.target)
            mine = Outcome.of_failure(failure)
        told = self._exchange.outcomes(f"a checkpoint that {what}", mine)
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(told):
            if outcome.failed:
                raise CheckpointError(f"it {what}: rank {rank}: {outcome.text}", str(self._wish.target))
        return [outcome.text for outcome in told]

    def _give_up(self) -> None:
        """Let go of everything, except for what a checkpoint may refer to that is there in spite of all."""
        if self._fate is _Fate.UNKNOWN:
            self._keep_pin()
        elif self._pin is not None:
            self._pin.release()
        if self._rank == 0 and self._working.name:
            with contextlib.suppress(OSError):  # the first error is the one to tell; `ckpt gc` removes the rest
                folder.remove(self._working)
        self._alive = None  # now, not when the frames of the error are collected: a disk may be unmounted meanwhile

    # -- before training goes on --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Decide how, make the folder, and hold on to everything as it is now."""
        name = self._all("could not be begun", lambda: self._make_folder() if self._rank == 0 else "")[0]
        self._working = self._wish.target.parent / name
        everybody = self._all("could not be begun", self._see_and_choose)
        self._all("could not be begun", lambda: self._check_and_hold(everybody))
        if self._wish.background and self._can_wait:
            self._worker.detach()

    def _see_and_choose(self) -> str:
        if not self._working.is_dir():
            raise CheckpointError(
                "rank 0 made it, but this rank does not see it: all ranks must see one folder", str(self._working)
            )
        self._choose()
        return self._needed_bytes()

    def _check_and_hold(self, everybody: list[str]) -> str:
        self._check_space(everybody)
        if self._wish.background:
            self._hold()
        return ""

    def _make_folder(self) -> str:
        self._working = self._wish.target.parent / folder.new_name(self._wish.target)
        self._alive = folder.make_marked(self._working)
        return self._working.name

    def _choose(self) -> None:
        """Which sections stay where they are."""
        sections = self._snapshot.sections()
        stored = [s for s in sections if s.stored]
        self._copied = sections
        store = self._engine.store
        if not stored:
            return
        if not isinstance(store, DiskStore):
            self._can_wait = False
            return
        wants_pin = self._wish.background or self._wish.may_link
        try:
            self._pin = store.pin(s.where.extent for s in stored if s.where is not None) if wants_pin else None
        except DiskFull as error:
            _log.info("checkpoint %s is copied, because the spool has no room to keep it: %s", self._wish.target, error)
        if self._pin is not None and self._wish.may_link and self._can_link(self._pin):
            self._linked, self._copied = stored, [s for s in sections if not s.stored]
        elif self._pin is not None and not self._wish.background:
            self._pin.release()
            self._pin = None
        self._can_wait = self._pin is not None

    def _can_link(self, pin: Pin) -> bool:
        fd = os.open(self._working, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return all(spool.can_link_to(fd) for spool in pin.spools())
        finally:
            os.close(fd)

    def _needed_bytes(self) -> str:
        """On which filesystem, and how many."""
        self._total = self._snapshot.nbytes(self._copied)
        return json.dumps([f"{this_host()}/{os.stat(self._working).st_dev}", self._total + _SMALL])

    def _check_space(self, everybody: list[str]) -> None:
        """All ranks together, per filesystem: a save that cannot end should not begin."""
        rows = [json.loads(text) for text in everybody]
        needed = sum(nbytes for where, nbytes in rows if where == rows[self._rank][0])
        free = free_bytes(self._working)
        if needed > free:
            raise CheckpointError(
                f"{needed / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free. "
                f"Remove older checkpoints (keep=), or save to another disk",
                str(self._wish.target),
            )

    def _hold(self) -> None:
        """Copy what is in memory, so that training can go on; if there is no memory for that, it has to wait instead."""
        held = [s for s in self._copied if not s.stored]
        budget, nbytes = self._engine.budget, self._snapshot.nbytes(held)
        budget.make_room(2 * nbytes)
        if budget.limit is not None and nbytes > (budget.limit - budget.read()) // 2:
            _log.info("checkpoint %s: no memory for a copy of what it holds, so it is written at once", self._wish.target)
            self._can_wait = False
        if self._can_wait:
            self._snapshot.freeze(held, self._pin)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write this rank's files, then, on rank 0, make the checkpoint appear."""
        everybody = self._all("was not written", lambda: json.dumps([f.model_dump() for f in self._write_files()]))
        self._fate = _Fate.UNKNOWN  # until rank 0 says that it is there
        self._all("could not be completed", lambda: self._commit(everybody), uses_model=False)
        self._fate = _Fate.THERE
        self._keep_pin()

    def _keep_pin(self) -> None:
        """The places that are referred to keep what they hold; those that a checkpoint of this name referred to are free."""
        pins = self._saves.pins
        replaced = pins.pop(self._wish.target, []) if self._fate is _Fate.THERE else []
        if self._pin is not None:
            self._pin.keep()
            pins.setdefault(self._wish.target, []).append(self._pin)
        for pin in replaced:
            pin.release()

    def _write_files(self) -> list[File]:
        stem = f"rank-{self._rank:05d}"
        names = self._link(stem)
        if self._pin is not None and self._linked:
            self._snapshot.add_pinned(self._linked, self._pin, names, self._builder)
        if self._snapshot.has_frozen(self._copied):
            self._write_frozen(self._working / f"{stem}-frozen.safetensors")
        main = self._snapshot.write(
            self._copied, self._working / f"{stem}.safetensors", self._builder, frozen=False, progress=self._note
        )
        self._builder.add_file(main)
        if self._pin is not None and not self._linked:
            self._pin.release()
            self._pin = None
        text = self._builder.table(self._objects).model_dump_json().encode()
        stored = len(text) + sum(file.nbytes for file in self._builder.files.values() if file is not None)
        if json_bytes(text) > allowed_bytes(stored):  # no reader would take it
            raise CheckpointError(
                "it has so many tensors with so few numbers that its table would take more memory than readers allow. "
                "Put small tensors into one, or leave values out of state= and extra=",
                str(self._wish.target),
            )
        name = table_name(self._rank)
        table = File(name=name, nbytes=len(text), xxh3=folder.write_file(self._working / name, text))
        folder.sync_folder(self._working)
        return [table, *(file for file in self._builder.files.values() if file is not None)]

    def _link(self, stem: str) -> dict[Any, str]:
        """The spool files get names in the folder."""
        names: dict[Any, str] = {}
        if self._pin is None or not self._linked:
            return names
        fd = os.open(self._working, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for number, spool in enumerate(self._pin.spools()):
                names[spool] = f"{stem}-spool-{number}"
                spool.link(fd, names[spool])
                self._builder.add_file(File(name=names[spool], nbytes=spool.size_bytes))
        finally:
            os.close(fd)
        return names

    def _write_frozen(self, path: Path) -> None:
        """Frozen parameters: the file of the last checkpoint gets one more name, if it holds the same."""
        found, _ = folder.checkpoints(self._wish.target.parent)
        there = next((f for last in found[:1] for f in last.manifest.files if f.name == path.name), None)
        if there is not None:
            before = len(self._builder.blocks)
            wanted = self._snapshot.write(self._copied, path, self._builder, frozen=True, dry=True, progress=self._note)
            if wanted == there and self._link_frozen(found[0].path / path.name, path, wanted):
                self._builder.add_file(wanted)
                return
            del self._builder.blocks[before:]
        file = self._snapshot.write(self._copied, path, self._builder, frozen=True, progress=self._note)
        self._builder.add_file(file)

    def _link_frozen(self, there: Path, path: Path, wanted: File) -> bool:
        with contextlib.suppress(OSError, Error), folder.opened(there.parent) as opened:
            if opened.checksum(there.name, wanted.nbytes) == wanted.xxh3:
                os.link(there, path, follow_symlinks=False)
                return True
        return False

    def _note(self, nbytes: int) -> None:
        self._worker.look_up()
        self._written += nbytes
        if self._wish.progress is not None:
            self._wish.progress(min(self._written, self._total), self._total)

    def _commit(self, everybody: list[str]) -> str:
        if self._rank != 0:
            return ""
        self._worker.look_up()
        try:
            self._appear(everybody)
        except BaseException:
            if self._working.is_dir():
                self._fate = _Fate.WORKING
            raise
        return ""

    def _appear(self, everybody: list[str]) -> None:
        files = [File(**row) for text in everybody for row in json.loads(text)]
        parent = self._wish.target.parent
        with folder.locked(parent):
            manifest = Manifest(
                lowtide=__version__,
                torch=str(torch.__version__),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                name=self._wish.target.name,
                step=min(self._wish.step, COUNT_LIMIT - 1),
                sequence=folder.next_sequence(parent),
                world_size=self._engine.group.size,
                stage=self._engine.config.stage.number,
                plan=xxhash.xxh3_128_hexdigest(repr(self._engine.placer.placement).encode()),
                files=tuple(sorted(files, key=lambda f: f.name)),
            )
            folder.commit(self._working, self._wish.target, manifest)

    def _drop_old(self) -> None:
        """Keep the newest ``keep``; their places on disk are free when they are gone."""
        if self._wish.keep is None:
            return
        keep = self._wish.keep
        self._all("is there, but older ones were not removed", lambda: self._remove_old(keep), uses_model=False)
        _release_removed(self._saves)

    def _remove_old(self, keep: int) -> str:
        if self._rank != 0:
            return ""
        parent = self._wish.target.parent
        try:
            with folder.locked(parent):
                for path in [*folder.unused(parent, keep)]:
                    folder.remove(path)
        except (OSError, CheckpointError) as error:  # the new one is there; `ckpt gc` can try again
            _log.warning("an old checkpoint could not be removed: %s", error)
        return ""


def _explained(error: BaseException, target: Path) -> BaseException:
    if isinstance(error, Error) or not isinstance(error, OSError) or error.errno is None:
        return error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    way_out = "Make room (keep=), or save to another disk" if full else "Look at the disk and who may write there"
    explained = CheckpointError(f"{error.strerror or error}. {way_out}", str(target))
    explained.__cause__ = error
    return explained


def refuse_target(path: str | os.PathLike[str]) -> Path:
    """The folder that a checkpoint will be, or an error that says what is wrong with it."""
    target = Path(os.path.abspath(path))
    if not folder.is_name(target.name):
        raise ArgumentError(
            f"{str(path)!r} cannot be the name of a checkpoint; use letters, digits and ._+=@-, as in run/step-100."
        )
    if target.is_symlink():
        raise ArgumentError(
            f"{str(path)!r} is a link; a checkpoint is a folder of its own. Give the name that it leads to, or remove the link."
        )
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{str(path)!r} is a file; a checkpoint is a folder.")
    return target
