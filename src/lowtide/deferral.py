"""Build a model with its usual numbers, without holding it in memory.

Every tensor that is made inside the context is given memory in an unlinked file, mapped: initialisation runs as always,
with the same random numbers in the same order, and the kernel writes pages out and drops them when memory is short.
``shard`` then reads the model unit by unit and lets go of the mapping.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.errors import ArgumentError
from lowtide.torch_internals import without_torch_function_modes

# Below this a tensor stays in ordinary memory: a file per bias would cost more than the bias.
_SMALL_BYTES = 64 << 10

_FACTORIES: frozenset[Any] = frozenset(
    getattr(torch, name)
    for name in (
        "empty empty_strided empty_like zeros zeros_like ones ones_like full full_like rand rand_like randn randn_like randint "
        "randperm arange linspace eye tensor normal clone"
    ).split()
) | {Tensor.clone}


class _FileBacked(TorchFunctionMode):
    """Moves what factory functions return into a mapped file."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and _is_large_cpu(result):
            return self._move(result, fill=func is not torch.empty)
        return result

    def _move(self, tensor: Tensor, *, fill: bool) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        handle, path = tempfile.mkstemp(prefix="lowtide-", dir=self._folder)
        try:
            os.posix_fallocate(handle, 0, nbytes)
            with without_torch_function_modes():
                storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
        finally:
            os.close(handle)
            os.unlink(path)
        with without_torch_function_modes():
            moved = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())  # pyright: ignore
            if fill:
                moved.copy_(tensor.detach())
            return moved.requires_grad_(tensor.requires_grad)


def _is_large_cpu(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.numel() * value.element_size() >= _SMALL_BYTES
        and value.is_contiguous()
    )


@contextmanager
def deferred(disk: str | os.PathLike[str] | None = None) -> Generator[None]:
    """Inside, tensors of models live in files under ``disk`` (default: the folder for temporary files) instead of memory."""
    folder = os.fspath(disk) if disk is not None else tempfile.gettempdir()
    if not os.path.isdir(folder):
        raise ArgumentError(f"deferred(disk={folder!r}): there is no such folder.")
    with _FileBacked(folder):
        yield
