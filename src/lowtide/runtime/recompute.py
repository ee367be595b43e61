"""Units whose activations are computed again in backward instead of being kept.

The forward of a unit's module runs inside ``torch.utils.checkpoint``; our saved-tensor hooks are open inside the checkpoint's,
so views of parameters stay recipes in the graph and the checkpoint is left with activations only.

[Note: the second time must be the first again] Recomputing is exact only if the module finds what it found the first time.
Random numbers and autocast are the checkpoint's part. Ours is the rest: the parameters are pinned, and must be as old as
they were; the buffers that the forward changed (BatchNorm statistics) are, for the time of the recomputation, copies with
their former values, so that the real ones do not move twice and no graph that saved them notices; ``training`` is what it
was; inputs that the forward changes in place are found out in the first call. What else a module keeps in Python is its own
affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lowtide.errors import Refused, StaleGraph
from lowtide.runtime.saved import SavedViews
from lowtide.runtime.unit import Unit
from lowtide.spec.units import needs
from lowtide.torch_internals import backward_under_way, close_saved_tensor_hooks, innermost_saved_tensor_hooks

_LARGE = 1 << 20  # buffers above this are copied before a forward only as long as it is not known to leave them alone


class Pinning(Protocol):
    """The part of an engine that recomputing needs."""

    def before_forward(self, units: Sequence[Unit]) -> None: ...

    def after_forward(self, units: Sequence[Unit]) -> None: ...


def modules_to_wrap(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Modules that can be recomputed one by one, and the units each needs: those of units that contain no other, nor are
    the model itself (then there would be nothing left to keep)."""
    hosts = {module for unit in units for module in unit.modules}
    unit_of = {param: unit for unit in units for param in unit.params}
    innermost = [h for h in hosts if h is not model and not any(m in hosts for m in h.modules() if m is not h)]
    return {h: sorted({unit_of[p] for p in needs(h, hosts)}, key=lambda u: u.index) for h in innermost}


