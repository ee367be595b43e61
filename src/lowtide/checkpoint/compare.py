"""What differs between two checkpoints: name by name, bit by bit, whatever ranks, units and tiers wrote them.

Numbers are compared as bits, so a NaN equals the same NaN and -0 is not 0. Both sides are read in small pieces; a tensor is
whole in memory only if the two sides keep its elements in different orders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from lowtide.checkpoint import tree
from lowtide.checkpoint.described import ParamFacts
from lowtide.checkpoint.source import Source, open_source
from lowtide.runtime.contents import PARAMETERS

_PIECE = 1 << 20
_SHOWN = 100  # characters of a value

BUFFERS, VALUES = "buffers", "values"

Report = Callable[[int, int], None]
"""Called with the bytes compared so far and the bytes to be compared."""
_Read = Callable[[int, int, Tensor], None]
"""Fill a tensor with elements ``lo:hi``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same."""

    section: str
    """parameters, masters, optimizer.<state>, buffers or values."""
    name: str
    what: str
    """only in the first, only in the second, shape, dtype, value or elements."""
    first: str = ""
    second: str = ""
    different: int = 0
    """How many elements have other bits, of ``count``."""
    count: int = 0
    largest: float = 0.0
    """The largest absolute difference of two of them."""
    not_numbers: int = 0
    """How many of them have no difference that is a number: one side is NaN, or infinite."""

    def __str__(self) -> str:
        where = f"{self.section} {self.name}:"
        if self.what == "elements":
            odd = f", {self.not_numbers} of them NaN or infinite" if self.not_numbers else ""
            return f"{where} {self.different} of {self.count} elements differ, by at most {self.largest:.6g}{odd}"
        if self.what.startswith("only"):
            return f"{where} {self.what}"
        return f"{where} {self.what} {self.first} in the first, {self.second} in the second"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that differs."""

    first: Path
    second: Path
    tensors: int
    nbytes: int
    """How many tensors were compared, and how many bytes of each side."""
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        return not self.differences


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    model_only: bool = False,
    progress: Report | None = None,
) -> Comparison:
    """Compare two checkpoints. ``model_only``: parameters and buffers, not the optimizer, random numbers and other values."""
    with open_source(Path(first)) as one, open_source(Path(second)) as two:
        comparing = _Comparing(one, two, model_only=model_only, report=progress)
        comparing.run()
    return Comparison(one.path, two.path, comparing.tensors, comparing.done, tuple(comparing.found))


class _Kind(NamedTuple):
    """A kind of a parameter that may be on both sides, under the names that each has for it."""

    kind: str
    first: str | None
    second: str | None


