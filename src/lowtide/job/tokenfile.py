"""A file of tokens: how it is laid out, made and checked. No torch here, and it is made in a process of its own
(``python -m lowtide.job.tokenfile``), so that what tokenising leaves behind in memory is no part of a rank.

Layout: one page that starts with ``MAGIC`` and a JSON header, the tokens as 16-bit numbers, the index as 64-bit numbers
(where each document starts, and the end). The file is written under another name and renamed, so a reader sees it whole
or not at all; one that does not add up (a torn disk, another format) is made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from lowtide.errors import Error
from lowtide.job.sources import PIECE_BYTES, Source, find_source, read_pieces
from lowtide.job.tokens import END, ByteEncoder, Encoder, PairEncoder, train_pairs

MAGIC = b"lowtide corpus 1\n"
PAGE = 4096
"""Bytes of the header; tokens start on a page of their own."""
HELD_OUT = 0.05
"""Share of the tokens that is never trained on."""
_PAIR_SAMPLE_BYTES = 16 << 20
"""Byte pairs are learned from at most this much text, which bounds the seconds that takes."""


class TokenisingFailed(Error, RuntimeError):
    """The token file could not be made; the message is what the process that makes it said last."""


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
        return -(-(PAGE + 2 * self.count) // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.index_offset + 8 * (self.documents + 1)


def make_in_process(path: Path, *, data: str | None, encoding: str, vocabulary: int) -> None:
    """Make the token file in a new process and wait for it."""
    command = [sys.executable, "-m", "lowtide.job.tokenfile", str(path), data or "", encoding, str(vocabulary)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise TokenisingFailed(f"tokenising failed: {said[-1]}")


def make(path: Path, source: Source, *, encoding: str, vocabulary: int) -> None:
    """Make the token file, and beside it the tokenizer if it has one."""
    encoder = _train(source, vocabulary) if encoding == "byte pairs" else ByteEncoder()
    if isinstance(encoder, PairEncoder):
        with _written_whole(path.with_suffix(".tokenizer.json")) as file:
            file.write(encoder.to_json().encode())
    with _written_whole(path) as file:
        _write(file, source, encoder, encoding)


def read_header(path: Path) -> Header | None:
    """The header, or nothing if the file is missing or does not add up."""
    try:
        with open(path, "rb") as file:
            page = file.read(PAGE)
            size = os.fstat(file.fileno()).st_size
        if not page.startswith(MAGIC):
            return None
        header = Header(**json.loads(page[len(MAGIC) :].split(b"\n", 1)[0]))
        return header if header.file_bytes == size and 0 < header.train_count < header.count else None
    except (OSError, ValueError, TypeError):
        return None


def _train(source: Source, vocabulary: int) -> PairEncoder:
    """Learn byte pairs from the front of the corpus, which the held-out tail is no part of."""
    return train_pairs(_sample(source, min(_PAIR_SAMPLE_BYTES, int(source.size * (1 - HELD_OUT)))), min(vocabulary, 1 << 16))


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
    file.seek(PAGE)
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
    wanted = int(starts[-1] * (1 - HELD_OUT))
    nearest = min(starts, key=lambda start: abs(start - wanted))
    return nearest if abs(nearest - wanted) <= starts[-1] * HELD_OUT / 2 else wanted


if __name__ == "__main__":
    make(Path(sys.argv[1]), find_source(sys.argv[2] or None), encoding=sys.argv[3], vocabulary=int(sys.argv[4]))
