"""A text as tokens that all ranks of a host share: found in the cache or made there once, then mapped into memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lowtide.errors import ArgumentError
from lowtide.job.sources import find_source
from lowtide.job.tokenfile import HELD_OUT, MAGIC, PAGE, Header, make_in_process, read_header
from lowtide.job.tokens import BYTE_TOKENS, pairs_available
from lowtide.spec.probe_cache import user_cache_folder


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
    if read_header(path) is not None:
        return path
    what = data or "Python's standard library"
    tell(f"tokenising {what} once: {len(source.documents):,} files, {source.size / 1e6:.1f} MB ({encoding})")
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot make the cache folder {str(cache)!r} ({error.strerror}); set XDG_CACHE_HOME.") from error
    make_in_process(path, data=data, encoding=encoding, vocabulary=vocabulary)
    return path


def open_corpus(path: Path, *, least_tokens: int) -> Corpus:
    """Map a token file. ``least_tokens`` is what one training or validation window needs."""
    header = read_header(path)
    if header is None:
        raise ArgumentError(f"{str(path)!r} is not a complete token file; remove it, the next run makes it again.")
    if header.count - header.train_count < least_tokens:
        raise ArgumentError(
            f"the text has {header.count:,} tokens, of which {HELD_OUT:.0%} are held out; the held-out part needs "
            f"{least_tokens} or more: give --data about {int(least_tokens / HELD_OUT):,} tokens of text."
        )
    with open(path, "rb") as file:
        # A private map: torch wants a writable buffer, and nothing here ever writes, so pages stay shared with the cache.
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tokens = torch.frombuffer(memory, dtype=torch.uint16, offset=PAGE, count=header.count)
    index = torch.frombuffer(memory, dtype=torch.int64, offset=header.index_offset, count=header.documents + 1)
    return Corpus(header, tokens, index)


def default_cache_folder() -> Path:
    """Where token files are kept."""
    return user_cache_folder() / "corpus"


def _choose_encoding(vocabulary: int, tell: Callable[[str], None]) -> str:
    if vocabulary < BYTE_TOKENS:
        raise ArgumentError(f"the model has {vocabulary} tokens; text needs at least {BYTE_TOKENS} (one per byte).")
    if vocabulary == BYTE_TOKENS:
        return "bytes"
    if not pairs_available():
        tell("the package 'tokenizers' is not installed, so a token is one byte (pip install tokenizers for byte pairs)")
        return "bytes"
    return "byte pairs"
