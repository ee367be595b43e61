"""Load the simulated device, and what PyTorch looks for in ``torch.sim``."""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from tests.kit.simdevice import build, composites

_ops = torch.ops.sim


class _Device:
    """``with torch.sim.device(1):`` as of other accelerators."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        if self.index is not None:
            torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _seed_all(seed: int) -> None:
    for index in range(_loaded[0]):
        _ops.seed(index, seed)


def _module(devices: int) -> types.ModuleType:
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module._initialized = True  # torch.utils.checkpoint then keeps the device's random state
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.device = _Device
    module.Stream, module.Event = torch.Stream, torch.Event
    module.manual_seed = lambda seed: _ops.seed(torch.accelerator.current_device_index(), seed)
    module.manual_seed_all = _seed_all
    module.initial_seed = lambda: _ops.initial_seed(torch.accelerator.current_device_index())
    module.get_rng_state = lambda device="sim": _ops.random_state(_index(device))
    module.set_rng_state = lambda state, device="sim": _ops.set_random_state(_index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16, torch.float32]
    return module


_loaded: list[int] = []


def load(devices: int = 1) -> None:
    """Make ``sim`` a device of this process, for as long as it lives. So tests call this in processes of their own."""
    if _loaded:
        if _loaded != [devices]:
            raise RuntimeError(f"the simulated device was loaded with {_loaded[0]} devices")
        return
    os.environ["SIM_DEVICES"] = str(devices)
    torch.ops.load_library(str(build.library()))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(devices))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    composites.register()
    _loaded.append(devices)
