"""Text to numbers: bytes as they are, or byte pairs trained on the text itself."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from lowtide.errors import ArgumentError

END = 0
"""Stands after every document: the byte NUL, or the byte-pair token ``<|end|>``."""

BYTE_TOKENS = 256
_END_WORD = "<|end|>"


class Encoder(Protocol):
    """Turns documents into token numbers below ``size``."""

    @property
    def size(self) -> int: ...

    def encode(self, documents: Sequence[bytes]) -> Iterable[array[int]]: ...


@dataclass(frozen=True, slots=True)
class ByteEncoder:
    """A token is a byte."""

    size: int = BYTE_TOKENS

    def encode(self, documents: Sequence[bytes]) -> Iterable[array[int]]:
        # Through a view: from bytes themselves, array would take two at a time.
        return (array("H", memoryview(document)) for document in documents)


@dataclass(frozen=True, slots=True)
class PairEncoder:
    """A token is a frequent sequence of bytes."""

    tokenizer: Any
    """A ``tokenizers.Tokenizer``."""

    @property
    def size(self) -> int:
        return cast(int, self.tokenizer.get_vocab_size())

    def encode(self, documents: Sequence[bytes]) -> Iterable[array[int]]:
        texts = [document.decode("utf-8", "replace") for document in documents]
        return (array("H", encoding.ids) for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False))

    def to_json(self) -> str:
        """What ``tokenizers.Tokenizer.from_str`` reads."""
        return cast(str, self.tokenizer.to_str())


def pairs_available() -> bool:
    """Whether the optional package ``tokenizers`` is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def train_pairs(documents: Iterable[bytes], size: int) -> PairEncoder:
    """Learn at most ``size`` byte-pair tokens (fewer if the text is short)."""
    if not BYTE_TOKENS < size <= 1 << 16:
        raise ArgumentError(f"the vocabulary has {size} tokens; byte pairs need more than {BYTE_TOKENS} and at most {1 << 16}.")
    tokenizers: Any = importlib.import_module("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END_WORD],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.decode("utf-8", "replace") for document in documents), trainer)
    return PairEncoder(tokenizer)
