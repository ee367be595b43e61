"""Text becomes tokens once, completely, in a file that all ranks map; odd files and damaged caches do no harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lowtide.errors import ArgumentError
from lowtide.job import corpus as corpus_module
from lowtide.job.batches import VALIDATION_BATCHES, TextBatches
from lowtide.job.corpus import Corpus, open_corpus, prepare_corpus
from lowtide.job.sources import PIECE_BYTES, find_source
from lowtide.job.tokenfile import TokenisingFailed, make, make_in_process
from lowtide.job.tokens import END


class Told(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


def _prepare(data: Path, cache: Path, *, vocabulary: int = 256, told: Told | None = None) -> Path:
    return prepare_corpus(str(data), vocabulary=vocabulary, cache=cache, tell=told if told is not None else Told())


def _documents(corpus: Corpus) -> set[bytes]:
    return {bytes(corpus.document(i)[:-1].tolist()) for i in range(corpus.header.documents)}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A hundred small documents of different lengths in two folders."""
    for i in range(100):
        folder = tmp_path / "library" / f"shelf {i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"book {i}.txt").write_text(f"document {i} " + "word " * (20 + i))
    return tmp_path / "library"


def test_every_document_is_in_the_index_and_ends_with_the_end_token(library: Path, tmp_path: Path) -> None:
    corpus = open_corpus(_prepare(library, tmp_path / "cache"), least_tokens=17)
    assert _documents(corpus) == {path.read_bytes() for path in library.rglob("*.txt")}
    assert all(int(corpus.document(i)[-1]) == END for i in range(100))
    assert int(corpus.index[0]) == 0
    assert int(corpus.index[-1]) == len(corpus.tokens) == corpus.header.count


def test_the_split_is_disjoint_complete_and_between_documents(library: Path, tmp_path: Path) -> None:
    corpus = open_corpus(_prepare(library, tmp_path / "cache"), least_tokens=17)
    assert torch.equal(
        torch.cat([corpus.train.to(torch.int64), corpus.held_out.to(torch.int64)]), corpus.tokens.to(torch.int64)
    )
    assert 0.02 < len(corpus.held_out) / corpus.header.count < 0.08
    assert corpus.header.train_count in corpus.index.tolist()


def test_one_long_file_is_split_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"0123456789" * 1000)
    corpus = open_corpus(_prepare(tmp_path / "book.txt", tmp_path / "cache"), least_tokens=17)
    assert corpus.header.train_count == 9500  # of 10,001: 95 %, rounded down


def test_the_cache_is_used_again_until_a_file_changes(library: Path, tmp_path: Path) -> None:
    told, cache = Told(), tmp_path / "cache"
    path = _prepare(library, cache, told=told)
    made = path.stat().st_mtime_ns
    assert _prepare(library, cache, told=told) == path
    assert path.stat().st_mtime_ns == made
    assert len(told) == 1
    (library / "shelf 0" / "book 0.txt").write_text("another text")
    assert _prepare(library, cache, told=told) != path
    assert len(told) == 2


def test_the_cache_is_private_and_holds_no_leftovers(library: Path, tmp_path: Path) -> None:
    path = _prepare(library, tmp_path / "cache")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["cut short", "other header", "empty"])
def test_a_damaged_cache_file_is_made_again(library: Path, tmp_path: Path, damage: str) -> None:
    path = _prepare(library, tmp_path / "cache")
    whole = path.read_bytes()
    path.write_bytes({"cut short": whole[:-8], "other header": b"{}" + whole[2:], "empty": b""}[damage])
    with pytest.raises(ArgumentError, match="not a complete token file"):
        open_corpus(path, least_tokens=17)
    assert _prepare(library, tmp_path / "cache") == path
    assert path.read_bytes() == whole


