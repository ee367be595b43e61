"""A small valid checkpoint, and forgeries of it that hold together: sizes and checksums fit whatever was put into it.

``examine`` reads a forgery without a disk and without a model, as far as a reader can go; ``Forger.load`` gives it to
``lowtide.load`` as files. Both let only a CheckpointError out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

import lowtide
from lowtide.api import engine_of
from lowtide.checkpoint import tree
from lowtide.checkpoint.folder import OpenFolder
from lowtide.checkpoint.manifest import MANIFEST, File, Manifest, parse_manifest, parse_table, table_name, to_text
from lowtide.checkpoint.source import Source, verify
from lowtide.errors import CheckpointCorrupted, CheckpointError

TABLE = table_name(0)
PAYLOAD = "rank-00000.safetensors"


class Small(nn.Module):
    """A few numbers of every sort that a checkpoint knows: trained, frozen, counted, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.down = nn.Linear(5, 2)
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Kept:
    """An object of ``state=`` that takes whatever it gets: what a caller's own does with it is the caller's."""

    def __init__(self) -> None:
        self.value: Any = {"epoch": 3, "order": [3, 1, 2], "rate": 0.5, "seen": torch.arange(3)}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def _in_two_groups(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}])


class Forger:
    """See the module's docstring. ``folder`` is better in memory (/dev/shm): every forgery is written."""

    def __init__(self, folder: Path, make: Callable[..., Optimizer] = _in_two_groups, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        lowtide.shard(self.model, self.optimizer, **{"stage": 0, **options})
        self.kept = Kept()
        for _ in range(2):
            self.train()
        self.path = folder / "step-2"
        extra = {"epoch": 3, "nested": {"a": (1, 2.5, None), 7: [True, float("inf")]}, "tensor": torch.arange(5)}
        lowtide.save(self.path, self.model, self.optimizer, state={"kept": self.kept}, extra=extra).wait()
        self.files = {path.name: path.read_bytes() for path in self.path.iterdir()}
        self.manifest = parse_manifest(self.files[MANIFEST], str(self.path))
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}

    def train(self) -> None:
        """One step."""
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def manifest_for(self, files: dict[str, bytes]) -> bytes:
        """A manifest that lists ``files`` as they are."""
        rows = tuple(File(name=n, nbytes=len(t), xxh3=xxhash.xxh3_64_hexdigest(t)) for n, t in sorted(files.items()))
        return to_text(self.manifest.model_copy(update={"files": rows}))

    def forged(self, table: bytes) -> dict[str, bytes]:
        """All files with another table."""
        files = {name: text for name, text in self.files.items() if name != MANIFEST}
        files[TABLE] = table
        return {**files, MANIFEST: self.manifest_for(files)}

    def resealed(self, table: Any, payload: bytes, *blocks: list[Any]) -> dict[str, bytes]:
        """All files with another payload, of which ``blocks`` of the table get the checksums."""
        for block in blocks:
            block[3] = xxhash.xxh3_64_intdigest(payload[block[1] : block[1] + block[2]])
        files = {n: t for n, t in self.files.items() if n != MANIFEST} | {TABLE: json.dumps(table).encode(), PAYLOAD: payload}
        return {**files, MANIFEST: self.manifest_for(files)}

    @property
    def poisoned(self) -> bool:
        """Whether a load that failed has left the model so that it has to be loaded anew."""
        return engine_of(self.model).poisoned_by is not None

    def write(self, files: dict[str, bytes]) -> None:
        for name in set(os.listdir(self.path)) - files.keys():
            os.unlink(self.path / name)
        for name, text in files.items():
            (self.path / name).write_bytes(text)

    def load(self) -> str:
        """What lowtide.load says to the files as they are: "loaded", or the error."""
        try:
            lowtide.load(self.path, self.model, self.optimizer, state={"kept": self.kept})
        except CheckpointError as error:
            return f"refused: {error}"
        return "loaded"

    def verify(self) -> str:
        try:
            verify(self.path)
        except CheckpointError as error:
            return f"refused: {error}"
        return "verified"


class MemoryFolder(OpenFolder):
    """The files of a checkpoint in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.path = Path("/in/memory")
        self._texts = files

    def file(self, name: str) -> tuple[int, int]:
        if name not in self._texts:
            raise CheckpointCorrupted(f"{name} cannot be opened", str(self.path))
        return 0, len(self._texts[name])

    def fill(self, name: str, fd: int, into: memoryview, offset: int) -> None:
        text = self._texts[name][offset : offset + len(into)]
        if len(text) < len(into):
            raise CheckpointCorrupted(f"{name} ends early", str(self.path))
        into[:] = text

    def stored_bytes(self, names: Iterable[str]) -> int:
        return sum(self.file(name)[1] for name in names)

    def close(self) -> None:
        pass


def examine(files: dict[str, bytes], shapes: dict[str, tuple[int, ...]]) -> None:
    """Read all that a loader would; ``shapes`` are those of the model it would load into."""
    manifest = parse_manifest(files[MANIFEST], "forged")
    source = Source(MemoryFolder(files), manifest)
    for name, facts in source.parameters.items():
        if shapes.get(name) == facts.shape:
            for kind in source.kinds(name):
                source.read_into(kind, name, 0, facts.numel, torch.empty(facts.numel))
    for table in source.tables:

        def get(name: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int = table.rank) -> Tensor:
            return source.object(rank, name, shape, dtype)

        for value in _trees(table.objects, with_model=table.rank == 0):
            tree.decode(value, get, "forged")


def _trees(objects: dict[str, Any], *, with_model: bool) -> list[Any]:
    """What the loader decodes: the model's only of rank 0."""
    rows = [objects.get("rng"), *(value for key in ("small", "state") for value in _values(objects.get(key)))]
    model = objects.get("model")
    if not with_model or not isinstance(model, dict):
        return rows
    groups = [group["options"] for group in model.get("groups") or []]
    return [*rows, *_values(model.get("buffers")), *groups, model.get("extra")]


def _values(rows: Any) -> list[Any]:
    return list(rows.values()) if isinstance(rows, dict) else [rows]


def parse_only(table: bytes, manifest: Manifest) -> Any:
    return parse_table(table, manifest, 0, "forged")
