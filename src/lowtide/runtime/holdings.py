"""What this rank holds, by tier and kind of bytes: what was reported to the ledger, and what arenas, shelves and stores know.

Host kinds: ``parameters``, ``gradients``, ``optimizer`` (homes and what autograd or the optimizer made), ``slots`` (units that
are whole for a while), ``activations`` (kept for backward, or on their way to or from a store), ``staging`` (update buffers and
device copies), ``buffers in flight`` (of reductions), ``buffers`` (the model's own), ``shared with ranks`` (parts of other
ranks of the host, and windows between them), ``unused`` (blocks that arenas keep for the next who asks).
Memory counts once it was written: the kernel gives none before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.runtime.grads import is_sparse
from lowtide.runtime.sharded_grad import ShardedGrad
from lowtide.tiers.arena import Arena
from lowtide.tiers.host import HostStore
from lowtide.tiers.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from lowtide.runtime.assembly import Assembly


@dataclass(frozen=True, slots=True)
class Holdings:
    """Bytes by kind, now. ``in_process``: how many of all of them the kernel counts for this process."""

    host: dict[str, int]
    device: dict[str, int]
    disk: dict[str, int]
    in_process: int


def holdings(held: Assembly, *, mapped: int = 0, buffers: int | None = None) -> Holdings:
    """Count. ``mapped``: shared memory that this process has touched; ``buffers``: bytes of the model's buffers, if they were
    counted lately. Only the thread that runs the step may ask."""
    host = Counter(held.ledger.now())
    disk: Counter[str] = Counter()
    for kind, shelf in _shelves(held):
        if shelf.in_memory:
            host[kind] += shelf.touched_bytes
        else:
            disk[kind] += shelf.nbytes
    for unit in held.units:  # their memory is in the ledger
        home = held.residency.home(unit)
        if not home.in_memory:
            disk["parameters"] += home.nbytes
    host["gradients"] += sum(_nbytes(g) for g in _unreduced(held))
    host["buffers"] += sum(b.nbytes for b in held.model.buffers()) if buffers is None else buffers
    _add_activations(held, host, disk)
    device: Counter[str] = Counter()
    _add_arenas(held, host, device)
    common, ranks = held.group.shared_memory()
    if common:  # what lies once per host: the ledger has this rank's part of it
        host["shared with ranks"] = max(0, min(mapped, common) - common // ranks)
    if held.store is not None:
        disk["spare"] = max(0, held.store.used_bytes - sum(disk.values()))
    on_host = sum(host.values())
    if held.arena.device.type == "cpu":  # an emulated device is memory of this process, too
        on_host += sum(device.values())
    return Holdings(_some(host), _some(device), _some(disk), on_host)


def arenas_of(held: Assembly) -> dict[str, Arena]:
    """Every arena of this rank by its name."""
    named = {"homes": held.homes, "slots": held.arena, "update buffers": held.buffers_arena}
    if held.memory.device.separate:
        named["staging"] = held.memory.staging
    if held.activations.saved.spill is not None:
        named["activations"] = held.activations.saved.spill.arena
    return named


def _shelves(held: Assembly) -> Iterator[tuple[str, Shelf]]:
    """All shelves but the homes of parameters, with the kind that they count as."""
    for shelved in held.grads.shelves.values():
        yield "gradients", shelved.shelf
    for stream in held.update.streams.values():
        for kind in stream.kinds():
            yield "optimizer", stream.shelf(kind)[0]


def _unreduced(held: Assembly) -> Iterator[Tensor]:
    """Gradients that are whole on this rank, or wait for their update."""
    if not held.handles_gradients:  # autograd's own are all there are
        yield from (p.grad for p in held.unit_of if p.grad is not None)
        return
    for record in held.grads.by_param.values():
        if record.local is not None:
            yield record.local
    for pieces in list(held.grads.reduced.values()):
        yield from (p for p in pieces if p is not None)


def _nbytes(grad: Tensor) -> int:
    if is_sparse(grad):
        return grad._indices().nbytes + grad._values().nbytes  # pyright: ignore
    return 0 if isinstance(grad, ShardedGrad) else grad.nbytes


def _add_activations(held: Assembly, host: Counter[str], disk: Counter[str]) -> None:
    saved = held.activations.saved
    if saved.kept is not None:
        host["activations"] += saved.kept.read()
    if saved.spill is None:
        return
    host["activations"] += saved.spill.held_bytes + saved.spill.arena.taken_bytes
    if isinstance(saved.spill.store, HostStore):
        host["activations"] += saved.spill.store.used_bytes
    else:
        disk["activations"] += saved.spill.spilled_bytes_live


def _add_arenas(held: Assembly, host: Counter[str], device: Counter[str]) -> None:
    host["staging"] += held.buffers_arena.taken_bytes
    if held.memory.device.separate:
        host["staging"] += held.memory.staging.taken_bytes
        host["slots"] = 0  # the ledger counts both kinds of places for whole units together
        device["slots"] = held.arena.taken_bytes
        device["unused"] = held.arena.reserved_bytes - held.arena.taken_bytes
    for name, arena in arenas_of(held).items():
        if not (name == "slots" and held.memory.device.separate):
            host["unused"] += arena.reserved_bytes - arena.taken_bytes


def _some(counted: Counter[str]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in counted.items() if nbytes}
