"""Module and autograd events → engine verbs. Nothing here decides anything."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import NO_WHOLE_COMPILE, Refused
from lowtide.runtime.engine import Engine
from lowtide.runtime.grads import GradRecord
from lowtide.spec.units import needs
from lowtide.torch_internals import grad_hooks_of, never_compiled


class _Call:
    """One forward under way. Torch runs the closing hook even if the opening one raised, but not after an interrupt."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._begun = False
        self._saved: saved_tensors_hooks | None = None

    def begin(self, engine: Engine) -> None:
        self._begun = True
        self._saved = engine.open_saved()

    def end(self, engine: Engine) -> bool:
        """Close what was opened; whether the opening hook had finished."""
        engine.close_saved(self._saved)
        return self._begun

    def is_running(self) -> bool:
        """Whether the call is still on this thread's stack."""
        frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class _Calls:
    """The forwards under way, innermost last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stack: list[_Call] = []

    def push(self) -> _Call:
        """A module's opening hook runs: note the frame that called it."""
        if self._stack and not self._stack[0].is_running():
            while self._stack:
                self._stack.pop().end(self._engine)
            self._engine.recover()
        self._stack.append(_Call(sys._getframe(2)))  # pyright: ignore[reportPrivateUsage]
        return self._stack[-1]

    def pop(self) -> bool:
        """The closing hook of the innermost one runs; whether its opening hook had finished."""
        return self._stack.pop().end(self._engine)


def install(engine: Engine) -> None:
    """Hook the model, its units' modules, and its parameters."""
    calls = _Calls(engine)
    if engine.config.stage.parameters or engine.activations.handled or engine.config.run is not None:
        hosts = {m for unit in engine.units for m in unit.modules}
        for module in hosts:
            _hook_unit_module(engine, calls, module, hosts)
    _hook_model(engine, calls)
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


def _hook_model(engine: Engine, calls: _Calls) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            raise Refused(NO_WHOLE_COMPILE)
        call = calls.push()
        hook_new_parameters(engine)
        inputs = engine.enter_model(args, kwargs)
        call.begin(engine)
        return inputs

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return engine.leave_model(output) if calls.pop() else output

    engine.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    engine.model.register_forward_hook(after, always_call=True)


def _hook_unit_module(engine: Engine, calls: _Calls, module: nn.Module, hosts: set[nn.Module]) -> None:
    reached = needs(module, hosts)
    units = sorted({engine.unit_of[p] for p in reached}, key=lambda u: u.index)

    @never_compiled
    def before(module: nn.Module, args: Any) -> None:
        call = calls.push()
        engine.before_forward(units)
        call.begin(engine)

    @never_compiled
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if calls.pop():
            engine.after_forward(units)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)
