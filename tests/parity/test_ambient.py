"""What the caller has switched on around a call must not reach the work that lowtide does inside it.

Every mode around every kind of call, wherever bytes are and whenever the update runs: the loop goes on with the numbers of
plain PyTorch under the same modes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.api import engine_of
from tests.kit.out_of_core import Where, left_over, settle, undefined_memory
from tests.kit.parity import Plain, Sharded, Trace, assert_same
from tests.kit.scenarios import adamw, batch, record_dict, stack


class _Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad_off": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default_dtype": lambda: _default_dtype(torch.float64),
    "default_device": lambda: torch.device("meta"),
    "function_mode": _Seen,
    "dispatch_mode": _Dispatched,
    "inference_and_autocast": lambda: _both(torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)),
}


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


_BATCHES = [batch(number, 0) for number in range(6)]  # made with nothing on


def _evaluate(system: Plain) -> Tensor:
    return system.model(_BATCHES[-1]).sum().detach().clone()


def _look(system: Plain) -> Tensor:
    with lowtide.gathered(system.model):
        return next(system.model.parameters()).detach().clone()


def _change(system: Plain) -> None:
    with torch.no_grad(), lowtide.gathered(system.model, write=True):
        for param in system.model.parameters():
            param.mul_(0.5)


def _reload(system: Plain) -> None:
    states = copy.deepcopy((system.model.state_dict(), system.optimizer.state_dict()))
    system.model.load_state_dict(states[0])
    system.optimizer.load_state_dict(states[1])


def _memory(system: Plain) -> None:
    if isinstance(system, Sharded) and (limit := engine_of(system.model).budget.limit) is not None:
        lowtide.set_memory(system.model, limit)


MOMENTS: dict[str, Callable[[Plain], Any]] = {
    "evaluate": _evaluate,
    "gathered": _look,
    "gathered_write": _change,
    "state_dicts": lambda system: (system.model.state_dict(), system.optimizer.state_dict()) and None,
    "reload": _reload,
    "set_memory": _memory,
    "zero_grad": lambda system: system.optimizer.zero_grad(),
}
"""Calls between two steps."""
INSIDE = ("forward", "backward", "step")
"""Parts of a step that run with the mode on."""
_OFF = {"inference", "no_grad", "grad_off", "inference_and_autocast"}


def _loop(system: Plain, mode: str, moment: str, trace: Trace) -> None:
    def on(part: str) -> Any:
        return MODES[mode]() if part == moment else contextlib.nullcontext()

    if moment in MOMENTS:  # before anything has run
        with MODES[mode]():
            MOMENTS[moment](system)
    for number in range(5):
        with on("forward"):
            loss = system.model(_BATCHES[number]).square().mean()
        with on("backward"):
            loss.backward()
        trace.add(f"loss {number}", loss)
        with on("step"):
            system.optimizer.step()
        system.optimizer.zero_grad()
        if moment in MOMENTS:
            with MODES[mode]():
                result = MOMENTS[moment](system)
            trace.add(f"result {number}", result)
    trace.add_all("parameter", system.model.state_dict().items())
    record_dict(trace, "optimizer", system.optimizer.state_dict())


_CASES = [(mode, moment) for mode in MODES for moment in (*MOMENTS, *INSIDE) if not (mode in _OFF and moment == "forward")]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("update", ["step", "backward", "memory"])
@pytest.mark.parametrize(("mode", "moment"), _CASES)
def test_the_callers_modes_change_nothing(mode: str, moment: str, update: str, tmp_path: Path) -> None:
    expected, got = Trace(), Trace()
    try:
        _loop(Plain(model := stack(), adamw(model)), mode, moment, expected)
    except RuntimeError as error:
        pytest.skip(f"plain PyTorch cannot do this: {error}")
    where = Where("step" if update == "memory" else update)
    options = {"comm": lowtide.Comm(bucket_bytes=0)} if update == "memory" else where.options(str(tmp_path))
    with undefined_memory():
        model = stack()
        system = Sharded(model, adamw(model), stage=3, **options)
        if update != "memory":
            settle(model, "disk")
        _loop(system, mode, moment, got)
        if update != "memory":
            assert left_over(engine_of(model)) is None
    assert_same(got, expected)