class Recompute:
    """Replaces the ``forward`` of modules by one that recomputes when ``chosen`` says so; it is asked at every call."""

    def __init__(self, engine: Pinning, saved: SavedViews, chosen: Callable[[nn.Module], bool]) -> None:
        self._engine = engine
        self._saved = saved
        self._chosen = chosen
        self._replaced: dict[nn.Module, Callable[..., Any] | None] = {}
        self._presents: list[_Present] = []  # of modules that are computed again now

    def install(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Make ``module``, which needs ``units``, able to recompute."""
        original: Callable[..., Any] = module.forward
        self._replaced[module] = vars(module).get("forward")
        habits = _Habits()

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # compiled code keeps what its own compiler decided to keep
                return original(*args, **kwargs)
            if not torch.is_grad_enabled() or not self._answer(module, habits):
                return original(*args, **kwargs)
            return _Call(self._engine, self._saved, module, units, habits, self._presents).run(original, args, kwargs)

        module.forward = forward

    def _answer(self, module: nn.Module, habits: _Habits) -> bool:
        # In backward this is the recomputation of a caller's checkpoint, which must go as its forward went.
        if backward_under_way() is None or habits.answer is None:
            habits.answer = not habits.changes_inputs and self._chosen(module)
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

    answer: bool | None = None  # whether the last forward was to be recomputed
    changes_inputs: bool | None = None  # unknown before the first call
    constant: set[tuple[bool, nn.Module, str]] = field(default_factory=set[tuple[bool, nn.Module, str]])
    """Large buffers that a forward (in training or not) left alone."""


class _Call:
    """One forward of a module, and its recomputations."""

    def __init__(
        self,
        engine: Pinning,
        saved: SavedViews,
        module: nn.Module,
        units: Sequence[Unit],
        habits: _Habits,
        presents: list[_Present],
    ) -> None:
        self._engine, self._saved, self._units, self._habits, self._presents = engine, saved, units, habits, presents
        self._params = [param for unit in units for param in unit.params]
        self._versions = [_version(p) for p in self._params]
        self._needed = [saved.need(unit) for unit in units]
        self._before = _Before(module, habits)
        self._name = units[0].name if units else type(module).__name__

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Keywords become positions: what a checkpoint gets by position passes through saved-tensor hooks, and can be spilled.
        names, count = tuple(kwargs), len(args)
        actual = (*args, *kwargs.values())
        first = [actual]

        def call(*again: Any) -> Any:
            values = first.pop() if first else again
            return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

        tensors = [value for value in actual if isinstance(value, Tensor) and not value.is_inference()]
        versions = [_version(tensor) for tensor in tensors]
        unknown = self._habits.changes_inputs is None
        kept = [value.clone() if unknown and type(value) is Tensor else value for value in actual]
        outer = innermost_saved_tensor_hooks()
        try:
            output = checkpoint(
                call,
                *kept,
                use_reentrant=False,
                preserve_rng_state=True,
                determinism_check="none",
                context_fn=lambda: (_Forward(self._saved), _Again(self)),
            )
        finally:  # an interrupt where ours end would leave the checkpoint's own
            close_saved_tensor_hooks(down_to=outer)
        self._learn(changed_inputs=versions != [_version(tensor) for tensor in tensors])
        return output

    def _learn(self, *, changed_inputs: bool) -> None:
        """The forward is over: what did it change?"""
        if self._habits.changes_inputs is None:
            self._habits.changes_inputs = changed_inputs
        elif changed_inputs:
            self._habits.changes_inputs = True
            raise self._refused("its inputs in place, which it did not before")
        if self._versions != [_version(p) for p in self._params]:
            raise self._refused("its own parameters")
        if (name := self._before.forget_unchanged(self._habits)) is not None:
            raise self._refused(f"its buffer {name!r}, which it did not before")

    def _refused(self, what: str) -> Refused:
        return Refused(
            f"the forward pass of unit {self._name!r} changes {what}, so that it cannot be computed again. "
            f'Keep its activations (activations="keep").'
        )

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
            return self._saved.open_in_checkpoint(again=True), present
        except BaseException:
            self._engine.after_forward(self._units)
            raise

    def end(self, context: saved_tensors_hooks, present: _Present) -> None:
        """Make everything as it was before ``begin``."""
        try:
            touched = present.restore()
            self._presents.remove(present)
            self._saved.close_in_checkpoint(context)
        finally:
            self._engine.after_forward(self._units)
        if touched is not None:
            raise Refused(
                f"the forward pass of unit {self._name!r} reaches its buffer {touched!r} through another name and cannot "
                f'be computed again. Keep its activations (activations="keep"), or use the buffer by its attribute.'
            )


class _Forward:
    """Around the first forward, inside the checkpoint's hooks."""

    def __init__(self, saved: SavedViews) -> None:
        self._saved = saved
        self._context: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        self._context = self._saved.open_in_checkpoint(again=False)

    def __exit__(self, *_: object) -> None:
        self._saved.close_in_checkpoint(self._context)


class _Again:
    """Around every recomputation: a retained graph enters it once per backward pass."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._open: list[tuple[saved_tensors_hooks, _Present]] = []

    def __enter__(self) -> None:
        self._open.append(self._call.begin())

    def __exit__(self, *_: object) -> None:
        self._call.end(*self._open.pop())


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
        """Keep only what the forward changed. Returns the name of a buffer that changed although no copy was made."""
        changed: list[_Buffer] = []
        lost = None
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
        self._training = [(m, m.training) for m in modules]
        named = [(m, name, value) for m in modules for name, value in _buffers(m).items()] if with_buffers else []
        self._buffers = [(*place, 0 if place[2] is None else _version(place[2])) for place in named]

    def restore(self) -> str | None:
        """Returns the name of a buffer that was changed although a copy stood in its place."""
        _set_training(self._training)
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


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]