def test_a_failure_while_writing_leaves_nothing(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # a full disk cannot be had here without root
        with pytest.raises(OSError, match="No space left"):
            make(tmp_path / "x.tokens", find_source(str(library)), encoding="bytes", vocabulary=256)
    assert [path.name for path in tmp_path.iterdir()] == ["library"]


def test_a_cache_that_cannot_be_written_says_why(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="XDG_CACHE_HOME"):
        _prepare(library, tmp_path / "file" / "cache")
    with pytest.raises(TokenisingFailed, match="No such file or directory"):
        make_in_process(tmp_path / "no" / "x.tokens", data=str(library), encoding="bytes", vocabulary=256)


def test_hostile_names_and_files_that_are_not_text(tmp_path: Path) -> None:
    root = tmp_path / "odd"
    root.mkdir()
    for name in (b"-rf", b"new\nline", b"\xff\xfe not utf-8", b"quote'\"; rm", "größe 東京".encode(), b" "):
        (root / os.fsdecode(name)).write_bytes(b"text of " + name + b" " + b"x" * 100)
    wanted = {path.read_bytes() for path in root.iterdir()}
    (root / "binary").write_bytes(b"ELF\0\1\2" * 100)
    (root / "empty").write_bytes(b"")
    (root / ".hidden").write_bytes(b"secret " * 100)
    (root / "loop").symlink_to(root)
    (root / "outside").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe")
    assert _documents(open_corpus(_prepare(root, tmp_path / "cache"), least_tokens=2)) == wanted


def test_a_document_larger_than_a_piece_is_one_document(tmp_path: Path) -> None:
    text = b"0123456789abcde\n" * ((PIECE_BYTES + PIECE_BYTES // 2) // 16)
    (tmp_path / "large.txt").write_bytes(text)
    corpus = open_corpus(_prepare(tmp_path / "large.txt", tmp_path / "cache"), least_tokens=17)
    assert corpus.header.documents == 1
    assert bytes(corpus.tokens[:-1].tolist()) == text


def test_byte_pairs_say_the_same_in_fewer_tokens(library: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = _prepare(library, tmp_path / "cache", vocabulary=400)
    corpus = open_corpus(path, least_tokens=17)
    assert corpus.header.encoding == "byte pairs"
    assert int(corpus.tokens.to(torch.int64).max()) < corpus.header.vocabulary <= 400
    assert corpus.header.count < sum(p.stat().st_size for p in library.rglob("*.txt")) / 2
    tokenizer = tokenizers.Tokenizer.from_file(str(path.with_suffix(".tokenizer.json")))
    texts = {tokenizer.decode(corpus.document(i).tolist()) for i in range(100)}
    assert texts == {p.read_text() for p in library.rglob("*.txt")}


def test_without_tokenizers_a_token_is_a_byte_and_a_message_says_so(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "pairs_available", lambda: False)  # the package is installed where tests run
    told = Told()
    corpus = open_corpus(_prepare(library, tmp_path / "cache", vocabulary=8192, told=told), least_tokens=17)
    assert corpus.header.encoding == "bytes"
    assert "tokenizers" in told[0]


def test_texts_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ArgumentError, match="holds no text"):
        _prepare(tmp_path / "nothing", tmp_path / "cache")
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ArgumentError, match="10 tokens"):
        open_corpus(_prepare(tmp_path / "short.txt", tmp_path / "cache"), least_tokens=257)
    with pytest.raises(ArgumentError, match="at least 256"):
        _prepare(tmp_path / "short.txt", tmp_path / "cache", vocabulary=100)


def test_the_default_is_the_standard_library() -> None:
    names = {document.name for document in find_source(None).documents}
    assert b"argparse.py" in names
    assert not any(b"site-packages" in name for name in names)


def test_batches_are_windows_of_the_right_part(library: Path, tmp_path: Path) -> None:
    corpus = open_corpus(_prepare(library, tmp_path / "cache"), least_tokens=17)
    batches = [TextBatches(corpus=corpus, batch=3, context=16, rank=rank, ranks=2, seed=0) for rank in (0, 1)]
    train, held_out = bytes(corpus.train.tolist()), bytes(corpus.held_out.tolist())
    drawn = [one.draw() for one in batches]
    for tokens, targets in drawn:
        assert tokens.shape == targets.shape == (3, 16)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert all(bytes(row.tolist()) in train for row in tokens)
    assert not torch.equal(drawn[0][0], drawn[1][0])
    for one in batches:
        windows = one.held_out()
        assert len(windows) == VALIDATION_BATCHES
        assert all(bytes(row.tolist()) in held_out for tokens, _ in windows for row in tokens)
