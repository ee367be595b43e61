"""What an optimizer shows for the length of a call instead of its own: other tensors in its groups, and their states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer


class Shown:
    """Made before anything is changed. ``put_back`` may be broken off at any line, and is then called again."""

    def __init__(self, optimizer: Optimizer, own: Mapping[Any, Any] | None = None) -> None:
        """``own``: the parameter that each tensor stands for, if states that are made meanwhile become those of parameters."""
        self._optimizer, self._own = optimizer, own
        self._state = cast("dict[Any, Any]", optimizer.state)
        self._params = [group["params"] for group in optimizer.param_groups]

    def show(self, params: Sequence[Sequence[Tensor]], state: Mapping[Any, Any]) -> None:
        """Let the optimizer see these."""
        self._optimizer.state = defaultdict(dict, state)
        for group, shown in zip(self._optimizer.param_groups, params, strict=True):
            group["params"] = list(shown)

    def put_back(self) -> None:
        """Let it see its own again."""
        shown = cast("dict[Any, Any]", self._optimizer.state)
        if shown is not self._state:  # until the last line of this block it is, and nothing of it is lost
            if self._own is not None:
                kept = {self._own.get(key, key) if isinstance(key, Tensor) else key: value for key, value in shown.items()}
                self._state.clear()
                self._state.update(kept)
            self._optimizer.state = cast("Any", self._state)
        for group, own in zip(self._optimizer.param_groups, self._params, strict=True):
            group["params"] = own
