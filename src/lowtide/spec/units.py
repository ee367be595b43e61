"""Which parameters travel together.

The rule: repeated blocks (children of one class in a ModuleList, Sequential or ModuleDict) are units; what is left is split
into the largest subtrees without blocks (an embedding, a head); parameters that sit directly on a module around blocks
belong to that module. Neighbours below ``bucket_bytes`` are put into one unit. A wrong guess costs time, never a bit: a
parameter that is used outside its unit's modules is gathered on demand.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from lowtide.config import UnitChoice
from lowtide.errors import ArgumentError


@dataclass(frozen=True)
class UnitSpec:
    """Parameters that travel together, with the modules whose forward needs them."""

    name: str
    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)


def find_units(model: nn.Module, choice: UnitChoice, *, bucket_bytes: int) -> list[UnitSpec]:
    """Split ``model`` into units. Every parameter is in exactly one of them: a tied one in the first that has it."""
    blocks = _chosen(model, choice) if choice is not None else _repeated(model)
    found = list(_walk(model, "", model, blocks))
    owner: dict[nn.Parameter, int] = {}
    units: list[UnitSpec] = []
    for name, module, params in found:
        own = {p: n for n, p in params if p not in owner}
        if own:
            owner.update(dict.fromkeys(own, len(units)))
            units.append(UnitSpec(name, (module,), tuple(own.values()), tuple(own)))
            continue
        for index in {owner[p] for _, p in params}:  # nothing but tied parameters: this module needs their units
            units[index] = replace(units[index], modules=(*units[index].modules, module))
    return _bucketed(units, bucket_bytes)


def needs(module: nn.Module, hosts: set[nn.Module]) -> set[nn.Parameter]:
    """Parameters that ``module``'s forward can reach without entering another unit's module."""
    reached = set(module.parameters(recurse=False))
    stack = list(module.children())
    while stack:
        child = stack.pop()
        if child in hosts:
            continue
        reached.update(child.parameters(recurse=False))
        stack.extend(child.children())
    return reached


def _is_called(module: nn.Module) -> bool:
    """ModuleList, ModuleDict and ParameterList have no forward of their own: their owner calls what is inside. Nor does anybody
    hear of calls that TorchScript makes."""
    return not is_scripted(module) and type(module).forward is not nn.Module.forward


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript runs ``module``, which takes no hooks then."""
    return isinstance(module, torch.jit.ScriptModule)


def _repeated(model: nn.Module) -> set[nn.Module]:
    """The outermost repeated blocks. Blocks inside blocks (a router's experts) stay with theirs: which of them runs may differ
    from rank to rank."""
    return _outermost(model, {block for module in model.modules() for block in _repeated_children(module)})


def _repeated_children(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    children = [c for c in module.children() if any(True for _ in c.parameters()) and not is_scripted(c)]
    counts = Counter(type(c) for c in children)
    return [c for c in children if counts[type(c)] > 1]


def _chosen(model: nn.Module, choice: UnitChoice) -> set[nn.Module]:
    if isinstance(choice, str | type):
        choice = [choice]
    named = dict(model.named_modules())
    if not isinstance(choice, Iterable):
        accept: Callable[[nn.Module], bool] = choice  # type: ignore[assignment]
        return _outermost(model, {m for m in named.values() if m is not model and accept(m)})
    blocks: set[nn.Module] = set()
    for item in choice:
        if isinstance(item, str):
            depth = item.count(".")
            hits = {m for n, m in named.items() if n.count(".") == depth and fnmatch.fnmatchcase(n, item)}
        else:
            hits = {m for m in named.values() if isinstance(m, item)}
        if not hits:
            some = ", ".join(list(named)[1:6])
            raise ArgumentError(f"units={item!r} matches no module of {type(model).__name__}; it has {some}, ...")
        blocks |= hits
    return _outermost(model, blocks)


def _outermost(model: nn.Module, blocks: set[nn.Module]) -> set[nn.Module]:
    blocks = {block for block in blocks if not is_scripted(block)}
    kept: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child in blocks:
                kept.add(child)
            else:
                visit(child)

    visit(model)
    return kept | ({model} & blocks)


Found = tuple[str, nn.Module, list[tuple[str, nn.Parameter]]]


def _walk(module: nn.Module, name: str, host: nn.Module, blocks: set[nn.Module]) -> Iterator[Found]:
    """Yield (name, module whose forward needs them, parameters). ``host`` is the nearest module that is really called."""
    prefix = f"{name}." if name else ""
    called = _is_called(module)
    whole = module in blocks or (name and called and not any(m in blocks for m in module.modules()))
    if whole:
        yield name, module, [(prefix + n, p) for n, p in module.named_parameters()]
        return
    host = module if called or not name else host
    own = [(prefix + n, p) for n, p in module.named_parameters(recurse=False)]
    if own:
        yield name or "(root)", host, own
    for child_name, child in module.named_children():
        yield from _walk(child, prefix + child_name, host, blocks)


def _bucketed(units: list[UnitSpec], bucket_bytes: int) -> list[UnitSpec]:
    """Put neighbours into one unit while the sum stays within ``bucket_bytes``."""
    out: list[UnitSpec] = []
    for unit in units:
        last = out[-1] if out else None
        if last is not None and last.nbytes + unit.nbytes <= bucket_bytes:
            modules = tuple(dict.fromkeys(last.modules + unit.modules))
            name = f"{last.name.split(' … ')[0]} … {unit.name}"
            out[-1] = UnitSpec(name, modules, last.names + unit.names, last.params + unit.params)
        else:
            out.append(unit)
    return out
