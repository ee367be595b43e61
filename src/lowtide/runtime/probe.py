"""Whether an optimizer may run on pieces, or on one tensor at a time: tried on small tensors like those that the model has.

For every parameter group a trial takes each shape and dtype that its parameters have; dimensions of more than ``_NUMEL``
elements together are made smaller. An optimizer may treat tensors by their dimensions, by their size (8-bit states from 4,096
elements on) or by how large their numbers are (a limit on norms), so gradients vary by orders of magnitude; and it may make a
state later than in its first step, so there are enough steps to see what happens in every tenth. Two runs must agree in every
number: the optimizer's own step on everything together, and the way in which the model's update will call it.

What a trial cannot see: another way for tensors of more than ``_NUMEL`` elements only, or from a later step on.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import Refused
from lowtide.runtime.ambient import undisturbed
from lowtide.runtime.chunked_step import ChunkedStep, Entry
from lowtide.runtime.optimizer_copy import (
    alike,
    copied,
    copy_of,
    options_of,
    own_attributes,
    plain_class,
    plain_step,
    same_bits,
    shared_state,
)
from lowtide.spec.layout import CUT_NUMEL

_NUMEL = 1 << 16
"""The most elements of a tensor in a trial: its memory is taken beside the model's."""
_MAGNITUDES = (1.0, 1.0, 1e3, 1e-3, 1e3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Of the gradients, step by step."""
_TRIAL_RATE = 1e-3

DtypeOf = Callable[[nn.Parameter], torch.dtype]
"""What the optimizer will see a parameter as."""


def own_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter was built, where the optimizer sees that."""
    return param.dtype


def needs_closure(cls: type[Optimizer]) -> bool:
    """Whether the optimizer evaluates the model inside its step, as LBFGS does."""
    _, *parameters = inspect.signature(plain_step(cls)).parameters.values()
    ordinary = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.default is inspect.Parameter.empty and p.kind in ordinary for p in parameters)


# -- what is tried ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LargeState:
    """A state of the optimizer that has one value per element of a parameter."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Sample:
    """A small tensor like some parameter of the model."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    like: nn.Parameter | None
    """The parameter whose states it begins with a part of; None: with none."""
    key: nn.Parameter
    """By which the trial knows it."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cut(self) -> int:
        """Where it is cut if it is: off the middle, at an odd multiple of 64 elements, so that no block of 128 or more ends
        there."""
        return CUT_NUMEL * (2 * int(0.21 * self.numel / CUT_NUMEL) + 1)

    def numbers(self, seed: int) -> Tensor:
        """As many random numbers, in its shape."""
        generator = torch.Generator().manual_seed(seed)
        real = torch.float64 if not self.dtype.is_complex else torch.complex128
        return torch.randn(self.shape, generator=generator, dtype=real).to(self.dtype)


def samples(optimizer: Optimizer, dtype_of: DtypeOf = own_dtype, of: Iterable[nn.Parameter] | None = None) -> list[Sample]:
    """One for every shape, dtype and list of states that parameters of a group have; ``of``: of these parameters only."""
    wanted = None if of is None else set(of)
    found: dict[Any, Sample] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            dtype = dtype_of(param)
            if not (dtype.is_floating_point or dtype.is_complex) or not (wanted is None or param in wanted):
                continue  # an optimizer never sees a gradient of integers
            shape = _smaller(tuple(param.shape))
            key = (number, shape, dtype, _states_known(optimizer, param))
            if key not in found:
                found[key] = Sample(number, shape, dtype, param, nn.Parameter(torch.empty(0, dtype=dtype)))
    return list(found.values())


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of at most ``_NUMEL`` elements; multiples of 64 where it was cut down."""
    sizes = list(shape)
    while math.prod(sizes) > _NUMEL:
        at = sizes.index(max(sizes))
        half = sizes[at] // 2
        sizes[at] = half // CUT_NUMEL * CUT_NUMEL or half
    return tuple(sizes)


def _states_known(optimizer: Optimizer, param: nn.Parameter) -> tuple[str, ...]:
    return tuple(optimizer.state[param]) if param in optimizer.state else ()


