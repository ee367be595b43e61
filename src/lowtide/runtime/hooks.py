"""Module and autograd events → engine verbs. Nothing here decides anything."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import NO_WHOLE_COMPILE, Refused
from lowtide.runtime.ambient import GradMode
from lowtide.runtime.engine import Engine
from lowtide.runtime.grads import GradRecord
from lowtide.runtime.turn import Call, forward, module_call
from lowtide.spec.units import needs
from lowtide.torch_internals import grad_hooks_of, never_compiled, unseen_by_compiler


def install(engine: Engine) -> None:
    """Hook the model, its units' modules, and its parameters."""
    if engine.config.stage.parameters or engine.activations.handled or engine.config.run is not None:
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
    # Python cannot see through a parameter's hooks: one that held the engine or the parameter would keep both for ever.
    reference, key = weakref.ref(engine), record.key

    def before(grad: Tensor) -> None:
        if (alive := reference()) is not None:
            param = alive.grads.by_key[key].param
            _move_to_the_end(param, number)
            alive.grad_arriving(key, grad, watched=len(grad_hooks_of(param)) > 1)

    def after(param: Tensor) -> None:
        if (alive := reference()) is not None:
            # A hook that was made since ``before`` still has to see the gradient: it is taken when backward ends.
            alive.grad_arrived(key, take=next(reversed(grad_hooks_of(param))) == number)

    record.param.register_hook(before)
    number = record.param.register_post_accumulate_grad_hook(after).id
    record.hooked = True


def _move_to_the_end(param: Tensor, number: int) -> None:
    """Ours takes the gradient away, so hooks that the caller has made since must run before it."""
    hooks = grad_hooks_of(param)
    if next(reversed(hooks)) != number:
        hooks[number] = hooks.pop(number)  # torch runs them in a dict's order, which an OrderedDict's own does not change


def _hook_model(engine: Engine) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            raise Refused(NO_WHOLE_COMPILE)
        if engine.needs_no_turn:
            return engine.inputs(args, kwargs, outermost=True)
        with GradMode():
            call = unseen_by_compiler(_begin)(engine)
            hook_new_parameters(engine)
            inputs = engine.enter_model(call, args, kwargs)
            call.saved = engine.open_saved()
            call.ready = True
        return inputs

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():  # the hook above has refused it
            return output
        with GradMode():
            call = unseen_by_compiler(_innermost)(engine)
            return engine.leave_model(call, output) if call is not None and call.ready else output

    engine.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    engine.model.register_forward_hook(after, always_call=True)


def _begin(engine: Engine) -> Call:
    return engine.turn.begin(forward(module_call()))


def _innermost(engine: Engine) -> Call | None:
    return engine.turn.innermost(module_call())


def _hook_unit_module(engine: Engine, module: nn.Module, hosts: set[nn.Module]) -> None:
    reached = needs(module, hosts)
    units = sorted({engine.unit_of[p] for p in reached}, key=lambda u: u.index)

    @never_compiled
    def before(module: nn.Module, args: Any) -> None:
        with GradMode():
            call = engine.turn.begin(forward(module_call()))
            engine.enter_units(call, units)
            call.saved = engine.open_saved()
            call.ready = True

    @never_compiled
    def after(module: nn.Module, args: Any, output: Any) -> None:
        with GradMode():
            call = engine.turn.innermost(module_call())
            if call is not None and call.ready:
                engine.leave_units(call)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
