"""The sizes of GPT that have a name. Data only: no torch, so that the command line can check a name at once."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = 8192
"""Size of the vocabulary that presets are built for."""

CONTEXT = 256
"""Tokens that a preset looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a GPT."""

    layers: int
    width: int
    heads: int
    tokens: int = TOKENS
    context: int = CONTEXT

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        width = self.width
        block = 12 * width * width + 13 * width
        return self.layers * block + (2 * self.tokens + self.context) * width + 2 * width


PRESETS = {
    "gpt-17m": Shape(layers=6, width=384, heads=6),
    "gpt-98m": Shape(layers=12, width=768, heads=12),
    "gpt-705m": Shape(layers=24, width=1536, heads=12),
}
