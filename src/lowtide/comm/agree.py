"""Ranks compare what they believe, and all of them raise with the first difference if they do not agree."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import zip_longest
from typing import cast

import torch
import xxhash

from lowtide.comm.channel import Channel, Label, Wire
from lowtide.errors import Mismatch

_DIGEST = struct.Struct("<QQ")  # xxh3 of the text, bytes of the text
_CAP = 64 << 20  # bytes of text per rank that are compared word by word

Facts = Sequence[tuple[str, str]]


def agree(channel: Channel, facts: Facts) -> None:
    """Collective: raise ``Mismatch`` on every rank unless all have the same (what, value) pairs in the same order."""
    text = json.dumps([list(fact) for fact in facts], separators=(",", ":")).encode()
    note = _DIGEST.pack(xxhash.xxh3_64_intdigest(text), len(text))

    def compare(wire: Wire, notes: list[bytes]) -> str | None:
        if len(set(notes)) == 1:
            return None
        sizes = [size for _, size in map(_DIGEST.unpack, notes)]
        if max(sizes) > _CAP:
            return f"the texts of the ranks have {sizes} bytes and different digests; above {_CAP} bytes no details are given"
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes), b" ")), dtype=torch.uint8)
        rows = wire.world.all_gather_small(padded)
        return _first_difference([_parse(row.numpy().tobytes()) for row in rows])

    difference = channel.run(Label("agree", -1, "what all ranks must have in common"), compare, note)
    if difference is not None:
        raise Mismatch(difference)


def _parse(text: bytes) -> list[tuple[str, str]]:
    return [(what, value) for what, value in cast("list[list[str]]", json.loads(text))]


def _first_difference(ranks: list[list[tuple[str, str]]]) -> str:
    """The same words on every rank: the first place where any rank differs from rank 0."""
    for row in zip_longest(*ranks):
        for rank, fact in enumerate(row):
            if fact != row[0]:
                return _tell(row[0], rank, fact)
    return "digests differ, but the texts are equal"


def _tell(first: tuple[str, str] | None, rank: int, other: tuple[str, str] | None) -> str:
    if first is not None and other is not None and first[0] == other[0]:
        return f"{first[0]}: rank 0 has {first[1]!r}, rank {rank} has {other[1]!r}"
    return f"rank 0 has {_name(first)}, rank {rank} has {_name(other)}"


def _name(fact: tuple[str, str] | None) -> str:
    return "no further entry" if fact is None else f"{fact[0]}: {fact[1]!r}"
