"""The tensors of one rank as one safetensors file, written from beginning to end in small pieces.

The sizes of all tensors are known before, so the header goes first and no tensor is ever whole in memory. Everything is hashed
on the way: each piece for those who read pieces, the file as a whole for those who check it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from lowtide.checkpoint.manifest import PIECE_BYTES
from lowtide.errors import InternalError

_WRITTEN_AT_ONCE = 64 << 20  # bytes after which the page cache is written out and let go of

SAFETENSORS_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"},
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece lies in the file."""

    offset: int
    nbytes: int
    xxh3: int


class PayloadWriter:
    """See the module's docstring. Pieces are added in the order of ``entries``; without a ``path`` they are only hashed."""

    def __init__(self, path: Path | None, entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> None:
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for entry in entries:
            # complex128 has no name in safetensors: twice as many halves have
            dtype, shape = entry.dtype, list(entry.shape)
            if dtype is torch.complex128:
                dtype, shape = torch.float64, [*shape, 2]
            header[entry.name] = {
                "dtype": SAFETENSORS_DTYPES[dtype],
                "shape": shape,
                "data_offsets": [end, end + entry.nbytes],
            }
            end += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.nbytes = 8 + len(text) + end
        self._hasher = xxhash.xxh3_64()
        self._end = self._synced = 0
        self._fd = -1
        try:
            if path is not None:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                os.posix_fallocate(self._fd, 0, self.nbytes)  # a full disk is known before the first byte
            self._append(memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self.close()
            raise

    def add(self, data: Tensor) -> list[Written]:
        """Write the next elements, 1-D and contiguous, in pieces."""
        raw = data.detach().contiguous().view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
        out: list[Written] = []
        for start in range(0, len(raw), PIECE_BYTES):
            piece = raw[start : start + PIECE_BYTES]
            out.append(Written(self._end, len(piece), xxhash.xxh3_64_intdigest(piece)))
            self._append(piece)
        return out

    def finish(self) -> str:
        """Everything is there: make it durable; the file's checksum."""
        try:
            if self._end != self.nbytes:
                raise InternalError(f"{self._end} of {self.nbytes} bytes of a payload were written")
            if self._fd >= 0:
                os.fsync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.close()
        return self._hasher.hexdigest()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, piece: memoryview) -> None:
        self._hasher.update(piece)
        if self._fd < 0:
            self._end += len(piece)
            return
        done = 0
        while done < len(piece):
            done += os.pwrite(self._fd, piece[done:], self._end + done)
        self._end += len(piece)
        if self._end - self._synced >= _WRITTEN_AT_ONCE:  # or the page cache would fill with what nobody will read
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, self._synced, self._end - self._synced, os.POSIX_FADV_DONTNEED)
            self._synced = self._end
