"""Module and autograd events → engine verbs. Nothing here decides anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import NO_WHOLE_COMPILE, Refused
from lowtide.runtime.engine import Engine
from lowtide.runtime.grads import GradRecord
from lowtide.spec.units import needs
from lowtide.torch_internals import never_compiled


class _Call:
    """One forward under way. Modules may call themselves, and torch runs the closing hook even if the opening one raised."""

    def __init__(self) -> None:
        self._begun = False
        self._saved: saved_tensors_hooks | None = None

    def begin(self, engine: Engine) -> None:
        self._begun = True
        self._saved = engine.open_saved()

    def end(self, engine: Engine) -> bool:
        """Close what was opened; whether the opening hook had finished."""
        engine.close_saved(self._saved)
        return self._begun


def install(engine: Engine) -> None:
    """Hook the model, its units' modules, and its parameters."""
    if engine.config.stage.parameters:
        hosts = {m for unit in engine.units for m in unit.modules}
        for module in hosts:
            _hook_unit_module(engine, module, hosts)
    _hook_model(engine)
    hook_new_parameters(engine)


def hook_new_parameters(engine: Engine) -> None:
    """Hook parameters that need gradients and have no hooks yet: those of the start, and those unfrozen later."""
    if not engine.handles_gradients:
        return
    for record in engine.grads.by_param.values():
        if record.param.requires_grad and not record.hooked:
            _hook_parameter(engine, record)


def _hook_parameter(engine: Engine, record: GradRecord) -> None:
    record.param.register_hook(lambda grad: engine.grad_arriving(record, grad))
    record.param.register_post_accumulate_grad_hook(lambda _: engine.grad_arrived(record))
    record.hooked = True


def _hook_model(engine: Engine) -> None:
    calls: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            raise Refused(NO_WHOLE_COMPILE)
        calls.append(_Call())
        hook_new_parameters(engine)
        inputs = engine.enter_model(args, kwargs)
        calls[-1].begin(engine)
        return inputs

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return engine.leave_model(output) if calls.pop().end(engine) else output

    engine.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    engine.model.register_forward_hook(after, always_call=True)


def _hook_unit_module(engine: Engine, module: nn.Module, hosts: set[nn.Module]) -> None:
    reached = needs(module, hosts)
    units = sorted({engine.unit_of[p] for p in reached}, key=lambda u: u.index)
    calls: list[_Call] = []

    @never_compiled
    def before(module: nn.Module, args: Any) -> None:
        calls.append(_Call())
        engine.before_forward(units)
        calls[-1].begin(engine)

    @never_compiled
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if calls.pop().end(engine):
            engine.after_forward(units)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
