"""Build a model with its usual numbers, without holding it in memory.

Every large tensor that is made inside the context is given memory in a file without a name, mapped: initialisation runs as
always, with the same random numbers in the same order. The kernel writes pages out and drops them when memory is short, and
tensors that were not used for a while are taken out of this process' resident set at once, so that building a model costs
the memory of a few tensors. ``shard`` then reads the model unit by unit and lets go of the files.

Two nets catch tensors: functions that make them (``torch.empty`` and its like, ``clone``, ``to``), and the registration of
a parameter or buffer, for those that arithmetic made. A tensor that slips through both stays in ordinary memory: that
costs memory, never a number.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.runtime.unit import dense_stride
from lowtide.torch_internals import storage_use_count, without_torch_function_modes

_log = logging.getLogger("lowtide")

# Below this a tensor stays in ordinary memory: a file per bias would cost more than the bias.
_SMALL_BYTES = 64 << 10
# Files that were used last keep their pages in the resident set up to this sum; the last one keeps them whatever its size.
_RESIDENT_BYTES = 48 << 20

_UNSET: frozenset[Any] = frozenset({torch.empty, torch.empty_strided, torch.empty_like, Tensor.new_empty})
_ZERO: frozenset[Any] = frozenset({torch.zeros, torch.zeros_like, Tensor.new_zeros})  # a new file reads as zeros
_MAKERS: frozenset[Any] = (
    _UNSET
    | _ZERO
    | {
        getattr(torch, name)
        for name in "ones ones_like full full_like rand rand_like randn randn_like randint randperm arange linspace eye tensor "
        "normal clone".split()
    }
    | {
        getattr(Tensor, name)
        for name in "clone to type half bfloat16 float double contiguous new_ones new_full new_tensor".split()
    }
)


class _ResidentFiles:
    """Which mapped files have pages in this process. Taking pages out of it loses nothing: the file has the bytes."""

    def __init__(self) -> None:
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[int, int] = OrderedDict()  # address → bytes, the last used at the end
        self._bytes = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        self._storages[storage.data_ptr()] = storage
        self.used(storage.data_ptr())

    def used(self, address: int) -> None:
        """Somebody may have read or written the file that is mapped at ``address``, if it is one of these."""
        storage = self._storages.get(address)
        if storage is None:
            return
        if address not in self._recent:
            self._recent[address] = storage.nbytes()
            self._bytes += storage.nbytes()
        self._recent.move_to_end(address)
        while self._bytes > _RESIDENT_BYTES and len(self._recent) > 1:
            self._let_go()

    def let_all_go(self) -> None:
        while self._recent:
            self._let_go()

    def _let_go(self) -> None:
        address, nbytes = self._recent.popitem(last=False)
        self._bytes -= nbytes
        storage = self._storages.get(address)  # held until the call below is over: the address is its own that long
        if storage is not None and storage.data_ptr() == address:
            _release_pages(address, storage.nbytes())


class _FileBacked(TorchFunctionMode):
    """Moves what is made into mapped files, and keeps few of them resident."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._files = _ResidentFiles()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _here.mode is not self:  # a context inside this one takes care of it
            return result
        if func in _MAKERS and kwargs.get("out") is None and not any(result is a for a in args) and _may_move(result):
            result = self._moved(result, func)
        for value in (*args, result):
            if type(value) in (Tensor, nn.Parameter):
                self._files.used(_address(value))
        return result

    def adopt(self, tensor: Any) -> None:
        """Move the memory of a parameter or buffer that was made by arithmetic; it stays the same object."""
        with torch.no_grad(), without_torch_function_modes():
            if _may_move(tensor):
                storage = self._storage_for(tensor)
                self._view(storage, tensor).copy_(tensor)
                tensor.set_(storage, 0, tensor.shape, tensor.stride())

    def let_all_go(self) -> None:
        self._files.let_all_go()

    def _moved(self, tensor: Tensor, maker: Any) -> Tensor:
        storage = self._storage_for(tensor)
        # where torch fills even what is "empty", so that runs repeat, the filling is kept
        has_values = maker not in _ZERO and (maker not in _UNSET or torch.are_deterministic_algorithms_enabled())
        with without_torch_function_modes():
            moved = self._view(storage, tensor)
            if has_values:
                moved.copy_(tensor.detach())
            return moved.requires_grad_() if tensor.requires_grad else moved

    @staticmethod
    def _view(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())  # pyright: ignore

    def _storage_for(self, tensor: Tensor) -> torch.UntypedStorage:
        nbytes = tensor.nbytes
        handle = _open_unnamed(self._folder)
        try:
            os.posix_fallocate(handle, 0, nbytes)  # a full disk is an error here, not a SIGBUS at the first write
            with without_torch_function_modes():
                storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{handle}", shared=True, nbytes=nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            fix = f"Give deferred(disk=...) a folder with room for the whole model; {self._folder!r} is full."
            raise DoesNotFit("disk", nbytes, shutil.disk_usage(self._folder).free, fix) from error
        finally:
            os.close(handle)
        self._files.add(storage)
        return storage


