"""State that a forward pass changes and that autograd knows nothing of: looked at before and after.

A module that keeps a counter, fills the cache it was given or draws from a generator of its own comes to other values when it
is computed again, and leaves other values behind. Four kinds of places are looked at: the attributes of the modules, the
containers and objects among the arguments, numbers, containers and generators in the classes of the modules and among the
globals that their methods name, and the generators that Python and NumPy have for everybody. What can be reached in no such way
(an iterator, a file, the time) shows only in the values that are computed again, which is why those are compared.
"""

from __future__ import annotations

import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.runtime.prints import can_be_printed, print_of
from lowtide.torch_internals import forward_hooks_of

_MOST_MARKS = 20_000  # beyond this, what an argument refers to is not followed
_MOST_DEPTH = 24
_SMALL = 1 << 16  # bytes of a tensor or array up to which its values are looked at, not only its version
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout)
_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}  # the module's own tables; ``forward`` is what we have put there


class _This:
    """An object that is told by its identity; held, so that no other gets its address."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and self._object is other._object

    __hash__ = None  # type: ignore[assignment]


class Look:
    """What the modules of ``tree`` and the ``arguments`` of a call hold now, in the order in which it is reached."""

    def __init__(self, tree: Iterable[tuple[str, nn.Module]], arguments: Mapping[str, Any]) -> None:
        self._marks: list[Any] = []
        self._places: list[tuple[int, object]] = []  # the index of the container's mark, and where in it
        self._seen: dict[int, int] = {}
        surroundings: dict[tuple[int, str], tuple[str, Mapping[str, Any]]] = {}
        for name, module in tree:
            surroundings.update(_surroundings(type(module)))
            top = self._add(-1, f"attribute of module {name!r}" if name else "attribute", None)
            for key, value in vars(module).items():
                if key not in _OF_TORCH:
                    self._visit(top, key, value, 0)
        for (_, name), (words, table) in surroundings.items():
            self._visit(-1, f"{words} {name!r}", table.get(name), 0, objects=False)
        for name, value in arguments.items():
            if not isinstance(value, Tensor):  # those have versions
                self._visit(-1, name, value, 0)

    def difference(self, later: Look) -> str | None:
        """The first place that holds something else ``later``, in words."""
        longer = later if len(later._marks) > len(self._marks) else self
        for index, (mark, now) in enumerate(zip(self._marks, later._marks, strict=False)):
            if mark is not now and mark != now:
                return longer._words(index)  # what has come, or gone, moves all that follows
        shorter = min(len(self._marks), len(later._marks))
        return None if shorter == len(longer._marks) else longer._words(shorter)

    def _words(self, index: int) -> str:
        keys: list[object] = []
        while index >= 0:
            index, key = self._places[index]
            keys.append(key)
        first, *path = reversed(keys)
        return f"{first} {'.'.join(map(str, path))!r}" if path and str(first).startswith("attribute") else str(first)

    def _add(self, parent: int, key: object, mark: Any) -> int:
        self._marks.append(mark)
        self._places.append((parent, key))
        return len(self._marks) - 1

    def _visit(self, parent: int, key: object, value: Any, depth: int, *, objects: bool = True) -> None:
        """``objects``: whether what they refer to is followed."""
        kind = type(value)
        if kind in _PLAIN:
            self._add(parent, key, (kind, value))
            return
        if id(value) in self._seen:
            self._add(parent, key, ("again", self._seen[id(value)]))
            return
        followed = depth < _MOST_DEPTH and len(self._marks) < _MOST_MARKS
        mark, inside = _opened(value, objects=objects) if followed else (_This(value), ())
        index = self._seen[id(value)] = self._add(parent, key, (kind, mark))
        for name, part in inside:
            if len(self._marks) >= _MOST_MARKS:
                return
            self._visit(index, name, part, depth + 1, objects=objects)


def _opened(value: Any, *, objects: bool) -> tuple[Any, Iterable[tuple[object, Any]]]:
    """What ``value`` itself is known by, and the parts that are to be looked at."""
    if isinstance(value, Tensor):
        return _mark_of_tensor(value), ()
    if isinstance(value, nn.Module | type | types.ModuleType | Enum):
        return _This(value), ()
    state = _generator_state(value)
    if state is not None:
        return state, ()
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _SMALL and not value.dtype.hasobject
        return (_This(value), value.tobytes() if small else None), ()
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return _This(value), [(name, cell.cell_contents) for name, cell in cells if not _is_empty(cell)]
    if isinstance(value, types.MethodType):
        return value.__func__, [("object", value.__self__)]
    if isinstance(value, partial):
        return None, [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    attributes = list(_attributes(value)) if objects else []
    if isinstance(value, Mapping) and isinstance(value, dict):
        keys = [key if type(key) in _PLAIN else _This(key) for key in value]
        return keys, [*value.items(), *attributes]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return len(value), [*enumerate(value), *attributes]
    return _This(value), attributes


def _attributes(value: Any) -> Iterable[tuple[object, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # a slot that nothing was put into yet
                    continue


Surroundings = Mapping[tuple[int, str], tuple[str, Mapping[str, Any]]]
"""Where to look, by table and name: what it is called, and the table."""

_known_surroundings: weakref.WeakKeyDictionary[type, Surroundings] = weakref.WeakKeyDictionary()


def _surroundings(kind: type[nn.Module]) -> Surroundings:
    """Class attributes of ``kind``, and globals that its methods name, as far as they are data."""
    if kind not in _known_surroundings:
        found: dict[tuple[int, str], tuple[str, Mapping[str, Any]]] = {}
        for owner in kind.__mro__:
            if issubclass(owner, nn.Module) and not owner.__module__.startswith("torch."):
                for name, value in vars(owner).items():
                    code = getattr(value, "__func__", getattr(value, "fget", value))
                    if isinstance(code, types.FunctionType):
                        _globals_named_in(code, found, set())
                    elif _is_data(value) and not name.startswith("__"):
                        found[id(owner), name] = "class attribute", vars(owner)
        _known_surroundings[kind] = found
    return _known_surroundings[kind]


def _globals_named_in(function: types.FunctionType, found: dict[tuple[int, str], Any], seen: set[types.CodeType]) -> None:
    """Add the data among the globals that ``function``, and functions beside it that it calls, name."""
    codes, table = [function.__code__], function.__globals__
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in code.co_names:
            value = table.get(name)
            if isinstance(value, types.FunctionType) and value.__globals__ is table:
                codes.append(value.__code__)
            elif name in table and _is_data(value):
                found[id(table), name] = "global", table


def _is_data(value: Any) -> bool:
    generators = (torch.Generator, random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState)
    return type(value) in _PLAIN or isinstance(value, (list, dict, set, deque, Tensor, np.ndarray, *generators))


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _mark_of_tensor(tensor: Tensor) -> Any:
    if isinstance(tensor, nn.Parameter) or tensor.is_inference():
        return _This(tensor)
    values = print_of(tensor) if can_be_printed(tensor) and tensor.nbytes <= _SMALL else None
    return _This(tensor), tensor._version, values  # pyright: ignore[reportPrivateUsage]


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return print_of(value.get_state()) if value.device.type == "cpu" else _This(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.BitGenerator):
        return repr(value.state)
    if isinstance(value, np.random.RandomState):
        return _numpy_mark(value.get_state(legacy=False))
    return None


# -- the generators that Python and NumPy have for everybody ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostGenerators:
    """The states of Python's and NumPy's own generators."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> HostGenerators:
        return cls(random.getstate(), np.random.get_state(legacy=False))

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def is_as(self, other: HostGenerators) -> bool:
        return self.python == other.python and _numpy_mark(self.numpy) == _numpy_mark(other.numpy)


def _numpy_mark(state: Any) -> Any:
    """A state of NumPy's as something that can be compared: arrays in it as bytes."""
    if isinstance(state, dict):
        return {key: _numpy_mark(value) for key, value in state.items()}  # pyright: ignore[reportUnknownVariableType]
    return state.tobytes() if isinstance(state, np.ndarray) else state


# -- hooks ------------------------------------------------------------------------------------------------------------


def hook_of_a_caller(tree: Iterable[tuple[str, nn.Module]]) -> str | None:
    """The first module inside a module (not itself) that has a forward hook which is not torch's own (weight_norm, pruning),
    in words: what such a hook counts or records, it would count again."""
    if forward_hooks_of(None):
        return "what a forward hook for all modules has seen"
    for name, module in tree:
        if name and any(not _is_of_torch(hook) for hook in forward_hooks_of(module)):
            return f"what a forward hook of module {name!r} has seen"
    return None


def _is_of_torch(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__ or "").startswith("torch.")
