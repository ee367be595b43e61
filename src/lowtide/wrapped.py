"""Models and optimizers that another library has wrapped: what ``shard`` says instead of taking them.

Wrappers are known by name, so that no library is imported for the question. A wrapped model would reduce every gradient twice,
or lose what its wrapper looks up by name; a wrapped optimizer is an ``Optimizer`` by its class alone.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from lowtide.errors import ArgumentError, Refused

_INSTEAD = {
    ("torch", "DistributedDataParallel"): "give it the module inside (model.module): lowtide adds gradients up over ranks",
    ("torch", "DataParallel"): "give it the module inside (model.module), and start one process per device",
    ("torch", "FullyShardedDataParallel"): "give it the plain module: lowtide shards it itself (stage=3)",
    ("torch", "FSDPModule"): "leave fully_shard out: lowtide shards the plain module itself (stage=3)",
    ("lightning", "_FabricModule"): "give it the module inside (model.module), or shard before fabric.setup",
    ("lightning_fabric", "_FabricModule"): "give it the module inside (model.module), or shard before fabric.setup",
    ("deepspeed", "DeepSpeedEngine"): "leave deepspeed.initialize out, and give it the plain module",
}
"""By the package and the name of a class: what to do instead."""


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raise if ``model``, or a module in it, is a wrapper of another library that moves or reduces its parameters."""
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            instead = _INSTEAD.get((cls.__module__.partition(".")[0], cls.__name__))
            if instead is not None:
                what = f"the model is a {cls.__name__}" if not name else f"its module {name!r} is a {cls.__name__}"
                raise Refused(f"{what}: lowtide.shard takes a module that nobody has wrapped; {instead}.")


def refuse_wrapped_optimizer(optimizer: Any) -> None:
    """Raise unless ``optimizer`` is a torch.optim.Optimizer itself: Accelerate's and Lightning's are wrappers around one."""
    # Torch's constructor gives hooks to every optimizer, and step() runs them; a wrapper does not call that constructor.
    if isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        return
    kind = type(optimizer).__name__
    for attribute in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer):
            raise ArgumentError(
                f"optimizer is a {kind}, a wrapper around {type(inner).__name__}; lowtide.shard takes the optimizer inside: "
                f"give it optimizer.{attribute}, or call it before the other library prepares the optimizer."
            )
    if isinstance(cast("object", optimizer), Optimizer):
        raise ArgumentError(
            f"optimizer is a {kind} that torch.optim.Optimizer has not set up; call super().__init__(params, defaults) in it."
        )
    raise ArgumentError(f"optimizer is a {kind}; lowtide.shard takes a torch.optim.Optimizer.")
