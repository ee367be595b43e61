"""Weights in safetensors files: what is there, which tensor of a model each belongs to, and their values in small pieces.

A file is 8 bytes (the length of the header), the header (JSON: name, dtype, shape and place of every tensor) and the data,
row by row, little-endian. We read it ourselves, because the bytes have to go straight to where they belong: a mapped file
would count as resident memory, and a whole tensor beside its destination would double the need. Files come from outside,
so nothing in them is believed before it was checked; nothing in them can run code.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, Refused
from lowtide.files import allowed_bytes, json_bytes, stored_bytes

_JSON_LIMIT = 100_000_000  # the format's own for headers
_PIECE_BYTES = 4 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5  # names in an error message

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it was when its header was read."""

    path: Path
    identity: tuple[int, int, int, int]  # device, inode, size, time of change


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies: bytes ``start:stop`` of ``file``."""

    file: _File
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Weights:
    """Tensors in one or several files, by name. Holds no file open and no values."""

    def __init__(self, path: Path, entries: Mapping[str, _Entry]) -> None:
        self.path = path
        self._entries = dict(entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill ``out``, of the same shape and any dtype, strides and device, as ``out.copy_(the tensor)`` would.

        A few MiB are in memory beside ``out`` at any time, and what was read does not stay in the page cache.
        """
        entry = self._entry(name)
        if tuple(out.shape) != entry.shape:
            raise ArgumentError(f"{entry.file.path}: {name!r} is {entry.shape}, not {tuple(out.shape)}.")
        if out.device.type == "meta":
            raise ArgumentError(f"{name!r} cannot be read into a tensor on the meta device: it has no memory.")
        with _Opened(entry.file.path) as opened:
            if opened.identity != entry.file.identity:
                raise Refused(f"{entry.file.path} was changed or replaced while it was being loaded; load it again.")
            os.posix_fadvise(opened.handle, entry.start, entry.stop - entry.start, os.POSIX_FADV_SEQUENTIAL)
            with torch.inference_mode(mode=out.is_inference()), torch.no_grad():
                _read_pieces(opened, name, entry, out.detach())

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ArgumentError(f"{self.path} has no tensor {name!r}; it has {_some(self._entries)}.") from None


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """A .safetensors file, a folder with model.safetensors, or one with model.safetensors.index.json and the files it names.

    Reads and checks all headers, no values.
    """
    where = Path(path)
    if sys.byteorder != "little":
        raise Refused("safetensors files are little-endian, and this machine is not.")
    if where.is_dir():
        if (where / _INDEX).exists():
            return Weights(where, _read_index(where / _INDEX))
        if not (where / _SINGLE).exists():
            raise ArgumentError(f"weights={str(where)!r}: the folder has neither {_INDEX} nor {_SINGLE}{_pickles(where)}.")
        return Weights(where, _read_header(where / _SINGLE))
    if where.name.endswith(".index.json"):
        return Weights(where, _read_index(where))
    if not where.exists():
        raise ArgumentError(f"weights={str(where)!r}: there is no such file or folder.")
    if where.suffix != ".safetensors":
        raise ArgumentError(
            f"weights={str(where)!r}: not a .safetensors file. Other formats can run code when read; convert it."
        )
    return Weights(where, _read_header(where))


def _pickles(folder: Path) -> str:
    found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    return f"; {found[0]} can run code when read, so it is not: save the weights as safetensors" if found else ""


# -- reading values ---------------------------------------------------------------------------------------------------


def _read_pieces(opened: _Opened, name: str, entry: _Entry, out: Tensor) -> None:
    itemsize = entry.dtype.itemsize
    # bool is checked on the way: a byte that is neither 0 nor 1 is not a bool that torch could keep
    straight = out.device.type == "cpu" and out.dtype is entry.dtype and entry.dtype is not torch.bool
    limit = _PIECE_BYTES // itemsize
    spare = torch.empty(0, dtype=torch.uint8)
    start = entry.start
    for block in _blocks(out, limit):
        nbytes = block.numel() * itemsize
        if straight and block.is_contiguous():
            opened.fill(block.reshape(-1).view(torch.uint8), start, name)
        elif nbytes:
            if spare.numel() < nbytes:
                spare = torch.empty(min(_PIECE_BYTES, out.numel() * itemsize), dtype=torch.uint8)
            opened.fill(spare[:nbytes], start, name)
            values = spare[:nbytes].ne(0) if entry.dtype is torch.bool else spare[:nbytes].view(entry.dtype)
            block.copy_(values.view(block.shape))
        start += nbytes


