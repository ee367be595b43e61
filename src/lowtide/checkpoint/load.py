"""Loading: from the newest checkpoint that verifies into any number of ranks, any stage, units, tiers and budget.

Every rank reads the elements that it answers for, wherever the writer put them, a chunk at a time. A checkpoint that turns out
to be damaged is passed over, on all ranks together, and the one before it is loaded instead. One that was removed or replaced
while it was read is none to pass over: another job saves there, and the newest is looked for again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.checkpoint import folder, objects, rng, tree
from lowtide.checkpoint.described import Group
from lowtide.checkpoint.fitting import Fitting, Saved, Unfit, Unusable
from lowtide.checkpoint.source import Source, open_source
from lowtide.errors import (
    CheckpointCorrupted,
    CheckpointError,
    CheckpointMismatch,
    CheckpointTooNew,
    CheckpointUnread,
    Error,
    NoCheckpoint,
)
from lowtide.runtime.contents import PARAMETERS, STATE, Contents
from lowtide.runtime.engine import Engine
from lowtide.runtime.exchange import Outcome
from lowtide.runtime.unit import Unit
from lowtide.tiers.shelf import Access

_log = logging.getLogger("lowtide")

Report = Callable[[int, int], None]

_LOOKS = 100
"""How often the newest checkpoint is looked for, if each was removed by another job before it was read."""

_LOOKS_AT_ONE = 10

_NO_MEMORY = "allocate memory"
"""What torch says then; on a CPU it has no class for it."""

_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, CheckpointCorrupted, CheckpointTooNew, CheckpointUnread, NoCheckpoint)
}
"""What rank 0 may find, by name: other ranks raise the same."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded."""

    path: Path
    step: int
    extra: dict[str, Any]
    world_size: int
    passed_over: tuple[str, ...]
    """Checkpoints that were not loaded, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller asked for."""

    path: Path
    state: Mapping[str, Any]
    strict: bool
    progress: Report | None


class _Listed(NamedTuple):
    """A checkpoint to try, relative to the folder that was asked for, and the digest that its manifest had."""

    name: str
    digest: str


def load(engine: Engine, optimizer: Optimizer | None, wish: Wish) -> Loaded:
    """Every rank calls this."""
    candidates, passed_over = _candidates(engine, wish.path)
    engine.before_load()
    for _ in range(_LOOKS):
        loaded = _first(engine, optimizer, wish, candidates, passed_over)
        if loaded is not None:
            return loaded
        candidates, passed_over = _candidates(engine, wish.path)
    raise NoCheckpoint("every one that was there was removed while it was read", str(wish.path))


def _first(
    engine: Engine, optimizer: Optimizer | None, wish: Wish, candidates: list[_Listed], passed_over: list[str]
) -> Loaded | None:
    """The first one that can be loaded; None if one is not there any more, so that the list is old."""
    for listed in candidates:
        loaded = _try(engine, optimizer, wish, listed, passed_over)
        if isinstance(loaded, Loaded):
            return loaded
        if _has_changed(engine, wish.path, listed):
            return None
        passed_over.append(loaded)
        if engine.group.rank == 0:
            _log.warning("passed over: %s", loaded)
    engine.loading = False
    raise NoCheckpoint(f"none of the checkpoints there can be loaded: {'; '.join(passed_over)}", str(wish.path))


def _has_changed(engine: Engine, path: Path, listed: _Listed) -> bool:
    """Whether a checkpoint was removed or replaced since it was listed; rank 0 looks."""
    changed = False
    if engine.group.rank == 0:
        try:
            changed = folder.read_manifest(path / listed.name).digest != listed.digest
        except CheckpointError:
            changed = not folder.is_checkpoint(path / listed.name)
    return bool(engine.exchange.numbers("whether a checkpoint is still there", int(changed))[0])


def _candidates(engine: Engine, path: Path) -> tuple[list[_Listed], list[str]]:
    """Which checkpoints to try, the same on all ranks: rank 0 has looked."""
    said = ""
    if engine.group.rank == 0:
        try:
            listed, passed_over = _look(path)
            said = json.dumps({"listed": listed, "passed_over": passed_over})
        except CheckpointError as error:
            said = json.dumps({"kind": type(error).__name__, "fields": error.fields()})
    answer = json.loads(engine.exchange.texts("checkpoints", said)[0])
    if "kind" in answer:
        raise _KINDS[answer["kind"]](**answer["fields"])
    return [_Listed(*row) for row in answer["listed"]], answer["passed_over"]


