"""What goes into a model: floating-point tensors in the dtype it computes with, gradients that leave through them unscaled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowtide.config import Precision
from lowtide.runtime.outputs import map_tensors
from lowtide.runtime.scale import LossScale


def prepare_inputs(inputs: Any, precision: Precision, scale: LossScale, *, outermost: bool) -> Any:
    """``inputs`` of any structure, ready for the forward of the model (``outermost``) or of one that runs inside it."""
    dtype = precision.compute
    if dtype is None and not scale.used:
        return inputs

    def prepare(tensor: Tensor) -> Tensor:
        if outermost:
            tensor = scale.on_input(tensor)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return map_tensors(inputs, prepare)
