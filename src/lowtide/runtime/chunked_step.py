"""The caller's optimizer, run on one list of tensors after another as if it were one step.

[Note: one step, many calls] An optimizer may count steps in its groups or in itself, not only per parameter. Every call
therefore begins with the groups and the counters as they were before the step; what the last call leaves is kept. An
optimizer whose result for one tensor depends on other tensors would still differ: the probe finds it (runtime/probe.py).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.runtime.probe import plain_step


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to update: whose part it is, what the optimizer sees, and its state, which is changed in place."""

    param: nn.Parameter
    target: nn.Parameter
    state: dict[str, Any]


class ChunkedStep:
    """One step of ``optimizer`` under way. Nothing that the caller can see of it changes before ``finish``."""

    def __init__(self, optimizer: Optimizer, *, put_off: bool = False) -> None:
        self._optimizer = optimizer
        self._put_off = put_off  # calls come later, when the caller may have changed the options for the next step
        self._step: Callable[..., Any] = plain_step(type(optimizer).plain_class)  # pyright: ignore[reportAttributeAccessIssue]
        self._groups = list(optimizer.param_groups)
        self._params = [group["params"] for group in self._groups]
        self._group_of = {p: i for i, params in enumerate(self._params) for p in params}
        self._options = [_copied({k: v for k, v in group.items() if k != "params"}) for group in self._groups]
        self._counters = {k: v for k, v in vars(optimizer).items() if isinstance(v, bool | int | float)}
        self.begun = False
        """Whether any tensor may have changed."""
        self._ran: set[int] = set()
        self._small: dict[nn.Parameter, dict[str, Any]] = {}

    def owns(self, param: nn.Parameter) -> bool:
        return param in self._group_of

    def small_state(self, param: nn.Parameter) -> dict[str, Any] | None:
        """A copy of what ``optimizer.state`` holds of ``param`` (step counters and the like); None if it had no step yet.

        Every part of a parameter gets a copy of its own, because each call of the optimizer counts it up."""
        if param not in self._optimizer.state:
            return None
        return _copied(self._optimizer.state[param])

    def keep_small_state(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        """What ``optimizer.state`` will hold of ``param`` after the step."""
        self._small[param] = state

    def changed_options(self) -> bool:
        """Whether the optimizer changed its groups or counters in this step."""
        now = [_copied({k: v for k, v in group.items() if k != "params"}) for group in self._groups]
        counters = {k: getattr(self._optimizer, k) for k in self._counters}
        return repr(now) != repr(self._options) or counters != self._counters

    def finish(self) -> None:
        """All calls are done: let the caller see the new small states."""
        self._optimizer.state.update(self._small)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def run(self, entries: Sequence[Entry]) -> None:
        """Update the targets of ``entries``, whose gradients are set."""
        lists: dict[int, list[nn.Parameter]] = defaultdict(list)
        for entry in entries:
            lists[self._group_of[entry.param]].append(entry.target)
        with self._showing(lists) as optimizer:
            optimizer.state = defaultdict(dict, {entry.target: entry.state for entry in entries})
            self.begun = True
            self._step(optimizer)
            for entry in entries:
                state: dict[str, Any] = optimizer.state[entry.target]
                if state is not entry.state:
                    entry.state.clear()
                    entry.state.update(state)
        self._ran |= set(lists)

    @contextmanager
    def _as_outside_forward(self) -> Generator[None]:
        """A put-off step runs inside the caller's forward pass, whose autocast and inference mode are not meant for it."""
        if not self._put_off:
            yield
            return
        with torch.inference_mode(mode=False), torch.autocast("cpu", enabled=False), torch.no_grad():
            yield

    @contextmanager
    def _showing(self, lists: dict[int, list[nn.Parameter]]) -> Generator[Optimizer]:
        """The optimizer with only these tensors in its groups, and as it was before the step."""
        optimizer = self._optimizer
        state, groups = optimizer.state, optimizer.param_groups
        present = [(self._groups[index], dict(self._groups[index])) for index in lists] if self._put_off else []
        if self._ran and not self._put_off:
            vars(optimizer).update(self._counters)
        for index in lists:
            if index in self._ran or self._put_off:
                self._groups[index].update(_copied(self._options[index]))
            self._groups[index]["params"] = lists[index]
        optimizer.param_groups = [self._groups[index] for index in sorted(lists)]
        try:
            with torch.no_grad(), self._as_outside_forward():
                yield optimizer
        finally:
            optimizer.state, optimizer.param_groups = state, groups
            for index in lists:
                self._groups[index]["params"] = self._params[index]
            for group, options in present:
                group.update(options)


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are now; what an optimizer changes in place must not change the copy."""
    return {
        k: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) if isinstance(v, list | dict | set) else v
        for k, v in options.items()
    }