def _look(path: Path) -> tuple[list[_Listed], list[str]]:
    """What to try in ``path``, and what was passed over."""
    for _ in range(_LOOKS_AT_ONE):  # while it makes room for another of its name, neither may be seen
        one = path if folder.is_checkpoint(path) else next(iter(folder.put_aside(path)), None)
        try:
            if one is not None:
                return [_Listed("." if one == path else f"../{one.name}", folder.read_manifest(one).digest)], []
        except CheckpointError:
            if folder.is_checkpoint(one or path):
                raise
    found, refused = folder.checkpoints(path)
    reasons = [f"{where.name}: {error.problem}" for where, error in refused]
    for reason, (_, error) in zip(reasons, refused, strict=True):
        if isinstance(error, CheckpointTooNew):
            raise error
        _log.warning("passed over: %s", reason)
    if not found:
        problem = f"nothing there can be used: {'; '.join(reasons)}" if reasons else "there is no checkpoint"
        raise NoCheckpoint(problem, str(path))
    return [_Listed(f.path.name, f.manifest.digest) for f in found], reasons


def _try(engine: Engine, optimizer: Optimizer | None, wish: Wish, listed: _Listed, passed_over: list[str]) -> Loaded | str:
    """Load one; what is wrong with it if it is damaged, on any rank."""
    path = wish.path / listed.name
    with ExitStack() as stack:
        opened: list[_Loading] = []

        def open_it() -> None:
            source = stack.enter_context(open_source(path))
            if source.manifest.digest != listed.digest:  # else ranks could load several that were there one after another
                raise CheckpointError("it is another one than rank 0 has found", str(path))
            opened.append(_Loading(engine, optimizer, wish, source))
            opened[0].compare()

        def read_it() -> None:
            engine.poisoned_by, engine.loading = "loading a checkpoint failed half-way", True
            opened[0].run()

        problem = _on_all(engine, path, open_it) or _on_all(engine, path, read_it)
        if problem is not None:
            return problem
        (loading,) = opened
        return Loaded(path, loading.step, loading.finish(), loading.world_size, tuple(passed_over))


def _on_all(engine: Engine, path: Path, work: Callable[[], None]) -> str | None:
    """Do ``work`` on every rank; what went wrong on one. No rank goes on before all have done it."""
    failure: CheckpointError | None = None
    try:
        with _believing_nothing(path):
            work()
    except CheckpointError as error:
        failure = error
    told = engine.exchange.outcomes(
        f"loading {path.name}",
        Outcome() if failure is None else Outcome(f"{type(failure).__name__}\0{failure.problem}", failed=True),
    )
    first = next(((rank, each.text) for rank, each in enumerate(told) if each.failed), None)
    if first is None:
        return None
    kind, _, problem = first[1].partition("\0")
    for final in (CheckpointMismatch, CheckpointUnread):  # an older one would not fit either, or is not better to read
        if kind == final.__name__:
            raise failure if isinstance(failure, final) else final(problem, str(path))
    where = f" (rank {first[0]})" if engine.group.size > 1 else ""
    return f"{path.name}{where}: {problem}"


@contextmanager
def _believing_nothing(path: Path) -> Generator[None]:
    """Values of the wrong kind where the format has others: damage, or somebody's work; not a bug of ours. That there is no
    memory for them says nothing of them."""
    try:
        yield
    except MemoryError as error:
        raise CheckpointUnread(f"there is no memory for it: {error!s:.200}", str(path)) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        if isinstance(error, Error):
            raise
        if isinstance(error, RuntimeError) and _NO_MEMORY in str(error):
            raise CheckpointUnread(f"there is no memory for it: {error!s:.200}", str(path)) from error
        raise CheckpointCorrupted(f"a value in it cannot be used: {type(error).__name__}: {error!s:.100}", str(path)) from error


