"""Who takes part in a benchmark of several ranks: which systems are alive together, what runs each, and which lowtide it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.gpt import Shape

from benchkit.peers import PeerUnavailable, deepspeed_python
from benchkit.turns import SOURCE, say

PEERS = Path(__file__).resolve().parent.parent / ".peers"
PROCESS_BYTES = 400 * 2**20  # Python and PyTorch themselves
GIB = 2**30


def parameter_count(shape: Shape) -> int:
    block = 12 * shape.width**2 + 13 * shape.width
    return shape.layers * block + (2 * shape.tokens + shape.context + 2) * shape.width


def model_facts(shape: Shape) -> dict[str, Any]:
    optimizer = "AdamW(fused=True, lr=1e-3)"
    return {**asdict(shape), "parameters": parameter_count(shape), "dtype": "fp32", "optimizer": optimizer}


def groups(
    systems: Sequence[str], *, reference: str, rank_bytes: Mapping[str, int], ranks: int, memory_bytes: int
) -> list[list[str]]:
    """Systems that are alive together: the reference and as many others as the memory allows. ``rank_bytes``: what one rank of
    each needs at its peak, besides Python and PyTorch."""

    def need(names: list[str]) -> int:
        return sum(ranks * (PROCESS_BYTES + rank_bytes[name]) for name in names)

    made: list[list[str]] = [[reference]]
    for name in systems:
        if name == reference:
            continue
        if len(made[-1]) > 1 and need([*made[-1], name]) > memory_bytes:
            made.append([reference])
        made[-1].append(name)
    return made


def find_pythons(systems: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Which interpreter runs which system, and why DeepSpeed has none, if so.

    What ships with PyTorch runs in the interpreter that runs lowtide: the same binary on both sides of the comparison.
    """
    wanted = [name for name in systems if name.startswith("deepspeed")]
    if not wanted:
        return {}, None
    try:
        python = str(deepspeed_python(PEERS, say))
    except PeerUnavailable as error:
        say(f"DeepSpeed cannot be installed: {error}")
        return {}, str(error)
    return dict.fromkeys(wanted, python), None


def source_digest() -> str:
    """Which lowtide was measured, also between two commits."""
    digest = hashlib.sha256()
    for path in sorted((SOURCE / "lowtide").rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
