"""Units whose activations are computed again in backward instead of being kept.

The forward of a unit's module runs inside ``torch.utils.checkpoint``; our saved-tensor hooks are open inside the checkpoint's,
so views of parameters stay recipes in the graph and the checkpoint is left with activations only.

[Note: the second time must be the first again] Recomputing is exact only if the module finds what it found the first time.
Random numbers of torch's and autocast are the checkpoint's part. Ours is the rest:

- The parameters are pinned, and must be as old as they were. The buffers that the forward changed (BatchNorm statistics) are,
  for the time of the recomputation, copies with their former values, so that the real ones do not move twice and no graph that
  saved them notices. ``training`` is what it was, the generators of Python and NumPy are put back, and arguments that were one
  object are one again.
- A forward that changes anything else is not computed again. It is looked at before and after (``hidden_state.py``); what
  autograd saved in it is held until then, and only dropped if nothing has changed.
- What is dropped is hashed (``prints.py``), and every recomputation is compared before anything is computed with it. The first
  one of each module runs to its end and is compared in its results, too; later ones stop at the last tensor that was saved. If
  it differs, state has moved on that nobody can see: going on would give other numbers, so the model is poisoned.

[Note: one rank may keep what the others compute again] Whether state has changed is found out by each rank for itself. A rank
that keeps a unit brings its parameters where it would have computed it again, so that all ranks gather in one order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowtide.errors import RecomputedDifferently, Refused, StaleGraph
from lowtide.runtime.hidden_state import HostGenerators, Look, hook_of_a_caller
from lowtide.runtime.outputs import tensors_in
from lowtide.runtime.prints import can_be_printed, print_of
from lowtide.runtime.saved import Held, SavedViews
from lowtide.runtime.unit import Unit
from lowtide.spec.units import needs
from lowtide.torch_internals import (
    backward_under_way,
    close_saved_tensor_hooks,
    innermost_saved_tensor_hooks,
    storage_of,
)

_LARGE = 1 << 20  # buffers above this are copied before a forward only as long as it is not known to leave them alone


class Pinning(Protocol):
    """The part of an engine that recomputing needs."""

    def before_forward(self, units: Sequence[Unit]) -> None: ...

    def after_forward(self, units: Sequence[Unit]) -> None: ...

    def as_if_computed_again(self, units: Sequence[Unit]) -> None:
        """Take part in what other ranks do to compute ``units`` again."""

    def poison(self, reason: str) -> None:
        """Nobody may use the model before it is loaded anew."""


class Choice(Protocol):
    """Who decides about activations."""

    def should_recompute(self, module: nn.Module) -> bool:
        """Asked when the forward of ``module`` begins: whether it is to be computed again."""
        ...

    def should_keep(self, module: nn.Module, nbytes: int, changes: str | None) -> bool:
        """Asked when it ends: whether the ``nbytes`` that autograd saved are kept all the same. ``changes``: they must be,
        because the forward has changed this."""
        ...


def modules_to_wrap(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Modules that can be recomputed one by one, and the units each needs: those of units that contain no other, nor are
    the model itself (then there would be nothing left to keep)."""
    hosts = {module for unit in units for module in unit.modules}
    unit_of = {param: unit for unit in units for param in unit.params}
    innermost = [h for h in hosts if h is not model and not any(m in hosts for m in h.modules() if m is not h)]
    return {h: sorted({unit_of[p] for p in needs(h, hosts)}, key=lambda u: u.index) for h in innermost}


