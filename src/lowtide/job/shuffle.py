"""A shuffled order of any length that takes no memory: the place of each number is computed when it is asked for.

A list of the windows of a large corpus would be larger than the batch it serves, on every rank. A keyed permutation of the
numbers below a power of four (a Feistel network: it can be undone whatever its rounds compute, so no two numbers meet) is
applied again and again until the result is below ``count``; that is again a permutation.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Shuffle:
    """The numbers ``0 … count − 1`` in an order that depends on ``key`` alone, the same on every machine."""

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self._half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.count:
            raise IndexError(f"place {place} of {self.count}")
        number = self._permute(place)
        while number >= self.count:  # less than four times on average: the power of four is less than four times as large
            number = self._permute(number)
        return number

    def _permute(self, number: int) -> int:
        low = (1 << self._half) - 1
        left, right = number >> self._half, number & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        return left << self._half | right


def _mix(number: int) -> int:
    """Every bit of the result depends on every bit of ``number``."""
    number = (number ^ (number >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    number = (number ^ (number >> 29)) * 0xD6E8FEB86659FD93 & _MASK
    return number ^ (number >> 32)
