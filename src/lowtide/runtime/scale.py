"""The loss scale of fp16 training: gradients are multiplied where they enter the model and divided when they are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue
from torch import Tensor

from lowtide.runtime.outputs import ScaleGradient, map_tensors

_START = 2.0**16
_GROW_AFTER = 2000


class LossScale:
    """A number that falls by half when gradients overflow and doubles after a long time without; or a fixed one."""

    def __init__(self, setting: float | str | None) -> None:
        self.dynamic = setting == "dynamic"
        self.value = _START if self.dynamic else float(setting or 1.0)
        self.used = setting is not None
        self._good_steps = 0

    def after_step(self, *, skipped: bool) -> None:
        """Adapt to the outcome of a step."""
        if not self.dynamic:
            return
        self._good_steps = 0 if skipped else self._good_steps + 1
        if skipped:
            self.value = max(self.value / 2, 1.0)
        elif self._good_steps == _GROW_AFTER:
            self.value *= 2
            self._good_steps = 0

    def state(self) -> dict[str, JsonValue]:
        """What a checkpoint keeps of it."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse; a fixed scale stays as it is."""
        if self.dynamic:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    def on_input(self, tensor: Tensor) -> Tensor:
        """What the model takes, such that gradients that leave through it are as if nothing had been scaled."""
        if not self.used or not tensor.requires_grad:
            return tensor
        return ScaleGradient.apply(tensor, lambda: 1.0 / self.value)  # pyright: ignore[reportReturnType]

    def on_output(self, output: Any) -> Any:
        """What the model returns, such that gradients that enter through it are scaled once."""
        if not self.used:
            return output
        return map_tensors(output, lambda t: ScaleGradient.apply(t, lambda: self.value) if t.requires_grad else t)
