"""Saving: all ranks write their part at once; rank 0 makes the checkpoint appear when everything is durable.

What is on disk already stays there, if spool and checkpoint share a filesystem and there is room for what will be written
meanwhile: the blocks are pinned (tiers/pins.py) and the spool file gets a name in the checkpoint. The rest is streamed into one
safetensors file per rank. With ``background=True`` that happens in a thread, from copies and pins.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from lowtide.checkpoint import folder, objects
from lowtide.checkpoint.manifest import File, Manifest, table_name
from lowtide.checkpoint.snapshot import Section, Snapshot, TableBuilder, free_bytes
from lowtide.comm.processes import this_host
from lowtide.errors import ArgumentError, CheckpointError, DiskFull, Error
from lowtide.runtime.contents import Contents
from lowtide.runtime.engine import Engine
from lowtide.runtime.exchange import Exchange
from lowtide.tiers.disk import DiskStore
from lowtide.tiers.pins import Pin
from lowtide.version import __version__

_log = logging.getLogger("lowtide")

Report = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to be written."""

_SMALL = 4 << 20  # for tables and the manifest


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until the checkpoint is there; raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self.path

    def run(self, work: Callable[[], None], *, background: bool) -> None:
        """Do ``work`` now, or in a thread."""
        if not background:
            work()
            return

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # belongs to whoever waits, or to the next save
                self._failure = error
                _log.error("checkpoint %s was not written: %s", self.path, error)

        self._thread = threading.Thread(target=guarded, name="lowtide-checkpoint")
        self._thread.start()


@dataclass(slots=True)
class _Saves:
    """What is known of one model's checkpoints."""

    exchange: Exchange
    """On a channel of its own: a save in the background must not mix with the collectives of training."""
    last: Saving | None = None
    pins: dict[Path, Pin] = field(default_factory=dict[Path, Pin])


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
        saves.last.wait()
    engine.settle()
    if engine.store is not None:
        engine.store.drain()
    _release_removed(saves)
    job = _Job(engine, optimizer, wish, saves)
    job.prepare()
    saving = saves.last = Saving(wish.target)
    saving.run(job.run, background=wish.background and job.may_run_later)
    return saving


def finish(engine: Engine) -> None:
    """Wait for a save in the background."""
    if engine in _saves and (last := _saves[engine].last) is not None:
        last.wait()


def _saves_of(engine: Engine) -> _Saves:
    if engine not in _saves:
        _saves[engine] = _Saves(Exchange(engine.group, engine.group.channel("checkpoint")))
    return _saves[engine]


def _release_removed(saves: _Saves) -> None:
    """The places of checkpoints that somebody has removed are free again; of one that was moved they are not."""
    gone = [path for path in saves.pins if not folder.is_checkpoint(path)]
    spools = {spool for path in gone for spool in saves.pins[path].spools()}
    for spool in spools:
        with_it = [path for path, pin in saves.pins.items() if spool in pin.spools()]
        if spool.links() > len(with_it) - sum(path in gone for path in with_it):
            _log.warning("a checkpoint was moved or linked: its room on disk is not used again while this job runs")
            return
    for path in gone:
        saves.pins.pop(path).release()


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
        self.may_run_later = True
        self._working = Path()
        self._alive: folder.Mark | None = None

    # -- before training goes on --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Decide how, make the folder, and hold on to everything as it is now."""
        with self._together("could not be begun"):
            self._objects = objects.of_rank(self._engine, self._optimizer, self._contents, self._wish.state, self._snapshot.put)
            if self._rank == 0:
                self._objects["model"] = objects.of_model(
                    self._engine, self._optimizer, self._contents, self._wish.extra, self._snapshot.put
                )
            name = self._make_folder() if self._rank == 0 else ""
        name = self._exchange.texts("the folder", name)[0]
        self._working = self._wish.target.parent / name
        with self._together("could not be begun"):
            if not self._working.is_dir():
                raise CheckpointError(
                    "rank 0 made it, but this rank does not see it: all ranks must see one folder", str(self._working)
                )
            self._choose()
            needed = self._needed_bytes()
        everybody = self._exchange.texts("the space", needed)
        with self._together("could not be begun"):
            self._check_space(everybody)
            if self._wish.background:
                self._hold()

    def _make_folder(self) -> str:
        self._working = self._wish.target.parent / folder.new_name(self._wish.target)
        folder.make_folder(self._working)
        self._alive = folder.marked_alive(self._working)
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
            self.may_run_later = False
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
        self.may_run_later = self._pin is not None

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
            self.may_run_later = False
        if self.may_run_later:
            self._snapshot.freeze(held, self._pin)

    # -- writing ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Write this rank's files, then, on rank 0, make the checkpoint appear."""
        with self._together("was not written"):
            files = self._write()
        everybody = self._exchange.texts("files", json.dumps([f.model_dump() for f in files]))
        with self._together("could not be completed"):
            if self._rank == 0:
                self._commit([File(**row) for text in everybody for row in json.loads(text)])
        if self._pin is not None:
            self._pin.keep()
            replaced = self._saves.pins.pop(self._wish.target, None)
            if replaced is not None:
                replaced.release()
            self._saves.pins[self._wish.target] = self._pin
        self._drop_old()

    def _write(self) -> list[File]:
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
        self._written += nbytes
        if self._wish.progress is not None:
            self._wish.progress(min(self._written, self._total), self._total)

    def _commit(self, files: list[File]) -> None:
        parent = self._wish.target.parent
        with folder.locked(parent):
            found, _ = folder.checkpoints(parent)
            manifest = Manifest(
                lowtide=__version__,
                torch=str(torch.__version__),
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                name=self._wish.target.name,
                step=self._wish.step,
                sequence=max((f.manifest.sequence for f in found), default=0) + 1,
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
        if self._rank == 0:
            try:
                for path in [*folder.unused(self._wish.target.parent, self._wish.keep)]:
                    folder.remove(path)
            except (OSError, CheckpointError) as error:  # the new one is there; `ckpt gc` can try again
                _log.warning("an old checkpoint could not be removed: %s", error)
        self._exchange.numbers("old checkpoints are gone", 0)
        _release_removed(self._saves)

    @contextlib.contextmanager
    def _together(self, what: str) -> Generator[None]:
        """If anything fails on one rank, all ranks raise it, and nothing is left of the checkpoint."""
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:  # raised below, on all ranks
            failure = _explained(error, self._wish.target)
        told = self._exchange.texts(f"a checkpoint that {what}", "" if failure is None else f"{failure}")
        if not any(told):
            return
        if self._pin is not None:
            self._pin.release()
        if self._rank == 0 and self._working.name:
            with contextlib.suppress(OSError):  # the first error is the one to tell; `ckpt gc` removes the rest
                folder.remove(self._working)
        if failure is not None:
            raise failure
        rank = next(r for r, text in enumerate(told) if text)
        raise CheckpointError(f"it {what}: rank {rank}: {told[rank]}", str(self._wish.target))


def _explained(error: Exception, target: Path) -> Exception:
    if isinstance(error, Error) or not isinstance(error, OSError):
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
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{str(path)!r} is a file; a checkpoint is a folder.")
    return target
