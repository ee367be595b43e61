"""A copy of an optimizer that may be run without a trace on the original: for trials, and for parts of one step.

What an optimizer keeps besides ``state`` and its groups is its own affair: counters, lists, a scheduler that refers back to it.
All of it is copied, so that a run of the copy is as if the original had never been run; references to the optimizer, to its
groups and to its state lead to the copy's. In the place of the caller's parameters it finds ones without memory, so that no run
of a copy can change them. What cannot be copied (a lock, an open file) is shared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_ELSEWHERE = frozenset({"state", "param_groups", "step", "lowtide_engine"})
"""Attributes that are no affair of the optimizer's own: ``step`` is there if a scheduler has wrapped it."""


def plain_class(optimizer: Optimizer) -> type[Optimizer]:
    """The caller's class, also of an optimizer that has been sharded."""
    return getattr(type(optimizer), "plain_class", type(optimizer))


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without the wrapper that runs step hooks: those belong around the whole update."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """The entries of ``optimizer.state`` that belong to no parameter, as MADGRAD's counter does."""
    state = cast("dict[Any, Any]", optimizer.state)
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def all_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of every group, as they are now."""
    return [copied(options_of(group)) for group in optimizer.param_groups]


def copy_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer like ``optimizer``, with empty groups, and with those states only that belong to no parameter."""
    twin = object.__new__(plain_class(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [{} for _ in optimizer.param_groups]
    memo = _Memo(param for group in optimizer.param_groups for param in group["params"])
    memo |= {id(optimizer): twin, id(optimizer.state): twin.state, id(optimizer.param_groups): twin.param_groups}
    memo |= {id(group): new for group, new in zip(optimizer.param_groups, twin.param_groups, strict=True)}
    for group, new in zip(optimizer.param_groups, twin.param_groups, strict=True):
        new.update({name: copied(value, memo) for name, value in options_of(group).items()}, params=[])
    twin.state.update({key: copied(value, memo) for key, value in shared_state(optimizer).items()})
    vars(twin).update({name: copied(value, memo) for name, value in own_attributes(optimizer).items()})
    vars(twin).update({name: type(hooks)() for name, hooks in vars(optimizer).items() if _is_hooks(name)})
    return twin


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps besides its groups and states; hooks on it are the caller's."""
    return {name: v for name, v in vars(optimizer).items() if name not in _ELSEWHERE and not _is_hooks(name)}


def _is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


class _Memo(dict[int, Any]):
    """What ``copy.deepcopy`` has met, and the caller's parameters as it is to find them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._params = {id(param): param for param in params}

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and (param := self._params.get(key)) is not None:
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            self[key] = nn.Parameter(empty, requires_grad=param.requires_grad)
        return super().get(key, default)


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """``value`` as it is now; the same object if it cannot be copied."""
    memo = {} if memo is None else memo
    if (known := memo.get(id(value))) is not None:
        return known
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), value.detach().clone())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever the caller's objects may raise
        return value


def alike(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values say the same, however deep; numbers that are not finite are equal to themselves."""
    seen = set() if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_bits(a, b)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, Mapping):
        rows, others = cast("Mapping[Any, Any]", a), cast("Mapping[Any, Any]", b)
        return list(rows) == list(others) and all(alike(rows[key], others[key], seen) for key in rows)
    if isinstance(a, list | tuple):
        items, others = cast("list[Any]", a), cast("list[Any]", b)
        return len(items) == len(others) and all(alike(x, y, seen) for x, y in zip(items, others, strict=True))
    if isinstance(a, float) and a != a:
        return b != b
    if hasattr(a, "__dict__") and not callable(a):
        return alike(vars(a), vars(b), seen)
    try:
        return bool(a == b)
    except Exception:  # whatever the caller's objects may raise
        return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same dtype and shape; NaN is equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, b))
    unequal = ~((a == b) & (torch.signbit(a) == torch.signbit(b)))
    return not bool((unequal & ~(a.isnan() & b.isnan())).any())
