"""lowtide: train PyTorch models that do not fit, with the exact bits of plain PyTorch."""

from __future__ import annotations

__version__ = "0.1.0.dev0"

from lowtide.api import clip_grad_norm_, clip_grad_value_, gathered, shard
from lowtide.config import Activations, Comm, Partition, Precision, Update
from lowtide.deferred import deferred
from lowtide.errors import Error

__all__ = [
    "Activations",
    "Comm",
    "Error",
    "Partition",
    "Precision",
    "Update",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "deferred",
    "gathered",
    "shard",
]