@dataclass(slots=True)
class _Comparing:
    one: Source
    two: Source
    model_only: bool
    report: Report | None
    found: list[Difference] = field(default_factory=list[Difference])
    tensors: int = 0
    done: int = 0
    total: int = 0

    def run(self) -> None:
        rows = [row for names in _matched(self.one, self.two) for row in self._kinds(*names)]
        self.total = sum(self._nbytes(self.one, row.kind, row.first) for row in rows)
        for row in rows:
            self._compare_kind(row)
        self._compare_trees(_buffer_leaves(self.one), _buffer_leaves(self.two), BUFFERS)
        if not self.model_only:
            self._compare_trees(dict(_value_leaves(self.one)), dict(_value_leaves(self.two)), VALUES)

    def _nbytes(self, source: Source, kind: str, name: str | None) -> int:
        return 0 if name is None else source.parameters[name].numel * _dtype(source, kind, name).itemsize

    def _differ(self, section: str, name: str, what: str, first: object = "", second: object = "") -> None:
        self.found.append(Difference(section=section, name=name, what=what, first=str(first), second=str(second)))

    # -- parameters and states ----------------------------------------------------------------------------------------

    def _kinds(self, first: str | None, second: str | None) -> list[_Kind]:
        """What there is to compare of one parameter; an empty one has no states worth naming."""
        there = [
            () if name is None or not source.parameters[name].numel or self.model_only else tuple(source.kinds(name))
            for source, name in ((self.one, first), (self.two, second))
        ]
        kinds = dict.fromkeys([PARAMETERS, *sorted({*there[0], *there[1]} - {PARAMETERS})])
        if first is None or second is None:
            return [_Kind(PARAMETERS, first, second)]
        return [
            _Kind(kind, *(n if kind in (PARAMETERS, *has) else None for n, has in zip((first, second), there, strict=True)))
            for kind in kinds
        ]

    def _compare_kind(self, row: _Kind) -> None:
        kind, first, second = row
        if first is None or second is None:
            self._differ(kind, str(first or second), "only in the first" if second is None else "only in the second")
            return
        one, two = self.one.parameters[first], self.two.parameters[second]
        if one.shape != two.shape:
            self._differ(kind, first, "shape", one.shape, two.shape)
            return
        dtype, other = _dtype(self.one, kind, first), _dtype(self.two, kind, second)
        if dtype is not other:
            self._differ(kind, first, "dtype", dtype, other)
            return
        read_one = _reader(self.one, kind, first)
        read_two = (
            _reader(self.two, kind, second) if one.stride == two.stride else _reordered(self.two, kind, second, one, dtype)
        )
        self._compare_elements(kind, first, one.numel, dtype, read_one, read_two)

    def _compare_elements(self, section: str, name: str, count: int, dtype: torch.dtype, one: _Read, two: _Read) -> None:
        step = _PIECE // dtype.itemsize
        memory = torch.empty((2, min(step, count)), dtype=dtype)
        different, largest, odd = 0, 0.0, 0
        for lo in range(0, count, step):
            hi = min(lo + step, count)
            a, b = memory[0, : hi - lo], memory[1, : hi - lo]
            one(lo, hi, a)
            two(lo, hi, b)
            number, most, strange = _differing(a, b)
            different, largest, odd = different + number, max(largest, most), odd + strange
            self._note(a.nbytes)
        self.tensors += 1
        if different:
            facts: dict[str, Any] = {"different": different, "count": count, "largest": largest, "not_numbers": odd}
            self.found.append(Difference(section=section, name=name, what="elements", **facts))

    def _note(self, nbytes: int) -> None:
        self.done += nbytes
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)

    # -- everything else ----------------------------------------------------------------------------------------------

    def _compare_trees(self, one: dict[str, _Leaf], two: dict[str, _Leaf], section: str) -> None:
        for path in dict.fromkeys([*one, *two]):
            if path not in one or path not in two:
                self._differ(section, path, "only in the second" if path not in one else "only in the first")
                continue
            a, b = one[path], two[path]
            has_tensor = "tensor" in (a.tag, b.tag)  # with the same text they may still have other numbers
            if has_tensor and (x := a.tensor()) is not None and (y := b.tensor()) is not None:
                self._compare_tensors(section, path, x, y)
            elif a.text() != b.text():
                self._differ(section, path, "value", *_as_shown(a, b))

    def _compare_tensors(self, section: str, path: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            self._differ(section, path, "shape", tuple(a.shape), tuple(b.shape))
        elif a.dtype is not b.dtype:
            self._differ(section, path, "dtype", a.dtype, b.dtype)
        else:
            self.total += a.nbytes
            self._compare_elements(section, path, a.numel(), a.dtype, _from(a), _from(b))


# -- which belongs to which -------------------------------------------------------------------------------------------


def _matched(one: Source, two: Source) -> Iterator[tuple[str | None, str | None]]:
    """The parameters of both; a tied one may be there under another of its names."""
    others, mine = two.model.aliases, one.model.aliases
    name_of = {n: n for n in one.parameters} | {a: n for a, n in mine.items() if n in one.parameters}
    names_of_other: dict[str, list[str]] = {name: [name] for name in two.parameters}
    for alias, name in others.items():
        names_of_other.get(name, []).append(alias)
    partner: dict[str, str] = {}
    for name, names in names_of_other.items():
        found = next((name_of[n] for n in names if n in name_of and name_of[n] not in partner), None)
        if found is not None:
            partner[found] = name
    yield from ((name, partner.get(name)) for name in one.parameters)
    yield from ((None, name) for name in two.parameters if name not in partner.values())


def _dtype(source: Source, kind: str, name: str) -> torch.dtype:
    return source.parameters[name].dtype if kind == PARAMETERS else source.dtype(kind, name) or torch.uint8


def _reader(source: Source, kind: str, name: str) -> _Read:
    return lambda lo, hi, out: source.read_into(kind, name, lo, hi, out)


def _reordered(source: Source, kind: str, name: str, like: ParamFacts, dtype: torch.dtype) -> _Read:
    """The elements in the order in which the other side keeps them: dimension after dimension, the widest steps first."""
    facts = source.parameters[name]
    flat = torch.empty(facts.numel, dtype=dtype)
    source.read_into(kind, name, 0, facts.numel, flat)
    widest_first = sorted(range(len(like.stride)), key=lambda d: -like.stride[d])
    return _from(flat.as_strided(facts.shape, facts.stride).permute(widest_first))


def _from(tensor: Tensor) -> _Read:
    flat = tensor.reshape(-1)

    def read(lo: int, hi: int, out: Tensor) -> None:
        out.copy_(flat[lo:hi])

    return read


def _differing(a: Tensor, b: Tensor) -> tuple[int, float, int]:
    """How many elements have other bits, the largest difference, and how many differ by no number."""
    width = a.dtype.itemsize
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(width, torch.int64)
    other = a.view(bits).ne(b.view(bits)).view(a.numel(), -1).any(dim=1)
    number = int(other.sum())
    if not number:
        return 0, 0.0, 0
    exact = torch.complex128 if a.dtype.is_complex else torch.float64
    x, y = (t[other] if width > 8 else t.view(bits)[other].view(t.dtype) for t in (a, b))  # float8 cannot be chosen from
    apart = (x.to(exact) - y.to(exact)).abs()
    finite = apart[apart.isfinite()]
    return number, float(finite.max()) if finite.numel() else 0.0, number - finite.numel()


# -- values: what is not a piece of a parameter -----------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A value of a rank that has no parts."""

    source: Source
    rank: int
    value: JsonValue

    def text(self) -> str:
        return json.dumps(self.value, sort_keys=True)

    @property
    def tag(self) -> JsonValue:
        return self.value.get("$") if isinstance(self.value, dict) else None

    def tensor(self) -> Tensor | None:
        """Its numbers, if it is a tensor; one without dimensions may stand in the text."""
        if self.tag not in ("tensor", "scalar"):
            return None

        def get(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return self.source.object(self.rank, name, shape, dtype)

        return tree.decode(self.value, get, str(self.source.path))


def _as_shown(a: _Leaf, b: _Leaf) -> tuple[str, str]:
    """Two values for a person: the number of a tensor without dimensions alone, if that tells them apart."""
    plain = [json.dumps(leaf.value.get("value")) for leaf in (a, b) if isinstance(leaf.value, dict) and leaf.tag == "scalar"]
    first, second = plain if len(set(plain)) == 2 else (a.text(), b.text())
    return first[:_SHOWN], second[:_SHOWN]


def _buffer_leaves(source: Source) -> dict[str, _Leaf]:
    buffers: JsonValue = source.model.buffers
    return {} if not buffers else {path.removeprefix("."): _Leaf(source, 0, value) for path, value in _leaves(buffers, "")}


def _value_leaves(source: Source) -> Iterator[tuple[str, _Leaf]]:
    """Everything that is not a tensor of the model, by a path that says what it is."""
    yield "step", _Leaf(source, 0, source.manifest.step)
    model = source.model.model_dump(include={"optimizer", "groups", "scale", "extra"})
    for key, part in model.items():
        yield from ((path, _Leaf(source, 0, value)) for path, value in _leaves(part, key))
    small: dict[str, tuple[int, JsonValue]] = {}
    for table in source.tables:
        for name, row in _items(table.objects.get("small")):
            small.setdefault(name, (table.rank, row))  # all ranks that have a piece of it have the same
    for name, (rank, row) in small.items():
        yield from ((path, _Leaf(source, rank, value)) for path, value in _leaves(row, f"states of {name}"))
    for table in source.tables:
        for key in ("rng", "state"):
            rows = _leaves(table.objects.get(key), f"rank {table.rank} {key}")
            yield from ((path, _Leaf(source, table.rank, value)) for path, value in rows)


def _items(value: JsonValue) -> Iterable[tuple[str, JsonValue]]:
    return value.items() if isinstance(value, dict) else ()


def _leaves(value: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    """The values of an encoded tree (checkpoint/tree.py) that have no parts; empty lists and dicts are values."""
    if isinstance(value, dict) and value.get("$") == "dict" and isinstance(pairs := value.get("pairs"), list):
        children = [(f"{path}[{json.dumps(p[0])}]", p[1]) for p in pairs if isinstance(p, list) and len(p) == 2]
    elif isinstance(value, dict) and value.get("$") == "tuple" and isinstance(items := value.get("items"), list):
        children = [(f"{path}({n})", item) for n, item in enumerate(items)]
    elif isinstance(value, dict) and "$" not in value:
        children = [(f"{path}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{n}]", item) for n, item in enumerate(value)]
    else:
        children = []
    if not children:
        yield path, value
    for where, child in children:
        yield from _leaves(child, where)
