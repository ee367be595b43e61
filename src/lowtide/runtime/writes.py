"""What a caller has written to parameters while they were whole, found by looking at the values.

A parameter that is here is an ordinary one, and there are ways to change it of which nothing tells: ``p.data`` has a version
counter of its own, ``p.data = x`` leaves the memory behind, NumPy and DLPack have no counter at all. So the values of a unit
are hashed when its parameters become usable, and again before their memory is given up (20 GB/s: measured; once per time that
a unit is brought).

[Note: memory that a caller still refers to] A view that was taken while a parameter was whole lives on, and so does a tensor
that was given to one by ``p.data = x``. In plain PyTorch a later write to either is a write to the parameter. Here the
parameter is elsewhere by then, so such memory is hashed as well, as long as anybody but us refers to it, and a change raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.errors import Refused
from lowtide.runtime.unit import Unit
from lowtide.tiers.transfer import digest_of
from lowtide.torch_internals import storage_of, storage_use_count


def prints_of(unit: Unit, whole: Tensor) -> list[int]:
    """A hash of every parameter in ``whole``, the unit's bytes. On an accelerator, whose memory is not read for that, only
    what autograd counts."""
    if whole.device.type != "cpu":
        return [p._version for p in unit.params]  # pyright: ignore[reportPrivateUsage]
    memory = whole.numpy()
    ranges = zip(unit.layout.offsets, unit.layout.params, strict=True)
    return [digest_of(memory[offset : offset + param.nbytes]) for offset, param in ranges]


def differing(unit: Unit, before: Sequence[int], now: Sequence[int]) -> list[int]:
    """The parameters of ``unit``, by index, whose prints are not the same."""
    return [index for index in range(len(unit.params)) if before and now and before[index] != now[index]]


def lost_through(unit: Unit, index: int) -> Refused:
    """A write that cannot be kept, because ranks share or divide the parameter's memory."""
    return Refused(
        f"parameter {unit.names[index]!r} was changed while its unit {unit.name!r} was gathered; the change would be lost when "
        f"the unit is released. Change parameters with `with lowtide.gathered(module, write=True):`, or use stage 2."
    )


@dataclass(eq=False)
class _Left:
    """Memory that a parameter lay in, or was given, and that a caller still refers to."""

    unit: Unit
    index: int | None
    """Of the parameter; None: the whole unit."""
    memory: Tensor
    ours: int
    """How many tensors of ours lie in it, without ``memory``."""
    print: int
    version: int
    """Of the unit, when it was left."""


class Left:
    """See the note above."""

    def __init__(self) -> None:
        self._all: list[_Left] = []
        alone = torch.empty(1)
        self._alone = storage_use_count(alone)

    def __bool__(self) -> bool:
        return bool(self._all)

    def watch(self, unit: Unit, index: int | None, memory: Tensor, *, ours: int) -> None:
        """From now on ``memory`` must not change, as long as anybody but us refers to it."""
        left = _Left(unit, index, memory, ours, _print(memory), unit.version)
        self._all.append(left)
        if not self._is_held(left):
            self._all.remove(left)

    def forget(self, unit: Unit, index: int) -> None:
        """The parameter was given other memory, or other values."""
        self._all = [left for left in self._all if left.unit is not unit or left.index != index]

    def refuse_again(self, unit: Unit, index: int, memory: Tensor) -> None:
        """Raise if a parameter is given memory that it was given before an update: in plain PyTorch the update went there."""
        for left in self._all:
            before = (left.unit, left.index, storage_of(left.memory)) == (unit, index, storage_of(memory))
            if before and left.version != unit.version:
                raise Refused(
                    f"parameter {unit.names[index]!r} was given the same memory twice (`param.data = tensor`, "
                    f"vector_to_parameters), and updated in between: here the update does not reach that tensor. "
                    f"Give a new one."
                )

    def look(self, *, at_all: bool) -> Refused | None:
        """Let go of what only we refer to, and look whether it was changed, or all of it. Returns what to raise if so."""
        error: Refused | None = None
        for left in list(self._all):
            held = self._is_held(left)
            if held and not at_all:
                continue
            changed = _print(left.memory) != left.print
            if changed:
                error = _changed_later(left)
            if changed or not held:
                self._all.remove(left)
        return error

    def _is_held(self, left: _Left) -> bool:
        storage = storage_of(left.memory)
        watching = sum(storage_of(other.memory) == storage for other in self._all)
        return storage_use_count(left.memory) > self._alone + watching - 1 + left.ours


def _print(memory: Tensor) -> int:
    return digest_of(memory.contiguous().reshape(-1).view(torch.uint8).numpy()) if memory.numel() else 0


def _changed_later(left: _Left) -> Refused:
    what = f"of unit {left.unit.name!r}" if left.index is None else f"{left.unit.names[left.index]!r}"
    return Refused(
        f"a view of parameter {what} (.data, .numpy(), or the tensor in `param.data = tensor`) was changed after the parameter "
        f"had gone elsewhere: the change would be lost. Change parameters with `with lowtide.gathered(module, write=True):`."
    )
