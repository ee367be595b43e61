"""Text as one indexed file of tokens in a cache folder, which all ranks of a host map into memory and so share.

Layout: one page that starts with ``MAGIC`` and a JSON header, the tokens as 16-bit numbers, the index as 64-bit numbers
(where each document starts, and the end). The file is written under another name and renamed, so a reader sees it whole
or not at all; one that does not add up (a torn disk, another format) is made again.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lowtide.errors import ArgumentError
from lowtide.job.sources import PIECE_BYTES, Source, find_source, read_pieces
from lowtide.job.tokens import BYTE_TOKENS, END, ByteEncoder, Encoder, PairEncoder, pairs_available, train_pairs

MAGIC = b"lowtide corpus 1\n"
_PAGE = 4096
_HELD_OUT = 0.05
"""Share of the tokens that is never trained on."""
_PAIR_SAMPLE_BYTES = 16 << 20
"""Byte pairs are learned from at most this much text, which bounds the seconds that takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the file says about itself. Counts are in tokens."""

    encoding: str
    vocabulary: int
    count: int
    train_count: int
    documents: int

    @property
    def index_offset(self) -> int:
        return -(-(_PAGE + 2 * self.count) // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.index_offset + 8 * (self.documents + 1)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A corpus that is mapped into memory: pages are read when touched, and are one copy for all ranks of the host."""

    header: Header
    tokens: Tensor
    """All tokens, uint16. Written to by nobody."""
    index: Tensor
    """Where each document starts, int64, and the end of the last."""

    @property
    def train(self) -> Tensor:
        return self.tokens[: self.header.train_count]

    @property
    def held_out(self) -> Tensor:
        return self.tokens[self.header.train_count :]

    def document(self, number: int) -> Tensor:
        return self.tokens[self.index[number] : self.index[number + 1]]


def prepare_corpus(data: str | None, *, vocabulary: int, cache: Path, tell: Callable[[str], None]) -> Path:
    """The token file of ``data`` for a model with ``vocabulary`` tokens, made if it is not in ``cache`` yet."""
    source = find_source(data)
    encoding = _choose_encoding(vocabulary, tell)
    path = cache / f"{source.fingerprint(MAGIC.decode(), sys.byteorder, encoding, str(vocabulary))}.tokens"
    if _read_header(path) is not None:
        return path
    what = data or "Python's standard library"
    tell(f"tokenising {what} once: {len(source.documents):,} files, {source.size / 1e6:.1f} MB ({encoding})")
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        encoder = _train(source, vocabulary) if encoding == "byte pairs" else ByteEncoder()
        if isinstance(encoder, PairEncoder):
            with _written_whole(path.with_suffix(".tokenizer.json")) as file:
                file.write(encoder.to_json().encode())
        with _written_whole(path) as file:
            _write(file, source, encoder, encoding)
    except PermissionError as error:
        raise ArgumentError(
            f"cannot write to the cache folder {str(cache)!r} ({error.strerror}); set XDG_CACHE_HOME."
        ) from error
    return path


def open_corpus(path: Path, *, least_tokens: int) -> Corpus:
    """Map a token file. ``least_tokens`` is what one training or validation window needs."""
    header = _read_header(path)
    if header is None:
        raise ArgumentError(f"{str(path)!r} is not a complete token file; remove it, the next run makes it again.")
    if header.count - header.train_count < least_tokens:
        raise ArgumentError(
            f"the text has {header.count:,} tokens, of which {_HELD_OUT:.0%} are held out; the held-out part needs "
            f"{least_tokens} or more: give --data about {int(least_tokens / _HELD_OUT):,} tokens of text."
        )
    with open(path, "rb") as file:
        # A private map: torch wants a writable buffer, and nothing here ever writes, so pages stay shared with the cache.
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tokens = torch.frombuffer(memory, dtype=torch.uint16, offset=_PAGE, count=header.count)
    index = torch.frombuffer(memory, dtype=torch.int64, offset=header.index_offset, count=header.documents + 1)
    return Corpus(header, tokens, index)


def default_cache_folder() -> Path:
    """Where token files are kept, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "lowtide", "corpus")


def _choose_encoding(vocabulary: int, tell: Callable[[str], None]) -> str:
    if vocabulary < BYTE_TOKENS:
        raise ArgumentError(f"the model has {vocabulary} tokens; text needs at least {BYTE_TOKENS} (one per byte).")
    if vocabulary == BYTE_TOKENS:
        return "bytes"
    if not pairs_available():
        tell("the package 'tokenizers' is not installed, so a token is one byte (pip install tokenizers for byte pairs)")
        return "bytes"
    return "byte pairs"


def _train(source: Source, vocabulary: int) -> PairEncoder:
    """Learn byte pairs from the front of the corpus, which the held-out tail is no part of."""
    return train_pairs(_sample(source, min(_PAIR_SAMPLE_BYTES, int(source.size * (1 - _HELD_OUT)))), min(vocabulary, 1 << 16))


def _sample(source: Source, limit: int) -> Iterator[bytes]:
    for document in source.documents:
        for piece in read_pieces(document):
            yield piece[:limit]
            limit -= len(piece)
            if limit <= 0:
                return


@contextmanager
def _written_whole(path: Path) -> Generator[IO[bytes], None, None]:
    """A file to write, which takes the name ``path`` when it is complete and on the disk, and leaves nothing if that fails."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _write(file: IO[bytes], source: Source, encoder: Encoder, encoding: str) -> None:
    file.seek(_PAGE)
    starts = _write_tokens(file, source, encoder)
    header = Header(
        encoding=encoding,
        vocabulary=encoder.size,
        count=starts[-1],
        train_count=_split(starts),
        documents=len(starts) - 1,
    )
    file.seek(header.index_offset)
    file.write(starts.tobytes())
    file.seek(0)
    file.write(MAGIC + json.dumps(asdict(header)).encode() + b"\n")


def _write_tokens(file: IO[bytes], source: Source, encoder: Encoder) -> array[int]:
    """Write all documents, each followed by ``END``; returns where each starts, and the end."""
    starts = array("q", [0])
    batch: list[bytes] = []
    ends: list[bool] = []
    held = written = 0

    def flush() -> None:
        nonlocal held, written
        for tokens, last in zip(encoder.encode(batch), ends, strict=True):
            if last:
                tokens.append(END)
            file.write(tokens.tobytes())
            written += len(tokens)
            if last:
                starts.append(written)
        batch.clear()
        ends.clear()
        held = 0

    for document in source.documents:
        for piece in read_pieces(document):
            batch.append(piece)
            ends.append(False)
            held += len(piece)
            if held >= PIECE_BYTES:
                flush()
        batch.append(b"")
        ends.append(True)
    flush()
    return starts


def _split(starts: array[int]) -> int:
    """How many tokens to train on: up to the document that starts nearest to the held-out share, if one starts near it."""
    wanted = int(starts[-1] * (1 - _HELD_OUT))
    nearest = min(starts, key=lambda start: abs(start - wanted))
    return nearest if abs(nearest - wanted) <= starts[-1] * _HELD_OUT / 2 else wanted


def _read_header(path: Path) -> Header | None:
    """The header, or nothing if the file is missing or does not add up."""
    try:
        with open(path, "rb") as file:
            page = file.read(_PAGE)
            size = os.fstat(file.fileno()).st_size
        if not page.startswith(MAGIC):
            return None
        header = Header(**json.loads(page[len(MAGIC) :].split(b"\n", 1)[0]))
        return header if header.file_bytes == size and 0 < header.train_count < header.count else None
    except (OSError, ValueError, TypeError):
        return None
