"""Ways to ask an evicted parameter something: every attribute and method of torch.Tensor, every function of torch's that takes
tensors. The answer is a plain parameter's, or an error of ours; never what lies in the parameter's place.

Whether an answer needs values is not listed here but found out: plain PyTorch is asked about two parameters that differ in
nothing else. If the answers differ, an evicted parameter must refuse.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

import lowtide
from lowtide.errors import Error
from tests.kit.dist import run_ranks

SHAPE = (4, 4)
MODULES = {torch: "torch", torch.nn.functional: "F", torch.linalg: "linalg", torch.special: "special", torch.fft: "fft"}
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided", "resize_as_", "empty_permuted"}
"""Whose results have no values that could be compared."""
NOT_ASKED = {
    "__class__": "the class says that it is evicted",
    "__deepcopy__": "refused, and plain PyTorch's answer cannot be compared",
    "__dict__": "holds nothing of torch's",
    "__doc__": "the class says that it is evicted",
    "__module__": "the same",
    "__weakref__": "of the Python object",
    "backward": "leaves a gradient, see tests/parity/test_ways_to_differentiate.py",
    "__hash__": "by identity",
    "grad_fn": "none: it is a leaf",
    "__repr__": "names the parameter instead of its values",
    "__str__": "the same",
    "__format__": "the same",
    "__dir__": "the class says that it is evicted",
    "__reduce__": "pickles",
    "__reduce_ex__": "pickles",
    "__sizeof__": "of the Python object",
    "__torch_function__": "what all of this goes through",
    "__torch_dispatch__": "the same",
    "__init_subclass__": "of the class",
    "__subclasshook__": "of the class",
    "__new__": "of the class",
    "__init__": "of the class",
    "share_memory_": "moves memory",
    "module_load": "of loading",
    "rename_": "names are experimental",
}


def _arguments() -> list[tuple[Any, ...]]:
    """What may follow the parameter itself; the first with which plain PyTorch answers is taken."""
    other, index = torch.full(SHAPE, 0.5), torch.tensor([[0, 1, 2, 3]])
    return [
        (),
        (0,),
        (other,),
        (1.5,),
        (0, 1),
        (0, 1, 2),
        (torch.float64,),
        ((4, 4),),
        ((16,), 0.0),
        (0, index),
        (0, index[0]),
        (0, index[0], other),
        (other > 0, 0.0),
        (other > 0, other),
        (other, other),
        ("cpu",),
        ((2, 0), (4, 1)),
        ([0],),
        ([0], [1]),
    ]


def parameter(seed: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)) + 0.1)


def questions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and function; the parameter comes first."""
    for name in dir(Tensor):
        if name in NOT_ASKED or (name.startswith("_") and not name.startswith("__")):
            continue
        yield f"Tensor.{name}", lambda p, *more, name=name: _attribute(p, name, more)
    for module, prefix in MODULES.items():
        for function in get_overridable_functions().get(module, []):
            name = getattr(function, "__name__", "")
            if name and not name.startswith("_"):
                yield f"{prefix}.{name}", function
                yield f"{prefix}.{name} of a list", lambda p, *more, function=function: function([p, p], *more)


def _attribute(p: nn.Parameter, name: str, more: tuple[Any, ...]) -> Any:
    found = getattr(p, name)
    return found(*more) if callable(found) else found


def answer(function: Callable[..., Any], p: nn.Parameter, more: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        found = function(p, *more)
    return list(found) if hasattr(found, "__next__") else found


def comparable(found: Any, p: nn.Parameter, *, values: bool) -> Any:
    """An answer as something that has ``==``; the parameter itself stands for itself."""
    if found is p:
        return "itself"
    if isinstance(found, Tensor):
        about = (type(found), tuple(found.shape), found.dtype, found.layout, found.requires_grad)
        if found.layout is not torch.strided or found.is_quantized:
            return about
        return (*about, found.stride(), found.resolve_conj().tolist() if values else None)
    if isinstance(found, list | tuple):
        return [comparable(x, p, values=values) for x in found]
    if isinstance(found, dict):
        return {key: comparable(x, p, values=values) for key, x in found.items()}
    simple = isinstance(found, int | float | complex | str | bytes | torch.dtype | torch.device | torch.Size)
    return found if simple or found is None else type(found).__name__


def ask(name: str, function: Callable[..., Any], evicted: nn.Parameter) -> str | None:
    """What is wrong with the answer of an evicted parameter, or None; "not asked" if plain PyTorch answers nothing."""
    values = name.split(".")[-1].removesuffix(" of a list") not in UNDEFINED
    for more in _arguments():
        first, second = parameter(0), parameter(1)
        try:
            one = comparable(answer(function, first, more), first, values=values)
            two = comparable(answer(function, second, more), second, values=values)
        except Exception:
            continue
        changed = not torch.equal(first, parameter(0))
        try:
            got = comparable(answer(function, evicted, more), evicted, values=values)
        except Error:
            return None
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}".split("\n")[0][:200]
        if one != two and repr(one) != repr(two):
            return f"{name}{more}: answers {got!r} although it needs values"[:300]
        if changed:
            return f"{name}{more}: would have changed the values"
        if got != one and repr(got) != repr(one):
            return f"{name}{more}: {got!r} instead of {one!r}"[:300]
        return None
    return "not asked"


def walk(rank: int, world: int) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(parameter(2))
    lowtide.shard(model, stage=3, comm=lowtide.Comm(bucket_bytes=0))
    evicted: Any = model[0].weight
    asked, wrong = 0, []
    for name, function in questions():
        found = ask(name, function, evicted)
        asked += found != "not asked"
        wrong += [found] if found not in (None, "not asked") else []
    with lowtide.gathered(model):
        if not torch.equal(evicted, parameter(2)):
            wrong.append("the values have changed")
    return asked, wrong


def test_every_question() -> None:
    [(asked, wrong)] = run_ranks(1, walk)
    assert not wrong, f"{len(wrong)} of {asked}:\n" + "\n".join(wrong)
    assert asked > 900, "most functions of torch's are asked"
