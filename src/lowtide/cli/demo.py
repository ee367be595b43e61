"""``lowtide demo``."""

from __future__ import annotations


def demo() -> int:
    """Show what lowtide does on this machine, in about two minutes."""
    return 0
