"""lowtide: train PyTorch models that do not fit, with the exact bits of plain PyTorch.

Public names are imported when they are first used, so that ``lowtide --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.version import __version__

if TYPE_CHECKING:
    from lowtide.api import (
        clip_grad_norm_,
        clip_grad_value_,
        gathered,
        load_sharded_state_dict,
        plan,
        report,
        set_memory,
        shard,
        sharded_state_dict,
    )
    from lowtide.config import Activations, Comm, Partition, Precision, Update
    from lowtide.deferral import deferred
    from lowtide.errors import Error
    from lowtide.saving import load, save

_HOMES = {
    "lowtide.api": (
        "clip_grad_norm_",
        "clip_grad_value_",
        "gathered",
        "load_sharded_state_dict",
        "plan",
        "report",
        "set_memory",
        "shard",
        "sharded_state_dict",
    ),
    "lowtide.config": ("Activations", "Comm", "Partition", "Precision", "Update"),
    "lowtide.deferral": ("deferred",),
    "lowtide.errors": ("Error",),
    "lowtide.saving": ("load", "save"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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
    "load",
    "load_sharded_state_dict",
    "plan",
    "report",
    "save",
    "set_memory",
    "shard",
    "sharded_state_dict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