def _blocks(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """``tensor`` as views of at most ``limit`` elements each, which follow one another row by row."""
    if tensor.numel() <= limit:
        yield tensor
        return
    per_row = math.prod(tensor.shape[1:])
    if per_row > limit:
        for row in tensor:
            yield from _blocks(row, limit)
        return
    rows = limit // per_row
    for first in range(0, tensor.shape[0], rows):
        yield tensor[first : first + rows]


class _Opened:
    """A regular file, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        except OSError as error:
            raise ArgumentError(f"{path} cannot be opened: {error.strerror}.") from error
        facts = os.fstat(self.handle)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self.handle)
            raise ArgumentError(f"{path} is not a regular file.")
        self.size = facts.st_size
        self.identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def fill(self, into: Tensor, start: int, what: str) -> None:
        """Read ``into`` (1-D bytes) full from byte ``start`` on, and drop those pages from the page cache."""
        array: Any = into.numpy()
        view, done = memoryview(array), 0
        while done < len(view):
            try:
                count = os.preadv(self.handle, [view[done:]], start + done)
            except OSError as error:
                where = f"{self.path}, byte {start + done}"
                raise Refused(
                    f"{where}: {what!r} cannot be read: {error.strerror}. Check the disk, or copy it again."
                ) from error
            if count == 0:
                raise Refused(f"{self.path} ends at byte {start + done}, inside {what!r}; the file is not complete.")
            done += count
        behind = max(0, start - _PIECE_BYTES)  # again: the kernel keeps a large page that the last piece ended in
        os.posix_fadvise(self.handle, behind, max(start + done - behind, 1), os.POSIX_FADV_DONTNEED)

    def text(self, start: int, nbytes: int, what: str) -> bytes:
        into = torch.empty(nbytes, dtype=torch.uint8)
        self.fill(into, start, what)
        return into.numpy().tobytes()


# -- headers: nothing in them is believed -----------------------------------------------------------------------------


def _read_header(path: Path) -> dict[str, _Entry]:
    with _Opened(path) as opened:
        if opened.size < 8:
            raise Refused(f"{path} is not a safetensors file: it has {opened.size} bytes.")
        length = int.from_bytes(opened.text(0, 8, "the header's length"), "little")
        if length > _JSON_LIMIT or length > opened.size - 8:
            limit = min(_JSON_LIMIT, opened.size - 8)
            raise Refused(
                f"{path} is not a safetensors file, or not complete: a header of {length} bytes, at most {limit} fit."
            )
        text = opened.text(8, length, "the header")
        if json_bytes(text) > allowed_bytes(stored_bytes(opened.handle)):
            raise Refused(f"{path}: its header of {length} bytes would take more memory than files of its size may.")
        header = _parse(path, text)
        file = _File(path, opened.identity)
        header.pop("__metadata__", None)
        begin = 8 + length
        entries = {name: _entry(file, begin, name, fields) for name, fields in header.items()}
        _refuse_gaps(path, entries, begin, opened.size)
    return entries


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands there twice")
        return found

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(f"{path}: the JSON in it is not valid: {reason[:200]}.") from None
    if not isinstance(parsed, dict):
        raise Refused(f"{path}: the JSON in it is not an object.")
    return parsed


def _entry(file: _File, begin: int, name: str, fields: Any) -> _Entry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise Refused(f"{file.path}: {name[:120]!r} lacks its dtype, shape or data_offsets.")
    dtype, shape, offsets, problem = fields["dtype"], fields["shape"], fields["data_offsets"], None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        problem = f"the unknown dtype {str(dtype)[:40]!r}; known are {', '.join(_DTYPES)}"
    elif not _are_sizes(shape) or len(shape) > 64:
        problem = f"the shape {str(shape)[:80]}"
    elif not name.isprintable() and not _is_text(name):
        problem = "a name that is no text"
    elif not _are_sizes(offsets) or len(offsets) != 2:
        problem = f"the place {str(offsets)[:80]}"
    elif math.prod(shape) * _DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        problem = f"{offsets[1] - offsets[0]} bytes, which is not a {dtype} of shape {tuple(shape)}"
    elif math.prod(max(size, 1) for size in shape) >= 2**58:  # torch counts the bytes between rows even if there are none
        problem = f"the shape {str(shape)[:80]}, which no tensor has"
    if problem is not None:
        raise Refused(f"{file.path}: {name[:120]!r} has {problem}.")
    return _Entry(file, _DTYPES[dtype], tuple(shape), begin + offsets[0], begin + offsets[1])


def _is_text(name: str) -> bool:
    """Whether every file and terminal can have it: halves of characters that stand alone are none."""
    return not any("\ud800" <= c <= "\udfff" for c in name)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**62 for v in values)  # a bool is no size


def _refuse_gaps(path: Path, entries: Mapping[str, _Entry], begin: int, size: int) -> None:
    """Tensors follow one another from the header to the end of the file: no overlap, nothing hidden, nothing cut off."""
    end, last = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            how = "overlaps" if entry.start < end else "leaves a gap after"
            raise Refused(f"{path}: {name[:120]!r} begins at byte {entry.start} and {how} {last[:120]!r}, which ends at {end}.")
        end, last = entry.stop, name
    if end != size:
        raise Refused(f"{path} has {size} bytes, but its tensors end at byte {end}; the file is not complete or not valid.")


def _read_index(path: Path) -> dict[str, _Entry]:
    with _Opened(path) as opened:
        if opened.size > _JSON_LIMIT:
            raise Refused(f"{path}: an index of {opened.size} bytes; at most {_JSON_LIMIT} are read.")
        text = opened.text(0, opened.size, "the index")
        if json_bytes(text) > allowed_bytes(opened.size):
            raise Refused(f"{path}: an index of {opened.size} bytes that would take more memory than files of its size may.")
        index = _parse(path, text)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise Refused(f"{path}: there is no weight_map from names to files in it.")
    files: dict[str, dict[str, _Entry]] = {}
    for shard in sorted(set(places.values())):
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise Refused(f"{path} names the file {shard[:200]!r}; only .safetensors files beside the index are read.")
        files[shard] = _read_header(path.parent / shard)
    for name, shard in places.items():
        if name not in files[shard]:
            raise Refused(f"{path} says that {name[:120]!r} is in {shard}, but it is not.")
    return {name: files[shard][name] for name, shard in places.items()}


# -- which weight belongs to which tensor of a model ------------------------------------------------------------------


def match(weights: Weights, model: nn.Module) -> dict[str, str]:
    """The weight for every name of a parameter or saved buffer of ``model``; a tied one has the same weight under each.

    Names are the same, or one prefix ("model.", "transformer.") is missing or extra on one side. As in
    ``load_state_dict(strict=True)`` nothing may be missing, be left over or have another shape; of tied parameters one name
    is enough, and what a model makes itself (buffers that are not saved) may be there. Changes nothing.
    """
    saved, own = _saved_tensors(model), _unsaved_buffers(model)
    refuse_lost_buffers(model)
    candidates = [_compare(weights, model, saved, own, rename) for rename in _renamings(weights, saved)]
    best = min(candidates, key=lambda c: len(c.missing) + len(c.unexpected))  # the first, exact names, if none is better
    if best.missing or best.unexpected:
        lists = (("missing in the file", best.missing), ("unknown to the model", best.unexpected))
        raise ArgumentError(
            f"{weights.path} does not fit {type(model).__name__}: "
            + "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in lists if names)
            + ". Build the model that the weights were saved from."
        )
    wrong = [
        f"{name!r} is {weights.shape(weight)} in the file and {tuple(saved[name].shape)} in the model"
        for name, weight in best.weight_of.items()
        if weights.shape(weight) != tuple(saved[name].shape)
    ]
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ArgumentError(f"{weights.path} does not fit {type(model).__name__}: {'; '.join(wrong[:_SHOWN])}{more}.")
    return best.weight_of


def refuse_lost_buffers(model: nn.Module) -> None:
    """A buffer that is not saved and was never computed cannot be had from a file."""
    lost = [name for name, buffer in _unsaved_buffers(model).items() if buffer.is_meta]
    if lost:
        raise Refused(
            f"buffer {_some(lost)} of {type(model).__name__} is on the meta device and is not part of saved weights, so its "
            f"values exist nowhere. Build the model under `with lowtide.deferred():` instead of `torch.device('meta')`."
        )


def give_buffers_memory(model: nn.Module, device: torch.device) -> None:
    """Buffers on the meta device get memory on ``device``, without values; one under two names stays one."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=device)
                setattr(module, name, made[id(buffer)])


def load_buffers(weights: Weights, model: nn.Module, weight_of: Mapping[str, str]) -> None:
    """Fill the saved buffers of ``model``, which all have memory."""
    for name, buffer in model.named_buffers():
        if name in weight_of:
            weights.read_into(weight_of[name], buffer)


def leave_meta(params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Make parameters on the meta device real ones on ``device``, without memory for values: all elements are one.

    They stay the same objects, for the optimizer that holds them. ``param.data = ...`` cannot do that across devices.
    """
    for param in params:
        if param.is_meta:
            if param._backward_hooks or param._post_accumulate_grad_hooks:  # pyright: ignore[reportPrivateUsage]
                raise Refused(
                    "a parameter on the meta device has hooks, which would be lost; register them after lowtide.shard."
                )
            real = nn.Parameter(torch.zeros((), dtype=param.dtype, device=device).expand(param.shape), param.requires_grad)
            vars(real).update(vars(param))  # the attributes go with the contents, and have to stay
            torch.utils.swap_tensors(param, real)


@dataclass(frozen=True, slots=True)
class _Comparison:
    weight_of: dict[str, str]
    missing: list[str]
    unexpected: list[str]


def _compare(
    weights: Weights, model: nn.Module, saved: dict[str, Tensor], own: dict[str, Tensor], rename: Callable[[str], str]
) -> _Comparison:
    names_of: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in saved.items():
        names_of[id(tensor)].append(name)
    weight_of: dict[str, str] = {}
    missing: list[str] = []
    taken: set[str] = set()  # without a prefix, names of two parameters may become one
    for names in names_of.values():
        there = [w for w in map(rename, names) if w in weights and w not in taken]
        if there:
            taken.update(there)
            weight_of.update(dict.fromkeys(names, there[-1]))  # of several, load_state_dict keeps the last
        else:
            missing += names
    known = {rename(n) for n in (*saved, *own)}
    # Hugging Face models say what older files have too much
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = [n for n in weights.names if n not in known and not any(p.search(n) for p in ignored)]
    return _Comparison(weight_of, missing, left)


def _renamings(weights: Weights, saved: Mapping[str, Tensor]) -> list[Callable[[str], str]]:
    """From a name of the model to a name in the file: as it is, or with the prefix that most names on one side have more."""
    extra = Counter(n[:at] for n in weights.names for at in _after_dots(n) if n[at:] in saved)
    lacking = Counter(n[:at] for n in saved for at in _after_dots(n) if n[at:] in weights)
    renamings: list[Callable[[str], str]] = [lambda name: name]
    renamings += [lambda name, p=prefix: p + name for prefix, _ in extra.most_common(1)]
    renamings += [lambda name, p=prefix: name.removeprefix(p) for prefix, _ in lacking.most_common(1)]
    return renamings


def _after_dots(name: str) -> list[int]:
    return [at + 1 for at, letter in enumerate(name) if letter == "."]


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    unsaved = _unsaved_buffers(model)
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if n not in unsaved}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        unsaved = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
        for name, buffer in module.named_buffers(recurse=False):
            if name in unsaved:
                out[f"{prefix}.{name}" if prefix else name] = buffer
    return out


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f", ... ({len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
    return ", ".join(repr(n[:120]) for n in names[:_SHOWN]) + more