class _Trial:
    """A copy of the optimizer, with samples for parameters."""

    def __init__(self, optimizer: Optimizer, chosen: Sequence[Sample]) -> None:
        self._optimizer, self.samples = optimizer, chosen
        self.copy = copy_of(optimizer)
        self.step = plain_step(plain_class(optimizer))
        for group in self.copy.param_groups:
            if "lr" in group and not group["lr"]:
                group["lr"] = _TRIAL_RATE  # a warm-up may begin at 0, where every optimizer looks elementwise

    def start(self, sample: Sample) -> Tensor:
        """The values of a sample before the first step."""
        return sample.numbers(0)

    def states(self, sample: Sample) -> dict[str, Any]:
        """What the optimizer has of a sample before the first step: parts of what it has of the parameter."""
        if sample.like is None or sample.like not in self._optimizer.state:
            return {}
        out: dict[str, Any] = {}
        for name, value in self._optimizer.state[sample.like].items():
            if not isinstance(value, Tensor) or value.numel() <= 1 or sample.shape == tuple(sample.like.shape):
                out[name] = copied(value)
            elif value.shape == sample.like.shape and type(value) is Tensor:
                out[name] = value.detach().flatten()[: sample.numel].clone().view(sample.shape)
            else:
                raise Refused(f"its state {name!r} has the shape {tuple(value.shape)} and not that of its parameter")
        return out

    def grad(self, sample: Sample, step: int) -> Tensor:
        """The gradient of a sample in one step."""
        return sample.numbers(1 + step) * _MAGNITUDES[step]


@contextmanager
def _apart_from_the_caller(seed: int) -> Generator[None]:
    """Neither the caller's modes nor the random numbers matter; ``seed`` differs between runs that are compared, so that an
    optimizer which draws random numbers is found."""
    with torch.random.fork_rng(devices=[]), undisturbed():
        torch.manual_seed(seed)
        yield


@dataclass
class _Result:
    """What a run left: by sample, its values and its states; and the optimizer."""

    values: dict[Sample, Tensor]
    states: dict[Sample, dict[str, Any]]
    optimizer: Optimizer


def _run_together(trial: _Trial, *, steps: int = len(_MAGNITUDES)) -> _Result:
    """The optimizer's own step, on all samples."""
    copy = trial.copy
    targets = {sample: nn.Parameter(trial.start(sample)) for sample in trial.samples}
    for sample, target in targets.items():
        copy.param_groups[sample.group]["params"].append(target)
        if states := trial.states(sample):
            copy.state[target] = states
    with _apart_from_the_caller(1):
        for number in range(steps):
            for sample, target in targets.items():
                target.grad = trial.grad(sample, number)
            trial.step(copy)
    return _Result(
        {sample: target.detach() for sample, target in targets.items()},
        {sample: copy.state[target] for sample, target in targets.items()},
        copy,
    )


# -- which states ------------------------------------------------------------------------------------------------------

_known_states: weakref.WeakKeyDictionary[Optimizer, dict[Any, tuple[LargeState, ...]]] = weakref.WeakKeyDictionary()


def large_states(optimizer: Optimizer, param: nn.Parameter, dtype: torch.dtype) -> tuple[LargeState, ...]:
    """The states of a parameter that have its shape, if it is of ``dtype``: found by a few steps on a tensor like it."""
    number = next(i for i, group in enumerate(optimizer.param_groups) if any(p is param for p in group["params"]))
    # A counter has the shape of a parameter without dimensions; a longer one, without a past, tells them apart.
    shape, like = (_smaller(tuple(param.shape)), param) if param.dim() else ((CUT_NUMEL,), None)
    options = repr(options_of(optimizer.param_groups[number]))
    key = (number, shape, dtype, _states_known(optimizer, param), options)
    known = _known_states.setdefault(optimizer, {})
    if key not in known:
        sample = Sample(number, shape, dtype, like, nn.Parameter(torch.empty(0, dtype=dtype)))
        try:
            found = _run_together(_Trial(optimizer, [sample])).states[sample]
        except Exception as error:  # whatever the caller's optimizer may raise
            name = plain_class(optimizer).__name__
            raise Refused(f"{name} cannot be tried ({type(error).__name__}: {error}); leave disk= and update= out.") from error
        large = (LargeState(k, v.dtype) for k, v in found.items() if isinstance(v, Tensor) and tuple(v.shape) == shape)
        known[key] = tuple(large)
    return known[key]


