"""Every function of PyTorch's without a public name that lowtide uses, in one place, typed.

lowtide requires the torch versions it is tested with; this file is what to look at when a new one comes.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What a trace with tensors that have no values raises when a model looks at one."""
NO_RULE = UnsupportedOperatorException
"""What it raises at an operator whose result's shape torch cannot tell."""

IGNORE_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for subclasses that work at the level of ``__torch_dispatch__`` only."""


CODE_OF_MODULE_CALL: Any = nn.Module._call_impl.__code__
"""What runs as long as a module's call with its hooks lasts."""
CODE_OF_BACKWARD: Any = torch.autograd.graph._engine_run_backward.__code__
"""And what as long as a backward pass, on the thread that began it."""


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors and storages refer to ``tensor``'s memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def backward_under_way() -> int | None:
    """The number of the backward pass that runs on this thread; a nested one has a number of its own."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward pass under way is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def grad_hooks_of(param: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """What runs when ``param.grad`` is there, in this order; by number of its handle."""
    return param._post_accumulate_grad_hooks  # type: ignore[return-value]


def profile_under_way() -> bool:
    """Whether a profiler records what this thread does."""
    return torch._C._autograd._profiler_enabled()


def innermost_saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The pack and unpack functions that would be used for a tensor saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def close_saved_tensor_hooks(down_to: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
    """Close the hooks that were opened on this thread inside those of ``down_to``, or all."""
    while (top := innermost_saved_tensor_hooks()) is not None and (down_to is None or top[0] is not down_to[0]):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def close_innermost_saved_tensor_hooks() -> None:
    """Close the innermost hooks on this thread."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def without_torch_function() -> AbstractContextManager[Any]:
    """Tensor subclasses behave as plain tensors inside."""
    return torch._C.DisableTorchFunctionSubclass()


def without_torch_function_modes() -> AbstractContextManager[Any]:
    """Neither subclasses nor modes see the calls inside."""
    return torch._C.DisableTorchFunction()


def any_torch_function_mode() -> bool:
    """Whether a mode sees the calls of torch's functions on this thread; a default device is such a mode."""
    return torch._C._len_torch_function_stack() > 0


def any_dispatch_mode() -> bool:
    """Whether a mode sees the operators that run on this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """No such mode sees the operators inside."""
    return _disable_current_modes()


def autocast_devices() -> list[str]:
    """The kinds of devices for which autocast is on."""
    if not torch._C._is_any_autocast_enabled():
        return []
    kinds = {"cpu"} | ({found.type} if (found := torch.accelerator.current_accelerator()) is not None else set())
    return [kind for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]


def wrapper_tensor(cls: type[Tensor], like: Tensor, stride: tuple[int, ...]) -> Any:
    """A tensor without memory, whose operations all go to ``cls.__torch_dispatch__``."""
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=stride, dtype=like.dtype, device=like.device)


def asked_by_checkpoint_api() -> Any:
    """What ``torch.distributed.checkpoint.state_dict`` wants to know, if the function that asks this was called from there.
    It calls ``state_dict()`` as anybody does, and does not say whether every rank needs an answer."""
    frame = sys._getframe(2)
    asks = frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
    return frame.f_locals.get("info") if asks else None


def is_tracing() -> bool:
    """Whether torch.compile is looking at the code that runs now."""
    return torch._guards.TracingContext.try_get() is not None


def is_compiled_whole(model: nn.Module) -> bool:
    """Whether ``model`` itself, not a part of it, was given to torch.compile."""
    return isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run as it is even when called from compiled code."""
    return torch._dynamo.disable(function)


def unseen_by_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function of a module. Where torch's compiler, of 70 MiB, was not imported yet, nothing is compiled."""
    return _never_compiled(function) if "torch._dynamo" in sys.modules else function


_never_compiled = functools.cache(never_compiled)


