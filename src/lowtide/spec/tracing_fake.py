"""Tensors without memory in the place of a model's own, for as long as a trace lasts.

The model itself is called, not a copy: forwards and hooks refer to modules by identity, from closures and lists. So its
parameters, buffers and other tensors are exchanged in place, and everything that its modules had is put back afterwards,
whatever the forward did to them.

[Note: a CUDA device without CUDA] Torch that is built without CUDA ends the process when autograd meets a fake tensor on a
CUDA device (its node asks for a device guard that was not linked). What differs there for a planner is which kernels run, and
of those the attention matters: so a trace for ``cuda`` runs on fake tensors of the CPU, and picks attention as CUDA does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lowtide.errors import ArgumentError
from lowtide.torch_internals import NEEDS_VALUES as NEEDS_VALUES
from lowtide.torch_internals import NO_RULE as NO_RULE
from lowtide.torch_internals import FakeTensorMode, is_compiled_whole

DEVICES = ("cpu", "cuda")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in what a module takes or returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


class Fakes:
    """Fake tensors for real, fake or meta ones. Those that share memory still do."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; both are held, so that no identity is used twice
        self._memory: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The fake that stands for ``tensor``. It never has gradients, hooks or a graph."""
        if id(tensor) not in self._of:
            with self.mode, torch.no_grad():
                fake = self._made(tensor)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                elif tensor.is_leaf:
                    fake.requires_grad_(tensor.requires_grad)
            self._of[id(tensor)] = (tensor, fake)
        return self._of[id(tensor)][1]

    def all_in(self, value: Any) -> Any:
        """``value`` with a fake for each tensor in it."""
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, Mapping):
            return {key: self.all_in(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.all_in(item) for item in value))
        if isinstance(value, tuple | list):
            return type(value)(self.all_in(item) for item in value)  # pyright: ignore[reportUnknownArgumentType]
        return value

    def _made(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"a {tensor.layout} tensor cannot be traced; give dense tensors.")
        storage = tensor.untyped_storage()
        if id(storage) not in self._memory:
            if storage.nbytes() <= tensor.nbytes:  # all of its memory, or a wrapper that has none of its own
                whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                self._memory[id(storage)] = (storage, whole)
                return whole
            self._memory[id(storage)] = (storage, torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu"))
        place: Any = (self._memory[id(storage)][1].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(*place)


@contextmanager
def standing_in(model: nn.Module, fakes: Fakes) -> Generator[None]:
    """``model`` with fakes for all its tensors; afterwards everything is as it was."""
    modules = list(dict.fromkeys(model.modules()))
    before = [_Contents(module) for module in modules]
    gradients = [(p, p.grad) for p in model.parameters()]
    generators = random.getstate(), torch.random.get_rng_state()
    compiled = "torch._dynamo" in sys.modules and any(is_compiled_whole(module) for module in modules)
    try:
        for contents in before:
            contents.exchange(fakes)
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for contents in before:
            contents.put_back()
        random.setstate(generators[0])
        torch.random.set_rng_state(generators[1])
        for parameter, gradient in gradients:  # of parameters that a forward found elsewhere, in a closure
            if parameter.grad is not gradient:
                parameter.grad = gradient


class _Contents:
    """All attributes of one module, and what is in those that are plain containers (tables of parameters and hooks, too)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._lists = [(v, list(v)) for v in self._attributes.values() if isinstance(v, list)]
        self._tables = [(v, dict(v)) for v in self._attributes.values() if isinstance(v, dict)]
        self._sets = [(v, set(v)) for v in self._attributes.values() if isinstance(v, set)]

    def exchange(self, fakes: Fakes) -> None:
        for name, value in self._attributes.items():
            if isinstance(value, Tensor):
                vars(self._module)[name] = fakes.of(value)
        for table, items in self._tables:
            table.update({key: fakes.of(item) for key, item in items.items() if isinstance(item, Tensor)})
        for listed, items in self._lists:
            listed[:] = [fakes.of(item) if isinstance(item, Tensor) else item for item in items]

    def put_back(self) -> None:
        vars(self._module).clear()
        vars(self._module).update(self._attributes)
        for listed, items in self._lists:
            listed[:] = items
        for table, items in self._tables:
            table.clear()
            table.update(items)
        for members, items in self._sets:
            members.clear()
            members.update(items)


class OnCuda(TorchFunctionMode):
    """What is asked of a CUDA device is done with tensors of the CPU; attention is picked as CUDA would.

    See [Note: a CUDA device without CUDA].
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _cuda_attention(*args, **kwargs)
        if func is Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is Tensor.to:
            args = tuple(_on_cpu(value) for value in args)
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    named = isinstance(device, str | torch.device) and str(device).split(":")[0] == "cuda"
    return torch.device("cpu") if named or type(device) is int else device


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **rest: Any,
) -> Tensor:
    """Flash attention for 16-bit numbers without a mask, the memory-efficient kernel for the rest, plain products otherwise."""
    aten, scale = torch.ops.aten, rest.get("scale")
    whole = query.dim() == 4 and query.shape[-1] <= 256 and query.shape[-1] == value.shape[-1]
    if whole and attn_mask is None and query.dtype.itemsize == 2:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if whole and query.shape[1] == key.shape[1]:
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        products = aten._scaled_dot_product_efficient_attention
        return products(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
