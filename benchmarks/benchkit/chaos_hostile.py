"""Manifests, tables and payload headers with anything in them: refused by a typed error, or right in every respect.

They are read in forked processes whose address space is limited, so that memory for a size that is only claimed cannot be had,
and a crash is seen. Most are given to the parsers alone; tables that pass are read to the end, and some are loaded from files.
"""

from __future__ import annotations

import json
import os
import random
import resource
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchkit.chaos_tally import Tally
from lowtide.checkpoint.manifest import MANIFEST, parse_manifest, parse_table
from lowtide.errors import CheckpointError, Error
from lowtide.spec.weights import open_weights
from tests.kit.crashes import Board, forked
from tests.kit.forgery import PAYLOAD, TABLE, Forger, examine
from tests.kit.hostile import Mutator, manifest_problem, signed, table_problem

SPARE_BYTES = 256 << 20
"""Address space beyond what the process has when it begins."""
BATCH = 20_000
LONGEST_SECONDS = 1.0
"""For one input; more is a difference, because somebody could stop a job with it."""
KINDS = ("manifest", "table", "payload header", "load")
SHARES = (50, 39, 10, 1)
EXAMINED = 0.25
"""Of the tables that pass their parser, so many are read to the end."""


class Reader:
    """Reads one hostile input after another."""

    def __init__(self, folder: Path) -> None:
        self.forger = Forger(folder)
        self._header_path = folder / "header.safetensors"
        payload = self.forger.files[PAYLOAD]
        end = 8 + int.from_bytes(payload[:8], "little")
        self._data = payload[end:]
        self._manifests = Mutator(self.forger.files[MANIFEST])
        self._tables = Mutator(self.forger.files[TABLE])
        self._short_tables = Mutator(_shortened(self.forger.files[TABLE]))
        self._headers = Mutator(payload[8:end].rstrip())

    def read(self, kind: str, chosen: random.Random) -> str:
        """ "refused", "accepted", or what is wrong."""
        try:
            problem = {
                "manifest": self._manifest,
                "table": self._table,
                "payload header": self._header,
                "load": self._load,
            }[kind](chosen)
        except CheckpointError:
            return "refused"
        return "accepted" if problem is None else problem

    def _manifest(self, chosen: random.Random) -> str | None:
        text = self._manifests.mutated(chosen)
        return manifest_problem(parse_manifest(signed(text) if chosen.random() < 0.9 else text, "hostile"))

    def _table(self, chosen: random.Random) -> str | None:
        text = self._short_tables.mutated(chosen)
        table = parse_table(text, self.forger.manifest, 0, "hostile")
        if (problem := table_problem(table, self.forger.manifest)) is not None:
            return problem
        if chosen.random() < EXAMINED:
            examine(self.forger.forged(text), self.forger.shapes)
        return None

    def _header(self, chosen: random.Random) -> str | None:
        header = self._headers.mutated(chosen)
        length = len(header) if chosen.random() < 0.95 else chosen.choice((0, 7, 2**31, 2**63, 2**64 - 1, len(header) + 1))
        self._header_path.write_bytes(length.to_bytes(8, "little") + header + self._data)
        try:
            weights = open_weights(self._header_path)
        except Error as error:
            raise CheckpointError(str(error), "") from error
        sizes = [weights.dtype(name).itemsize * _count(weights.shape(name)) for name in weights.names]
        return None if sum(sizes) <= len(self._data) else f"tensors of {sum(sizes)} bytes in {len(self._data)}"

    def _load(self, chosen: random.Random) -> str | None:
        self.forger.write(self.forger.forged(self._tables.mutated(chosen)))
        if self.forger.load() != "loaded":
            raise CheckpointError("refused", "")
        return None


def _shortened(table: bytes) -> bytes:
    """Without most of the 625 numbers of Python's generator, which say nothing and would get most of the changes."""
    found = json.loads(table)
    numbers = found["objects"]["rng"]["python"]["items"][1]["items"]
    del numbers[4:]
    return json.dumps(found, separators=(",", ":")).encode()


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def batch(folder: Path, first: int, count: int, board: Board, once: bool) -> dict[str, Any]:
    """Read ``count`` inputs in this process, with little memory; what came of them."""
    reader = Reader(folder)
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts: dict[str, int] = {}
    wrong: list[tuple[int, str]] = []
    longest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, first + count):
        board[0] = seed
        chosen = random.Random(seed)
        kind = chosen.choices(KINDS, SHARES)[0]
        began = time.perf_counter()
        try:
            outcome = reader.read(kind, chosen)
        except BaseException:
            outcome = traceback.format_exc()
        took = time.perf_counter() - began
        longest = max(longest, took)
        if took > LONGEST_SECONDS and outcome in ("refused", "accepted"):
            outcome = f"it took {took:.1f} s"
        if outcome not in ("refused", "accepted"):
            wrong.append((seed, f"{kind}: {outcome}"))
            outcome = "wrong"
        counts[f"{kind}: {outcome}"] = counts.get(f"{kind}: {outcome}", 0) + 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return {"counts": counts, "wrong": wrong, "longest": longest, "grown": grown}


def run(folder: Path, tally: Tally, seed: int, *, once: bool) -> None:
    """Read until enough was read; ``once``: one input."""
    tally.facts |= {"limit_bytes": SPARE_BYTES, "longest_seconds": 0.0, "grown_bytes": 0}
    beside = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    while tally.goes_on:
        count = 1 if once else min(BATCH, tally.planned - tally.done)
        with tempfile.TemporaryDirectory(prefix="chaos-hostile-", dir=beside) as name:
            board = Board()
            ended = forked(batch, Path(name), seed, count, board, once, seconds=600)
        if ended.status:
            tally.differs(board[0], f"the reader ended with status {ended.status}\n{ended.error}")
            count = max(1, board[0] - seed + 1)
        else:
            for kind, number in ended.value["counts"].items():
                tally.counts[kind] += number
            for number, what in ended.value["wrong"]:
                tally.differs(number, what)
            tally.facts["longest_seconds"] = round(max(tally.facts["longest_seconds"], ended.value["longest"]), 3)
            tally.facts["grown_bytes"] = max(tally.facts["grown_bytes"], ended.value["grown"])
        tally.done += count
        seed += count
        tally.note()
        if once:
            return
