"""Which files a corpus is made of, in which order, and how their bytes are read in pieces of bounded size."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import ArgumentError

PIECE_BYTES = 4 << 20
"""What is read and tokenised at once; a document is cut after the line that passes this size."""

_SNIFF_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_STANDARD_LIBRARY_SKIPS = frozenset({"test", "tests", "idle_test", "lib2to3"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file of a corpus. ``name`` is its path below the corpus' root, as bytes: a file name need not be text."""

    name: bytes
    path: str
    size: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Source:
    """The documents of a corpus, shuffled the same way on every machine, so that its tail is a fair sample of it."""

    root: str
    documents: tuple[Document, ...]

    @property
    def size(self) -> int:
        return sum(document.size for document in self.documents)

    def fingerprint(self, *facts: str) -> str:
        """Changes when a file appears, goes, grows or is written, or when one of the ``facts`` changes."""
        digest = hashlib.sha256("\0".join((self.root, *facts)).encode("utf-8", "surrogateescape"))
        for document in self.documents:
            digest.update(b"\0%d %d %d " % (len(document.name), document.size, document.changed_ns))
            digest.update(document.name)
        return digest.hexdigest()[:32]


def find_source(data: str | None) -> Source:
    """The text file or folder ``data``; without one, the source text of Python's own standard library."""
    if data is None:
        root = sysconfig.get_path("stdlib")
        documents = _walk(root, suffix=b".py", skipped=_SKIPPED_FOLDERS | _STANDARD_LIBRARY_SKIPS)
    else:
        root = os.path.realpath(data)
        documents = _walk(root, suffix=b"", skipped=_SKIPPED_FOLDERS) if os.path.isdir(root) else [_document(Path(root), root)]
    found = [document for document in documents if document is not None and document.size > 0]
    if not found:
        raise ArgumentError(f"{data or root!r} holds no text; give --data a text file or a folder of text files.")
    found.sort(key=lambda document: hashlib.sha256(document.name).digest())
    return Source(root, tuple(found))


def read_pieces(document: Document) -> Iterator[bytes]:
    """The bytes of a document, in pieces that end with a line where lines are not absurdly long."""
    with open(document.path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece + file.readline(PIECE_BYTES)


def _walk(root: str, *, suffix: bytes, skipped: frozenset[str]) -> list[Document | None]:
    documents: list[Document | None] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in files:
            if not name.startswith(".") and os.fsencode(name).endswith(suffix):
                documents.append(_document(Path(folder, name), root))
    return documents


def _document(path: Path, root: str) -> Document | None:
    """The file as a document, or nothing if it is a link, not a plain file, not readable, or not text."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):
        return None
    with open(path, "rb") as file:
        if b"\0" in file.read(_SNIFF_BYTES):
            return None
    name = os.fsencode(os.path.relpath(path, root) if str(path) != root else path.name)
    return Document(name, str(path), status.st_size, status.st_mtime_ns)
