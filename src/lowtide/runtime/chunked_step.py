"""The caller's optimizer, run on one list of tensors after another as if it were one step.

[Note: one step, many calls] An optimizer may keep counters, lists or a scheduler in itself, in its groups, or in entries of its
state that belong to no parameter. The first call of a step runs the optimizer itself, and what that leaves is what the step
leaves; every other call runs a copy of it as it was before the step (runtime/optimizer_copy.py). An optimizer whose result for
one tensor depends on other tensors would still differ: a trial, which goes this very way, finds it (runtime/probe.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.runtime.ambient import undisturbed
from lowtide.runtime.optimizer_copy import (
    alike,
    all_options,
    copied,
    copy_of,
    options_of,
    own_attributes,
    plain_class,
    plain_step,
    shared_state,
)
from lowtide.runtime.shown import Shown


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to update: whose part it is, what the optimizer sees, and its state, which is changed in place."""

    param: nn.Parameter
    target: nn.Parameter
    state: dict[str, Any]


class ChunkedStep:
    """One step of ``optimizer`` in progress. The states that the caller sees do not change before ``finish``."""

    def __init__(self, optimizer: Optimizer, *, put_off: bool = False, in_backward: bool = False) -> None:
        self._optimizer = optimizer
        self._in_a_pass = put_off or in_backward
        # Calls come later, in the caller's forward pass, when the caller may have changed the options for the next step: no
        # call runs the optimizer itself, which an earlier step has shown not to change anything but states.
        self._put_off = put_off
        self._default_dtype = torch.get_default_dtype()
        self._step: Callable[..., Any] = plain_step(plain_class(optimizer))
        self._group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._before = copy_of(optimizer)
        """As it was before the step; copied for every call, and never run."""
        self.begun = False
        """Whether any tensor may have changed."""
        self.options: list[dict[str, Any]] = []
        """What the groups' options were when the first call had run: with those all others run, too."""
        self.shown: Shown | None = None
        """What the caller's own optimizer shows, while it runs."""
        self._small: dict[Any, Any] = {}
        self._at_finish: dict[Hashable, Callable[[], None]] = {}

    def owns(self, param: nn.Parameter) -> bool:
        return param in self._group_of

    def small_state(self, param: nn.Parameter) -> dict[str, Any] | None:
        """A copy of what ``optimizer.state`` holds of ``param`` (step counters and the like); None if it had no step yet.

        Every part of a parameter gets a copy of its own, because each call of the optimizer counts it up."""
        if param not in self._optimizer.state:
            return None
        return {name: copied(value) for name, value in self._optimizer.state[param].items()}

    def keep_small_state(self, param: nn.Parameter, state: dict[str, Any]) -> bool:
        """What ``optimizer.state`` will hold of ``param`` after the step; whether other parts of it left the same."""
        return alike(self._small.setdefault(param, state), state)

    def at_finish(self, key: Hashable, call: Callable[[], None]) -> None:
        """Call ``call`` when all is done: once for every ``key``."""
        self._at_finish[key] = call

    def changed_more_than_states(self) -> bool:
        """Whether the optimizer changed its groups or anything of its own in this step."""
        before, now = self._before, copy_of(self._optimizer)
        groups = zip(before.param_groups, now.param_groups, strict=True)
        return not (
            all(alike(options_of(old), options_of(new)) for old, new in groups)
            and alike(own_attributes(before), own_attributes(now))
        )

    def finish(self) -> None:
        """All calls are done: let the caller see the new small states."""
        if not self.begun:
            self.run([])  # a step without any gradient is a step, to an optimizer that counts them
        self._optimizer.state.update(self._small)  # pyright: ignore[reportCallIssue, reportArgumentType]
        for call in self._at_finish.values():
            call()

    def run(self, entries: Sequence[Entry]) -> None:
        """Update the targets of ``entries``, whose gradients are set."""
        lists: dict[int, list[nn.Parameter]] = defaultdict(list)
        for entry in entries:
            lists[self._group_of[entry.param]].append(entry.target)
        first, self.begun = not self.begun, True
        runner = self._optimizer if first and not self._put_off else copy_of(self._before)
        with self._showing(runner, lists, entries):
            self._step(runner)
            for entry in entries:
                state: dict[str, Any] = runner.state[entry.target]
                if state is not entry.state:
                    entry.state.clear()
                    entry.state.update(state)
            if first:
                self._small.update(shared_state(runner))
                self.options = all_options(self._optimizer)

    @contextmanager
    def _showing(self, runner: Optimizer, lists: dict[int, list[nn.Parameter]], entries: Sequence[Entry]) -> Generator[None]:
        """``runner`` with only these tensors in its groups, and only their states."""
        state: dict[Any, Any] = {key: copied(value) for key, value in shared_state(runner).items()}
        shown = Shown(runner)
        if runner is self._optimizer:
            self.shown = shown
        try:
            targets = [lists[index] for index in range(len(runner.param_groups))]
            shown.show(targets, state | {entry.target: entry.state for entry in entries})
            with undisturbed(self._default_dtype) if self._in_a_pass else torch.no_grad():
                yield
        finally:
            shown.put_back()
            self.shown = None
