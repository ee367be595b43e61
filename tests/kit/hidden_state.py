"""Kinds of state that a forward pass moves on and that autograd knows nothing of, and ways to pass one tensor twice.

Each is a block: computed a second time without care it comes to other values, or leaves other values behind.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WIDTH = 8

KINDS: dict[str, type[Block]] = {}
UNSEEN: set[str] = set()
"""Those that no look at module and arguments can find: only the values tell."""


class Block(nn.Module):
    """A residual block, scaled by ``self.factor(given)``. ``given`` is what the model passes on from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """State of its own."""

    def factor(self, given: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        factor = self.factor(given)
        return x + torch.tanh(self.linear(x) * factor)


def kind(*, unseen: bool = False) -> Callable[[type[Block]], type[Block]]:
    def register(block: type[Block]) -> type[Block]:
        KINDS[block.__name__] = block
        if unseen:
            UNSEEN.add(block.__name__)
        return block

    return register


@dataclass
class Cache:
    """An object that a call fills, as those for keys and values are."""

    seen: list[Tensor] = field(default_factory=list)
    calls: int = 0

    def update(self, x: float) -> float:
        self.calls += 1
        self.seen.append(torch.tensor(x))
        return 1 + 0.1 * self.calls + float(sum(self.seen))


class Slots:
    """The same, without a ``__dict__``."""

    __slots__ = ("calls", "unset")

    def __init__(self) -> None:
        self.calls = 0


class Model(nn.Module):
    def __init__(self, block: type[Block], count: int = 3) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        given = {"list": [], "dict": {}, "cache": Cache(), "slots": Slots(), "deque": collections.deque([1.0], maxlen=3)}
        for block in self.blocks:
            x = block(x, given)
        return x


# -- generators -------------------------------------------------------------------------------------------------------


@kind()
class PythonRandom(Block):
    def factor(self, given: Any) -> Any:
        return random.random()


@kind()
class NumpyRandom(Block):
    def factor(self, given: Any) -> Any:
        return float(np.random.rand()) + float(np.random.standard_normal())


@kind()
class OwnTorchGenerator(Block):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, given: Any) -> Any:
        return torch.rand(WIDTH, generator=self.generator)


@kind()
class OwnPythonGenerator(Block):
    def prepare(self) -> None:
        self.generator = random.Random(3)

    def factor(self, given: Any) -> Any:
        return self.generator.random()


@kind()
class OwnNumpyGenerator(Block):
    def prepare(self) -> None:
        self.generator = np.random.default_rng(3)

    def factor(self, given: Any) -> Any:
        return float(self.generator.random())


@kind()
class OwnNumpyState(Block):
    def prepare(self) -> None:
        self.generator = np.random.RandomState(3)

    def factor(self, given: Any) -> Any:
        return self.generator.rand()


# -- attributes -------------------------------------------------------------------------------------------------------


@kind()
class Counter(Block):
    calls = 0

    def factor(self, given: Any) -> Any:
        self.calls += 1
        return 1 / self.calls


@kind()
class CounterWithoutEffectYet(Block):
    """The values of this step do not show it."""

    def prepare(self) -> None:
        self.calls = 0

    def factor(self, given: Any) -> Any:
        self.calls += 1
        return 1.0 if self.calls < 4 else 0.5


@kind()
class ListAttribute(Block):
    def prepare(self) -> None:
        self.history: list[float] = []

    def factor(self, given: Any) -> Any:
        self.history.append(0.5)
        return sum(self.history)


@kind()
class TensorAttribute(Block):
    def prepare(self) -> None:
        self.average = torch.ones(())

    def factor(self, given: Any) -> Any:
        self.average = self.average * 0.5 + 0.1
        return self.average


@kind()
class TensorWrittenThroughData(Block):
    def prepare(self) -> None:
        self.average = torch.ones(())

    def factor(self, given: Any) -> Any:
        self.average.data.mul_(0.5)
        return self.average.clone()


@kind()
class ArrayAttribute(Block):
    def prepare(self) -> None:
        self.array = np.ones(3)

    def factor(self, given: Any) -> Any:
        self.array *= 0.5
        return float(self.array[0])


@kind()
class Closure(Block):
    def prepare(self) -> None:
        calls = [0]

        def count() -> float:
            calls[0] += 1
            return 1 / calls[0]

        self.count = count

    def factor(self, given: Any) -> Any:
        return self.count()


@kind()
class BoundMethodOfAnObject(Block):
    def prepare(self) -> None:
        self.update = Cache().update

    def factor(self, given: Any) -> Any:
        return self.update(0.1)


@kind()
class AttributeThatBeginsLater(Block):
    def factor(self, given: Any) -> Any:
        vars(self).setdefault("calls", 0)
        self.calls += 1
        return self.calls


# -- arguments --------------------------------------------------------------------------------------------------------


@kind()
class ListArgument(Block):
    def factor(self, given: Any) -> Any:
        given["list"].append(0.5)
        return sum(given["list"])


@kind()
class DictArgument(Block):
    def factor(self, given: Any) -> Any:
        given["dict"][len(given["dict"])] = 0.5
        return sum(given["dict"].values())


@kind()
class CacheArgument(Block):
    def factor(self, given: Any) -> Any:
        return given["cache"].update(0.1)


@kind()
class SlotsArgument(Block):
    def factor(self, given: Any) -> Any:
        given["slots"].calls += 1
        return 1 / given["slots"].calls


@kind()
class DequeArgument(Block):
    def factor(self, given: Any) -> Any:
        given["deque"].append(given["deque"][-1] * 0.5)
        return given["deque"][0]


# -- classes and globals, and what is out of sight --------------------------------------------------------------------

_GLOBAL = [0]
_STREAM = random.Random(7)


@kind()
class Global(Block):
    def factor(self, given: Any) -> Any:
        _GLOBAL[0] += 1
        return 1 + 1 / _GLOBAL[0]


@kind()
class ClassAttribute(Block):
    calls = 0

    def factor(self, given: Any) -> Any:
        ClassAttribute.calls += 1
        return 1 + 1 / ClassAttribute.calls


@kind()
class GlobalWithoutEffectYet(Block):
    def factor(self, given: Any) -> Any:
        return _counted()


def _counted() -> float:
    _GLOBAL[0] += 1
    return 1.0 if _GLOBAL[0] < 10 else 0.5


@kind(unseen=True)
class OnlyInTheResult(Block):
    """What autograd saves is the same again."""

    draws: Iterator[float] = iter(())

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        factor = next(OnlyInTheResult.draws)
        return (x + torch.tanh(self.linear(x))) * factor


@kind(unseen=True)
class Clock(Block):
    """Time goes on."""

    now: Iterator[int] = itertools.count(1)

    def factor(self, given: Any) -> Any:
        return 1 + 1 / next(Clock.now)


@kind()
class Memoised(Block):
    """The second call finds what the first one has left, which is the same."""

    def factor(self, given: Any) -> Any:
        return _drawn(self.linear.in_features)


@functools.cache
def _drawn(_: int) -> float:
    return _STREAM.random()


def rewind() -> None:
    """Everything out of sight as it was."""
    _GLOBAL[0] = ClassAttribute.calls = 0
    OnlyInTheResult.draws = iter([1 / (2 + n) for n in range(100)])
    _STREAM.seed(7)
    Clock.now = itertools.count(1)
    _drawn.cache_clear()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