class _Loading:
    """One checkpoint on its way into one rank."""

    def __init__(self, engine: Engine, optimizer: Optimizer | None, wish: Wish, source: Source) -> None:
        self._engine, self._optimizer, self._wish, self._source = engine, optimizer, wish, source
        self._contents = Contents(engine, optimizer)
        self._model = source.model
        self._names = self._matched()
        self._options: list[dict[str, Any]] | None = None
        self._states: dict[nn.Parameter, Saved] = {}
        self.step, self.world_size = source.manifest.step, source.manifest.world_size
        self._state: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._extra: dict[str, Any] = {}
        self._done = 0
        self._total = sum(u.layout.shard_bytes(engine.group.shard.rank) for u in engine.units)

    def _matched(self) -> dict[str, str]:
        """Names of this model to names in the checkpoint; tied parameters may have been saved under another of theirs."""
        saved, others = self._source.parameters, self._model.aliases
        mine: dict[str, list[str]] = {}
        for alias, name in objects.aliases(self._engine).items():
            mine.setdefault(name, []).append(alias)
        out: dict[str, str] = {}
        for name in (n for unit in self._engine.units for n in unit.names):
            found = next((others.get(n, n) for n in (name, *mine.get(name, ())) if others.get(n, n) in saved), None)
            if found is not None:
                out[name] = found
        return out

    def compare(self) -> None:
        """Raise CheckpointMismatch if the checkpoint is of another model; nothing has changed yet."""
        here = {
            name: (tuple(spec.shape), dtypes.param)
            for unit in self._engine.units
            for name, spec, dtypes in zip(unit.names, unit.layout.params, unit.dtypes, strict=True)
        }
        for name, saved in self._names.items():
            (shape, dtype), facts = here[name], self._source.parameters[saved]
            if shape != facts.shape:
                raise self._mismatch(f"{name!r} is {shape} here and {facts.shape} in the checkpoint")
            if facts.dtype.is_complex and not dtype.is_complex:
                raise self._mismatch(f"{name!r} is {dtype} here and {facts.dtype} in the checkpoint")
        if self._optimizer is not None and self._model.groups is None and self._wish.strict:
            raise self._mismatch("it was saved without an optimizer")
        if self._wish.strict:
            missing = [n for n in here if n not in self._names]
            known = {*self._names.values(), *objects.persistent_buffers(self._engine.model)}
            unexpected = [n for n in self._source.parameters if n not in known]
            for names, where in ((missing, "the checkpoint lacks"), (unexpected, "the model lacks")):
                if names:
                    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                    raise self._mismatch(f"{where} {names[0]!r}{more}")
            self._compare_groups()
            lacking = sorted(set(self._wish.state) - set(self._saved_state()))
            if lacking:
                raise self._mismatch(f"it has no state {lacking[0]!r}")
        for name, buffer in objects.persistent_buffers(self._engine.model).items():
            shape = self._shape_of_buffer(name)
            if shape is None and self._wish.strict:
                raise self._mismatch(f"the checkpoint lacks the buffer {name!r}")
            if shape is not None and shape != tuple(buffer.shape):
                raise self._mismatch(f"the buffer {name!r} is {tuple(buffer.shape)} here and {shape} in the checkpoint")
        if self._optimizer is not None and self._model.groups is not None:
            self._compare_states(self._optimizer, self._model.groups)

    def _shape_of_buffer(self, name: str) -> tuple[int, ...] | None:
        row: Any = self._model.buffers.get(name)
        if row is not None:
            return tuple(row.get("shape", ()))  # a scalar has none
        facts = self._source.parameters.get(name)
        return None if facts is None else facts.shape

    def _compare_states(self, optimizer: Optimizer, groups: list[Group]) -> None:
        """What the optimizer will get, or an error that says why it cannot go on from there."""
        fitting = Fitting(optimizer, self._contents, self._model.optimizer, strict=self._wish.strict)
        saved = self._source.small_states()
        try:
            if len(optimizer.param_groups) == len(groups):
                self._options = fitting.options([self._decode(group.options, 0) for group in groups])
            for unit in self._engine.units:
                for param, own in zip(unit.params, unit.names, strict=True):
                    name = self._names.get(own)
                    if name in saved and self._contents.holds(param):
                        rank, row = saved[name]
                        kinds = [kind for kind in self._source.kinds(name) if kind.startswith(STATE)]
                        large = {k.removeprefix(STATE): self._source.dtype(k, name) or torch.float32 for k in kinds}
                        found = fitting.states(param, Saved(name, self._decode(row, rank), large))
                        if found is not None:
                            self._states[param] = found
        except Unfit as error:
            raise self._mismatch(str(error)) from error
        except Unusable as error:
            raise CheckpointCorrupted(str(error), str(self._source.path)) from error

    def _compare_groups(self) -> None:
        saved = self._model.groups
        if self._optimizer is None or saved is None:
            return
        here = self._optimizer.param_groups
        if len(saved) != len(here):
            raise self._mismatch(f"the optimizer has {len(here)} groups here and {len(saved)} in the checkpoint")
        for number, (old, new) in enumerate(zip(saved, here, strict=True)):
            names = [self._names.get(self._engine.name_of[p]) for p in new["params"]]
            if sorted(map(str, names)) != sorted(old.parameters):
                raise self._mismatch(f"group {number} of the optimizer has other parameters")

    def _mismatch(self, problem: str) -> CheckpointMismatch:
        return CheckpointMismatch(problem, str(self._source.path))

    # -- everything ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Replace every number of the model and the optimizer."""
        engine = self._engine
        engine.residency.forget()
        if self._optimizer is not None and self._model.groups is not None:
            self._load_small_states(self._optimizer)
        for unit in engine.units:
            for kind in self._kinds(unit):
                for number in range(len(unit.chunks)):
                    self._load_chunk(unit, kind, number)
        self._load_buffers()
        self._state, self._random, self._extra = self._objects()

    def finish(self) -> dict[str, Any]:
        """All ranks have read it: it is the model now. Returns ``extra``."""
        engine = self._engine
        engine.scale.restore(self._model.scale.model_dump())
        engine.steps_taken = self.step
        engine.after_load()
        if self._random is not None:
            rng.restore(self._random)
        engine.loading = False
        for name, value in self._state.items():
            self._wish.state[name].load_state_dict(value)
        return self._extra

    def _kinds(self, unit: Unit) -> list[str]:
        """What is loaded: without saved states, those that are here stay as they are."""
        kinds = self._contents.kinds(unit)
        return kinds if self._model.groups is not None else [k for k in kinds if not k.startswith(STATE)]

    def _load_chunk(self, unit: Unit, kind: str, number: int) -> None:
        names = [self._names.get(unit.names[part.index]) for part in unit.chunks[number].parts]
        if not any(names):
            return
        # strict=False: what the checkpoint lacks stays as it is
        how = Access.REPLACE if all(names) else Access.CHANGE
        with self._contents.open(unit, kind, number, how) as rows, torch.no_grad():
            for cut, tensor in rows:
                name = self._names.get(unit.names[cut.index])
                if name is not None:
                    self._fill(unit, kind, name, cut.lo, cut.hi, cut.index, tensor)
                    if kind == PARAMETERS:
                        self._note(tensor.nbytes)

    def _fill(self, unit: Unit, kind: str, name: str, lo: int, hi: int, index: int, out: Tensor) -> None:
        found = self._source.best(kind, name, out.dtype)
        if found is None:
            out.zero_()  # a state that its optimizer did not have yet
            return
        facts, here = self._source.parameters[name], unit.layout.params[index]
        if facts.stride == tuple(here.stride) or facts.numel < 2 or lo == hi:
            self._source.read_into(found, name, lo, hi, out)
            return
        # Saved in another order of memory (channels_last): bring it whole and cut it here.
        dtype = self._source.dtype(found, name) or out.dtype
        whole = torch.empty(facts.numel, dtype=dtype)
        self._source.read_into(found, name, 0, facts.numel, whole)
        ordered = torch.empty_strided(here.shape, here.stride, dtype=dtype)
        ordered.copy_(whole.as_strided(facts.shape, facts.stride))
        out.copy_(ordered.as_strided((facts.numel,), (1,))[lo:hi])

    def _note(self, nbytes: int) -> None:
        self._done += nbytes
        if self._wish.progress is not None:
            self._wish.progress(min(self._done, self._total), self._total)

    # -- states -------------------------------------------------------------------------------------------------------

    def _load_small_states(self, optimizer: Optimizer) -> None:
        self._contents.forget_states()
        for param, saved in self._states.items():
            self._contents.set_states(param, saved.small, dict(saved.large))
        for group, options in zip(optimizer.param_groups, self._options or (), strict=False):
            group.update(options)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _load_buffers(self) -> None:
        saved = self._model.buffers
        for name, buffer in objects.persistent_buffers(self._engine.model).items():
            value = self._decode(saved[name], 0) if name in saved else None
            if value is None and name in self._source.parameters:  # imported weights do not tell the two apart
                value = torch.empty(self._source.parameters[name].shape, dtype=self._source.parameters[name].dtype)
                self._source.read_into(PARAMETERS, name, 0, value.numel(), value.view(-1))
            if value is not None:
                buffer.detach().copy_(value)

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
        """For the caller's objects, for the random number generators (this rank's, if it was there), and ``extra``."""
        rank = self._engine.group.rank
        same = rank < self._source.manifest.world_size
        mine = self._source.tables[rank if same else 0]
        saved: Any = mine.objects["state"]
        state = {name: self._decode(saved[name], mine.rank) for name in self._wish.state if name in saved}
        random = self._source.random_states(mine.rank) if same else None  # or imported: there are none
        return state, random, self._decode(self._model.extra, 0)

    def _saved_state(self) -> dict[str, Any]:
        saved: Any = self._source.tables[0].objects["state"]
        return saved

    def _decode(self, value: Any, rank: int) -> Any:
        def get(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return self._source.object(rank, name, shape, dtype)

        return tree.decode(value, get, str(self._source.path))