def tried_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor that stands for one of ``shape`` in a trial."""
    return _smaller(shape) if shape else (CUT_NUMEL,)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a trial of one tensor begins."""

    group: int
    options: dict[str, Any]
    """That replace those of the group."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    states: dict[str, Any]


def states_after_steps(optimizer: Optimizer, start: Start, *, steps: int = len(_MAGNITUDES)) -> list[dict[str, Any]]:
    """What the optimizer has of a tensor after its first and its last step. Raises whatever the optimizer raises."""
    copy = copy_of(optimizer)
    group = copy.param_groups[start.group]
    group.update({name: copied(value) for name, value in start.options.items()})
    target = nn.Parameter(torch.zeros(start.shape, dtype=start.dtype))
    group["params"].append(target)
    if start.states:
        copy.state[target] = {name: copied(value) for name, value in start.states.items()}
    found: list[dict[str, Any]] = []
    with _apart_from_the_caller(1):
        for number in range(steps):
            target.grad = torch.randn(start.shape, dtype=torch.float64).to(start.dtype) * _MAGNITUDES[number]
            plain_step(plain_class(optimizer))(copy)
            if number in (0, steps - 1):
                found.append(dict(copy.state[target]))
    return found


# -- whether it may be called for parts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Elements ``lo:hi`` of a sample."""

    sample: Sample
    lo: int
    hi: int

    @property
    def is_whole(self) -> bool:
        return self.hi - self.lo == self.sample.numel

    def of(self, value: Tensor) -> Tensor:
        """This part of a tensor like the sample, as the optimizer will see it: flat, unless it is the whole."""
        return (value if self.is_whole else value.flatten()[self.lo : self.hi]).clone()


def why_not_apart(
    optimizer: Optimizer, dtype_of: DtypeOf = own_dtype, *, in_chunks: bool, of: Iterable[nn.Parameter] | None = None
) -> str | None:
    """``None`` if whole tensors may be updated without one another, else what went wrong. ``in_chunks``: in calls that make up
    one step, as out of core; otherwise on ranks, each of which has an optimizer of its own. ``of``: only these parameters."""
    chosen = samples(optimizer, dtype_of, of)
    return _why_not(optimizer, [[_Part(sample, 0, sample.numel)] for sample in chosen], in_chunks=in_chunks)


def why_not_elementwise(
    optimizer: Optimizer, dtype_of: DtypeOf = own_dtype, *, in_chunks: bool, of: Iterable[nn.Parameter] | None = None
) -> str | None:
    """The same with tensors that are cut at a multiple of 64 elements."""
    rows = [
        [_Part(s, 0, s.cut), _Part(s, s.cut, s.numel)] if s.numel > s.cut else [_Part(s, 0, s.numel)]
        for s in samples(optimizer, dtype_of, of)
    ]
    return _why_not(optimizer, rows, in_chunks=in_chunks)


def _why_not(optimizer: Optimizer, rows: list[list[_Part]], *, in_chunks: bool) -> str | None:
    if not rows:
        return None
    is_cut = any(len(row) > 1 for row in rows)
    try:
        together = _run_together(_Trial(optimizer, [row[0].sample for row in rows]))
        reason = _unfit(together, moved=is_cut or in_chunks)
    except Exception as error:  # the caller's optimizer may raise anything; that is the answer
        return f"it cannot be tried ({type(error).__name__}: {error})"
    if reason is not None:
        return reason
    try:
        if in_chunks:
            return _difference(together, rows, *_run_in_chunks(_Trial(optimizer, list(together.values)), rows))
        found = [_run_alone(optimizer, part) for row in rows for part in row]
    except Exception as error:  # as above
        what = "a flat piece of a tensor" if is_cut else "one tensor at a time"
        return f"it cannot update {what} ({type(error).__name__}: {error})"
    parts = {part: (values, states) for part, values, states, _ in found}
    return next((r for *_, copy in found if (r := _difference(together, rows, parts, copy))), None)


def _unfit(result: _Result, *, moved: bool) -> str | None:
    """Why an optimizer with such states, or without any effect, is not tried further. ``moved``: states are cut, or moved."""
    some = {sample: value for sample, value in result.values.items() if value.numel()}
    if some and all(same_bits(value, sample.numbers(0)) for sample, value in some.items()):
        return "it changed nothing when it was tried"
    for states in result.states.values():
        for name, value in states.items():
            if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                return f"it keeps {name!r} as a {type(value).__name__}, whose numbers lie in tensors of another shape"
            codes = isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8) and value.numel() > 1
            if moved and codes:
                kind = str(value.dtype).removeprefix("torch.")
                return f"it keeps {name!r} as {kind}, quantised: what its numbers mean lies in other tensors"
    return None


