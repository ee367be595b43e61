"""Whether the states and options of a checkpoint are such as this optimizer has: found out before anything is changed.

An optimizer takes what stands in its state for granted. Its kernels read and write as many numbers as the parameter has,
whatever size a state has; an option of another kind is an error in the middle of the next step. So the optimizer is tried, on
small tensors of the same shapes (runtime/probe.py), with the options of the checkpoint: what it makes there says which states
are large, and what the small ones are. Then one more step is tried from states like those of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.runtime.contents import Contents
from lowtide.runtime.optimizer_copy import plain_class
from lowtide.runtime.probe import Start, states_after_steps, tried_shape

Options = dict[str, Any]
States = dict[str, Any]


class Unfit(Exception):
    """What does not fit; the message says it in words that go behind a colon."""


class Unusable(Exception):
    """What no optimizer of this class could have."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint has of one parameter: small states as they are, and the dtypes of the large ones."""

    name: str
    small: States
    large: Mapping[str, torch.dtype]


class Fitting:
    """See the module's docstring. ``saved_class``: the name of the optimizer's class in the checkpoint."""

    def __init__(self, optimizer: Optimizer, contents: Contents, saved_class: str | None, *, strict: bool) -> None:
        self._optimizer, self._contents, self._strict = optimizer, contents, strict
        self._class = plain_class(optimizer).__name__
        self._saved_class = saved_class or ""
        self._group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._options: list[Options] = [{} for _ in optimizer.param_groups]
        self._known: dict[Any, tuple[States, States] | None] = {}
        self._fine: set[Any] = set()

    @property
    def _same_class(self) -> bool:
        return self._saved_class == self._class

    def options(self, saved: Sequence[Options]) -> list[Options]:
        """What the groups are to be given of ``saved``. Raises ``Unfit`` or ``Unusable``."""
        for number, (group, options) in enumerate(zip(self._optimizer.param_groups, saved, strict=True)):
            where = f"group {number} of the optimizer"
            lacking = [name for name in self._optimizer.defaults if name not in options]
            if self._strict and not self._same_class and lacking:
                raise Unfit(f"it was saved from {self._saved_class}: {where} has no {lacking[0]!r}, which {self._class} has")
            kept = {n: v for n, v in options.items() if n not in ("params", "param_names")}
            if not self._same_class:
                kept = {n: v for n, v in kept.items() if self._strict or (n in group and _alike(group[n], v))}
            for name, value in kept.items():
                if name in group and not _alike(group[name], value):
                    raise Unusable(f"{where}: {name!r} is {value!s:.60}, and {group[name]!s:.60} here")
            self._options[number] = kept
        return self._options

    def states(self, param: nn.Parameter, saved: Saved) -> Saved | None:
        """What the optimizer is to be given of ``saved``; None if it has to begin anew with a parameter, because the states of
        another class are not enough for it. Raises ``Unfit`` or ``Unusable``."""
        try:
            return self._states(param, saved)
        except Unusable:
            if self._strict or self._same_class:
                raise
            return None

    def _states(self, param: nn.Parameter, saved: Saved) -> Saved:
        shape, dtype = self._contents.seen_as(param)
        number = self._group_of[param]
        known = self._forms(number, shape, dtype)
        saved = self._without_strangers(saved, known)
        if known is None:
            return saved
        forms = {**known[0], **known[1]}
        expected = [n for n, v in forms.items() if _is_large(v, tried_shape(shape))]
        if (name := self._contents.lacks_room(param, expected)) is not None:
            raise Unfit(
                f"its options make {self._class} keep {name!r}, for which there is no room: "
                f"give the optimizer the same options before lowtide.shard"
            )
        key = (number, shape, dtype, _signature(saved))
        if key not in self._fine:
            _refuse_other_forms(saved, forms, shape)
            self._try(number, shape, dtype, saved, forms)
            self._fine.add(key)
        return saved

    def _without_strangers(self, saved: Saved, known: tuple[States, States] | None) -> Saved:
        """States that another class of optimizer has are no business of this one."""
        if self._same_class:
            return saved  # it may make some later than in its first steps
        names = set() if known is None else {*known[0], *known[1]}
        strangers = [name for name in (*saved.small, *saved.large) if name not in names]
        if strangers and self._strict:
            raise Unfit(f"it has the state {strangers[0]!r} of {self._saved_class}, which {self._class} does not have")
        small = {n: v for n, v in saved.small.items() if n in names}
        return Saved(saved.name, small, {n: d for n, d in saved.large.items() if n in names})

    def _forms(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[States, States] | None:
        """States of such a parameter after the first step and later; None if the optimizer cannot be tried at all."""
        key = (number, shape, dtype)
        if key not in self._known:
            self._known[key] = self._trial(number, shape, dtype)
        return self._known[key]

    def _trial(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[States, States] | None:
        if not (dtype.is_floating_point or dtype.is_complex):
            return {}, {}  # an optimizer never sees a gradient of integers
        start = Start(group=number, options=self._options[number], shape=tried_shape(shape), dtype=dtype, states={})
        try:
            first, last = states_after_steps(self._optimizer, start)
        except Exception as error:  # whatever an optimizer may raise
            if self._runs_as_it_is(start):
                raise Unusable(
                    f"the options of group {number} cannot be used: {type(error).__name__}: {error!s:.100}"
                ) from error
            return None
        return first, last

    def _runs_as_it_is(self, start: Start) -> bool:
        """Whether it can be tried with the options that it has here: then it is those of the checkpoint that are wrong."""
        own = Start(group=start.group, options={}, shape=start.shape, dtype=start.dtype, states={})
        try:
            states_after_steps(self._optimizer, own, steps=1)
        except Exception:  # one that has to be given a closure, for example
            return False
        return True

    def _try(self, number: int, shape: tuple[int, ...], dtype: torch.dtype, saved: Saved, forms: States) -> None:
        """One step from states like the saved ones, which have the right sizes."""
        small = {n: forms[n] if _has_other_size(v, forms.get(n)) else v for n, v in saved.small.items()}
        here = tried_shape(shape)
        kept = {n: forms[n].dtype if isinstance(forms.get(n), Tensor) else d for n, d in saved.large.items()}
        large = {name: torch.ones(here).to(kind) for name, kind in kept.items()}
        start = Start(group=number, options=self._options[number], shape=here, dtype=dtype, states={**small, **large})
        try:
            states_after_steps(self._optimizer, start, steps=1)
        except Exception as error:  # whatever an optimizer may raise
            what = f"{type(error).__name__}: {error!s:.100}"
            raise Unusable(f"{self._class} cannot go on from the states of {saved.name[:100]!r}: {what}") from error


def _refuse_other_forms(saved: Saved, forms: States, shape: tuple[int, ...]) -> None:
    here = tried_shape(shape)
    for name, dtype in saved.large.items():
        form = forms.get(name)
        if name in forms and form is not None and not (_is_large(form, here) and _same_sort(form.dtype, dtype)):
            raise Unusable(
                f"the state {name[:60]!r} of {saved.name[:100]!r} is {_words(form)}, not one {dtype} for every element"
            )
    for name, value in saved.small.items():
        form = forms.get(name)
        if name not in forms and _is_large(value, shape) and value.numel() > 1:
            raise Unusable(
                f"the state {name[:60]!r} of {saved.name[:100]!r} is {_words(value)}, and it is said to be a small one"
            )
        if form is None or value is None:
            continue  # an optimizer may put nothing where it puts numbers later; the trial of a step finds what it must have
        if isinstance(form, Tensor):
            fits = isinstance(value, Tensor) and not _is_large(form, here) and _same_sort(form.dtype, value.dtype)
            if not fits or not _may_have_shape(tuple(value.shape), tuple(form.shape), shape, here):
                raise Unusable(f"the state {name[:60]!r} of {saved.name[:100]!r} is {_words(value)}, not {_words(form)}")
        elif not _alike(form, value):
            raise Unusable(f"the state {name[:60]!r} of {saved.name[:100]!r} is {value!s:.60}, not like {form!s:.60}")


def _is_large(form: Any, here: tuple[int, ...]) -> bool:
    return isinstance(form, Tensor) and tuple(form.shape) == here


def _same_sort(one: torch.dtype, other: torch.dtype) -> bool:
    return one is other or (one.is_floating_point and other.is_floating_point)


def _may_have_shape(found: tuple[int, ...], tried: tuple[int, ...], shape: tuple[int, ...], here: tuple[int, ...]) -> bool:
    """Whether a state that was ``tried`` of a tensor ``here`` may be ``found`` of one of ``shape``."""
    if found == tried:
        return shape == here or math.prod(tried) <= 1
    if shape == here:
        return False
    longer = {(small, large) for small, large in zip(here, shape, strict=False)}
    if len(found) == len(tried) and all(a == b or (b, a) in longer for a, b in zip(found, tried, strict=True)):
        return True
    share = math.prod(here) // max(math.prod(tried), 1)  # one number for so many elements
    return len(found) == len(tried) == 1 and share > 1 and found[0] == -(-math.prod(shape) // share)


def _has_other_size(value: Any, form: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(form, Tensor) and value.shape != form.shape


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are of one kind: what an optimizer does with the one it can do with the other."""
    if one is None or other is None:
        return True
    return _kind(one) == _kind(other)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float | complex) or (isinstance(value, Tensor) and value.numel() == 1):
        return "number"
    if isinstance(value, list | tuple):
        return "sequence"
    return "mapping" if isinstance(value, Mapping) else type(value).__name__


def _signature(saved: Saved) -> Any:
    """What of the saved states decides whether they fit; two parameters with the same need one trial."""
    small = [
        (name, value.dtype, tuple(value.shape), value.flatten()[:4].tolist()) if isinstance(value, Tensor) else (name, value)
        for name, value in saved.small.items()
    ]
    return repr(small), tuple(sorted((name, str(dtype)) for name, dtype in saved.large.items()))


def _words(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else f"{value!s:.60}"
