"""What the caller has switched on around a call, and is not meant for the work that lowtide does inside it.

Inference mode, gradients on or off, autocast, a default dtype or device, modes that watch every function or operator: all of
them hold for whatever runs on this thread. A step that was put off runs inside the caller's next forward pass, an update in
backward inside ``loss.backward()``, memory is taken when it is first needed. Those begin with ``undisturbed``, so that what
they make and change is the same wherever it happens to be done.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from lowtide.torch_internals import (
    any_dispatch_mode,
    any_torch_function_mode,
    autocast_devices,
    without_dispatch_modes,
    without_torch_function_modes,
)


class GradMode:
    """``with`` this gradients are on afterwards if they were before, whatever is raised inside: a signal's handler may run just
    before ``torch.no_grad()`` puts back what it found."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()

    def __exit__(self, *_: object) -> None:
        if torch.is_grad_enabled() is not self._before:
            torch.set_grad_enabled(self._before)


def disturbed() -> bool:
    """Whether anything is on that would change what an optimizer does, were it run now."""
    on = torch.is_inference_mode_enabled() or any_torch_function_mode() or any_dispatch_mode()
    return on or bool(autocast_devices())


@contextmanager
def undisturbed(default_dtype: torch.dtype | None = None) -> Generator[None]:
    """None of the caller's modes inside; no gradients. ``default_dtype``: the one that was in force when this was asked for."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.no_grad())
        for device in autocast_devices():
            stack.enter_context(torch.autocast(device, enabled=False))
        if any_torch_function_mode():  # a default device is one, too
            stack.enter_context(without_torch_function_modes())
        if any_dispatch_mode():
            stack.enter_context(without_dispatch_modes())
        if default_dtype is not None and default_dtype is not torch.get_default_dtype():
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default_dtype)
        yield