def _difference(
    together: _Result,
    rows: list[list[_Part]],
    parts: dict[_Part, tuple[Tensor, dict[str, Any]]],
    copy: Optimizer,
) -> str | None:
    """What the parts have that the whole has not, or None."""
    for row in rows:
        sample = row[0].sample
        where = f" (tried on the shape {sample.shape})"
        values = torch.cat([parts[part][0].flatten() for part in row])
        if not same_bits(together.values[sample].flatten(), values):
            if len(row) == 1:
                return f"its result for one tensor depends on the other tensors of the step{where}"
            return f"its result for one element depends on the other elements of the tensor{where}"
        if any(list(parts[part][1]) != list(together.states[sample]) for part in row):
            return f"it keeps other states of a piece than of the whole tensor{where}"
        for name, whole in together.states[sample].items():
            pieces = [parts[part][1][name] for part in row]
            is_large = isinstance(whole, Tensor) and tuple(whole.shape) == sample.shape and whole.numel() > 1
            if is_large and all(
                isinstance(p, Tensor) and p.numel() == part.hi - part.lo for p, part in zip(pieces, row, strict=True)
            ):
                pieces, whole = [torch.cat([p.flatten() for p in pieces])], whole.flatten()
            if not all(alike(whole, piece) for piece in pieces):
                return f"its state {name!r} of a tensor depends on how the tensor was cut{where}"
    own, others = own_attributes(together.optimizer), own_attributes(copy)
    changed = next((name for name in own if name not in others or not alike(own[name], others[name])), None)
    if changed is not None:
        return f"what it keeps in .{changed} depends on which tensors are in a step together"
    if not alike(shared_state(together.optimizer), shared_state(copy)):
        return "what it keeps in its state of no parameter depends on which tensors are in a step together"
    groups = zip(together.optimizer.param_groups, copy.param_groups, strict=True)
    if not all(alike(options_of(a), options_of(b)) for a, b in groups):
        return "the options that it keeps in its groups depend on which tensors are in a step together"
    return None


def _run_alone(optimizer: Optimizer, part: _Part) -> tuple[_Part, Tensor, dict[str, Any], Optimizer]:
    """As if on a rank that has this part of the model only."""
    trial = _Trial(optimizer, [part.sample])
    target = nn.Parameter(part.of(trial.start(part.sample)))
    trial.copy.param_groups[part.sample.group]["params"].append(target)
    if states := _cut_states(trial.states(part.sample), part):
        trial.copy.state[target] = states
    with _apart_from_the_caller(2):
        for number in range(len(_MAGNITUDES)):
            target.grad = part.of(trial.grad(part.sample, number))
            trial.step(trial.copy)
    return part, target.detach(), trial.copy.state[target], trial.copy


def _cut_states(states: dict[str, Any], part: _Part) -> dict[str, Any]:
    return {
        n: part.of(v) if isinstance(v, Tensor) and tuple(v.shape) == part.sample.shape else copied(v) for n, v in states.items()
    }


def _run_in_chunks(trial: _Trial, rows: list[list[_Part]]) -> tuple[dict[_Part, tuple[Tensor, dict[str, Any]]], Optimizer]:
    """As runtime/stream.py does it: every part in a call of its own."""
    copy = trial.copy
    parts: dict[_Part, tuple[nn.Parameter, dict[str, Any]]] = {}
    for row in rows:
        copy.param_groups[row[0].sample.group]["params"].append(row[0].sample.key)
        for part in row:
            states = _cut_states(trial.states(part.sample), part)
            parts[part] = nn.Parameter(part.of(trial.start(part.sample))), states
    with _apart_from_the_caller(2):
        for number in range(len(_MAGNITUDES)):
            step = ChunkedStep(copy)
            for part, (target, states) in parts.items():
                target.grad = part.of(trial.grad(part.sample, number))
                step.run([Entry(part.sample.key, target, states)])
            step.finish()
    return {part: (target.detach(), states) for part, (target, states) in parts.items()}, copy
