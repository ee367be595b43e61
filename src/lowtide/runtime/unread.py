"""Numbers that were computed and not looked at yet.

Reading a number from an accelerator makes the host wait for everything that was queued before it. Results are therefore left
where they were computed until all of them are there, and then read together: one copy, one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unread(Generic[T]):
    """``numbers``, 1-D fp64, where they were computed; ``make`` turns the same numbers in host memory into a result."""

    numbers: Tensor
    make: Callable[[Tensor], T]


def read_together(unread: Sequence[Unread[T]]) -> list[T]:
    """The results, with one wait for each device that holds numbers."""
    found: dict[int, T] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(unread):
        by_device.setdefault(one.numbers.device, []).append(index)
    for indices in by_device.values():
        numbers = torch.cat([unread[index].numbers for index in indices]).cpu()
        for index, part in zip(indices, numbers.split([unread[i].numbers.numel() for i in indices]), strict=True):
            found[index] = unread[index].make(part)
    return [found[index] for index in range(len(unread))]
