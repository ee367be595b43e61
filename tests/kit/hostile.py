"""Checkpoints that somebody made to do harm: manifests, tables and payload headers with anything in them.

A mutation works on the tokens of a valid text: it replaces, drops, doubles or moves some of them, so that most results are
still JSON and reach the checks behind the parser. Whoever attacks can compute a checksum, so manifests are signed again.
Everything follows from the random numbers that a caller gives, so that a seed is enough to see a result again.
"""

from __future__ import annotations

import random
import re

import xxhash

from lowtide.checkpoint.manifest import BLOCK_LIMIT, DTYPES, Manifest, Table, table_name

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[\[\]{},:]')
_DIGEST = b'"digest":"'

_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 63, 64, 65, 255, 4095, 4096, 2**20, 2**30, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**61, 2**62 - 1),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, 10**400),
)
EVIL: tuple[bytes, ...] = (
    *(str(n).encode() for n in _NUMBERS),
    *(b"1.0", b"0.5", b"-0", b"-0.0", b"1e3", b"1e308", b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity", b"01", b"0x10"),
    *(b"null", b"true", b"false", b"[]", b"{}", b"[[]]", b"[{}]", b'{"":[]}', b'""'),
    *(b'"../../../etc/passwd"', b'"/etc/passwd"', b'"."', b'".."', b'"rank-00000.json/.."', b'"rank-00000.json"'),
    *(b'"manifest.json"', b'"rank-00001.json"', b'"rank-00000.safetensors"', b'"a/b"', b'"a\\u0000b"', b'"-rf"', b'"~"'),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xc3\xa9"', b'"\xff\xfe"', b'"\\u202e"', b'"\\n"', b'"%s%n"', b'"$(id)"'),
    *(b'"object"', b'"parameters"', b'"masters"', b'"float32"', b'"float64"', b'"bool"', b'"complex128"', b'"float8_e4m3fn"'),
    *(b'"lowtide checkpoint"', b'"__class__"', b'"$"', b'"params"', b'"0000000000000000"', b'"' + b"f" * 32 + b'"'),
    *(b'{"$":"tuple","items":[]}', b'{"$":"int","text":"' + b"9" * 5000 + b'"}', b'{"$":"int","text":"x"}', b'{"$":1}'),
    *(
        b'{"$":"float","text":"nan"}',
        b'{"$":"float","text":[]}',
        b'{"$":"dict","pairs":[[[1],2]]}',
        b'{"$":"dict","pairs":[1]}',
    ),
    *(b'{"$":"scalar","dtype":"int64","value":1e30}', b'{"$":"scalar","dtype":"int64","value":99999999999999999999}'),
    *(b'{"$":"scalar","dtype":"float32","value":"x"}', b'{"$":"scalar","dtype":"bool","value":null}'),
    *(b'{"$":"scalar","dtype":"uint8","value":-1}', b'{"$":"scalar","dtype":"float16","value":{}}'),
    b'{"$":"tensor","name":"rng.torch","dtype":"uint8","shape":[4611686018427387903]}',
    b'{"$":"tensor","name":"rng.torch","dtype":"float64","shape":[2147483647,2147483647]}',
    b'{"$":"tensor","name":"rng.torch","dtype":"float64","shape":[0,4611686018427387903]}',
    b'{"$":"tensor","name":"nothing","dtype":"float32","shape":[]}',
    b'{"$":"tensor","name":"nothing","dtype":"float32","shape":[0]}',
    b"[" * 100 + b"]" * 100,
    b"[" * 5000 + b"]" * 5000,
    b'{"a":' * 150 + b"1" + b"}" * 150,
    b'{"$":"tuple","items":[' * 90 + b"1" + b"]}" * 90,
    b'"' + b"x" * 70_000 + b'"',
    b"[" + b"0," * 20_000 + b"0]",
)


class Mutator:
    """Texts that are almost ``text``. ``more``: tokens that mean something in it, beside those that mean nothing anywhere."""

    def __init__(self, text: bytes, more: tuple[bytes, ...] = ()) -> None:
        self.text = text
        self._tokens = _TOKEN.findall(text)
        self._values = [i for i, token in enumerate(self._tokens) if token not in b"[]{},:"]
        self._evil = EVIL + more

    def mutated(self, chosen: random.Random) -> bytes:
        kind = chosen.random()
        if kind < 0.12:
            return self._bytes(chosen)
        tokens = self._tokens.copy()
        for _ in range(1 if kind < 0.7 else chosen.randrange(2, 6)):
            self._change(tokens, chosen)
        return b"".join(tokens)

    def _change(self, tokens: list[bytes], chosen: random.Random) -> None:
        kind, count = chosen.random(), len(tokens)
        at = chosen.choice(self._values) if chosen.random() < 0.9 else chosen.randrange(count)
        at = min(at, count - 1)
        if kind < 0.55:
            tokens[at] = chosen.choice(self._evil)
        elif kind < 0.7:  # a value from elsewhere in the same text
            tokens[at] = tokens[chosen.randrange(count)]
        elif kind < 0.8 and tokens[at].isdigit():
            tokens[at] = str(max(0, int(tokens[at][:30]) + chosen.choice((-1, 1, 8, -8, 4096)))).encode()
        elif kind < 0.87:  # a stretch is gone
            del tokens[at : at + chosen.randrange(1, 12)]
        elif kind < 0.94:  # a stretch is there twice: keys, entries, brackets
            stretch = tokens[at : at + chosen.randrange(1, 40)]
            tokens[at:at] = [*stretch, b","] if chosen.random() < 0.5 else stretch
        else:
            tokens.insert(at, chosen.choice(self._evil) + b",")
        if not tokens:
            tokens.append(b"")

    def _bytes(self, chosen: random.Random) -> bytes:
        text, kind = bytearray(self.text), chosen.randrange(5)
        at = chosen.randrange(len(text))
        if kind == 0:
            text[at] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            del text[at:]
        elif kind == 2:
            del text[at : at + chosen.randrange(1, 200)]
        elif kind == 3:
            text[at:at] = chosen.randbytes(chosen.randrange(1, 40))
        else:
            other = chosen.randrange(len(text))
            text[at:at] = text[other : other + chosen.randrange(1, 300)]
        return bytes(text)


def signed(text: bytes) -> bytes:
    """A manifest with the right checksum at its end, whatever else is in it."""
    head = text[: text.rfind(_DIGEST)] if _DIGEST in text else text.rstrip(b"}\n \t")
    return head + _DIGEST + xxhash.xxh3_128_hexdigest(head).encode() + b'"}\n'


# -- what a parser may let through, said a second time in other words -------------------------------------------------


def manifest_problem(manifest: Manifest) -> str | None:
    """What is wrong with a manifest that was accepted, or None."""
    names = [file.name for file in manifest.files]
    if any(not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or len(name) > 100 for name in names):
        return f"a file name {names}"
    if len(set(names)) < len(names) or any(table_name(rank) not in names for rank in range(manifest.world_size)):
        return "files are listed twice, or tables are missing"
    if any(not 0 <= file.nbytes < 2**62 for file in manifest.files) or not 0 <= manifest.step < 2**62:
        return "a size or a step"
    return None


def table_problem(table: Table, manifest: Manifest) -> str | None:
    """What is wrong with a table that was accepted, or None."""
    sizes = {file.name: file.nbytes for file in manifest.files}
    for block in table.blocks:
        size = sizes.get(table.files[block.file], -1)
        if min(block.offset, block.nbytes) < 0 or block.offset + block.nbytes > size or block.nbytes > BLOCK_LIMIT:
            return f"{block} lies outside of its file of {size} bytes"
        for part in block.parts:
            width = DTYPES[table.kinds[part.kind].dtype].itemsize
            if not 0 <= part.lo <= part.hi or part.at < 0 or part.at + (part.hi - part.lo) * width > block.nbytes:
                return f"{part} lies outside of its block"
            if part.name >= len(table.names):
                return f"{part} has no name"
    return None