def gloo_options(address: str, interfaces: Sequence[str], timeout: timedelta) -> Any:
    """What a ``ProcessGroupGloo`` takes instead of a timeout: where its sockets listen; its default if nothing is said."""
    make = torch.distributed.ProcessGroupGloo.create_device
    devices = [make(interface=name) for name in interfaces]
    if address and not devices:
        devices = [make(hostname=address)]
    options = torch.distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = devices or [torch.distributed.ProcessGroupGloo.create_default_device()]
    return options


def mark_changed(tensors: Iterable[Tensor]) -> None:
    """Autograd's version counters: graphs that saved these tensors are stale from now on."""
    with without_torch_function():
        torch.autograd.graph.increment_version(list(tensors))


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version counter of ``tensor``."""
    counter = tensor.detach()
    Tensor.data.__set__(counter, torch.empty(0, dtype=tensor.dtype))  # type: ignore[attr-defined]
    return counter


def forget_memory(tensor: Tensor) -> None:
    """Make ``tensor`` one without memory, which still shares its version counter."""
    Tensor.data.__set__(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[attr-defined]


def is_of_checkpoint(pack: Callable[[Tensor], Any]) -> bool:
    """Whether a pack function is one of torch.utils.checkpoint's, which tell saved tensors by their number."""
    return pack.__module__ == torch.utils.checkpoint.__name__


def storage_of(tensor: Tensor) -> int:
    """The number of the storage that ``tensor`` lies in; no other has it as long as the storage lives."""
    return tensor.untyped_storage()._cdata


def has_no_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of forward-mode's zeros, which are there in name only."""
    return tensor._is_zerotensor()


def under_transform() -> bool:
    """Whether one of torch.func's transforms (vmap, grad, jvp) sees the operators that run on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_recorded() -> bool:
    """Whether the operators that run on this thread are being recorded as a graph (``make_fx``, ``torch.func.linearize``)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def without_transforms() -> AbstractContextManager[Any]:
    """No such transform sees the operators inside."""
    return torch._C._DisableFuncTorch()


def takes_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks may be opened: torch.func's gradients allow none."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a transform (vmap, func.grad) has put ``tensor`` into one of its own, which has no memory."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_own_dispatch(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a class that answers every operator itself, and may have no memory."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def forward_hooks_of(module: nn.Module | None) -> list[Callable[..., Any]]:
    """Forward hooks and pre-hooks of ``module``; None: those for all modules."""
    if module is None:
        tables = torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
    else:
        tables = module._forward_hooks, module._forward_pre_hooks
    return [hook for table in tables for hook in table.values()]


def unreadable(value: Tensor, shape: torch.Size) -> Tensor:
    """``value``, one number, as a tensor of ``shape`` that torch does not read.

    It is a negated view: before any operator reads one, the dispatcher makes it plain, which ``refuse_reads`` stops. Writes
    and ways to its address (DLPack, NumPy) raise by themselves.
    """
    torch._C._set_throw_on_mutable_data_ptr(value)
    return value.expand(shape)._neg_view()


def refuse_reads(refuse: Callable[[int], None]) -> None:
    """Call ``refuse`` with the storage of every negated view that is about to be read, in whatever way torch came to it: an
    argument of compiled or scripted code, inside a transform, ``torch.tensor(x)``. To be called once in a process."""
    negative = torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)

    def guarded(operator: Any) -> Callable[..., Any]:
        @functools.wraps(operator)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, Tensor):
                    refuse(storage_of(value))
            with torch._C._ExcludeDispatchKeyGuard(negative):  # what torch's own kernel for this key does: it falls through
                return operator(*args, **kwargs)

        return kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced, which is what we want
        for name in ("clone", "copy_", "resolve_neg"):  # all that read, or call one of these first
            operator = getattr(torch.ops.aten, name).default
            _kernels.impl(name, guarded(operator), "Negative", allow_override=True)


_kernels = torch.library.Library("aten", "IMPL")
"""Holds our kernels for as long as the process lives."""