class _Here(threading.local):
    """The innermost context of this thread."""

    mode: _FileBacked | None = None


_here = _Here()
_hooks_lock = threading.Lock()
_hooks: list[Any] = []


def _on_registration(_: nn.Module, __: str, value: Any) -> None:
    if _here.mode is not None:
        _here.mode.adopt(value)


def _watch_registrations() -> None:
    """Once and for good: torch walks these hooks on every thread, so they must not come and go with a context."""
    with _hooks_lock:
        if not _hooks:
            _hooks.append(register_module_parameter_registration_hook(_on_registration))
            _hooks.append(register_module_buffer_registration_hook(_on_registration))


def _may_move(value: Any) -> bool:
    """Whether ``value`` is large and its memory is ordinary, dense and nobody else's."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.nbytes >= _SMALL_BYTES
        and value.is_leaf  # a result of a computation that autograd knows has to stay that
        and not value.is_quantized
        and _address(value) != 0
        and not value.untyped_storage().is_shared()  # in a file already, or in memory shared with other processes
        and storage_use_count(value) <= storage_use_count(torch.empty(1))
        and dense_stride(value) == tuple(value.stride())
    )


def _address(tensor: Tensor) -> int:
    """Where ``tensor``'s memory begins; 0 if it has none of its own (vmap and the like wrap tensors)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _release_pages(address: int, nbytes: int) -> None:
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is not None and madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
        _log.debug("madvise: %s", os.strerror(ctypes.get_errno()))  # the pages stay until memory is short


def _open_unnamed(folder: str) -> int:
    """A new private file that nobody can find by name, and that goes when its last user goes, however that ends."""
    try:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        handle, path = tempfile.mkstemp(prefix="lowtide-", dir=folder)  # some file systems need a name for a moment
        os.unlink(path)
        return handle
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(f"deferred(disk={folder!r}): no file can be made there: {error.strerror}.") from error


def _is_in_memory(folder: str) -> bool:
    """Whether files in ``folder`` take memory, not disk (tmpfs)."""
    device = os.stat(folder).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    table = Path("/proc/self/mountinfo")
    mounts = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return any(m[2] == numbers and m[m.index("-") + 1] in ("tmpfs", "ramfs") for m in mounts)


def _default_folder() -> str:
    folder = tempfile.gettempdir()
    if _is_in_memory(folder) and os.access("/var/tmp", os.W_OK) and not _is_in_memory("/var/tmp"):
        return "/var/tmp"
    return folder


@contextmanager
def deferred(disk: str | os.PathLike[str] | None = None) -> Generator[None]:
    """Inside, tensors of models live in files under ``disk`` (default: the folder for temporary files) instead of memory.

    It holds for the thread that opened it. Files have no name and vanish with their tensors.
    """
    folder = os.fspath(disk) if disk is not None else _default_folder()
    if not os.path.isdir(folder):
        raise ArgumentError(f"deferred(disk={folder!r}): there is no such folder.")
    if _is_in_memory(folder):
        _log.warning("deferred: files in %r take memory, not disk; give disk= a folder on a disk", folder)
    _watch_registrations()
    mode, outer = _FileBacked(folder), _here.mode
    _here.mode = mode
    try:
        with mode:
            yield
    finally:
        _here.mode = outer
        mode.let_all_go()