class Recompute:
    """Replaces the ``forward`` of modules by one that recomputes when ``choice`` says so; it is asked at every call."""

    def __init__(self, engine: Pinning, saved: SavedViews, choice: Choice) -> None:
        self._engine = engine
        self._saved = saved
        self._choice = choice
        self._replaced: dict[nn.Module, Callable[..., Any] | None] = {}
        self._presents: list[_Present] = []  # of modules that are computed again now

    def install(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Make ``module``, which needs ``units``, able to recompute."""
        original: Callable[..., Any] = module.forward
        self._replaced[module] = vars(module).get("forward")
        parameters = [(m, name, p) for m in module.modules() for name, p in _parameters(m).items()]
        habits = _Habits(_names_of(original), parameters)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # compiled code keeps what its own compiler decided to keep
                return original(*args, **kwargs)
            if not torch.is_grad_enabled() or not self._answer(module, habits):
                return original(*args, **kwargs)
            call = _Call(self._engine, self._saved, self._choice, module, units, habits, self._presents)
            return call.run(original, args, kwargs)

        module.forward = forward

    def _answer(self, module: nn.Module, habits: _Habits) -> bool:
        # In backward this is the recomputation of a caller's checkpoint, which must go as its forward went.
        if backward_under_way() is None or habits.answer is None:
            habits.answer = habits.has_its_own_parameters() and self._choice.should_recompute(module)
        return habits.answer

    def put_back(self) -> None:
        """Recomputations were broken off: modules are what they were before them."""
        while self._presents:
            self._presents[-1].restore()
            self._presents.pop()

    def remove(self) -> None:
        """Put every ``forward`` back. Graphs that exist can still be walked."""
        for module, own in self._replaced.items():
            if own is None:
                del module.forward
            else:
                module.forward = own
        self._replaced.clear()


@dataclass(slots=True)
class _Habits:
    """What earlier calls of a module have shown."""

    names: tuple[str, ...]  # of the arguments of its forward
    parameters: list[tuple[nn.Module, str, nn.Parameter | None]]
    """Which it was built with, and where."""
    answer: bool | None = None  # whether the last forward was to be recomputed
    tried: bool = False  # one recomputation has come to the same results
    writes: bool | None = None  # whether the forward writes to its parameters; unknown before the first
    constant: set[tuple[bool, nn.Module, str]] = field(default_factory=set[tuple[bool, nn.Module, str]])
    """Large buffers that a forward (in training or not) left alone."""

    def has_its_own_parameters(self) -> bool:
        """Or torch.func.functional_call has put others in their place, for the length of the forward pass only."""
        return all(_parameters(module).get(name) is param for module, name, param in self.parameters)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, by the names that a message gives them."""
        names = [*self.names, *(f"argument {number + 1}" for number in range(len(self.names), len(args)))]
        return {**dict(zip(names, args, strict=False)), **{f"argument {name!r}": value for name, value in kwargs.items()}}


def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """What a message calls the arguments that ``forward`` gets by position."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # it is built in
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(f"argument {p.name!r}" for p in parameters if p.kind in by_position)


class _Arguments:
    """The arguments of a call as a list of tensors, each once, and what is left of them without tensors.

    What a checkpoint gets by position passes through saved-tensor hooks, and can be spilled; but each for itself, so that
    ``a is b`` would be lost between two arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._rest = self._without_tensors((args, kwargs))
        self._numbers.clear()

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._filled(self._rest, tensors)

    def _without_tensors(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return _Number(self._numbers[id(value)])
        return _mapped(value, self._without_tensors)

    def _filled(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if type(value) is _Number:
            return tensors[value.number]
        return _mapped(value, lambda inner: self._filled(inner, tensors))


@dataclass(frozen=True, slots=True)
class _Number:
    """The place of a tensor."""

    number: int


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """``value`` with ``function`` of everything in it, if it is a container of Python's own; other objects are themselves."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(function(each) for each in value)
    if kind is dict:
        return {key: function(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return kind._make(function(each) for each in value)
    return value


class _Call:
    """One forward of a module, and its recomputations."""

    def __init__(
        self,
        engine: Pinning,
        saved: SavedViews,
        choice: Choice,
        module: nn.Module,
        units: Sequence[Unit],
        habits: _Habits,
        presents: list[_Present],
    ) -> None:
        self._engine, self._saved, self._choice = engine, saved, choice
        self._module, self._units, self._habits = module, units, habits
        self._presents = presents
        self._params = [param for unit in units for param in unit.params]
        self._versions = [_version(p) for p in self._params]
        self._needed = [saved.need(unit) for unit in units]
        self._before = _Before(module, habits)
        self._name = units[0].name if units else type(module).__name__
        self._generators: HostGenerators | None = None  # as they were, if the forward has used them
        self._prints = _Prints()
        self._held: list[Held] = []
        self._pass: int | None = None  # the last backward pass in which something was used that was kept

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = _Arguments(args, kwargs)
        tensors = [tensor for tensor in arguments.tensors if not tensor.is_inference()]
        versions = [_version(tensor) for tensor in tensors]
        named = self._habits.named(args, kwargs)
        tree = list(self._module.named_modules())
        look, generators = Look(tree, named), HostGenerators.now()
        trial = not self._habits.tried
        written = [print_of(p) for p in self._params] if self._habits.writes is not False else []
        first = [(args, kwargs)]
        del args, kwargs  # or the graph would hold them

        def call(*again: Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                return original(*args, **kwargs)
            args, kwargs = arguments.with_tensors(again)
            output = original(*args, **kwargs)
            self._prints.compare_results(output)
            return None

        outer = innermost_saved_tensor_hooks()
        try:
            output = checkpoint(
                call,
                *arguments.tensors,
                use_reentrant=False,
                preserve_rng_state=True,
                determinism_check="none",
                early_stop=not trial,
                context_fn=lambda: (_Forward(self, self._saved), _Again(self)),
            )
        finally:  # an interrupt where ours end would leave the checkpoint's own
            close_saved_tensor_hooks(down_to=outer)
        arguments.tensors = []
        if not (now := HostGenerators.now()).is_as(generators):
            self._generators = generators
        del now
        changed = (
            "its inputs in place"
            if versions != [_version(tensor) for tensor in tensors]
            else look.difference(Look(tree, named)) or self._changed_tensors(written) or hook_of_a_caller(tree)
        )
        self._drop_or_keep(changed)
        if trial and changed is None:
            self._prints.note_results(output)
        return output

    def _changed_tensors(self, prints: Sequence[int | None]) -> str | None:
        """The parameter or buffer that the forward has changed and that cannot be put back. ``prints``: of the parameters
        before it, if it is not known yet whether it writes to them past their versions (``param.data``)."""
        if prints:
            self._habits.writes = list(prints) != [print_of(p) for p in self._params]
        if self._habits.writes or self._versions != [_version(p) for p in self._params]:
            return "its own parameters"
        name = self._before.forget_unchanged(self._habits)
        return None if name is None else f"its buffer {name!r}"

    def _drop_or_keep(self, changed: str | None) -> None:
        held, self._held = self._held, []
        if self._choice.should_keep(self._module, self._saved.bytes_of(held), changed):
            self._saved.keep(held)
        else:
            for each in held:
                each.drop()
        self._prints.forget_tensors()

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def saw(self, tensor: Tensor, parameter: tuple[object, ...] | None) -> int | None:
        return self._prints.saw(tensor, parameter)

    def hold(self, held: Held) -> Held:
        self._held.append(held)
        return held

    def used(self) -> None:
        if (this := backward_under_way()) != self._pass:
            self._pass = this
            self._engine.as_if_computed_again(self._units)

    # -- again --------------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[saved_tensors_hooks, _Present]:
        """Make everything as it was before the forward."""
        self._engine.before_forward(self._units)
        try:
            for needed in self._needed:
                needed.check()
            for param, version in zip(self._params, self._versions, strict=True):
                if _version(param) != version:
                    raise StaleGraph(self._name)
            present = self._before.put_back(self._presents)
            if self._generators is not None:
                present.generators = HostGenerators.now()
                self._generators.put_back()
            self._prints.begin()
            return self._saved.open_in_checkpoint(self, again=True), present
        except BaseException:
            self._engine.after_forward(self._units)
            raise

    def end(self, context: saved_tensors_hooks, present: _Present, error: BaseException | None) -> None:
        """Make everything as it was before ``begin``."""
        self._prints.forget_tensors()  # before the unit is released: one may be a view of it
        try:
            touched = present.restore()
            self._presents.remove(present)
            self._saved.close_in_checkpoint(context)
        finally:
            self._engine.after_forward(self._units)
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt
        if touched is not None:
            raise Refused(
                f"the forward pass of unit {self._name!r} reaches its buffer {touched!r} through another name and cannot "
                f'be computed again. Keep its activations (activations="keep"), or use the buffer by its attribute.'
            )
        if (difference := self._prints.difference(to_its_end=error is None)) is not None:
            found = RecomputedDifferently(self._name, difference)
            self._engine.poison(str(found))
            raise found from error
        if error is None:
            self._habits.tried = True


class _Prints:
    """What autograd saved in a forward, by its prints, in order; and whether a recomputation is the same."""

    def __init__(self) -> None:
        self._expected: list[Any] = []
        self._results: list[int | None] | None = None
        self._again: int | None = None  # how many tensors the recomputation has saved
        self._difference: str | None = None
        self._known: dict[tuple[object, ...], int | None] = {}
        self._tensors: list[Tensor] = []  # that are known: nobody else gets their memory meanwhile

    def saw(self, tensor: Tensor, parameter: tuple[object, ...] | None) -> int | None:
        """A tensor is saved: its number, None for one too many."""
        found = parameter if parameter is not None else self._print(tensor)
        if self._again is None:
            self._expected.append(found)
            return len(self._expected) - 1
        number, self._again = self._again, self._again + 1
        if number >= len(self._expected):
            self._differs(f"it saved more than the {len(self._expected)} tensors of the first time")
            return None
        if found != self._expected[number]:
            total, what = len(self._expected), f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")
            self._differs(f"tensor {number + 1} of the {total} that autograd saved in it, {what}, is not the same")
        return number

    def _print(self, tensor: Tensor) -> int | None:
        if not can_be_printed(tensor) or (tensor.dtype is torch.uint8 and tensor.dim() == 1):
            return None  # of the second kind is the working memory of oneDNN's LSTM: parts of it nobody has ever written
        version = _version(tensor)
        key = (storage_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, version)
        if key not in self._known:
            self._known[key] = print_of(tensor)
            self._tensors.append(tensor.detach())
        return self._known[key]

    def note_results(self, output: Any) -> None:
        """Recomputations that run to their end are to come to ``output``."""
        self._results = [print_of(tensor) for tensor in tensors_in(output)]

    def compare_results(self, output: Any) -> None:
        """A recomputation ran to its end."""
        if self._results is not None and self._results != [print_of(tensor) for tensor in tensors_in(output)]:
            self._differs("its result is not the same")

    def begin(self) -> None:
        """A recomputation begins."""
        self._again, self._difference = 0, None

    def difference(self, *, to_its_end: bool) -> str | None:
        """What has differed in the recomputation that is over."""
        missing = len(self._expected) - (self._again or 0)
        if self._difference is None and to_its_end and missing > 0:
            self._differs(f"it saved {missing} fewer than the {len(self._expected)} tensors of the first time")
        return self._difference

    def forget_tensors(self) -> None:
        self._known.clear()
        self._tensors.clear()

    def _differs(self, how: str) -> None:
        self._difference = self._difference or how


class _Forward:
    """Around the first forward, inside the checkpoint's hooks."""

    def __init__(self, call: _Call, saved: SavedViews) -> None:
        self._call = call
        self._saved = saved
        self._context: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        self._context = self._saved.open_in_checkpoint(self._call, again=False)

    def __exit__(self, *_: object) -> None:
        self._saved.close_in_checkpoint(self._context)


class _Again:
    """Around every recomputation: a retained graph enters it once per backward pass."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._open: list[tuple[saved_tensors_hooks, _Present]] = []

    def __enter__(self) -> None:
        self._open.append(self._call.begin())

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._call.end(*self._open.pop(), error)


@dataclass(slots=True)
class _Buffer:
    """A buffer before a forward pass."""

    owner: nn.Module
    name: str
    value: Tensor | None
    version: int
    copy: Tensor | None

    def is_replaced(self) -> bool:
        return _buffers(self.owner).get(self.name) is not self.value

    def is_changed_in_place(self) -> bool:
        """Not every writer raises the version, so the values are looked at too."""
        if self.value is None:
            return False
        return _version(self.value) != self.version or (self.copy is not None and not torch.equal(self.copy, self.value))


class _Before:
    """What a module was before its forward pass."""

    def __init__(self, module: nn.Module, habits: _Habits) -> None:
        self._modules = list(module.modules())
        self._training = [m.training for m in self._modules]
        self._buffers: list[_Buffer] = []
        copies: dict[int, Tensor] = {}  # one buffer may have several names
        for owner in self._modules:
            for name, value in _buffers(owner).items():
                copy = None
                if value is not None and (owner.training, owner, name) not in habits.constant:
                    copy = copies[id(value)] if id(value) in copies else value.detach().clone()
                    copies[id(value)] = copy
                self._buffers.append(_Buffer(owner, name, value, 0 if value is None else _version(value), copy))

    def forget_unchanged(self, habits: _Habits) -> str | None:
        """Keep only what the forward changed. Returns the name of a buffer that changed although no copy was made, or that is
        new."""
        changed: list[_Buffer] = []
        known = {(buffer.owner, buffer.name) for buffer in self._buffers}
        lost = next((name for owner in self._modules for name in _buffers(owner) if (owner, name) not in known), None)
        for buffer in self._buffers:
            habit = (buffer.owner.training, buffer.owner, buffer.name)
            if buffer.is_changed_in_place() and buffer.copy is None:
                habits.constant.discard(habit)
                lost = buffer.name
            if buffer.is_changed_in_place() or buffer.is_replaced():
                changed.append(buffer)
            elif buffer.copy is not None and buffer.copy.nbytes > _LARGE:
                habits.constant.add(habit)
        for buffer in changed:
            buffer.value = buffer.value if buffer.copy is None else buffer.copy  # let go of the real one
        self._buffers = changed
        return lost

    def put_back(self, presents: list[_Present]) -> _Present:
        """Give the module its former buffers, as copies, and its former mode. What it is now is noted in ``presents`` first."""
        formers = {id(b.value): b.value.clone() for b in self._buffers if b.value is not None}
        present = _Present(self._modules, with_buffers=bool(self._buffers))
        presents.append(present)
        for buffer in self._buffers:
            _buffers(buffer.owner)[buffer.name] = formers.get(id(buffer.value))
        _set_training(zip(self._modules, self._training, strict=True))
        return present


class _Present:
    """What a module is before it is computed again, to be restored afterwards."""

    def __init__(self, modules: Sequence[nn.Module], *, with_buffers: bool) -> None:
        self.generators: HostGenerators | None = None
        self._training = [(m, m.training) for m in modules]
        named = [(m, name, value) for m in modules for name, value in _buffers(m).items()] if with_buffers else []
        self._buffers = [(*place, 0 if place[2] is None else _version(place[2])) for place in named]

    def restore(self) -> str | None:
        """Returns the name of a buffer that was changed although a copy stood in its place."""
        _set_training(self._training)
        if self.generators is not None:
            self.generators.put_back()
        touched = None
        for module, name, value, version in self._buffers:
            _buffers(module)[name] = value
            if value is not None and _version(value) != version:
                touched = name
        return touched


def _set_training(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]
